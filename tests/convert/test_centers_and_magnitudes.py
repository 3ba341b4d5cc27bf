"""`to_sphere` and `to_plain` with centered kernels and magnitude functions."""

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.convert import sphere_summary, to_plain, to_sphere


def network():
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=4), nn.BatchNorm2d(4)),
        *(nn.Flatten(), nn.Linear(144, 5), nn.ReLU(), nn.Linear(5, 2)),
    )


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"drop_batch_norm": True}, "patch"),
        ({"drop_batch_norm": True, "center": None}, None),
        ({"drop_batch_norm": True, "center": "none"}, None),
        ({"drop_batch_norm": True, "center": "weight"}, "weight"),
        ({"center": "patch"}, "patch"),
    ],
    ids=str,
)
def test_center_is_patch_by_default_if_batch_norm_is_dropped_only(options, expected):
    sphere = to_sphere(network(), **options)
    assert [sphere[index].center for index in (0, 3, 6)] == [expected, None, expected]
    depthwise = "converted from Conv2d" + ("; not centered: kernels have a single entry" if expected else "")
    assert sphere_summary(sphere)["3"].reason == depthwise
    assert sphere_summary(sphere)["0"].center == expected
    assert sphere(IMAGES).isfinite().all()


def test_converted_layers_equal_created_layers():
    conv = nn.Conv2d(3, 4, 3)
    sphere = to_sphere(conv, center="patch", magnitude="tanh", radius="learned", classifier=True)
    created = sn.SphereConv2d(3, 4, 3, bias=True, center="patch", magnitude="tanh", radius="learned")
    created.load_state_dict(sphere.state_dict())
    assert str(created) == str(sphere)
    assert torch.equal(created(IMAGES), sphere(IMAGES))


def test_printed_table_shows_center_and_magnitude():
    table = str(sphere_summary(to_sphere(network(), center="weight", magnitude="ball")))
    assert table.splitlines()[0].split() == ["name", "layer", "kind", "operator", "k", "center", "magnitude", "reason"]
    assert table.splitlines()[1].split()[3:7] == ["cosine", "–", "weight", "ball"]
    assert "magnitude" not in str(sphere_summary(to_sphere(network())))


def test_plain_models_have_neither_center_nor_magnitude():
    original = network()
    sphere = to_sphere(original, drop_batch_norm=False, center="weight", magnitude="ball", radius="learned")
    plain = to_plain(sphere)
    assert list(plain.state_dict()) == list(original.state_dict())
    assert torch.equal(plain.eval()(IMAGES), original.eval()(IMAGES))
    reason = "converted back from SphereConv2d; centering, magnitude function dropped"
    assert sphere_summary(plain)["0"].reason == reason
    again = to_sphere(plain)
    assert again[0].center is again[0].magnitude is None


def test_radius_has_the_dtype_of_the_weight_and_is_frozen_with_it():
    model = network().double()
    model[0].weight.requires_grad_(False)
    sphere = to_sphere(model, magnitude="ball", radius="learned")
    radii = [sphere[index].magnitude.raw_radius for index in (0, 3, 6)]
    assert [(radius.dtype, radius.requires_grad) for radius in radii] == [
        (torch.float64, False),
        (torch.float64, True),
        (torch.float64, True),
    ]


def test_lazy_layers_are_centered():
    sphere = to_sphere(
        nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConv2d(2, 3), nn.ReLU()), center="patch", classifier=True
    )
    sphere(IMAGES)
    assert [layer.center for layer in sphere[:2]] == ["patch", "patch"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"center": "kernel"}, "center must be one of"),
        ({"magnitude": "cube"}, "magnitude must be one of"),
        ({"radius": 2.0}, "radius must be None for the magnitude 'sphere'"),
        ({"magnitude": "ball", "radius": "lerned"}, "radius must be a number, 'learned' or"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected_and_the_model_is_unchanged(options, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        to_sphere(model, inplace=True, **options)
    assert not any(isinstance(module, sn.SphereLayer) for module in model.modules())
