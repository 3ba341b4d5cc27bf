"""Pickles where data should be: refused at every door, and what they would have done was not done."""

import ast
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from faults.children import OPTIONS
from faults.folders import assert_same_run, sign
from faults.small_sets import SMALL10, SMALL100, pickled_files, write_folder
from spherenet.runs import RunDirectory

POINT = 4
SOURCES = Path(__file__).parents[2] / "src" / "spherenet"


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def plain(proof):
    return pickle.dumps({"weight": Calls(os.mkdir, str(proof))})


def by_torch(proof):
    """A torch checkpoint in its zip form, with a call in it."""
    path = proof.with_suffix(".pt")
    torch.save({"weight": Calls(os.mkdir, str(proof))}, path)
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.fixture
def proof(tmp_path):
    """A folder that is there if a pickle was run."""
    path = tmp_path / "proof"
    pickle.loads(plain(path))
    assert path.exists()  # so it does when somebody unpickles it
    path.rmdir()
    yield path
    assert not path.exists()


@pytest.mark.parametrize("make", [plain, by_torch])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_in_the_newest_checkpoint(children, interrupted, whole, folder, proof, tried, make, name):
    """With a manifest that fits: refused all the same, and the previous one is used."""
    run = interrupted(10, folder / "run")
    newest = RunDirectory(run).checkpoints.paths()[-1]
    (newest / name).write_bytes(make(proof))
    (newest / "extra.pt").write_bytes(make(proof))
    sign(newest)
    done = children.run("train", "--resume", run)
    assert done.code == 0, done.said
    assert "step-00000009" in done.said
    assert_same_run(run, whole())
    tried("a pickle in a file of the newest checkpoint")


DOORS = {
    "resume": lambda run, folder: ["train", "--resume", run],
    "init-from": lambda run, folder: ["train", *OPTIONS, "--init-from", run, "--output", folder / "new"],
    "evaluate": lambda run, folder: ["evaluate", run],
    "predict": lambda run, folder: ["predict", "picture.png", "--run", run],
    "export": lambda run, folder: ["export", run, folder / "exported"],
    "doctor": lambda run, folder: ["doctor", run],
}


@pytest.mark.parametrize("door", DOORS)
def test_in_every_checkpoint(children, whole, folder, proof, tried, door):
    run = folder / "run"
    shutil.copytree(whole(), run)
    (run / "summary.json").unlink()
    for kind in ("step", "best"):
        for checkpoint in RunDirectory(run).checkpoints.paths(kind):
            (checkpoint / "model.safetensors").write_bytes(plain(proof))
            sign(checkpoint)
    done = children.run(*DOORS[door](run, folder))
    assert done.code == (1 if door == "doctor" else 2), done.said
    assert "Traceback" not in done.said
    assert {entry.name for entry in folder.iterdir()} == {"run"}
    tried("a pickle in every checkpoint, at each verb that reads one")


@pytest.mark.parametrize("make", [plain, by_torch])
def test_in_a_saved_model(children, whole, folder, proof, tried, make):
    assert children.run("export", whole(), folder / "model").code == 0
    (folder / "model" / "model.safetensors").write_bytes(make(proof))
    for arguments in (
        ["predict", "picture.png", "--run", folder / "model"],
        ["train", *OPTIONS, "--init-from", folder / "model", "--output", folder / "new"],
    ):
        done = children.run(*arguments)
        assert done.code == 2, done.said
        assert "Traceback" not in done.said
        tried("a pickle in a saved model")
    assert not (folder / "new").exists()


@pytest.mark.parametrize("form", [SMALL10, SMALL100], ids=lambda form: form.name)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_in_a_data_batch(children, folder, proof, tried, form, protocol):
    files = pickled_files(form, protocol=2)
    name = next(iter(form.test))
    files[name] = pickle.dumps({b"data": Calls(os.mkdir, str(proof))}, protocol=protocol)
    write_folder(folder / form.python_folder, files)
    options = ["--data", form.name, "--data-dir", folder, "--download", "false"]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 2, done.said
    assert "asks for posix.mkdir" in done.said
    assert "Traceback" not in done.said
    assert not (folder / "run").exists()
    tried("a pickle that calls, in a data batch")


def test_in_a_configuration(children, folder, proof, tried):
    config = folder / "my.yaml"
    for text in (
        f"!!python/object/apply:os.mkdir ['{proof}']",
        f"operator: !!python/object/apply:os.mkdir ['{proof}']",
        f"data: !!python/name:os.mkdir\nmodel: !!python/object/new:os.mkdir ['{proof}']",
    ):
        config.write_text(text)
        done = children.run("train", "--config", config, "--output", folder / "run")
        assert done.code == 2, done.said
        assert "Traceback" not in done.said
        tried("a call in a YAML file")
    assert not (folder / "run").exists()


MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "torch.hub.load", "yaml.load", "yaml.full_load",
         "yaml.unsafe_load", "yaml.load_all"}  # fmt: skip
METHODS = {"extractall", "unpack_archive"}
KEYWORDS = {"weights_only": False, "allow_pickle": True, "shell": True}


def offences(tree):
    """What runs code of others' making, in a module of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield node.module
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.split(".")[-1] in METHODS:
                yield name
            for keyword in node.keywords:
                harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is not KEYWORDS.get(
                    keyword.arg
                )
                if keyword.arg in KEYWORDS and not harmless:
                    yield f"{name}({keyword.arg}=…)"


def test_no_code_of_ours_runs_what_it_reads(tried):
    for path in SOURCES.rglob("*.py"):
        assert list(offences(ast.parse(path.read_text(encoding="utf-8")))) == [], path
        tried("a source file searched for pickle, eval, extractall, shell=True and the like")


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(text)",
     "torch.load(f, weights_only=False)", "yaml.load(text)", "run(command, shell=True)", "archive.extractall()",
     "run(command, shell=flag)"],
)  # fmt: skip
def test_the_search_finds_what_it_looks_for(code):
    assert list(offences(ast.parse(code)))
