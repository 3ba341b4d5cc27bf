"""Runs whose files were changed or left behind by a killed process, used on the command line."""

import json
from pathlib import Path

import pytest
from PIL import Image

from command_line import TINY, one_sentence, spherenet
from spherenet._util.atomic import is_temporary
from spherenet.runs import RunDirectory
from spherenet.runs.checkpoints import load_checkpoint


def change(run, **values):
    """Change values of config.json: change(run, train={"seed": 1})."""
    config = json.loads((run / "config.json").read_text())
    for name, value in values.items():
        config[name] = {**config[name], **value} if isinstance(config[name], dict) else value
    (run / "config.json").write_text(json.dumps(config))


def leave_unfinished(run):
    """Leave what a process leaves that is killed after the rename of summary.json."""
    (run / ".writing-summary.json-123").mkdir()
    (run / "checkpoints" / ".writing-step-00000001-gone").mkdir()
    assert all(map(is_temporary, unfinished(run)))


def unfinished(run):
    return sorted(path for path in run.rglob(".writing-*"))


def test_resume_of_a_finished_run_removes_unfinished_files(run, capsys):
    leave_unfinished(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert spherenet("train", "--resume", run) == 0
    assert "already finished" in capsys.readouterr().out
    assert unfinished(run) == []
    assert {path: path.read_bytes() for path in before} == before


def test_unfinished_files_of_a_run_in_use_are_kept(run, capsys):
    leave_unfinished(run)
    with RunDirectory(run).locked():
        assert spherenet("train", "--resume", run) == 0
    assert "already finished" in capsys.readouterr().out
    assert len(unfinished(run)) == 2


def test_readers_keep_unfinished_files(run, capsys):
    leave_unfinished(run)
    assert spherenet("doctor", run) == 0
    assert "2 of a killed process, removed on resume" in capsys.readouterr().out
    assert spherenet("evaluate", run) == 0
    assert spherenet("report", run) == 0
    assert len(unfinished(run)) == 2


@pytest.mark.parametrize("classes", [["a", "b", "c"], [], [f"c{i}" for i in range(1000)], {"a": 1}, [None] * 10, "abc"])
def test_names_must_be_one_per_class(run, tmp_path, capsys, classes):
    """Otherwise predictions would have no name, or that of another class."""
    from PIL import Image

    Image.new("L", (28, 28)).save(tmp_path / "0.png")
    change(run, classes=classes)
    for arguments in (["predict", tmp_path / "0.png", "--run", run], ["export", run, tmp_path / "exported"]):
        assert spherenet(*arguments) == 2
        assert one_sentence(said := capsys.readouterr().err), said
        assert "classes must be" in said
    assert not (tmp_path / "exported").exists()


def test_exported_model_must_have_one_name_per_class(run, tmp_path, capsys):
    from PIL import Image

    Image.new("L", (28, 28)).save(tmp_path / "0.png")
    exported = tmp_path / "exported"
    assert spherenet("export", run, exported) == 0
    config = json.loads((exported / "config.json").read_text())
    config["metadata"]["classes"] = ["a", "b"]
    (exported / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert spherenet("predict", tmp_path / "0.png", "--run", exported) == 2
    assert one_sentence(said := capsys.readouterr().err), said
    assert "the names of the 10 classes of the network, got 2" in said


@pytest.mark.parametrize("option", ["seed", "fold", "train_images", "log_every", "learning_rate"])
def test_integer_that_is_too_large_is_rejected(run, capsys, option):
    change(run, train={option: 10**30})
    (run / "summary.json").unlink()
    for arguments in (["train", "--resume", run], ["evaluate", run]):
        assert spherenet(*arguments) == 2
        assert one_sentence(said := capsys.readouterr().err), said
        assert "must be below 2^63 in magnitude" in said
        assert option in said.replace("-", "_")


def test_message_about_the_preprocessing_is_one_sentence(run, capsys):
    change(run, preprocessing={"size": [40_000, 40_000]})
    assert spherenet("evaluate", run) == 2
    assert one_sentence(said := capsys.readouterr().err), said
    assert ".)" not in said


@pytest.mark.parametrize(
    "options", [("--train-images", 300), ("--set", "bn_eval=[batch]")], ids=lambda options: options[0]
)
def test_finished_run_with_changed_evaluation_is_evaluated_again(run, capsys, options):
    """Its accuracies are those of other images or statistics: the best checkpoint is selected anew."""
    directory = RunDirectory(run)
    rows = len(directory.metrics)
    assert spherenet("train", "--resume", run, *options, "--allow-changes") == 0
    assert "-100.00%" not in capsys.readouterr().out
    summary = RunDirectory(run).summary
    assert summary["best_step"] == summary["iterations"]
    assert summary["best_accuracy"] == summary["accuracy"]
    (best,) = directory.checkpoints.paths("best")
    assert load_checkpoint(best).step == summary["iterations"]
    assert len(RunDirectory(run).metrics) > rows
    # The last checkpoint knows about it, so that the run can be resumed once more without an evaluation.
    rows = len(RunDirectory(run).metrics)
    assert spherenet("train", "--resume", run, "--allow-changes") == 0
    assert len(RunDirectory(run).metrics) == rows
    assert {**RunDirectory(run).summary, "seconds": 0, "peak_megabytes": 0} == {
        **summary, "seconds": 0, "peak_megabytes": 0,
    }  # fmt: skip


def test_best_checkpoint_on_other_images_is_gone_if_the_run_is_killed_before_its_next_one(run, monkeypatch):
    """config.json has the new images then, so that the change is not noticed again."""
    from spherenet.training.trainer import Trainer

    class Killed(BaseException):
        pass

    def kill(trainer, stop):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", kill)
        with pytest.raises(Killed):
            spherenet("train", "--resume", run, "--train-images", 300, "--allow-changes")
    assert RunDirectory(run).checkpoints.paths("best") == []
    assert spherenet("train", "--resume", run) == 0
    summary = RunDirectory(run).summary
    assert summary["best_step"] == summary["iterations"]


def test_evaluate_uses_the_precision_of_the_run(tmp_path, capsys):
    run = tmp_path / "run"
    assert spherenet("train", *TINY, "--train-images", 200, "--precision", "bfloat16", "--output", run) == 0
    capsys.readouterr()
    recorded = [row for row in RunDirectory(run).metrics.read() if row["split"] == "test"][-1]
    results = {}
    for precision in ("bfloat16", "float32"):
        options = [] if precision == "bfloat16" else ["--precision", precision]
        assert spherenet("evaluate", run, *options, "--json") == 0
        results[precision] = json.loads(capsys.readouterr().out)
        assert results[precision]["precision"] == precision
    assert results["bfloat16"]["loss"] == pytest.approx(recorded["loss"], rel=1e-6)
    assert results["bfloat16"]["accuracy"] == recorded["accuracy"]
    assert results["float32"]["loss"] != pytest.approx(recorded["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("--operator", ("--operator", "linear")), ("relu", ("--set", "relu=false")), ("--loss", ("--loss", "w-cosine"))],
)
def test_best_checkpoint_of_another_network_is_forgotten(run, capsys, name, options):
    """Its accuracy is that of another function of the same weights."""
    steps = RunDirectory(run).summary["iterations"] + 2
    assert spherenet("train", "--resume", run, *options, "--iterations", steps, "--allow-changes") == 0
    assert f"with {name}: the best checkpoint is selected anew" in capsys.readouterr().err
    summary = RunDirectory(run).summary
    assert summary["best_step"] == summary["iterations"] == steps
    assert spherenet("evaluate", run, "--checkpoint", "best", "--json") == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == summary["best_accuracy"]


def test_full_disk_loses_no_best_checkpoint(run, capsys, monkeypatch):
    """The new config.json must be complete before the best checkpoint of other statistics is removed."""
    best = RunDirectory(run).checkpoints.paths("best")
    assert len(best) == 1
    before = (run / "config.json").read_bytes()
    written = Path.write_text

    def no_space(path, *arguments, **options):
        if path.name == "config.json":
            raise OSError(28, "No space left on device")
        return written(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_space)
        assert (
            spherenet("train", "--resume", run, "--set", "bn_eval=[batch]", "--iterations", 8, "--allow-changes") == 2
        )
    assert "the run is unchanged" in capsys.readouterr().err
    assert RunDirectory(run).checkpoints.paths("best") == best
    assert (run / "config.json").read_bytes() == before


def test_best_checkpoint_on_differently_prepared_images_is_forgotten(tmp_path, capsys):
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(8):
            Image.effect_noise((24, 8), 99).save(tmp_path / "photos" / name / f"{index}.png")
    options = [*TINY, "--batch-size", 4, "--data", tmp_path / "photos", "--image-size", 16, "--workers", 0]
    assert spherenet("train", *options, "--resize", "squash", "--output", tmp_path / "run") == 0
    resumed = ["--resume", tmp_path / "run", "--resize", "crop", "--iterations", 8, "--allow-changes"]
    assert spherenet("train", *resumed) == 0
    assert (
        "images are prepared differently with --resize: the best checkpoint is selected anew" in capsys.readouterr().err
    )
    assert RunDirectory(tmp_path / "run").summary["best_step"] == 8


def test_home_folder_is_expanded(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert spherenet("evaluate", "~/run") == 0
    assert spherenet("export", "~/run", "~/model.pt2") == 0
    assert spherenet("export", "~/run", "~/model.pt2") == 2
    assert "model.pt2 exists: add --overwrite" in capsys.readouterr().err
    assert spherenet("train", *TINY, "--init-from", "~/run", "--iterations", 1, "--output", "~/new") == 0
    assert (tmp_path / "new" / "config.json").is_file()
