"""The network of the speed recipe: whitening, CNN twin, sizes, and its bad input."""

import pytest
import torch
from torch import nn

import spherenet as sn
from spherenet.models.air import Whitening


def correlated_images(count=20, channels=3, size=12):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(channels, channels, generator=generator)
    noise = torch.randn(count, channels, size, size, generator=generator)
    smooth = nn.functional.avg_pool2d(noise, 3, 1, 1) + 0.3 * noise
    return torch.einsum("dc,nchw->ndhw", mixing, smooth)


@pytest.mark.parametrize("channels", [1, 3])
def test_whitened_patches_are_uncorrelated(channels):
    layer = Whitening(channels)
    images = correlated_images(channels=channels)
    layer.initialize_from(images)
    outputs = layer(images)
    assert outputs.shape == (20, 8 * channels, 11, 11)
    half = outputs[:, : 4 * channels].transpose(0, 1).flatten(1)
    torch.testing.assert_close(outputs[:, 4 * channels :], -outputs[:, : 4 * channels])
    moments = half @ half.T / half.shape[1]
    # The eps under the square root reduces directions with little variance.
    off_diagonal = moments - torch.diag(moments.diagonal())
    assert off_diagonal.abs().max() < 1e-3
    assert moments.diagonal().max() < 1.001
    assert moments.diagonal()[0] > 0.99


@pytest.mark.parametrize(("center", "offset"), [(None, 0.0), ("patch", 3.0)])
def test_light_changes_no_output_of_an_unwhitened_spherenet(center, offset):
    torch.manual_seed(0)
    options = {"operator": "cosine", "center": center, "widths": (8, 8, 8)}
    images = 100 * correlated_images(count=4, size=32)
    light = torch.linspace(0.3, 1, 4).view(4, 1, 1, 1) * images + offset  # another gain for each image
    # Patches of the border contain zeros, which no light changes: the offset is only compared for whole patches.
    network = sn.create_model("air-unwhitened", **options).eval()
    assert isinstance(network.features.first, sn.SphereConv2d)
    torch.testing.assert_close(
        network.features.first(light)[..., 1:-1, 1:-1],
        network.features.first(images)[..., 1:-1, 1:-1],
        rtol=0,
        atol=1e-3,
    )
    if not offset:
        torch.testing.assert_close(network.features(light), network.features(images), rtol=0, atol=1e-3)
    whitened = sn.create_model("air", **options).eval()
    assert (whitened.features(light / 100) - whitened.features(images / 100)).abs().max() > 0.01


def test_first_layer_of_an_unwhitened_network_is_the_first_of_the_factory():
    network = sn.create_model("air-unwhitened", operator="cosine", center="first-patch", widths=(4, 4, 8))
    layers = sn.regularizers.sphere_layers(network)
    assert next(iter(layers)) == "features.first"
    assert [layer.center for layer in layers.values()] == ["patch", *[None] * 6]


def test_whitening_does_not_depend_on_the_scale_of_the_images():
    outputs = []
    for scale in (1.0, 1e-3):
        layer, images = Whitening(3), correlated_images() * scale
        layer.initialize_from(images)
        outputs.append(layer(images))
    torch.testing.assert_close(outputs[0].abs(), outputs[1].abs(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(1, 3, 3, 3), r"^images must have at least 12 patches of 2×2 pixels for whitening, got 4\.$"),
        (
            torch.tensor([0.5, -1, 2]).view(3, 1, 1, 1).expand(3, 3, 8, 8),
            r"^images must not all be constant for whitening, got 147 patches without any variation\.$",
        ),
        (torch.zeros(4, 3, 8, 8), r"^images must be finite and not all 0 for whitening, got a mean square of 0\.$"),
        (
            torch.full((4, 3, 8, 8), torch.nan),
            "^images must be finite and not all 0 for whitening, got .* nan",
        ),
    ],
)
def test_images_that_cannot_be_whitened_are_refused(images, message):
    with pytest.raises(ValueError, match=message):
        Whitening(3).initialize_from(images)


def test_one_varying_pixel_is_enough_for_whitening():
    layer, images = Whitening(3), torch.ones(4, 3, 8, 8)
    images[0, 0, 0, 0] = 0
    layer.initialize_from(images)
    assert layer.weight.isfinite().all()


def test_filters_are_frozen_and_the_bias_is_trained():
    model = sn.create_model("air", widths=(8, 8, 8))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "features.whitening.bias" in trained
    assert "features.whitening.weight" not in trained
    assert not any("norm.weight" in name for name in trained)
    assert "features.whitening.weight" in model.state_dict()


def test_record_has_its_number_of_weights():
    with torch.device("meta"):
        model = sn.create_model("air", operator=None)
    convolutions = 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256)
    norms = 2 * 2 * (64 + 256 + 256)
    assert sum(parameter.numel() for parameter in model.parameters()) == 24 * 12 + 24 + convolutions + norms + 2560


@pytest.mark.parametrize("operator", [None, "cosine", "learnable"])
@pytest.mark.parametrize("size", [9, 32, (10, 17)])
def test_any_image_from_nine_pixels_gives_features(operator, size):
    model = sn.create_model("air", operator=operator, widths=(4, 6, 8), input_size=size)
    height, width = (size, size) if isinstance(size, int) else size
    loss, scores = model(torch.rand(3, 3, height, width), torch.arange(3))
    loss.backward()
    assert scores.shape == (3, 10)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_smaller_images_are_refused():
    with pytest.raises(ValueError, match=r"^input_size must be at least 9×9 for 3 poolings .*, got 8×8\.$"):
        sn.create_model("air", input_size=8)


def test_network_without_batch_norm_has_the_chosen_normalization():
    with_groups = sn.create_model("air", batch_norm=False, group_norm=2, widths=(4, 4, 4))
    without = sn.create_model("air", batch_norm=False, widths=(4, 4, 4))
    assert sum(isinstance(module, nn.GroupNorm) for module in with_groups.modules()) == 6
    assert without.config["center"] == "patch"
    assert not any(isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)) for module in without.modules())


def test_initial_logits_do_not_grow_with_the_width():
    for width in (16, 256):
        torch.manual_seed(0)
        model = sn.create_model("air", widths=(8, 8, width))
        assert model.head.weight.std().item() == pytest.approx(1 / width, rel=0.2)
