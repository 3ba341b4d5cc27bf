"""What one does with a run: evaluate, predict, export, report, doctor."""

import json

import pytest
import torch
from PIL import Image

from command_line import TINY, one_sentence, spherenet
from spherenet.data import load_dataset


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "digits"
    assert (
        spherenet("train", *TINY, "--iterations", 60, "--learning-rate", 0.01, "--eval-every", 20, "--output", path)
        == 0
    )
    return path


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A digit of each class as a file."""
    folder = tmp_path_factory.mktemp("pictures")
    test = load_dataset("mnist5k").test
    paths = []
    for digit in range(10):
        index = torch.nonzero(test.labels == digit)[0]
        batch = next(test.batches([(0, index)], device=torch.device("cpu"), augmentation=None))
        pixels = (batch.images[0, 0] * 128 + 127.5).round().to(torch.uint8).numpy()
        paths.append(folder / f"{digit}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def test_evaluate_agrees_with_the_run(run, capsys):
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


def test_evaluate_prints_tables_and_draws(run, tmp_path, capsys):
    assert spherenet("evaluate", run, "--picture", tmp_path / "confusion.png") == 0
    said = capsys.readouterr().out
    assert "accuracy" in said
    assert "precision" in said
    assert "rows are the truth" in said
    with Image.open(tmp_path / "confusion.png") as drawn:
        assert drawn.size[0] > 300


def test_predict_a_file_as_evaluate_sees_the_picture(run, pictures, capsys):
    assert spherenet("predict", *pictures, "--run", run, "--json") == 0
    answers = json.loads(capsys.readouterr().out)
    assert [len(answer["classes"]) for answer in answers] == [3] * 10
    right = sum(answer["classes"][0]["class"] == str(digit) for digit, answer in enumerate(answers))
    assert right >= 5
    assert spherenet("predict", pictures[3], "--run", run, "--top", 1) == 0
    assert capsys.readouterr().out.startswith(str(pictures[3]))


def test_an_exported_folder_predicts_the_same(run, pictures, tmp_path, capsys):
    assert spherenet("export", run, tmp_path / "model") == 0
    card = (tmp_path / "model" / "README.md").read_text()
    assert "mnist5k" in card
    capsys.readouterr()
    answers = []
    for source in (run, tmp_path / "model"):
        assert spherenet("predict", *pictures, "--run", source, "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert (
        spherenet("train", *TINY, "--iterations", 1, "--init-from", tmp_path / "model", "--output", tmp_path / "run")
        == 0
    )


@pytest.mark.parametrize("suffix", [".pt2", ".ts", ".onnx"])
def test_exported_files(run, tmp_path, capsys, suffix):
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
    assert "Plotly.react" in page
    assert "http" not in page.split("<script>")[0]  # nothing is fetched


def test_a_page_shows_hostile_names_as_text(run, tmp_path):
    import shutil

    evil = tmp_path / "<script>alert(1)<"
    shutil.copytree(run, evil)
    assert spherenet("report", evil, "-o", tmp_path / "page.html") == 0
    assert "<script>alert" not in (tmp_path / "page.html").read_text()


def test_doctor(run, tmp_path, capsys):
    import shutil

    assert spherenet("doctor", run) == 0
    assert "BAD" not in capsys.readouterr().out
    ill = tmp_path / "ill"
    shutil.copytree(run, ill)
    weights = next((ill / "checkpoints").glob("step-*")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    (ill / "metrics.jsonl").write_text("nonsense\n")
    (ill / ".writing-1-x").write_text("")
    assert spherenet("doctor", ill, "--json") == 1
    bad = {finding["part"].split("/")[0] for finding in json.loads(capsys.readouterr().out) if not finding["good"]}
    assert bad == {"metrics.jsonl", "checkpoints"}


WRONG = {
    "evaluate nothing": (["evaluate", "nowhere"], "nowhere is not a folder"),
    "evaluate what is no run": (["evaluate", "{tmp}"], "is not a run"),
    "evaluate a batch of none": (["evaluate", "{run}", "--batch-size", "0"], "--batch-size must be at least 1"),
    "evaluate elsewhere": (["evaluate", "{run}", "--device", "gpu"], "device 'gpu' is not available here"),
    "draw a text": (["evaluate", "{run}", "--picture", "{tmp}/x.txt"], "--picture must end in one of"),
    "predict nothing": (["predict", "{tmp}/nothing.png", "--run", "{run}"], "nothing.png"),
    "predict a text": (["predict", "{tmp}/text.png", "--run", "{run}"], "text.png"),
    "predict without classes": (
        ["predict", "{tmp}/text.png", "--run", "{run}", "--top", "0"],
        "--top must be at least 1",
    ),
    "predict with nothing": (["predict", "x.png", "--run", "{tmp}"], "is not a run"),
    "export to something": (["export", "{run}", "{tmp}/model.tflite"], ".onnx"),
    "export over something": (["export", "{run}", "{tmp}"], ""),
    "report nothing": (["report", "{tmp}"], "is not a run"),
    "report as text": (["report", "{run}", "-o", "x.txt"], "--output must end in .html"),
    "doctor of nothing": (["doctor", "nowhere"], "nowhere is not a folder"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_sentence_and_code_2(case, run, tmp_path, capsys):
    (tmp_path / "text.png").write_text("no picture")
    arguments, message = WRONG[case]
    assert spherenet(*(argument.format(run=run, tmp=tmp_path) for argument in arguments)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert one_sentence(said.err), said.err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["text.png"]


def test_a_damaged_best_checkpoint_is_named(run, tmp_path, capsys):
    import shutil

    ill = tmp_path / "ill"
    shutil.copytree(run, ill)
    for state in ill.glob("checkpoints/best-*/state.json"):
        state.write_text("{}")
    assert spherenet("evaluate", ill) == 2
    said = capsys.readouterr().err
    assert "state.json is damaged" in said
    assert one_sentence(said)
