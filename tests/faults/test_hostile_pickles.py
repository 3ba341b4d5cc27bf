"""Pickles instead of data are rejected by every command, and their code is not run."""

import ast
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from faults.children import OPTIONS
from faults.folders import assert_same_run, sign
from spherenet.runs import RunDirectory

POINT = 4
SOURCES = Path(__file__).parents[2] / "src" / "spherenet"


class Calls:
    """Object whose pickle calls `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def plain_pickle(proof):
    """Return a pickle that creates the folder `proof`."""
    return pickle.dumps({"weight": Calls(os.mkdir, str(proof))})


def torch_checkpoint(proof):
    """Return a torch checkpoint in the zip format that contains a call."""
    path = proof.with_suffix(".pt")
    torch.save({"weight": Calls(os.mkdir, str(proof))}, path)
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.fixture
def proof(tmp_path):
    """Return a folder that exists if a pickle was run, and assert that it does not."""
    path = tmp_path / "proof"
    pickle.loads(plain_pickle(path))
    assert path.exists()  # unpickling creates it
    path.rmdir()
    yield path
    assert not path.exists()


@pytest.mark.parametrize("make", [plain_pickle, torch_checkpoint])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_pickle_in_newest_checkpoint_is_skipped(children, interrupted, uninterrupted, folder, proof, tried, make, name):
    """The checkpoint is rejected although its manifest fits, and the previous one is used."""
    run = interrupted(10, folder / "run")
    newest = RunDirectory(run).checkpoints.paths()[-1]
    (newest / name).write_bytes(make(proof))
    (newest / "extra.pt").write_bytes(make(proof))
    sign(newest)
    done = children.run("train", "--resume", run)
    assert done.code == 0, done.output
    assert "step-00000009" in done.output
    assert_same_run(run, uninterrupted())
    tried("a pickle in a file of the newest checkpoint")


COMMANDS = {
    "resume": lambda run, folder: ["train", "--resume", run],
    "init-from": lambda run, folder: ["train", *OPTIONS, "--init-from", run, "--output", folder / "new"],
    "evaluate": lambda run, folder: ["evaluate", run],
    "predict": lambda run, folder: ["predict", "image.png", "--run", run],
    "export": lambda run, folder: ["export", run, folder / "exported"],
    "doctor": lambda run, folder: ["doctor", run],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_pickle_in_every_checkpoint_is_rejected(children, uninterrupted, folder, proof, tried, command):
    run = folder / "run"
    shutil.copytree(uninterrupted(), run)
    (run / "summary.json").unlink()
    for name in ("step", "best"):
        for checkpoint in RunDirectory(run).checkpoints.paths(name):
            (checkpoint / "model.safetensors").write_bytes(plain_pickle(proof))
            sign(checkpoint)
    done = children.run(*COMMANDS[command](run, folder))
    assert done.code == (1 if command == "doctor" else 2), done.output
    assert "Traceback" not in done.output
    assert {entry.name for entry in folder.iterdir()} == {"run"}
    tried("a pickle in every checkpoint, at each verb that reads one")


@pytest.mark.parametrize("make", [plain_pickle, torch_checkpoint])
def test_pickle_in_a_saved_model_is_rejected(children, uninterrupted, folder, proof, tried, make):
    assert children.run("export", uninterrupted(), folder / "model").code == 0
    (folder / "model" / "model.safetensors").write_bytes(make(proof))
    for arguments in (
        ["predict", "image.png", "--run", folder / "model"],
        ["train", *OPTIONS, "--init-from", folder / "model", "--output", folder / "new"],
    ):
        done = children.run(*arguments)
        assert done.code == 2, done.output
        assert "Traceback" not in done.output
        tried("a pickle in a saved model")
    assert not (folder / "new").exists()


def test_call_in_a_yaml_file_is_rejected(children, folder, proof, tried):
    config = folder / "my.yaml"
    for text in (
        f"!!python/object/apply:os.mkdir ['{proof}']",
        f"operator: !!python/object/apply:os.mkdir ['{proof}']",
        f"data: !!python/name:os.mkdir\nmodel: !!python/object/new:os.mkdir ['{proof}']",
    ):
        config.write_text(text)
        done = children.run("train", "--config", config, "--output", folder / "run")
        assert done.code == 2, done.output
        assert "Traceback" not in done.output
        tried("a call in a YAML file")
    assert not (folder / "run").exists()


MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "os.system", "os.popen", "torch.load", "torch.hub.load", "yaml.load", "yaml.full_load",
         "yaml.unsafe_load", "yaml.load_all"}  # fmt: skip
METHODS = {"extractall", "unpack_archive"}
KEYWORDS = {"weights_only": False, "allow_pickle": True, "shell": True}


def unsafe_calls(tree):
    """Yield imports and calls in a module that could run code from files."""
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


def test_package_has_no_unsafe_calls(tried):
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert list(unsafe_calls(tree)) == [], path
        tried("a source file searched for pickle, eval, extractall, shell=True and the like")


@pytest.mark.parametrize(
    "code",
    ["import pickle", "from pickle import loads", "torch.load(f)", "np.load(f, allow_pickle=True)", "eval(text)",
     "torch.load(f, weights_only=False)", "yaml.load(text)", "run(command, shell=True)", "archive.extractall()",
     "run(command, shell=flag)"],
)  # fmt: skip
def test_unsafe_call_is_found(code):
    assert list(unsafe_calls(ast.parse(code)))
