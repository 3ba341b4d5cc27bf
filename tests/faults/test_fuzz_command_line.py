"""Every command with mutated files or options ends with a result or one sentence, in bounded time and memory."""

import json
import random
import shutil

import pytest
from PIL import Image

from command_line import spherenet
from faults.commands import TINY, mutated_file, mutated_options, options_of, run_command
from faults.fork_server import build_data
from faults.mutation import mutated_bytes, mutated_value
from faults.scale import COMMAND_LINES
from faults.small_sets import SMALL10, archive_of, binary_files, write_folder
from spherenet.cli.main import verb_parser
from spherenet.data import DATASETS
from spherenet.data.cifar import cifar_info
from spherenet.training import build
from spherenet.training import run as training

POINT = 15
SHARES = {"runs": 30, "models": 8, "option files": 14, "data": 16, "embeddings": 13,
          "options": 19}  # fmt: skip
"""Percent of the command lines per test."""

FILES = ("config.json", "metrics.jsonl", "summary.json", "checkpoints/{step}/manifest.json",
         "checkpoints/{step}/state.json", "checkpoints/{step}/model.safetensors")  # fmt: skip


def trials(test):
    """Return the numbers of the command lines of a test."""
    return range(COMMAND_LINES * SHARES[test] // 100)


def test_shares_add_up_to_all_command_lines():
    assert sum(SHARES.values()) == 100
    assert sum(len(trials(test)) for test in SHARES) == COMMAND_LINES


@pytest.fixture
def image(tmp_path):
    Image.new("L", (12, 12)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


@pytest.fixture
def run(uninterrupted, tmp_path):
    return shutil.copytree(uninterrupted(), tmp_path / "run")


def use_few_digits(monkeypatch):
    """Train and evaluate on the digits that the run was trained on; other data sets are read as always."""
    original = build.build_data

    def few_or_original(config, progress=None, **options):
        is_default = config.data == "mnist5k" and not config.folds and config.train_images is None
        return build_data(config) if is_default else original(config, progress, **options)

    monkeypatch.setattr(training, "build_data", few_or_original)
    monkeypatch.setattr(build, "build_data", few_or_original)


def test_mutated_runs(run, image, tmp_path, capsys, monkeypatch, tried):
    use_few_digits(monkeypatch)
    chance = random.Random(0)
    step = sorted((run / "checkpoints").glob("step-*"))[-1].name
    files = [name.format(step=step) for name in FILES]
    contents = {name: (run / name).read_bytes() for name in files}
    target, aside = tmp_path / "exported", shutil.copytree(run, tmp_path / "aside")
    verbs = {
        "doctor": lambda: ["doctor", run],
        "report": lambda: ["report", run],
        "predict": lambda: ["predict", image, "--run", run, "--checkpoint", "last"],
        "export": lambda: ["export", run, target, "--overwrite", "--checkpoint", "last"],
        "resume": lambda: ["train", "--resume", run],
        "doctor --json": lambda: ["doctor", run, "--json"],
        "evaluate": lambda: ["evaluate", run, "--checkpoint", "last"],
        "evaluate --json": lambda: ["evaluate", run, "--checkpoint", "last", "--allow-changes", "--json"],
    }
    codes = set()
    for _ in trials("runs"):
        verb = chance.choice(list(verbs))
        name = chance.choice(files)
        if verb == "resume":
            (run / "summary.json").unlink()
        if (run / name).exists():
            (run / name).write_bytes(mutated_file(contents[name], name, chance))
        codes.add(run_command(verbs[verb](), capsys))
        (run / name).write_bytes(contents[name])
        if verb == "resume":  # it changes other files
            shutil.rmtree(run)
            shutil.copytree(aside, run)
        tried(f"{verb} of a run with a mutated file")
    assert {0, 2} <= codes


def test_mutated_models(run, image, tmp_path, capsys, tried):
    chance, model = random.Random(1), tmp_path / "model"
    assert spherenet("export", run, model) == 0
    capsys.readouterr()
    contents = {path.name: path.read_bytes() for path in model.iterdir() if path.name != "README.md"}
    codes = set()
    for _ in trials("models"):
        name = chance.choice(sorted(contents))
        (model / name).write_bytes(mutated_file(contents[name], name, chance))
        codes.add(run_command(["predict", image, "--run", model, *chance.choice([[], ["--json"]])], capsys))
        (model / name).write_bytes(contents[name])
        tried("predict with a mutated model")
    assert 2 in codes


def test_mutated_option_files(tmp_path, capsys, tried):
    """Option files for --config, without training."""
    chance, path = random.Random(2), tmp_path / "my.yaml"
    values = TINY.as_dict()
    text = "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()).encode()
    codes = set()
    for number in trials("option files"):
        mutated = json.dumps(mutated_value(values, chance)).encode() if number % 2 else mutated_bytes(text, chance)
        path.write_bytes(mutated)
        # The output folder cannot be created, so that nothing is trained with valid options.
        codes.add(run_command(["train", "--config", path, "--output", path / "run"], capsys))
        tried("train with mutated options")
    assert codes <= {1, 2}


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Return a folder of images and two folders of a small CIFAR-10."""
    monkeypatch.setitem(DATASETS, "cifar10", cifar_info(SMALL10, augmentation="flip"))
    photos, files, archive = tmp_path / "photos", tmp_path / "files", tmp_path / "archive"
    for number in range(6):
        path = photos / f"class {number % 2}" / f"{number}.{('png', 'jpg')[number // 4]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((9, 9), 50).save(path)
    write_folder(files / SMALL10.binary_folder, binary_files(SMALL10))
    archive.mkdir()
    (archive / SMALL10.archive).write_bytes(archive_of(SMALL10))
    return {"folder": photos, "cifar10": files, "cifar10 in an archive": archive}


def test_mutated_data(data, capsys, tried):
    chance, codes = random.Random(4), set()
    files = {name: sorted(path for path in root.rglob("*") if path.is_file()) for name, root in data.items()}
    for _ in trials("data"):
        name = chance.choice(list(data))
        path = chance.choice(files[name])
        content = path.read_bytes()
        path.write_bytes(mutated_bytes(content, chance))
        options = chance.choice([[], ["--json"]])
        codes.add(run_command(["data", name.split()[0], "--data-dir", data[name], *options], capsys))
        path.write_bytes(content)
        tried(f"data with a mutated file: {name}")
    assert {0, 2} <= codes


@pytest.fixture
def embedded(run, data, tmp_path, capsys):
    """Return the files of `verify` and `embed`: embeddings in two forms, pairs, and images in folders of classes."""
    photos = sorted(data["folder"].rglob("*.*"))
    for name in ("x.npy", "x.csv"):
        assert spherenet("embed", run, data["folder"], "-o", tmp_path / name, "--checkpoint", "last") == 0
    pairs = [f"{a},{b},{int(a.parent == b.parent)}" for i, a in enumerate(photos) for b in photos[:i]]
    (tmp_path / "pairs.csv").write_text("\n".join(["first,second,same", *pairs]) + "\n")
    capsys.readouterr()
    return tmp_path


def test_mutated_embeddings(embedded, run, data, capsys, tried):
    chance, codes = random.Random(7), set()
    pairs, photos = embedded / "pairs.csv", sorted(data["folder"].rglob("*.*"))
    model = [path for path in sorted((run / "checkpoints").rglob("model.safetensors")) if "step" in path.parent.name]
    verify = ["--folds", 2, "--json"]
    verbs = {
        "verify x.npy": (["verify", embedded / "x.npy", pairs, *verify],
                         [embedded / "x.npy", embedded / "x.files.csv", pairs]),
        "verify x.csv": (["verify", embedded / "x.csv", pairs, *verify], [embedded / "x.csv", pairs]),
        "verify RUN": (["verify", run, pairs, "--checkpoint", "last", *verify],
                       [run / "config.json", model[-1], pairs, *photos]),
        "embed": (["embed", run, data["folder"], "-o", embedded / "new.npy", "--checkpoint", "last", "--retrieval"],
                  [run / "config.json", model[-1], *photos]),
    }  # fmt: skip
    for arguments, _ in verbs.values():
        assert run_command(arguments, capsys) == 0, arguments
    for _ in trials("embeddings"):
        verb = chance.choice(list(verbs))
        arguments, files = verbs[verb]
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(mutated_file(content, path.name, chance))
        codes.add(run_command(arguments, capsys))
        path.write_bytes(content)
        tried(f"{verb} with a mutated file")
    assert {0, 2} <= codes


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than processors
def test_unexpected_options(run, data, embedded, tmp_path, capsys, monkeypatch, tried):
    """Every verb of which no test above covers the options."""
    use_few_digits(monkeypatch)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # would apply to the next commands too
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")  # some values are valid names of files to write
    chance = random.Random(6)
    bench = ["bench", "--operators", "cosine", "--widths", 2, 2, 2, "--network", "cnn-3", "--batch-size", 1,
             "--rounds", 2, "--warmup", 1, "--mode", "inference"]  # fmt: skip
    commands = {
        "evaluate": (["evaluate", run], verb_parser("evaluate")),
        "embed": (["embed", run, data["folder"], "-o", embedded / "new.npy"], verb_parser("embed")),
        "verify": (["verify", embedded / "x.npy", embedded / "pairs.csv", "--folds", 2], verb_parser("verify")),
        "data": (["data", "folder", "--data-dir", data["folder"]], verb_parser("data")),
        "bench": (bench, verb_parser("bench")),
    }
    codes = set()
    for _ in trials("options"):
        verb = chance.choice(list(commands))
        arguments, parser = commands[verb]
        codes.add(run_command([*arguments, *mutated_options(options_of(parser), chance)], capsys))
        tried(f"{verb} with unexpected options")
    assert {0, 2} <= codes
