"""Networks of the paper: shapes, parameter counts, CNN twins, options."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spherenet as sn
from spherenet.angles import OPERATORS
from spherenet.models import create
from spherenet.models.networks import LayerFactory
from spherenet.ops.angular import AngularLogits

SMALL = {name: {"widths": (4, 6, 8)} for name in sn.list_models()} | {
    "resnet-18": {"widths": (4, 6, 8, 10), "input_size": 64},
    "sphere-vit-tiny": {"widths": (8,), "input_size": 8},
}
CONVOLUTIONAL = [name for name in sn.list_models() if name != "sphere-vit-tiny"]  # see test_transformer.py


def num_convolution_weights(depth, widths, kernel=9, channels=3):
    """Return the number of weights in the convolutions of a plain network."""
    total = 0
    for width in widths:
        for _ in range(depth // 3):
            total += kernel * channels * width
            channels = width
    return total


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONAL if "air" not in name])  # see test_air.py
def test_parameter_counts_match_the_paper(name):
    """Count convolutions, BatchNorm (2 per channel), the fully connected layer and the head without bias."""
    with torch.device("meta"):
        count = sum(p.numel() for p in sn.create_model(name, operator="cosine").parameters())
    if name.startswith("cnn-"):
        depth = int(name.removeprefix("cnn-"))
        batch_norm = 2 * depth // 3 * (64 + 96 + 128)
        expected = num_convolution_weights(depth, (64, 96, 128)) + batch_norm + 128 * 4 * 4 * 256 + 256 * 10
    elif name == "resnet-18":
        expected = 49 * 3 * 256 + 2 * 256 + 1024 * 10
        previous = 256
        for width in (256, 512, 768, 1024):
            expected += 9 * (previous * width + 3 * width * width) + 2 * 4 * width
            expected += previous * width + 2 * width if previous != width else 0
            previous = width
    else:
        widths = (64, 96, 128) if name == "resnet-32" else (96, 192, 384)
        expected = 27 * widths[0] + 2 * widths[0] + widths[-1] * 10
        previous = widths[0]
        for width in widths:
            expected += 9 * (previous * width + 9 * width * width) + 2 * 10 * width
            expected += previous * width + 2 * width if previous != width else 0
            previous = width
    assert count == expected


@pytest.mark.parametrize(("name", "layers"), [("cnn-9", 9), ("cnn-69", 69), ("resnet-32", 31), ("resnet-18", 17)])
def test_number_of_operator_convolutions(name, layers):
    with torch.device("meta"):
        model = sn.create_model(name, operator="cosine")
        with_shortcuts = sn.create_model(name, operator="cosine", shortcut="operator")
    spherical = [m for m in model.modules() if isinstance(m, sn.SphereConv2d)]
    assert len(spherical) == layers
    shortcuts = [m for m in model.modules() if type(m) is nn.Conv2d]
    assert all(m.kernel_size == (1, 1) for m in shortcuts)
    assert not [m for m in with_shortcuts.modules() if type(m) is nn.Conv2d]


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        (name, operator)
        for name in sn.list_models()
        for operator in (None, "none", *OPERATORS)
        if name in CONVOLUTIONAL or operator in (None, "none", "cosine")
    ],
)
def test_forward_and_backward_of_every_network(name, operator):
    model = sn.create_model(name, num_classes=7, operator=operator, **SMALL[name])
    size = model.config["input_size"]
    images, labels = torch.randn(3, 3, *size), torch.tensor([0, 6, 2])
    loss, scores = model(images, labels)
    assert scores.shape == (3, 7)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)
    features = model.features(images)
    assert features.shape == (3, model.head.in_features)
    model.eval()
    torch.testing.assert_close(model(images), model.criterion.logits(model.head(model.features(images))))


@pytest.mark.parametrize("name", CONVOLUTIONAL)
def test_cnn_twin_differs_in_the_operator_only(name):
    torch.manual_seed(3)
    sphere = sn.create_model(name, operator="cosine", **SMALL[name])
    torch.manual_seed(3)
    plain = sn.create_model(name, operator=None, **SMALL[name])
    assert [n for n, _ in sphere.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for a, b in zip(sphere.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    pairs = zip(_leaves(sphere), _leaves(plain), strict=True)
    different = {(type(a), type(b)) for a, b in pairs if type(a) is not type(b)}
    assert different
    assert different <= {(sn.SphereConv2d, nn.Conv2d), (sn.SphereLinear, nn.Linear)}


def _leaves(model):
    return [m for m in model.modules() if not isinstance(m, sn.AngleFunction)]


def test_initialization_matches_the_released_code():
    weight = sn.create_model("cnn-9", operator="cosine").features.stages[2][1][0].weight
    assert weight.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.01)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_norm": False},
        {"relu": False},
        {"batch_norm": False, "rescale": "learned"},
        {"in_channels": 1, "input_size": 28},
        {"input_size": 64},
        {"input_size": (24, 40)},
        {"head_bias": True},
        {"loss": "ga-linear", "loss_options": {"m": 2}},
        {"loss": sn.WSoftmaxLoss("sigmoid", k=0.1)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["cnn-9", "resnet-32"])
def test_options_run_forward_and_backward(name, options):
    model = sn.create_model(name, operator="sigmoid", **SMALL[name], **options)
    images = torch.randn(2, model.config["in_channels"], *model.config["input_size"])
    loss, _ = model(images, torch.tensor([1, 2]))
    loss.backward()
    module_types = {type(m) for m in model.modules()}
    assert (nn.BatchNorm2d in module_types) == options.get("batch_norm", True)
    assert all(p.grad is not None for p in model.parameters())


def test_k_sharing_network_uses_one_k():
    model = sn.create_model("cnn-9", operator="learnable", k=0.4, k_sharing="network", **SMALL["cnn-9"])
    raw = [p for name, p in model.named_parameters() if name.endswith("raw_k")]
    assert len(raw) == 1
    assert [layer.k.item() for layer in sn.regularizers.sphere_layers(model).values()] == [pytest.approx(0.4)] * 10


@pytest.mark.parametrize("loss", sn.list_losses())
def test_every_loss_is_available_by_name(loss):
    model = sn.create_model("cnn-3", operator="cosine", loss=loss, **SMALL["cnn-3"])
    value, scores = model(torch.randn(4, 3, 32, 32), torch.arange(4))
    value.backward()
    assert scores.shape == (4, 10)
    (undecayed,) = (group["params"] for group in sn.param_groups(model, 0.1) if group["name"] == "no_decay")
    assert any(parameter is model.head.weight for parameter in undecayed) == (loss != "softmax")


def test_class_weights_decay_with_plain_softmax_only():
    for loss, group in (("softmax", "decay"), ("w-cosine", "no_decay")):
        model = sn.create_model("cnn-3", operator="cosine", loss=loss, **SMALL["cnn-3"])
        groups = {g["name"]: {id(p) for p in g["params"]} for g in sn.param_groups(model, 5e-4)}
        assert id(model.head.weight) in groups[group]


@pytest.mark.parametrize("name", ["cnn-9", "resnet-18"])
def test_network_is_created_with_few_operations(name):
    """A few per tensor: allocation, initial values and views."""

    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.operations += 1
            return function(*args, **(kwargs or {}))

    with torch.device("meta"), Count() as count:
        model = sn.create_model(name, operator="learnable")
    assert 0 < count.operations < 10 * len(model.state_dict())


INVALID = {
    "name": (lambda: sn.create_model("cnn9"), "name must be one of.*got 'cnn9'. Did you mean 'cnn-9'"),
    "size": (lambda: sn.create_model("cnn-9", input_size=7), "at least 8×8 for 3 poolings, got 7×7"),
    "widths": (lambda: sn.create_model("cnn-9", widths=(4, 6)), "widths must be 3 positive integers for cnn-9"),
    "loss": (lambda: sn.create_model("cnn-9", loss="w-cos"), "loss must be one of.*Did you mean 'w-cosine'"),
    "operator": (lambda: sn.create_model("cnn-9", operator="cos"), "operator must be one of"),
    "shortcut": (lambda: sn.create_model("resnet-32", shortcut="v1"), "'plain', 'operator', got 'v1'"),
    "k of a CNN": (lambda: sn.create_model("cnn-9", operator=None, k=0.3), "k must be None if operator is None"),
    "rescale of a CNN": (lambda: sn.create_model("cnn-9", operator="none", rescale="learned"), "rescale must be None"),
    "k_sharing": (lambda: sn.create_model("cnn-9", operator="cosine", k_sharing="network"), "unless operator is"),
    "options with an object": (
        lambda: sn.create_model("cnn-9", loss=sn.SoftmaxLoss(), loss_options={"m": 2}), "must be left out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_arguments_raise(case):
    call, message = INVALID[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_unknown_option_suggests_the_nearest_name():
    with pytest.raises(TypeError, match=r"^create_model has no option 'oprator'; did you mean 'operator'\? Allowed"):
        sn.create_model("cnn-3", oprator="cosine")
    assert list(inspect.signature(sn.create_model).parameters)[:3] == ["name", "num_classes", "operator"]


def test_unknown_loss_option_suggests_the_nearest_name():
    with pytest.raises(TypeError, match=r"Loss 'arcface' has no option 'margin'; did you mean 'm'\?"):
        sn.create_model("cnn-3", loss="arcface", loss_options={"margin": 0.5})


def test_default_operator_is_cosine():
    model = sn.create_model("cnn-3", **SMALL["cnn-3"])
    assert {layer.operator for layer in sn.regularizers.sphere_layers(model).values()} == {"cosine"}
    assert model.config["operator"] == "cosine"


@pytest.mark.parametrize("operator", [None, "none"])
@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_operator_none_creates_plain_convolutions(name, operator):
    model = sn.create_model(name, operator=operator, **SMALL[name])
    assert not sn.regularizers.sphere_layers(model)
    assert model.config["operator"] is None
    assert not sn.regularizers.sphere_layers(LayerFactory(operator).unit(3, 4, 3))


@pytest.mark.parametrize("loss", ["softmax", "ga-linear", "arcface"])
def test_loss_without_scores_equals_loss_with_scores(loss):
    model = sn.create_model("cnn-3", loss=loss, **SMALL["cnn-3"]).eval()
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    value, scores = model(images, labels)
    assert torch.equal(model(images, labels, return_scores=False), value)
    assert torch.equal(model(images), scores)


@pytest.mark.parametrize("loss", ["softmax", "ga-linear", "arcface"])
def test_training_computes_logits_once(loss, monkeypatch):
    calls = []
    scores = AngularLogits.scores
    monkeypatch.setattr(AngularLogits, "scores", lambda *a: calls.append(1) or scores(*a))
    sn.create_model("cnn-3", loss=loss, **SMALL["cnn-3"])(torch.randn(4, 3, 32, 32), torch.arange(4))
    assert len(calls) == 1


def test_new_architecture_needs_one_registry_entry(monkeypatch):
    class Pooled(nn.Module):
        def __init__(self, layers, widths, in_channels, input_size, *, kernel):
            super().__init__()
            self.out_features = widths[0]
            self.unit = layers.unit(in_channels, widths[0], kernel)

        def forward(self, images):
            return self.unit(images).mean((2, 3))

    monkeypatch.setitem(create._NETWORKS, "pooled", create._Network(Pooled, (6,), 16, {"kernel": 5}))
    model = sn.create_model("pooled", num_classes=3, operator="sigmoid", loss="w-cosine")
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)
    assert model.features.unit[0].kernel_size == (5, 5)


@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_feature_batch_norm_normalizes_the_features(name):
    model = sn.create_model(name, loss="a", feature_batch_norm=True, **SMALL[name])
    features = model.features(torch.randn(8, 3, 32, 32))
    assert features.mean(0).abs().max() < 1e-4
    assert features.var(0, unbiased=False).mean().item() == pytest.approx(1, abs=0.05)
    assert model.config["feature_batch_norm"] is True
    loss, scores = model(torch.randn(8, 3, 32, 32), torch.arange(8))
    loss.backward()
    assert scores.shape == (8, 10)
    again = sn.create_model(**model.config)
    assert again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"batch_norm": False}, "patch"),
        ({"batch_norm": False, "group_norm": 2}, None),
        ({"batch_norm": False, "center": None}, None),
        ({"batch_norm": False, "center": "none"}, None),
        ({"batch_norm": False, "center": "weight"}, "weight"),
        ({"center": "patch"}, "patch"),
        ({"center": "auto"}, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["cnn-3", "resnet-32"])
def test_center_is_patch_by_default_without_batch_norm_only(name, options, expected):
    with torch.device("meta"):
        model = sn.create_model(name, operator="cosine", **SMALL[name], **options)
        again = sn.create_model(**model.config)
    assert {layer.center for layer in sn.regularizers.sphere_layers(model).values()} == {expected}
    assert model.config["center"] == again.config["center"] == expected
    assert str(again) == str(model)


@pytest.mark.parametrize("name", ["cnn-9", "resnet-32", "air"])
@pytest.mark.parametrize("options", [{}, {"batch_norm": False}, {"k_sharing": "network", "operator": "learnable"}])
def test_first_patch_centers_the_first_sphere_layer_alone(name, options):
    options = {"operator": "cosine", "widths": (4, 4, 8), **options}
    model = sn.create_model(name, center="first-patch", **options)
    again = sn.create_model(**model.config)
    for network in (model, again):
        first, *others = sn.regularizers.sphere_layers(network)
        layers = sn.regularizers.sphere_layers(network)
        assert first == {"cnn-9": "features.stages.0.0.0", "resnet-32": "features.begin.0"}.get(
            name, "features.groups.0.first"
        )
        assert layers[first].center == "patch"
        assert {layers[other].center for other in others} == {None}
    assert model.config["center"] == again.config["center"] == "first-patch"
    chosen = sn.SphereOptions("cosine", center="first-patch")
    assert sn.create_model(name, operator=chosen, widths=(4, 4, 8)).config["center"] == "first-patch"


def test_first_patch_belongs_to_networks():
    for make in (
        lambda: sn.SphereConv2d(3, 4, 3, center="first-patch"),
        lambda: sn.to_sphere(nn.Sequential(nn.Conv2d(3, 4, 3)), center="first-patch"),
    ):
        with pytest.raises(ValueError, match=r"^center must be one of .*, got 'first-patch'\."):
            make()
    with pytest.raises(ValueError, match=r"^center must be None if operator is None"):
        sn.create_model("air", operator=None, center="first-patch")


@pytest.mark.parametrize("operator", [None, "none"])
def test_plain_networks_are_never_centered(operator):
    model = sn.create_model("cnn-3", operator=operator, batch_norm=False, widths=(2, 2, 2))
    assert model.config["center"] is None
    for name, value in (("center", "weight"), ("magnitude", "ball"), ("radius", 2.0)):
        with pytest.raises(ValueError, match=f"{name} must be None if operator is None"):
            sn.create_model("cnn-3", operator=operator, **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"magnitude": "ball", "radius": "learned"},
        {"magnitude": "linear", "center": "weight"},
        {"magnitude": sn.TanhMagnitude(radius=2.0)},
        {"batch_norm": False},
        {"batch_norm": False, "group_norm": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("shortcut", ["plain", "operator"])
def test_centers_and_magnitudes_run_forward_and_backward(options, shortcut):
    model = sn.create_model("resnet-32", operator="cosine", shortcut=shortcut, **SMALL["resnet-32"], **options)
    loss, _ = model(torch.randn(2, 3, 32, 32), torch.tensor([1, 2]))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    radii = [name for name, _ in model.named_parameters() if name.endswith("raw_radius")]
    assert len(radii) == (len(sn.regularizers.sphere_layers(model)) if "radius" in options else 0)


def test_kernels_with_a_single_entry_are_not_centered():
    model = sn.create_model("cnn-3", operator="cosine", batch_norm=False, widths=(1, 1, 1), input_size=8)
    centers = {name: layer.center for name, layer in sn.regularizers.sphere_layers(model).items()}
    assert centers.pop("features.fully_connected") is None  # 1 × 1 pixels of one channel
    assert set(centers.values()) == {"patch"}


def test_group_norm_replaces_batch_norm():
    model = sn.create_model("cnn-3", operator=None, batch_norm=False, group_norm=2, widths=(4, 6, 8))
    norms = [module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert norms == [2, 2, 2]
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"center": "kernel"},
            "center must be one of None, 'none', 'auto', 'weight', 'patch', 'first-patch', got 'kernel'",
        ),
        ({"magnitude": "bal"}, "magnitude must be one of .* Did you mean 'ball'"),
        ({"radius": 1.0}, "radius must be None for the magnitude 'sphere'"),
        ({"group_norm": 8}, "group_norm must be 0 unless batch_norm is False, got 8"),
        (
            {"group_norm": 8, "batch_norm": False, "widths": (8, 12, 16)},
            "group_norm must divide the 12 channels of every convolution, got 8",
        ),
        ({"group_norm": -1, "batch_norm": False}, "group_norm must be an integer of at least 0, got -1"),
    ],
    ids=str,
)
def test_invalid_center_magnitude_and_group_norm_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        sn.create_model("cnn-3", **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"input_size": (32,)}, ValueError, r"input_size must be 2 positive integers, got \(32,\)"),
        ({"input_size": (32, 32, 3)}, ValueError, "input_size must be 2 positive integers"),
        ({"input_size": 32.0}, TypeError, r"input_size must be 2 positive integers, got 32\.0"),
        ({"input_size": 0}, ValueError, "input_size must be 2 positive integers"),
        ({"in_channels": 0}, ValueError, "in_channels must be at least 1, got 0"),
        ({"widths": 4}, TypeError, "widths must be 3 positive integers for resnet-32, got 4"),
        ({"widths": (4.0, 4, 4)}, TypeError, "widths must be 3 positive integers for resnet-32"),
        ({"loss_options": [1]}, TypeError, "loss_options must be a mapping, got list"),
    ],
    ids=str,
)
def test_wrong_sizes_are_named(options, error, message):
    with pytest.raises(error, match=message):
        sn.create_model("resnet-32", 10, **options)


def test_sizes_may_be_numpy_integers():
    model = sn.create_model("cnn-3", 10, input_size=np.int64(28), widths=np.array([4, 4, 4]), in_channels=np.int64(1))
    assert model.config["input_size"] == [28, 28]
    assert all(type(number) is int for number in (*model.config["widths"], model.config["in_channels"]))


def test_wrong_image_size_is_named():
    model = sn.create_model("cnn-3", widths=(2, 2, 2))
    with pytest.raises(
        ValueError, match=r"^images must be 32 × 32, the input_size of this network, got shape \[2, 3, 28"
    ):
        model(torch.rand(2, 3, 28, 28))
    assert model(torch.rand(2, 3, 33, 32)).shape == (2, 10)  # the poolings drop the last row
