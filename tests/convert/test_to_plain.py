"""`to_plain` restores the original model with its current weights."""

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import to_plain, to_sphere
from spherenet.layers import SphereLayer


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same", padding_mode="circular"), nn.ReLU(inplace=True))
        self.conv = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.Conv1d(4, 4, 2, stride=2)
        self.fc = nn.Linear(4 * 32, 5)

    def forward(self, x):
        x = self.stem(x)
        x = (x + self.norm(self.conv(x))).flatten(2)
        return self.fc(self.pool(x).flatten(1))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("operator", ["linear", "cosine", "sigmoid", "learnable"])
@pytest.mark.parametrize("rescale", [None, "learned", (2.0, 0.0)], ids=str)
def test_to_plain_inverts_to_sphere(operator, rescale, inplace):
    model = Residual()
    original = Residual()
    original.load_state_dict(model.state_dict())
    layers, parameters = list(model.modules()), [id(p) for p in model.parameters()]
    x = torch.randn(2, 3, 8, 8)
    expected = original(x)
    back = to_plain(to_sphere(model, operator, rescale=rescale, inplace=inplace), inplace=inplace)
    assert (back is model) == inplace
    assert repr(back) == repr(original)
    state = back.state_dict()
    assert list(state) == list(original.state_dict())
    fresh = Residual().state_dict()  # the forward above changed the running statistics
    for name, value in original.state_dict().items():
        torch.testing.assert_close(state[name], fresh[name] if "running" in name or "num_" in name else value)
    torch.testing.assert_close(back(x), expected, rtol=0, atol=0)
    if inplace:
        assert [a is b for a, b in zip(back.modules(), layers, strict=True)] == [True] * len(layers)
        assert [id(p) for p in back.parameters()] == parameters


def test_restored_layers_have_the_attributes_of_torch_layers():
    back = to_plain(to_sphere(Residual(), "learnable", rescale="learned"))
    fresh = Residual()
    for module, expected in zip(back.modules(), fresh.modules(), strict=True):
        assert type(module) is type(expected)
        assert set(vars(module)) - {"_spherenet_reason"} == set(vars(expected))


def test_trained_weights_are_kept():
    sphere = to_sphere(Residual(), "learnable")
    optimizer = torch.optim.SGD(sphere.parameters(), lr=0.1)
    sphere(torch.randn(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    back = to_plain(sphere)
    torch.testing.assert_close(back.conv.weight, sphere.conv.weight, rtol=0, atol=0)
    assert isinstance(sphere.conv, SphereLayer)  # to_plain converted a copy


def test_sphere_network_becomes_its_cnn_twin():
    options = {"widths": (4, 6, 8), "input_size": 16}
    sphere = sn.create_model("cnn-9", operator="learnable", rescale="learned", **options)
    cnn = sn.create_model("cnn-9", operator=None, **options)
    plain = to_plain(sphere)
    cnn.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(plain.eval()(x), cnn.eval()(x), rtol=0, atol=0)


def test_plain_models_are_unchanged_and_dropped_batch_norms_not_restored():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    assert repr(to_plain(model)) == repr(model)
    back = to_plain(to_sphere(model, drop_batch_norm=True))
    assert [type(m) for m in back] == [nn.Conv2d, nn.Identity, nn.Conv2d]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layers_stay_lazy():
    back = to_plain(to_sphere(nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyConv1d(2, 1))))
    assert [type(m) for m in back] == [nn.LazyConv1d, nn.LazyConv1d]
    assert back(torch.randn(2, 3, 8)).shape == (2, 2, 6)
    assert [type(m) for m in back] == [nn.Conv1d, nn.Conv1d]


def test_conversion_to_another_operator():
    sphere = to_sphere(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), "cosine")
    linear = to_sphere(to_plain(sphere), "linear")
    assert linear[0].operator == "linear"
    torch.testing.assert_close(linear[0].weight, sphere[0].weight, rtol=0, atol=0)


def test_shared_k_is_removed_from_every_layer():
    sphere = to_sphere(
        nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)), "learnable", k_sharing="network", classifier=True
    )
    back = to_plain(sphere, inplace=True)
    assert list(back.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("options", [{"operator": "sigmoid", "k": 0.5}, {"batch_norm": False, "magnitude": "tanh"}])
def test_network_of_create_model_can_be_saved(options, tmp_path):
    options = {"operator": "cosine", **options}
    plain = to_plain(sn.create_model("cnn-3", widths=(4, 4, 4), input_size=8, **options))
    x = torch.randn(2, 3, 8, 8)
    for name, model in (("plain", plain), ("again", to_sphere(plain, "linear"))):
        sn.save_model(model.eval(), tmp_path / name)
        torch.testing.assert_close(sn.load_model(tmp_path / name)(x), model(x))
    assert not any(isinstance(module, SphereLayer) for module in sn.create_model(**plain.config).modules())
