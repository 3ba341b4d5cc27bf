"""torch.export: same scores at any batch size, without this library."""

import io
import json
import subprocess
import sys
import zipfile

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.angles import OPERATORS
from spherenet.errors import ModelError
from spherenet.export import export_onnx, export_program, freeze
from spherenet.export.programs import require_same_scores, trace_program

LOSSES = {
    None: "softmax",
    "cosine": "w-cosine",
    "linear": "ga-linear",
    "sigmoid": "s-sigmoid",
    "learnable": "w-sigmoid",
    "square-cosine": "w-cosine",
    "sharpened-cosine": "w-linear",
}


def assert_same_scores(run, model, accuracy=1e-5):
    model = model.eval()
    for batch in (1, 2, 5):
        images = torch.randn(batch, model.config["in_channels"], *model.config["input_size"])
        with torch.no_grad():
            expected, actual = model(images), run(images)
            one_by_one = torch.cat([run(image.unsqueeze(0)) for image in images])
        peak = max(1.0, expected.abs().max().item())
        assert (actual - expected).abs().max().item() <= accuracy * peak
        assert (one_by_one - actual).abs().max().item() <= accuracy * peak


@pytest.mark.parametrize("operator", [None, *OPERATORS])
def test_exported_program_matches(network, tmp_path, operator):
    model = network("cnn-3", operator=operator, loss=LOSSES[operator])
    file = export_program(model, tmp_path / "x.pt2", metadata={"classes": ["a"]})
    assert file == tmp_path / "x.pt2"
    extra = {"metadata.json": ""}
    program = torch.export.load(file, extra_files=extra)
    assert_same_scores(program.module(), model)
    assert json.loads(extra["metadata.json"]) == {"classes": ["a"]}
    operations = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith("aten.") for name in operations)


class Mixed(nn.Module):
    """Custom network with padding modes, groups, 1-D and 3-D convolutions and a custom angle function."""

    def __init__(self):
        super().__init__()
        self.image = sn.SphereConv2d(4, 6, 3, padding=1, padding_mode="circular", groups=2, operator="learnable")
        self.stretched = sn.SphereConv2d(6, 4, 2, padding="same", dilation=2, operator="linear", rescale="learned")
        self.volume = sn.SphereConv3d(1, 2, 2, stride=2, operator=sn.CustomAngle(lambda theta: 1 - theta))
        self.sequence = sn.SphereConv1d(2, 3, 1, bias=True, padding_mode="replicate", operator="sigmoid")
        self.last = sn.SphereLinear(48, 5, operator="cosine")

    def forward(self, x):
        maps = self.volume(self.stretched(self.image(x)).unsqueeze(1))
        return self.last(self.sequence(maps.flatten(2)).flatten(1))


