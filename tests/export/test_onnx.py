"""ONNX export: scores in onnxruntime against those of plain networks with each operator and of residual ones."""

import json
import sys

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.errors import MissingExtraError, ModelError
from spherenet.export import export_onnx
from spherenet.export import onnx as onnx_file

LOSSES = {
    None: "softmax",
    "cosine": "w-cosine",
    "linear": "ga-linear",
    "sigmoid": "s-sigmoid",
    "learnable": "w-sigmoid",
}
CASES = {
    **{f"cnn-3 {operator}": ("cnn-3", operator, {}) for operator in LOSSES},
    "widths of the paper": ("cnn-9", "sigmoid", {"widths": (64, 96, 128)}),
    "residual": ("resnet-32", "cosine", {}),
    "residual with operators in shortcuts": ("resnet-32", "sigmoid", {"shortcut": "operator"}),
}


def onnx_scores(file, images):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["scores"], {"images": images.numpy()})[0])


def worst_difference(file, model, batches=(1, 4)):
    model = model.eval()
    worst = 0.0
    for batch in batches:
        images = torch.randn(batch, model.config["in_channels"], *model.config["input_size"])
        images[0, :, :9] = 0  # zero patches
        with torch.no_grad():
            expected = model(images)
        actual = onnx_scores(file, images)
        assert actual.shape == expected.shape
        worst = max(worst, (actual - expected).abs().max().item() / max(1.0, expected.abs().max().item()))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_scores_match(network, tmp_path, case):
    name, operator, options = CASES[case]
    model = network(name, operator=operator, loss=LOSSES[operator], **options)
    assert worst_difference(export_onnx(model, tmp_path / "x.onnx", check=False), model) <= 1e-5


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = sn.create_model("cnn-3", operator="cosine", loss="w-cosine", widths=(2, 3, 4), num_classes=3)
    folder = tmp_path_factory.mktemp("exported")
    metadata = {"classes": ["Käfer", "b", "c"], "preprocessing": {"mean": 127.5, "scale": 128}}
    return model, export_onnx(model, folder, metadata=metadata)


def test_contents_of_the_file(exported):
    model, file = exported
    assert file.name == "model.onnx"
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]
    proto = onnx.load(file)
    onnx.checker.check_model(proto, full_check=True)
    assert [value.name for value in proto.graph.input] == ["images"]
    assert [value.name for value in proto.graph.output] == ["scores"]
    for value, rest in ((proto.graph.input[0], [3, 32, 32]), (proto.graph.output[0], [3])):
        dims = value.type.tensor_type.shape.dim
        assert dims[0].dim_param == "batch"
        assert [dim.dim_value for dim in dims][1:] == rest
    assert {node.domain for node in proto.graph.node} == {""}
    properties = {entry.key: json.loads(entry.value) for entry in proto.metadata_props}
    assert properties == {"classes": ["Käfer", "b", "c"], "preprocessing": {"mean": 127.5, "scale": 128}}
    assert b".py" not in file.read_bytes()
    assert worst_difference(file, model, (1, 2, 3, 7)) <= 1e-5


def test_constants_are_folded(exported):
    """A layer needs two convolutions, its own and that of the patch norms, and no BatchNorm."""
    _, file = exported
    operations = [node.op_type for node in onnx.load(file).graph.node]
    assert operations.count("Conv") == 6
    assert "BatchNormalization" not in operations
    assert "Acos" not in operations


def tiny():
    """Return a minimal model, which is quick to export."""
    return nn.Sequential(nn.Flatten(), sn.SphereLinear(4, 3, operator="sigmoid")).eval()


EXAMPLE = torch.linspace(-1, 2, 8).reshape(2, 4)


def test_older_opset(tmp_path):
    proto = onnx.load(export_onnx(tiny(), tmp_path / "x.onnx", example=EXAMPLE, opset=18))
    assert [entry.version for entry in proto.opset_import if entry.domain == ""] == [18]


def test_large_models_store_tensors_in_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_file, "LARGEST_SINGLE_FILE", 10)
    model = nn.Sequential(nn.Flatten(), sn.SphereLinear(4, 300)).eval()
    file = export_onnx(model, tmp_path / "x.onnx", example=EXAMPLE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    torch.testing.assert_close(onnx_scores(file, EXAMPLE), model(EXAMPLE).detach(), rtol=0, atol=1e-5)


def test_different_scores_raise_and_keep_the_old_file(tmp_path, monkeypatch):
    session = onnx_file._session
    monkeypatch.setattr(onnx_file, "_session", lambda path: lambda images: session(path)(images) + 1e-3)
    (tmp_path / "x.onnx").write_bytes(b"old")
    with pytest.raises(ModelError, match=r"onnxruntime must return the scores of the model up to .*, got 0\.001 for"):
        export_onnx(tiny(), tmp_path / "x.onnx", example=EXAMPLE)
    assert [path.name for path in tmp_path.iterdir()] == ["x.onnx"]
    assert (tmp_path / "x.onnx").read_bytes() == b"old"


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_missing_package_raises(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        MissingExtraError, match=rf"^{package} is not installed: pip install 'spherenet-torch\[onnx\]'\.$"
    ):
        export_onnx(tiny(), tmp_path / "x.onnx", example=EXAMPLE)
    assert not list(tmp_path.iterdir())


class Eigenvalues(nn.Module):
    """Model with an operation that ONNX does not have."""

    def forward(self, x):
        return torch.linalg.eigvals(x).abs()


def test_invalid_arguments_and_models_raise(tmp_path):
    for opset in (17, 1000, 18.0, True, "18"):
        with pytest.raises(ValueError, match="opset must be None or an integer from 18 to"):
            export_onnx(tiny(), tmp_path / "x.onnx", example=EXAMPLE, opset=opset)
    double = nn.Sequential(sn.SphereConv1d(2, 2, 1), nn.Flatten()).double()
    with pytest.raises(ModelError, match=r"onnxruntime has no Conv in float64"):
        export_onnx(double, tmp_path / "x.onnx", example=torch.randn(2, 2, 2).double())
    with pytest.raises(ModelError, match="cannot be written as ONNX") as caught:
        export_onnx(Eigenvalues(), tmp_path / "x.onnx", example=torch.randn(2, 3, 3))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dtype", "center"), [(torch.float64, None), (torch.float64, "patch")])
def test_missing_operator_of_the_runtime_is_named(tmp_path, dtype, center):
    layer = sn.SphereConvTranspose2d(3, 4, 3, stride=2, operator="cosine", center=center)
    model = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten()).to(dtype)
    with pytest.raises(ModelError, match=r"^onnxruntime has no ConvTranspose in float64, .* another format[.]$"):
        export_onnx(model, tmp_path / "x.onnx", example=torch.randn(2, 3, 5, 5, dtype=dtype))
    assert list(tmp_path.iterdir()) == []
