"""Verbs for trained runs: evaluate, predict, export, report, doctor."""

import json

import pytest
import torch
from PIL import Image

import spherenet as sn
from command_line import TINY, one_sentence, spherenet
from made_runs import make_run
from spherenet.data import Preprocessing, load_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "digits"
    assert (
        spherenet("train", *TINY, "--iterations", 60, "--learning-rate", 0.01, "--eval-every", 20, "--output", path)
        == 0
    )
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write one digit per class to a file."""
    folder = tmp_path_factory.mktemp("images")
    test = load_dataset("mnist5k").test
    paths = []
    for digit in range(10):
        index = torch.nonzero(test.labels == digit)[0]
        batch = next(test.batches([(0, index)], device=torch.device("cpu"), augmentation=None))
        pixels = (batch.images[0, 0] * 128 + 127.5).round().to(torch.uint8).numpy()
        paths.append(folder / f"{digit}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def test_evaluate_reproduces_the_accuracy_of_the_run(run, capsys):
    assert spherenet("evaluate", run, "--checkpoint", "last", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    summary = json.loads((run / "summary.json").read_text())
    assert result["accuracy"] == summary["accuracy"]
    assert result["count"] == 1000
    confusion = torch.tensor(result["confusion"])
    assert confusion.trace().item() / confusion.sum().item() == result["accuracy"]
    for index, row in enumerate(result["classes"]):
        assert row["count"] == 100
        assert row["recall"] == confusion[index, index].item() / 100


def test_evaluate_reports_corruptions_beside_the_clean_images(run, capsys):
    arguments = ["--corrupt", "dark:0", "spot:0.85", "noise:40", "--tta", "mirror"]
    assert spherenet("evaluate", run, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    unchanged, spot, noise = result["corruptions"]
    assert unchanged["accuracy"] == result["accuracy"]
    assert unchanged["tta_accuracy"] == result["tta_accuracy"]
    assert unchanged["loss"] == result["loss"]
    assert (spot["corruption"], spot["strength"]) == ("spot", 0.85)
    assert spot["loss"] != result["loss"] != noise["loss"]
    assert spherenet("evaluate", run, *arguments, "--batch-size", 77) == 0
    table = capsys.readouterr().out
    for row, shown in (("clean", result), ("dark:0", unchanged), ("spot:0.85", spot), ("noise:40", noise)):
        line = next(line for line in table.splitlines() if f" {row} " in line)
        assert f"{shown['accuracy']:.2%}" in line
        assert f"{shown['tta_accuracy']:.2%}" in line


def test_evaluate_without_corruptions_lists_none(run, capsys):
    assert spherenet("evaluate", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["corruptions"] == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fgo:1", "corruption must be one of 'spot', 'ramp'"),
        ("spot", "strength of spot must be a number from 0 to 1, got none."),
        ("spot:2", "strength of spot must be a number from 0 to 1, got '2'."),
        ("cast:0.5", "images must have 3 channels for the corruption 'cast', got 1."),
    ],
)
def test_evaluate_refuses_wrong_corruptions(run, text, message, capsys):
    assert spherenet("evaluate", run, "--corrupt", "dark:0.5", text) == 2
    said = capsys.readouterr().err
    assert one_sentence(said)
    assert message in said


def test_evaluate_prints_tables_and_draws_the_confusion_matrix(run, tmp_path, capsys):
    assert spherenet("evaluate", run, "--image", tmp_path / "confusion.png") == 0
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert "precision" in said
    assert "rows are true classes" in said
    with Image.open(tmp_path / "confusion.png") as drawn:
        assert drawn.size[0] > 300


def test_predict_finds_the_classes_of_files(run, images, capsys):
    assert spherenet("predict", *images, "--run", run, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [len(row["classes"]) for row in rows] == [3] * 10
    correct = sum(row["classes"][0]["class"] == str(digit) for digit, row in enumerate(rows))
    assert correct >= 5
    assert spherenet("predict", images[3], "--run", run, "--top", 1) == 0
    assert capsys.readouterr().out.startswith(str(images[3]))


def test_exported_folder_predicts_the_same(run, images, tmp_path, capsys):
    assert spherenet("export", run, tmp_path / "model") == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "mnist5k" in card
    capsys.readouterr()
    predictions = []
    for source in (run, tmp_path / "model"):
        assert spherenet("predict", *images, "--run", source, "--json") == 0
        predictions.append(json.loads(capsys.readouterr().out))
    assert predictions[0] == predictions[1]
    assert (
        spherenet("train", *TINY, "--iterations", 1, "--init-from", tmp_path / "model", "--output", tmp_path / "run")
        == 0
    )


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_export_writes_files_and_overwrites_on_request(run, tmp_path, capsys, suffix):
    target = tmp_path / f"digits{suffix}"
    assert spherenet("export", run, target) == 0
    assert str(target) in capsys.readouterr().out
    assert target.stat().st_size > 1000
    assert spherenet("export", run, target) == 2
    assert one_sentence(capsys.readouterr().err)
    assert spherenet("export", run, target, "--overwrite") == 0


def test_report_prints_a_table_and_writes_a_page(run, tmp_path, capsys):
    assert spherenet("report", run, "-o", tmp_path / "page.html", "--title", "Digits <b>") == 0
    said = capsys.readouterr().out
    assert "digits" in said
    assert "█" in said
    page = (tmp_path / "page.html").read_text()
    assert "Digits &lt;b&gt;" in page
    assert "drawCurves(" in page
    assert "http" not in page.split("<script>")[0]  # nothing is loaded from the network


def test_page_shows_hostile_names_as_text(run, tmp_path):
    import shutil

    evil = tmp_path / "<script>alert(1)<"
    shutil.copytree(run, evil)
    assert spherenet("report", evil, "-o", tmp_path / "page.html") == 0
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_doctor_accepts_a_finished_run_without_checkpoints(tmp_path, capsys):
    """Runs in results/ are like this."""
    finished, started = (
        make_run(tmp_path / name, [0.5], finished=name == "finished") for name in ("finished", "started")
    )
    assert spherenet("doctor", finished) == 0
    assert "checkpoints    none, so the finished run cannot be evaluated or resumed" in capsys.readouterr().out
    assert spherenet("doctor", started) == 0
    assert "checkpoints    none yet" in capsys.readouterr().out


def test_doctor_finds_corrupt_files(run, tmp_path, capsys):
    import shutil

    assert spherenet("doctor", run) == 0
    assert "BAD" not in capsys.readouterr().out
    corrupt = tmp_path / "corrupt"
    shutil.copytree(run, corrupt)
    weights = next((corrupt / "checkpoints").glob("step-*")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (corrupt / "metrics.jsonl").write_text("nonsense\n")
    (corrupt / ".writing-1-x").write_text("")
    assert spherenet("doctor", corrupt, "--json") == 1
    bad = {finding["name"].split("/")[0] for finding in json.loads(capsys.readouterr().out) if not finding["valid"]}
    assert bad == {"metrics.jsonl", "checkpoints"}


WRONG = {
    "evaluate missing folder": (["evaluate", "nowhere"], "nowhere is not a folder"),
    "evaluate folder without run": (["evaluate", "{tmp}"], "is not a run"),
    "evaluate empty batches": (["evaluate", "{run}", "--batch-size", "0"], "--batch-size must be at least 1"),
    "evaluate on missing device": (["evaluate", "{run}", "--device", "gpu"], "device 'gpu' is not available here"),
    "draw to text file": (["evaluate", "{run}", "--image", "{tmp}/x.txt"], "--image must end in one of"),
    "predict missing file": (["predict", "{tmp}/nothing.png", "--run", "{run}"], "nothing.png"),
    "predict text file": (["predict", "{tmp}/text.png", "--run", "{run}"], "text.png"),
    "predict zero classes": (
        ["predict", "{tmp}/text.png", "--run", "{run}", "--top", "0"],
        "--top must be at least 1",
    ),
    "predict without model": (["predict", "x.png", "--run", "{tmp}"], "is not a run"),
    "export unknown format": (["export", "{run}", "{tmp}/model.tflite"], ".onnx"),
    "export over folder": (["export", "{run}", "{tmp}"], ""),
    "report without run": (["report", "{tmp}"], "is not a run"),
    "report to text file": (["report", "{run}", "-o", "x.txt"], "--output must end in .html"),
    "doctor of missing folder": (["doctor", "nowhere"], "nowhere is not a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_with_exit_code_2(case, run, tmp_path, capsys):
    (tmp_path / "text.png").write_text("not an image")
    arguments, message = WRONG[case]
    assert spherenet(*(argument.format(run=run, tmp=tmp_path) for argument in arguments)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert one_sentence(said.err), said.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text.png"]


def test_corrupt_best_checkpoint_is_named(run, tmp_path, capsys):
    import shutil

    corrupt = tmp_path / "corrupt"
    shutil.copytree(run, corrupt)
    for state in corrupt.glob("checkpoints/best-*/state.json"):
        state.write_text("{}")
    assert spherenet("evaluate", corrupt, "--checkpoint", "best") == 2
    said = capsys.readouterr().err
    assert "state.json is corrupt" in said
    assert one_sentence(said)


def test_exported_model_is_not_a_run(run, images, tmp_path, capsys):
    assert spherenet("export", run, tmp_path / "model") == 0
    for verb in ("doctor", "evaluate", "report"):
        capsys.readouterr()
        assert spherenet(verb, tmp_path / "model") == 2
        said = capsys.readouterr().err
        assert "is an exported model, not a run" in said
        assert one_sentence(said)
    assert spherenet("predict", images[0], "--run", tmp_path / "model", "--checkpoint", "best") == 2
    assert "--checkpoint must be last for an exported model" in capsys.readouterr().err


def test_model_folder_in_another_precision_is_used_in_float32(run, images, tmp_path, capsys):
    from spherenet.export import load_metadata, load_model, save_model

    assert spherenet("export", run, tmp_path / "model") == 0
    save_model(load_model(tmp_path / "model").double(), tmp_path / "double", metadata=load_metadata(tmp_path / "model"))
    printed = []
    for name in ("model", "double"):
        capsys.readouterr()
        assert spherenet("predict", *images, "--run", tmp_path / name, "--json") == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]


def test_images_of_a_model_folder_may_not_fit_the_memory(tmp_path):
    import resource

    from spherenet.export import save_model
    from spherenet.training.saved_runs import load_predictor

    model = sn.create_model("resnet-32", 10, widths=(4, 4, 4))
    preprocessing = Preprocessing.standard((8192, 8192), 3).as_dict()
    metadata = {"classes": list("abcdefghij"), "preprocessing": preprocessing}
    save_model(model, tmp_path / "model", metadata=metadata)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert load_predictor(tmp_path / "model").preprocessing.size == (8192, 8192)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


def test_description_belongs_to_the_file_in_a_folder(run, tmp_path, capsys):
    (tmp_path / "models").mkdir()
    assert spherenet("export", run, tmp_path / "models", "--format", "program", "--with-preprocessing") == 0
    assert spherenet("export", run, tmp_path / "models", "--format", "onnx", "--overwrite") == 2
    assert "which has another input or model: choose another target" in capsys.readouterr().err
