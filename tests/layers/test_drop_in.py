"""Sphere layers replace torch's layers: arguments, shapes, state, tools of torch."""

import copy
import inspect
import io
import pickle
from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.testing._internal import common_nn
from torch.testing._internal.common_modules import module_db

import spherenet as sn
from spherenet.angles import OPERATORS

COUNTERPARTS = {
    nn.Conv1d: sn.SphereConv1d,
    nn.Conv2d: sn.SphereConv2d,
    nn.Conv3d: sn.SphereConv3d,
    nn.Linear: sn.SphereLinear,
}
LAZY_COUNTERPARTS = {
    nn.LazyConv1d: sn.LazySphereConv1d,
    nn.LazyConv2d: sn.LazySphereConv2d,
    nn.LazyConv3d: sn.LazySphereConv3d,
    nn.LazyLinear: sn.LazySphereLinear,
}
every_operator = pytest.mark.parametrize("operator", OPERATORS)


def samples_of_torch():
    """Yield the constructor and forward calls of torch's own test database for these classes."""
    for info in module_db:
        counterpart = (COUNTERPARTS | LAZY_COUNTERPARTS).get(info.module_cls)
        if counterpart is None:
            continue
        calls = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
        for index, call in enumerate(calls):
            constructor, forward = call.constructor_input, call.forward_input
            yield pytest.param(
                info.module_cls,
                counterpart,
                constructor.args,
                constructor.kwargs,
                (*forward.args, *forward.kwargs.values()),
                id=f"{info.name}-{index}-{call.desc}",
            )
    for sample in [*common_nn.get_new_module_tests(), *common_nn.module_tests]:  # torch's older table
        plain = getattr(nn, sample.get("module_name", ""), None)
        if plain in COUNTERPARTS:
            inputs = sample["input_fn"]() if "input_fn" in sample else torch.randn(sample["input_size"])
            name = f"older-{plain.__name__}-{sample.get('desc', 'plain')}"
            yield pytest.param(plain, COUNTERPARTS[plain], sample["constructor_args"], {}, (inputs,), id=name)


SAMPLES = list(samples_of_torch())


def test_torch_has_samples_of_every_class():
    assert {sample.values[0] for sample in SAMPLES} == set(COUNTERPARTS | LAZY_COUNTERPARTS) - {
        nn.LazyLinear
    }  # torch has none
    assert len(SAMPLES) >= 60


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # of the plain layer
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@every_operator
@pytest.mark.parametrize(("plain", "counterpart", "sizes", "options", "inputs"), SAMPLES)
def test_samples_of_torch_have_same_output_shape(plain, counterpart, sizes, options, inputs, operator):
    expected = plain(*sizes, **options)(*inputs)
    got = counterpart(*sizes, **options, operator=operator)(*inputs)
    assert got.shape == expected.shape
    assert got.isfinite().all()
    got.sum().backward()


@pytest.mark.parametrize(("plain", "counterpart"), COUNTERPARTS.items(), ids=lambda c: c.__name__)
def test_order_of_arguments_equals_torch(plain, counterpart):
    positional = [
        name
        for name, p in inspect.signature(plain).parameters.items()
        if p.kind is p.POSITIONAL_OR_KEYWORD and name not in ("device", "dtype")
    ]
    assert list(inspect.signature(counterpart).parameters)[: len(positional)] == positional


def test_losses_show_all_options_with_their_defaults():
    cross_entropy = {"class_weight": None, "ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"}
    for shown in [sn.SoftmaxLoss, sn.GASoftmaxLoss, sn.ASoftmaxLoss, sn.ArcFaceLoss]:
        parameters = inspect.signature(shown).parameters
        assert {name: parameters[name].default for name in cross_entropy} == cross_entropy
        assert all(p.kind is not p.VAR_KEYWORD and p.default is not p.empty for p in parameters.values())


