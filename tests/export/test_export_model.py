"""`export_model`: choice of the format by suffix or name."""

import pytest
import torch

from spherenet.errors import ModelError
from spherenet.export import FORMATS, export_model, format_of, load_metadata, load_model
from spherenet.export import onnx as formats

SUFFIXES = {"a.onnx": "onnx", "a.ONNX": "onnx", "a.pt2": "program", "a": "folder", "b.c/a": "folder"}  # fmt: skip


@pytest.mark.parametrize(("target", "expected"), SUFFIXES.items())
def test_suffix_selects_the_format(target, expected):
    assert format_of(target) == expected
    assert expected in FORMATS


@pytest.mark.parametrize("target", ["model.pth", "model.safetensors", "model.ts", "cnn-k0.3"])
def test_unknown_suffix_raises(tmp_path, target):
    with pytest.raises(ValueError, match=rf"must end in \.onnx, \.pt2 or, for a folder.*got '.*{target}'"):
        export_model(torch.nn.Linear(2, 2), tmp_path / target)


def test_unknown_format_raises(tmp_path):
    with pytest.raises(ValueError, match="format must be one of 'folder', 'onnx', 'program', got 'onx'"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "x", "onx")


def test_folder_format(network, tmp_path):
    model = network(operator="cosine")
    # The dot belongs to the name if the format is explicit.
    target = tmp_path / "cnn-k0.3"
    assert export_model(model, target, "folder", metadata={"a": 1}) == target
    assert load_metadata(target) == {"a": 1}
    load_model(target)
    with pytest.raises(ModelError, match="is not empty"):
        export_model(model, target, "folder")
    export_model(model, target, "folder", overwrite=True)
    with pytest.raises(TypeError, match="model must be a Classifier"):
        export_model(torch.nn.Linear(2, 2), tmp_path / "other")


@pytest.mark.parametrize("target", ["a", "a.onnx", "a.pt2"])
def test_equal_models_become_equal_files(network, tmp_path, target):
    model = network(operator="learnable")
    contents = []
    for number in range(2):
        export_model(model, tmp_path / str(number) / target, metadata={"b": 1, "a": 2}, check=False)
        written = sorted(path for path in (tmp_path / str(number)).rglob("*") if path.is_file())
        contents.append([(path.name, path.read_bytes()) for path in written])
    assert contents[0] == contents[1]


@pytest.mark.parametrize(("target", "format"), [("x.onnx", None), ("x.pt2", None), ("x.bin", "onnx")])
def test_file_formats_call_their_export_function(tmp_path, monkeypatch, target, format):
    calls = []
    for name in formats._FILES:
        monkeypatch.setitem(
            formats._FILES, name, lambda *args, name=name, **options: calls.append((name, args, options))
        )
    model = torch.nn.Linear(2, 2)
    example = torch.zeros(1, 2)
    export_model(model, tmp_path / target, format, example=example, metadata={"a": 1}, check=False)
    options = {"example": example, "metadata": {"a": 1}, "check": False}
    assert calls == [(format or SUFFIXES[target.replace("x", "a", 1)], (model, tmp_path / target), options)]
