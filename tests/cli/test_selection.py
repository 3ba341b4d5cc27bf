"""Which data and options a run has: contradictions are refused, and every result states what selected its weights."""

import json
import shlex
import shutil

import pytest
from PIL import Image

from command_line import TINY, one_sentence, spherenet
from spherenet.runs import RunDirectory
from spherenet.training.run_export import without_folders

FOLDER = ["--image-size", 12, "--batch-size", 8, "--workers", 0]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return a folder of two classes of 16 images."""
    root = tmp_path_factory.mktemp("data") / "photos"
    for label, name in enumerate(("a", "b")):
        (root / name).mkdir(parents=True)
        for index in range(16):
            Image.new("RGB", (12, 12), (200 * label, 10 * index, 50)).save(root / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return a finished run on the digits, in a folder whose name needs quotes, without validation images."""
    path = tmp_path_factory.mktemp("runs") / "a run"
    assert spherenet("train", *TINY, "--output", path) == 0
    return path


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """Return a finished run with validation images."""
    path = tmp_path_factory.mktemp("runs") / "validated"
    assert spherenet("train", *TINY, "--eval-every", 1, "--validation-fraction", 0.1, "--output", path) == 0
    return path


def refused(capsys, *arguments):
    """Run a command that must be refused in one sentence, and return the sentence."""
    assert spherenet(*arguments) == 2
    message = capsys.readouterr().err
    assert one_sentence(message), message
    return message


def test_folder_without_data_is_not_ignored(photos, tmp_path, capsys):
    message = refused(capsys, "train", *TINY, "--data-dir", photos, "--output", tmp_path / "run")
    assert message.startswith("spherenet train: --data-dir must be left out with mnist5k")
    assert not (tmp_path / "run").exists()
    message = refused(capsys, "train", *TINY, "--data", photos, "--data-dir", tmp_path, "--output", tmp_path / "run")
    assert "--data-dir must be left out if data is the folder" in message
    message = refused(capsys, "train", *TINY, "--data", tmp_path / "nowhere", "--output", tmp_path / "run")
    assert "--data must be mnist5k, cifar10, cifar100 or an existing folder" in message


def test_other_data_of_a_run_are_not_ignored(finished, photos, capsys):
    for arguments in (["evaluate", finished], ["train", "--resume", finished]):
        message = refused(capsys, *arguments, "--data-dir", photos)
        assert "--data-dir must be left out with mnist5k" in message


def test_other_options_of_a_finished_run_are_not_ignored(finished, capsys):
    before = (finished / "config.json").read_bytes()
    message = refused(capsys, "train", "--resume", finished, "--iterations", 12)
    assert "finished; it was started with --iterations 6, got 12" in message
    assert "add --allow-changes to resume with --iterations changed" in message
    message = refused(capsys, "train", "--resume", finished, "--iterations", 3, "--allow-changes")
    assert f"iterations must be at least the 6 that {finished} has made, got 3." in message
    assert (finished / "config.json").read_bytes() == before
    assert RunDirectory(finished).finished
    assert spherenet("train", "--resume", finished) == 0
    assert "already finished" in capsys.readouterr().out


def test_history_has_every_command(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "my run")
    for iterations in (8, 9):
        assert spherenet("train", "--resume", run, "--iterations", iterations, "--allow-changes") == 0
    history = RunDirectory(run).config["history"]
    assert [entry["step"] for entry in history] == [0, 6, 8]
    assert [entry.get("changes") for entry in history] == [None, {"iterations": [6, 8]}, {"iterations": [8, 9]}]
    assert shlex.split(history[0]["command"]) == ["spherenet", "train", *TINY, "--output", str(finished)]
    assert spherenet("export", run, tmp_path / "model") == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "\n".join(without_folders(entry["command"]) for entry in history) in card
    assert str(tmp_path) not in card
    capsys.readouterr()


def test_best_checkpoint_is_selected_on_the_validation_images(validated):
    rows = RunDirectory(validated).metrics.read()
    curves = {split: {row["step"]: row for row in rows if row["split"] == split} for split in ("test", "validation")}
    assert {row["count"] for row in curves["validation"].values()} == {400}
    best = max(curves["validation"], key=lambda step: (curves["validation"][step]["accuracy"], -step))
    (folder,) = RunDirectory(validated).checkpoints.paths("best")
    assert folder.name == f"best-{best:08}"
    state = json.loads((folder / "state.json").read_text())
    assert state["selected_on"] == "validation"
    assert state["accuracy"] == curves["test"][best]["accuracy"]
    assert state["selection_accuracy"] == curves["validation"][best]["accuracy"]
    summary = RunDirectory(validated).summary
    assert (summary["selected_on"], summary["best_step"]) == ("validation", best)
    assert summary["best_accuracy"] == state["selection_accuracy"]
    assert RunDirectory(validated).config["images"] == {"train": 3600, "validation": 400, "test": 1000}


STATEMENTS = {
    "last": "This is the last checkpoint of the training; no images were used to select it.",
    "test": "The checkpoint was selected on these test images, so that its accuracy on them is too high.",
    "validation": "The checkpoint was selected on validation images, which were held out of the training images.",
}


@pytest.mark.parametrize("run", ["finished", "validated"])
def test_results_state_what_selected_the_checkpoint(run, request, tmp_path, capsys):
    path = request.getfixturevalue(run)
    split = "test" if run == "finished" else "validation"
    capsys.readouterr()
    assert spherenet("evaluate", path) == 0
    printed = capsys.readouterr()
    assert "last checkpoint (step 6), test split" in printed.out
    assert printed.err == ""
    assert spherenet("evaluate", path, "--checkpoint", "best") == 0
    printed = capsys.readouterr()
    assert f", selected on the {split} images), test split: " in printed.out
    assert ("its test accuracy is too high" in printed.err) == (run == "finished")
    for options, statement in (([], STATEMENTS["last"]), (["--checkpoint", "best"], STATEMENTS[split])):
        folder = tmp_path / f"model{len(options)}"
        assert spherenet("export", path, folder, *options) == 0
        assert statement in (folder / "README.md").read_text()
        assert {file.stat().st_mode for file in folder.iterdir()} == {(path / "config.json").stat().st_mode}
    code = spherenet("evaluate", path, "--split", "validation")
    assert code == (2 if run == "finished" else 0)


def test_evaluation_skips_images_that_broke_since(photos, tmp_path, capsys):
    images, run = shutil.copytree(photos, tmp_path / "photos"), tmp_path / "run"
    assert spherenet("train", *TINY, *FOLDER, "--data", images, "--output", run) == 0
    (images / "a" / "3.png").write_bytes(b"broken")
    (images / "b" / "3.png").write_bytes(b"broken")
    capsys.readouterr()
    counts = {}
    for split in ("test", "train"):
        assert spherenet("evaluate", run, "--split", split, "--on-broken", "skip", "--json") == 0
        printed = capsys.readouterr()
        counts[split] = json.loads(printed.out)["count"]
    assert sum(counts.values()) == 30
    assert "cannot be read" in printed.err
    assert "they are left out" in printed.err
    assert "--on-broken skip leaves such images out" in refused(capsys, "evaluate", run, "--split", "train")