LAYERS = [*COUNTERPARTS.values(), sn.LazySphereConv2d, sn.LazySphereLinear, sn.SphereLSTMCell, sn.SphereLSTM]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda c: c.__name__)
def test_layers_show_all_options_with_their_defaults(layer):
    shown = inspect.signature(layer).parameters
    own = list(inspect.signature(layer.__init__).parameters)[1:-1]
    defaults = {field.name: field.default for field in fields(sn.SphereOptions)}
    defaults |= {"rescale": "learned"} if "LSTM" in layer.__name__ else {}
    assert [name for name in shown if name not in defaults] == own
    assert {name: shown[name].default for name in defaults} == defaults
    assert all(shown[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults)
    assert list(shown)[-2:] == ["device", "dtype"]


@pytest.mark.parametrize(("plain", "counterpart"), COUNTERPARTS.items(), ids=lambda c: c.__name__)
def test_same_seed_gives_weights_of_torch(plain, counterpart):
    sizes = (6, 8) if plain is nn.Linear else (6, 8, 3)
    torch.manual_seed(1)
    expected = plain(*sizes, bias=False)
    torch.manual_seed(1)
    layer = counterpart(*sizes)
    assert isinstance(layer, plain)
    torch.testing.assert_close(layer.weight, expected.weight, rtol=0, atol=0)
    layer.load_state_dict(expected.state_dict())


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@every_operator
@pytest.mark.parametrize("bias", [False, True])
def test_lazy_layers_are_initialized_by_first_input(operator, bias):
    for lazy, counterpart, shape in [
        (sn.LazySphereConv1d(4, 3, operator=operator, bias=bias), sn.SphereConv1d, (2, 3, 5)),
        (sn.LazySphereConv2d(4, 3, operator=operator, bias=bias), sn.SphereConv2d, (2, 3, 5, 5)),
        (sn.LazySphereConv3d(4, 3, operator=operator, bias=bias), sn.SphereConv3d, (2, 3, 5, 5, 5)),
        (sn.LazySphereLinear(4, operator=operator, bias=bias), sn.SphereLinear, (2, 3)),
    ]:
        assert lazy.has_uninitialized_params()
        lazy(torch.randn(shape))
        assert type(lazy) is counterpart
        sizes = (3, 4) if counterpart is sn.SphereLinear else (3, 4, 3)
        assert repr(lazy) == repr(counterpart(*sizes, operator=operator, bias=bias))
        counterpart(*sizes, operator=operator, bias=bias).load_state_dict(lazy.state_dict())


def test_repr_shows_geometry_and_operator():
    layer = sn.SphereConv2d(3, 8, 3, padding=1, operator="sigmoid", k=0.7, rescale="learned")
    text = repr(layer)
    for part in ("3, 8, kernel_size=(3, 3)", "padding=(1, 1)", "operator='sigmoid'", "k=0.7", "rescale='learned'"):
        assert part in text
    assert "eps=0.0001" in repr(sn.SphereLinear(3, 4))


def test_reset_parameters_restores_all_parameters():
    layer = sn.SphereConv2d(3, 8, 3, operator="learnable", k=0.4, rescale="learned", bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    assert layer.weight.abs().max() < 1
    torch.testing.assert_close(layer.k, torch.full((8,), 0.4))
    assert (layer.beta == 1).all()
    assert (layer.gamma == 0).all()


@every_operator
def test_state_dict_keys_are_fixed(operator):
    """Saved files depend on these names: changing one needs a migration in `_load_from_state_dict`."""
    layer = sn.SphereConv2d(3, 8, 3, operator=operator, bias=True, rescale="learned")
    expected = {"weight": (8, 3, 3, 3), "bias": (8,), "beta": (8,), "gamma": (8,)}
    expected |= {"learnable": {"angle.raw_k": (8,)}, "sharpened-cosine": {"angle.raw_p": (8,)}}.get(operator, {})
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == expected


def test_state_of_first_version_gives_same_outputs():
    """Stored numbers detect changes of names, of the parametrization of k and of the formula."""
    layer = sn.SphereLinear(2, 2, operator="learnable", bias=True, rescale="learned")
    layer.load_state_dict(
        {
            "weight": torch.tensor([[1.0, 2.0], [3.0, -1.0]]),
            "bias": torch.tensor([0.1, -0.2]),
            "beta": torch.tensor([2.0, 0.5]),
            "gamma": torch.tensor([0.0, 1.0]),
            "angle.raw_k": torch.tensor([-0.5, 0.5]),
        }
    )
    expected = torch.tensor([[2.1474046918, 0.9], [-0.3861057582, 1.2992182671]])
    torch.testing.assert_close(layer(torch.tensor([[0.5, 1.5], [2.0, -1.8]])), expected)


@every_operator
@pytest.mark.parametrize("copier", ["deepcopy", "pickle", "torch.save"])
def test_copies_give_same_outputs(operator, copier):
    layer = sn.SphereConv2d(3, 4, 3, operator=operator, rescale="learned")
    if copier == "deepcopy":
        counterpart = copy.deepcopy(layer)
    elif copier == "pickle":
        counterpart = pickle.loads(pickle.dumps(layer))
    else:
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        counterpart = sn.SphereConv2d(3, 4, 3, operator=operator, rescale="learned")
        counterpart.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(counterpart(x), layer(x), rtol=0, atol=0)
    assert counterpart.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("size", [(2, 3, 6, 6), (2, 3, 6, 6, 6)])
@every_operator
def test_channels_last_is_kept(operator, size):
    memory_format = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    cls = sn.SphereConv2d if len(size) == 4 else sn.SphereConv3d
    layer = cls(3, 4, 3, operator=operator, bias=True, rescale="learned")
    x = torch.randn(size)
    expected = layer(x)
    out = layer.to(memory_format=memory_format)(x.to(memory_format=memory_format))
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out, expected)


@every_operator
def test_autocast_returns_dtype_of_convolution(operator):
    layer = sn.SphereConv2d(3, 4, 3, operator=operator, bias=True, rescale="learned")
    linear = sn.SphereLinear(5, 4, operator=operator)
    x, rows = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(3, 5)
    expected, expected_rows = layer(x), linear(rows)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, out_rows = layer(x), linear(rows)
    assert out.dtype == out_rows.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.05)
    torch.testing.assert_close(out_rows.float(), expected_rows, rtol=0.02, atol=0.05)
    out.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert x.grad.isfinite().all()


