"""A converted layer equals a sphere layer created with the same weights, and stays the same object."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import spherenet as sn
from cases import GEOMETRIES
from spherenet.convert import to_sphere
from spherenet.layers import SphereLayer

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
lazy = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


def plain_layer(geometry, **options):
    cls = PLAIN[geometry.dims]
    return cls(
        geometry.channels, geometry.filters, geometry.kernel, **geometry.arguments, dtype=torch.float64, **options
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_converted_convolution_equals_sphere_convolution(geometry, bias):
    plain = plain_layer(geometry, bias=bias)
    expected = geometry.layer(bias=bias, operator="sigmoid", k=0.4, rescale=(2.0, 0.5), eps=1e-3)
    expected.load_state_dict(plain.state_dict())
    layer = to_sphere(plain, "sigmoid", k=0.4, rescale=(2.0, 0.5), eps=1e-3)
    assert type(layer) is type(expected)
    assert repr(layer) == repr(expected)
    images = geometry.images().requires_grad_()
    out = layer(images)
    torch.testing.assert_close(out, expected(images), rtol=0, atol=0)
    out.square().sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("operator", ["linear", "cosine", "sigmoid", "learnable", sn.CustomAngle(torch.cos)], ids=str)
@pytest.mark.parametrize("rescale", [None, "learned", (1.5, 0.1)], ids=str)
def test_converted_linear_layer_equals_sphere_linear(operator, rescale):
    plain = nn.Linear(5, 4)
    expected = sn.SphereLinear(5, 4, bias=True, operator=operator, rescale=rescale)
    expected.load_state_dict(plain.state_dict(), strict=False)
    layer = to_sphere(plain, operator, rescale=rescale)
    assert type(layer) is sn.SphereLinear
    assert layer.state_dict().keys() == expected.state_dict().keys()
    rows = torch.randn(3, 2, 5)
    torch.testing.assert_close(layer(rows), expected(rows), rtol=0, atol=0)


@lazy
def test_default_returns_a_copy_and_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(2))
    before, attributes = repr(model), [set(vars(module)) for module in model.modules()]
    sphere = to_sphere(model, classifier=True)
    assert repr(model) == before
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert sphere is not model
    assert sphere[0].weight is not model[0].weight
    torch.testing.assert_close(sphere[0].weight, model[0].weight, rtol=0, atol=0)


def test_inplace_keeps_layers_and_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    layer, weight, bias = model[0], model[0].weight, model[0].bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert to_sphere(model, "cosine", inplace=True) is model
    assert model[0] is layer
    assert layer.weight is weight
    assert layer.bias is bias
    before = weight.clone()
    model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, layer.weight)


def test_mode_dtype_requires_grad_and_attributes_are_kept():
    layer = nn.Conv2d(3, 4, 3, dtype=torch.bfloat16).eval()
    layer.weight.requires_grad_(False)
    layer.custom_attribute = "value"
    sphere = to_sphere(layer, "learnable", rescale="learned")
    assert not sphere.training
    assert sphere.custom_attribute == "value"
    assert {p.dtype for p in sphere.parameters()} == {torch.bfloat16}
    assert [name for name, p in sphere.named_parameters() if p.requires_grad] == ["bias"]


def test_new_parameters_receive_gradients():
    sphere = to_sphere(nn.Conv2d(3, 4, 3), "learnable", rescale="learned")
    sphere(torch.randn(2, 3, 5, 5)).square().sum().backward()
    assert all(p.grad is not None for p in sphere.parameters())


def test_models_on_the_meta_device_convert():
    with torch.device("meta"):
        sphere = to_sphere(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)), "learnable", classifier=True)
    assert {p.device.type for p in sphere.parameters()} == {"meta"}
    assert sphere(torch.empty(2, 3, 6, 6, device="meta")).shape == (2, 2, 4, 4)


@pytest.mark.parametrize("inplace", [False, True])
def test_hooks_are_kept(inplace):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    calls = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: calls.append(("before", type(module)))),
        model[0].register_forward_hook(lambda module, args, out: out * 2),
        model[0].register_full_backward_hook(lambda module, *_: calls.append(("backward", type(module)))),
    ]
    sphere = to_sphere(model, "cosine", inplace=inplace)
    x = torch.randn(2, 3, requires_grad=True)
    sphere(x).sum().backward()
    assert calls == [("before", sn.SphereLinear), ("backward", sn.SphereLinear)]
    direct = sn.functional.sphere_linear(x, sphere[0].weight, sphere[0].bias)
    torch.testing.assert_close(sphere(x), sphere[1](2 * direct))
    if inplace:  # the handles still refer to the layer
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(sphere(x), sphere[1](direct))


@pytest.mark.parametrize("inplace", [False, True])
@lazy
def test_lazy_layers_become_lazy_sphere_layers(inplace):
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(5), nn.LazyLinear(2))
    sphere = to_sphere(model, "learnable", inplace=inplace)
    assert [type(m) for m in sphere if not isinstance(m, nn.Flatten)] == [
        *(sn.LazySphereConv2d, sn.LazySphereLinear, nn.LazyLinear)
    ]
    out = sphere(torch.randn(2, 3, 6, 6))
    assert [type(m) for m in sphere if not isinstance(m, nn.Flatten)] == [sn.SphereConv2d, sn.SphereLinear, nn.Linear]
    assert sphere[0].in_channels == 3
    assert sphere[2].in_features == 64
    out.sum().backward()
    assert all(p.grad is not None for p in sphere.parameters())


def test_shared_layers_and_weights_stay_shared():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.again = self.first
            self.other = nn.Linear(4, 4)
            self.other.weight = self.first.weight
            self.unregistered = [self.first]
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            return self.fc(self.unregistered[0](self.other(self.again(self.first(x)))))

    for sphere in (to_sphere(Tied(), "learnable"), to_sphere(Tied(), "learnable", inplace=True)):
        assert sphere.first is sphere.again
        assert sphere.first is sphere.unregistered[0]
        assert sphere.first.weight is sphere.other.weight
        assert type(sphere.first) is type(sphere.other) is sn.SphereLinear
        assert len(sn.regularizers.sphere_layers(sphere)) == 1
        sphere(torch.randn(2, 4)).sum().backward()
        assert all(p.grad is not None for p in sphere.parameters())


def test_k_sharing_network_uses_one_k():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.Conv1d(4, 5, 3), nn.Conv1d(5, 2, 1)).double()
    sphere = to_sphere(model, "learnable", k=0.4, k_sharing="network", classifier=True)
    assert len({id(layer.angle) for layer in sphere}) == 1
    assert [name for name, _ in sphere.named_parameters() if "raw_k" in name] == ["0.angle.raw_k"]
    assert sphere[2].k.item() == pytest.approx(0.4)
    assert sphere[2].k.dtype == torch.float64
    assert sphere(torch.randn(2, 3, 9, dtype=torch.float64)).shape == (2, 2, 5)


@pytest.mark.parametrize("sharing", ["filter", "layer"])
def test_shape_of_k_per_filter_and_per_layer(sharing):
    sphere = to_sphere(nn.Conv1d(3, 4, 3), "learnable", k_sharing=sharing)
    assert sphere.k.shape == ((4,) if sharing == "filter" else ())


class Renamed(nn.Conv2d):
    """Subclass with another constructor only."""

    def __init__(self, channels):
        super().__init__(channels, channels, 3, padding=1)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


class Mixin:
    def describe(self):
        return "mixed"


class Mixed(nn.Linear, Mixin):
    pass


def test_subclasses_that_override_methods_stay_plain():
    model = nn.ModuleList([Renamed(4), Scaled(4, 4, 3), Mixed(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)])
    model[3].forward = model[3].forward  # as tools do that wrap the forward of a single layer
    sphere = to_sphere(model, classifier=True)
    assert [type(layer) for layer in sphere] == [sn.SphereConv2d, Scaled, Mixed, nn.Linear, sn.SphereLinear]
    assert sphere[1](torch.ones(1, 4, 3, 3)).shape == (1, 4, 1, 1)


def test_layers_inside_an_angle_function_are_not_layers_of_the_model():
    class Learned(sn.AngleFunction):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, cosine):
            return self.inner(cosine[..., None]).squeeze(-1)

    model = nn.Sequential(sn.SphereLinear(3, 4, operator=Learned()), nn.Linear(4, 4), nn.Linear(4, 2))
    sphere = to_sphere(model)
    assert type(sphere[0].angle.inner) is nn.Linear
    assert [isinstance(layer, SphereLayer) for layer in sphere] == [True, True, False]
    assert sphere[0].operator == "custom"


def test_converted_models_survive_copy_pickle_and_state_dict():
    sphere = to_sphere(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)), "learnable")
    x = torch.randn(1, 3, 5, 5)
    file = io.BytesIO()
    torch.save(sphere.state_dict(), file)
    file.seek(0)
    reloaded = to_sphere(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), "learnable")
    reloaded.load_state_dict(torch.load(file, weights_only=True))
    for model in (copy.deepcopy(sphere), pickle.loads(pickle.dumps(sphere)), reloaded):
        torch.testing.assert_close(model(x), sphere(x), rtol=0, atol=0)


def test_converted_layers_work_with_regularizers_and_compile():
    sphere = to_sphere(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)))
    assert list(sn.regularizers.sphere_layers(sphere)) == ["0"]
    sn.orthogonality(sphere).backward()
    decayed = sn.param_groups(sphere, 1e-4)[0]["params"]
    assert [id(p) for p in decayed] == [id(sphere[2].weight)]
    compiled = torch.compile(sphere, fullgraph=True, backend="eager")
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(compiled(x), sphere(x))


@pytest.mark.parametrize("k_sharing", ["filter", "layer", "network"])
def test_frozen_layers_get_frozen_parameters_and_keep_their_mode(k_sharing):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2)).eval()
    model[:2].requires_grad_(False)
    sphere = sn.to_sphere(model, "learnable", k_sharing=k_sharing, magnitude="tanh")
    assert [name for name, parameter in sphere.named_parameters() if parameter.requires_grad] == ["3.weight", "3.bias"]
    assert not any(module.training for module in sphere.modules())


def test_first_input_of_a_lazy_layer_keeps_k_and_rescaling():
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 2))
    sphere = sn.to_sphere(model, "learnable", k_sharing="network", rescale="learned")
    nn.init.constant_(sphere[0].angle.raw_k, 2.0)
    nn.init.constant_(sphere[2].beta, 0.1)
    k = sphere[0].k.item()
    sphere(torch.randn(2, 3))
    assert sphere[0].k.item() == k != 0.5
    assert sphere[2].beta.eq(0.1).all()
    assert sphere[2].weight.std() > 0
