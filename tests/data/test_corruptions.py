"""Corruptions: formulas, ranges, and independence of the batch."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from spherenet.data import CORRUPTIONS, Corruption, TensorSplit, corrupt, load_dataset, parse_corruption
from spherenet.data.preprocessing import Preprocessing

STRENGTHS = {
    "spot": 0.85, "ramp": 0.9, "shadow": 0.7, "gamma": 2.2, "cast": 0.6, "contrast": 0.75, "dark": 0.7, "bright": 60,
    "noise": 20, "blur": 1.5, "jpeg": 20,
}  # fmt: skip
UNCHANGED = {name: 1 if name == "gamma" else 0 for name in STRENGTHS if name != "jpeg"}


def random_images(count=6, channels=3, height=12, width=17):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)


def white(count=40, height=33, width=33):
    return torch.full((count, 3, height, width), 255, dtype=torch.uint8)


def test_every_corruption_is_tested():
    assert set(STRENGTHS) == set(CORRUPTIONS)


@pytest.mark.parametrize("name", STRENGTHS)
def test_corruption_depends_on_the_index_and_not_on_the_batch(name):
    images, corruption = random_images(), Corruption(name, STRENGTHS[name])
    before = images.clone()
    changed = corrupt(images, corruption)
    assert torch.equal(images, before)
    assert changed.dtype == torch.uint8
    assert changed.shape == images.shape
    assert not torch.equal(changed, images)
    assert torch.equal(corrupt(images, str(corruption)), changed)
    order = torch.tensor([4, 1, 3])
    assert torch.equal(corrupt(images[order], corruption, order), changed[order])
    for index in range(len(images)):
        assert torch.equal(corrupt(images[index : index + 1], corruption, torch.tensor([index]))[0], changed[index])


@pytest.mark.parametrize("name", UNCHANGED)
def test_weakest_strength_changes_nothing(name):
    images = random_images()
    assert torch.equal(corrupt(images, Corruption(name, UNCHANGED[name])), images)


@pytest.mark.parametrize("name", STRENGTHS)
@pytest.mark.parametrize("edge", ["lowest", "highest"])
def test_edges_of_the_range_and_tiny_images(name, edge):
    corruption = Corruption(name, getattr(CORRUPTIONS[name], edge))
    assert corrupt(random_images(2, height=1, width=1), corruption).shape == (2, 3, 1, 1)
    assert corrupt(random_images(2, height=9, width=2), corruption).shape == (2, 3, 9, 2)
    assert corrupt(random_images(0), corruption).shape == (0, 3, 12, 17)
    if name != "cast":
        assert corrupt(random_images(2, channels=1), corruption).shape == (2, 1, 12, 17)


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("gamma:2.2", lambda p: 255 * (p / 255) ** 2.2),
        ("contrast:0.75", lambda p: 127.5 + 0.25 * (p - 127.5)),
        ("dark:0.7", lambda p: (1 - 0.7) * p),
        ("bright:60", lambda p: p + 60),
    ],
)
def test_formulas_of_a_pixel(text, formula):
    levels = np.arange(256, dtype=np.float64)
    expected = np.clip(np.round(formula(levels)), 0, 255)
    changed = corrupt(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), text)
    assert changed.view(-1).tolist() == expected.tolist()


def test_spot_is_bright_around_one_point_per_image():
    changed = corrupt(white(), "spot:0.85")[:, 0].double()
    peaks = changed.flatten(1).argmax(1)
    assert (changed.amax((1, 2)) >= 254).all()
    assert (changed.amin((1, 2)) < 255 * 0.2).all()
    assert len(set(peaks.tolist())) > 30
    rows, columns = peaks // 33, peaks % 33
    assert min(rows.min(), columns.min()) >= 8
    assert max(rows.max(), columns.max()) <= 24


def test_ramp_falls_to_the_strength_in_many_directions():
    changed = corrupt(white(), "ramp:0.8")[:, 0]
    assert (changed.amax((1, 2)) == 255).all()
    assert (changed.amin((1, 2)) == 51).all()
    darkest = {int(image.flatten().argmin()) for image in changed}
    assert darkest == {0, 32, 32 * 33, 33 * 33 - 1}


def test_shadow_divides_the_image_in_two():
    changed = corrupt(white(), "shadow:0.6")[:, 0]
    assert set(changed.unique().tolist()) == {102, 255}
    shaded = (changed == 102).double().mean((1, 2))
    assert 0.05 < shaded.min() < shaded.max() < 0.95
    # The edge is straight: no row or column enters the shadow more than once.
    for dimension in (1, 2):
        assert (changed.int().diff(dim=dimension) != 0).sum(dimension).max() <= 1


def test_cast_dims_the_colors_in_all_orders():
    gains = {tuple(image[:, 0, 0].tolist()) for image in corrupt(white(60), "cast:0.6")}
    assert gains == {(255, 178, 102), (255, 102, 178), (178, 255, 102), (178, 102, 255), (102, 255, 178),
                     (102, 178, 255)}  # fmt: skip
    with pytest.raises(ValueError, match=r"^images must have 3 channels for the corruption 'cast', got 1\.$"):
        corrupt(random_images(channels=1), "cast:0.6")


def test_noise_has_the_stated_deviation():
    gray = torch.full((20, 3, 16, 16), 128, dtype=torch.uint8)
    difference = corrupt(gray, "noise:20").double() - 128
    assert abs(difference.mean()) < 1
    assert abs(difference.std() - 20) < 1


def test_blur_is_the_gaussian_of_a_point_and_keeps_constant_images():
    point = torch.zeros(1, 1, 31, 31, dtype=torch.uint8)
    point[0, 0, 15, 15] = 255
    offsets = torch.arange(31, dtype=torch.float64) - 15
    weights = torch.where(offsets.abs() <= 3, (-0.5 * offsets**2).exp(), 0.0)
    weights /= weights.sum()
    assert torch.equal(corrupt(point, "blur:1")[0, 0], (255 * weights[:, None] * weights).round().to(torch.uint8))
    assert torch.equal(corrupt(white(2), "blur:16"), white(2))


def test_jpeg_is_that_of_pillow():
    image = load_dataset("mnist5k").test._images[torch.device("cpu")][:1].permute(0, 3, 1, 2)
    file = io.BytesIO()
    Image.fromarray(image[0, 0].numpy()).save(file, "JPEG", quality=10)
    assert np.array_equal(corrupt(image, "jpeg:10")[0, 0].numpy(), np.asarray(Image.open(file)))


def test_parse_returns_the_corruption():
    assert parse_corruption("spot:0.85") == Corruption("spot", 0.85)
    assert str(parse_corruption("gamma:2.20")) == "gamma:2.2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spto:0.5", "corruption must be one of 'spot', 'ramp', .*, got 'spto'. Did you mean 'spot'"),
        ("fog", "corruption must be KIND:STRENGTH with one of spot, ramp, .*, got 'fog'."),
        ("", "corruption must be KIND:STRENGTH with one of spot, ramp, .*, got ''."),
        ("spot", "strength of spot must be a number from 0 to 1, got none."),
        ("spot:", "strength of spot must be a number from 0 to 1, got ''."),
        ("spot:1.5", "strength of spot must be a number from 0 to 1, got '1.5'."),
        ("gamma:nan", "strength of gamma must be a number from 0.1 to 10, got 'nan'."),
        ("jpeg:0", "strength of jpeg must be a number from 1 to 100, got '0'."),
        ("noise:much", "strength of noise must be a number from 0 to 255, got 'much'."),
    ],
)
def test_wrong_texts_are_refused(text, message):
    with pytest.raises(ValueError, match="^" + message):
        parse_corruption(text)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=re.escape("strength of dark must be from 0 to 1, got 2.")):
        Corruption("dark", 2)
    with pytest.raises(TypeError, match=re.escape("strength of dark must be a number, got '1' of type str.")):
        Corruption("dark", "1")
    with pytest.raises(ValueError, match=r"^corruption must be one of"):
        Corruption("fog", 1)
    with pytest.raises(TypeError, match=r"^images must be uint8 \[N, C, H, W\], got torch.float32 \[1, 3, 2, 2\]"):
        corrupt(torch.zeros(1, 3, 2, 2), "dark:0.5")
    with pytest.raises(ValueError, match=r"^images must have 1 or 3 channels, got 2"):
        corrupt(torch.zeros(1, 2, 2, 2, dtype=torch.uint8), "dark:0.5")
    with pytest.raises(TypeError, match=r"^indices must be int64 \[6\], got torch.int64 \[2\]"):
        corrupt(random_images(), "dark:0.5", torch.arange(2))


def test_corrupted_split_corrupts_by_index_and_leaves_the_original():
    pixels = random_images(8).permute(0, 2, 3, 1).contiguous()
    split = TensorSplit(pixels, torch.arange(8), Preprocessing.standard((12, 17), 3))
    corrupted = split.corrupted(Corruption("spot", 0.85))
    order = [(0, torch.tensor([5, 2]))]

    def images(of):
        batch = next(of.batches(order, device=torch.device("cpu"), augmentation=None))
        return (batch.images * 128 + 127.5).round().to(torch.uint8)

    originals = random_images(8)[[5, 2]]
    assert torch.equal(images(corrupted), corrupt(originals, "spot:0.85", torch.tensor([5, 2])))
    assert torch.equal(images(split), originals)
    assert torch.equal(images(corrupted.corrupted(None)), originals)
    assert corrupted.subset(torch.tensor([1])).corruption == corrupted.corruption
