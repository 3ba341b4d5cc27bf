"""torch.compile, torch.jit.script and FLOP counters: no graph break with changing sizes and options, right counts."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import spherenet as sn

LAYERS = {
    "conv": (
        lambda **options: sn.SphereConv2d(3, 4, 3, padding=1, **options),
        [(2, 3, 8, 9), (3, 3, 9, 7), (5, 3, 6, 6)],
    ),
    "linear": (lambda **options: sn.SphereLinear(8, 4, **options), [(5, 8), (6, 8), (7, 8)]),
    "transposed": (
        lambda **options: sn.SphereConvTranspose2d(3, 4, 3, stride=2, **options),
        [(2, 3, 4, 5), (3, 3, 5, 4), (5, 3, 6, 6)],
    ),
}
OPTIONS = [
    {"operator": "cosine"},
    {"operator": "sigmoid", "rescale": "learned", "bias": True},
    {"operator": "learnable", "center": "patch"},
    {"operator": "linear", "magnitude": "tanh", "radius": "learned"},
    {"operator": "sharpened-cosine", "center": "weight"},
]


def gradients(function, layer, x):
    x = x.clone().requires_grad_()
    out = function(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


def assert_same(got, expected):
    for value, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5 * max(1, wanted.abs().max().item()))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_compiled_layers_with_changing_sizes(name, options):
    torch._dynamo.reset()
    make, shapes = LAYERS[name]
    layer = make(**options)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for shape in shapes:
        x = torch.randn(shape)
        assert_same(gradients(compiled, layer, x), gradients(layer, layer, x))


def test_layers_with_different_numbers_through_one_compiled_function():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def through(layer, x):
        return layer(x)

    for eps, k in ((1e-4, 0.3), (1e-3, 0.4), (1e-2, 0.5)):
        layer, x = sn.SphereConv2d(3, 4, 3, eps=eps, operator="sigmoid", k=k), torch.randn(2, 3, 7, 7)
        assert_same(gradients(lambda x, layer=layer: through(layer, x), layer, x), gradients(layer, layer, x))


@pytest.mark.parametrize("loss", ["w-cosine", "arcface"])
def test_compiled_classifier_with_changing_batches(loss):
    torch._dynamo.reset()
    model = sn.create_model("cnn-3", operator="sigmoid", loss=loss, widths=(4, 4, 4), input_size=16)
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for batch in (4, 6, 9):
        images, labels = torch.randn(batch, 3, 16, 16), torch.arange(batch) % 10
        model.zero_grad()
        value = compiled(images, labels)[0]
        value.backward()
        got = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model(images, labels)[0].backward()
        assert_same(got, [parameter.grad for parameter in model.parameters()])


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_inductor_compiles_layers_and_losses_with_changing_sizes(tmp_path, monkeypatch):
    """The default backend of torch.compile: code in C++, with the gradients of the layer."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    layer = sn.SphereConv2d(3, 4, 3, padding=1, operator="sigmoid", rescale="learned")
    model = nn.ModuleDict({"layer": layer, "head": sn.AngularHead(4, 5), "loss": sn.ArcFaceLoss()})
    attention = sn.SphereMultiheadAttention(4, 2, batch_first=True)

    def forward(images, labels):
        features = model["layer"](images).flatten(2).transpose(1, 2)
        attended, _ = attention(features, features, features, need_weights=False)
        return model["loss"](model["head"](attended.mean(1)), labels)

    compiled = torch.compile(forward, dynamic=True, fullgraph=True)
    parameters = [*model.parameters(), *attention.parameters()]
    for shape in ((4, 3, 8, 9), (6, 3, 7, 7)):
        images, labels = torch.randn(shape, requires_grad=True), torch.arange(shape[0]) % 5
        results = []
        for function in (compiled, forward):
            value = function(images, labels)
            results.append([value, *torch.autograd.grad(value, [images, *parameters])])
        assert_same(*results)
    assert list(tmp_path.rglob("*.cpp")), "nothing was compiled"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: sn.SphereConv2d(3, 4, 3),
        lambda: sn.AngularHead(3, 4),
        lambda: sn.SphereLSTM(3, 4),
        lambda: sn.SphereMultiheadAttention(4, 2),
        lambda: sn.MPLinear(3, 4),
        lambda: sn.ArcFaceLoss(),
        lambda: sn.FastConv2d(3, 4, 3),
        lambda: sn.SphereViT(),
        lambda: sn.SphereGPT(10),
        lambda: sn.LinearAngle(),
        lambda: sn.TanhMagnitude(),
    ],
    ids=[
        *("layer", "head", "recurrence", "attention", "magnitude-preserving", "loss", "plain convolution"),
        *("images", "tokens", "angle", "magnitude"),
    ],
)
def test_script_names_what_works(make, nested):
    module = make()
    with pytest.raises(TypeError, match=r"use torch\.jit\.trace or torch\.export\.export, got torch\.jit\.script of "):
        torch.jit.script(nn.Sequential(module) if nested else module)


COUNT = """
import torch, spherenet as sn
from torch.utils.flop_counter import FlopCounterMode
counts = []
for operator in ({operator!r}, None):
    model = sn.create_model("cnn-9", operator=operator, widths=(8, 8, 8), input_size=16).train({training})
    images = torch.randn(2, 3, 16, 16)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled({training}):
        out = model(images)
        if {training}:
            out.sum().backward()
    counts.append(counter.get_total_flops())
print(*counts)
"""


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("operator", ["cosine", "learnable"])
def test_first_flop_count_of_a_process_is_that_of_the_cnn(operator, training):
    code = COUNT.format(operator=operator, training=training)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    sphere, plain = map(int, done.stdout.split())
    assert sphere == plain > 1e6