def test_norms_stay_float32_under_autocast():
    """A norm in bfloat16 would change outputs by up to 0.4 %, the product alone by less."""
    layer = sn.SphereConv2d(64, 4, 3)
    x = torch.rand(1, 64, 8, 8) + 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    torch.testing.assert_close(out.float(), layer(x), rtol=0, atol=2e-3)


class SideBySide(nn.ModuleList):
    """Layers that get the same input; a list of their outputs."""

    def forward(self, x):
        return [layer(x) for layer in self]


def test_compile_equals_eager():
    torch._dynamo.reset()  # the limit of recompilations counts those of other tests
    options = {"padding": 1, "bias": True, "rescale": "learned"}
    layers = SideBySide(sn.SphereConv2d(3, 4, 3, operator=operator, **options) for operator in OPERATORS)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    compiled = torch.compile(layers, fullgraph=True)(x)
    for layer, got, expected in zip(layers, compiled, layers(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        gradients = [
            torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], retain_graph=True)
            for out in (got, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@every_operator
def test_per_sample_gradients_by_vmap_of_grad(operator):
    layer = sn.SphereConv2d(3, 4, 3, operator=operator, rescale="learned")
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    x = torch.randn(5, 3, 6, 6)

    def loss(weights, image):
        return torch.func.functional_call(layer, weights, (image[None],)).square().sum()

    got = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for index in range(5):
        expected = torch.func.grad(loss)(weights, x[index])
        for name in weights:
            torch.testing.assert_close(got[name][index], expected[name], rtol=1e-4, atol=1e-6)


@every_operator
def test_vmap_over_weights_and_jacobians(operator):
    x, weights = torch.randn(2, 6), torch.randn(3, 4, 6)
    k, power = torch.tensor(0.4), sn.SharpenedCosineAngle()

    def call(w, x):
        by_name = {"learnable": ("sigmoid", {"k": k}), "sharpened-cosine": (power, {})}
        chosen, arguments = by_name.get(operator, (operator, {}))
        return sn.functional.sphere_linear(x, w, operator=chosen, **arguments)

    got = torch.func.vmap(call, in_dims=(0, None))(weights, x)
    torch.testing.assert_close(got, torch.stack([call(w, x) for w in weights]))
    reverse, forward = torch.func.jacrev(call)(weights[0], x), torch.func.jacfwd(call)(weights[0], x)
    torch.testing.assert_close(reverse, forward)


def test_meta_device_gives_shapes():
    layer = sn.SphereConv2d(3, 4, 3, operator="learnable", rescale="learned", device="meta")
    assert layer(torch.empty(2, 3, 6, 6, device="meta")).shape == (2, 4, 4, 4)


def test_device_and_dtype_reach_every_parameter():
    layer = sn.SphereConv2d(3, 4, 3, operator="learnable", rescale="learned", bias=True, dtype=torch.float64)
    assert {p.dtype for p in layer.parameters()} == {torch.float64}


def test_in_place_relu_after_the_layer():
    layer = sn.SphereConv2d(3, 4, 3, operator="sigmoid")
    x = torch.randn(2, 3, 6, 6)
    gradients = []
    for inplace in (False, True):
        layer.zero_grad()
        nn.functional.relu(layer(x), inplace=inplace).square().sum().backward()
        gradients.append(layer.weight.grad.clone())
    torch.testing.assert_close(*gradients)