@pytest.mark.parametrize("geometry", [(2, 4, 8, 4)], ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_custom_module_is_exported_with_an_example(tmp_path, geometry, count):
    model = Mixed().eval()
    run = torch.export.load(export_program(model, tmp_path / "x.pt2", example=torch.randn(geometry)[:count])).module()
    for batch in (1, 3):
        images = torch.randn(batch, *geometry[1:])
        torch.testing.assert_close(run(images), model(images), rtol=0, atol=1e-5)


def test_default_file_names_in_a_folder(network, tmp_path):
    assert export_program(network(), tmp_path) == tmp_path / "model.pt2"


def test_program_contains_no_local_paths(network):
    model = network(operator="cosine")
    buffer = io.BytesIO()
    torch.export.save(trace_program(model, torch.randn(2, 3, 32, 32)), buffer)
    for name in zipfile.ZipFile(buffer).namelist():
        assert b"frozen_layers.py" not in zipfile.ZipFile(buffer).read(name)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return 3 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class UsesPython(sn.AngleFunction):
    def forward(self, cosine):
        return Triple.apply(cosine)


def test_angle_function_that_calls_an_autograd_function(network, tmp_path):
    model = network(operator=UsesPython(), batch_norm=False)
    assert_same_scores(torch.export.load(export_program(model, tmp_path / "x.pt2")).module(), model)


class Fixed(nn.Module):
    """Model that only accepts batches of two."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x):
        return self.inner(x.reshape(2, 4))


class Pair(nn.Linear):
    def forward(self, input):
        return super().forward(input), input


INVALID = {
    "fixed batch size": (Fixed, {"example": torch.randn(2, 4)}, ModelError, "torch.export cannot trace the model"),
    "two outputs": (lambda: Pair(4, 3), {"example": torch.randn(2, 4)}, ModelError, "one tensor .*, got tuple"),
    "one row": (lambda: nn.Flatten(0), {"example": torch.randn(2, 4)}, ModelError, r"one row per input .* \[8\]"),
    "other input size": (lambda: nn.Linear(5, 3), {"example": torch.randn(2, 4)}, ModelError, r"\[2, 4\]: .*mat1"),
    "no example": (lambda: nn.Linear(5, 3), {}, ValueError, "example must be a batch of inputs"),
    "example is a list": (lambda: nn.Linear(5, 3), {"example": [1.0]}, TypeError, "example must be a tensor, got list"),
    "empty batch": (lambda: nn.Linear(5, 3), {"example": torch.zeros(0, 5)}, ValueError, r"at least one input, .*\[0"),
    "metadata": (lambda: nn.Linear(5, 3), {"example": torch.zeros(2, 5), "metadata": {"a": 1j}}, ModelError, "complex"),
    "folder": (lambda: nn.Linear(5, 3), {"example": torch.zeros(2, 5)}, ModelError, "a folder has that name"),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_and_models_raise(tmp_path, case):
    make, options, error, message = INVALID[case]
    (tmp_path / "sub" / "model.pt2").mkdir(parents=True)
    with pytest.raises(error, match=message) as caught:
        export_program(make(), tmp_path / "sub", **options)
    assert "\n" not in str(caught.value)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["model.pt2"]


def test_different_scores_raise(network, tmp_path, monkeypatch):
    """A model with a wrong constant must not be written."""
    model = network(operator="sigmoid")

    def wrong_freeze(model):
        frozen = freeze(model)
        frozen.features.fully_connected.angle.scale.mul_(1.001)
        return frozen

    monkeypatch.setattr("spherenet.export.programs.freeze", wrong_freeze)
    with pytest.raises(
        ModelError, match=r"must return the scores of the model up to a difference of 1e-05, got \S+ for"
    ):
        export_program(model, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    export_program(model, tmp_path / "x", check=False)


def test_tolerance_follows_the_rounding_error_of_the_model(network):
    example = torch.randn(2, 3, 32, 32)
    deep = network("cnn-69", operator="sigmoid", k=0.1)
    assert require_same_scores(freeze(deep), deep, example, "the frozen model") > 1e-6
    half = network(operator="cosine", loss="s-cosine").to(torch.bfloat16)
    assert require_same_scores(freeze(half), half, example.to(torch.bfloat16), "the frozen model") < 0.05
    wrong = freeze(deep)
    wrong.features.fully_connected.angle.scale.mul_(1.1)
    with pytest.raises(ModelError, match="the wrong model must return the scores of the model"):
        require_same_scores(wrong, deep, example, "the wrong model")


RUN_ALONE = """
import sys, warnings
sys.modules["spherenet"] = None  # makes imports of it fail
import torch, onnxruntime
warnings.simplefilter("ignore")
images = torch.load("images.pt", weights_only=True)
session = onnxruntime.InferenceSession("x.onnx", providers=["CPUExecutionProvider"])
with torch.no_grad():
    scores = {
        "program": torch.export.load("x.pt2").module()(images),
        "onnx": torch.from_numpy(session.run(None, {"images": images.numpy()})[0]),
    }
torch.save(scores, "scores.pt")
"""


def test_exported_files_run_without_spherenet(network, tmp_path):
    model = network(operator="learnable", loss="w-sigmoid").eval()
    for export, name in ((export_program, "x.pt2"), (export_onnx, "x.onnx")):
        export(model, tmp_path / name, check=False)
    images = torch.randn(3, 3, 32, 32)
    torch.save(images, tmp_path / "images.pt")
    subprocess.run([sys.executable, "-c", RUN_ALONE], cwd=tmp_path, check=True, timeout=300)
    with torch.no_grad():
        expected = model(images)
    for name, actual in torch.load(tmp_path / "scores.pt", weights_only=True).items():
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5, msg=name)
