"""Flips and crops of a batch: equal to one image at a time and independent of the batch."""

import json
from dataclasses import asdict

import pytest
import torch

from spherenet.data import AUGMENTATIONS, Augmentation, Preprocessing, TensorSplit, default_augmentation
from spherenet.data.augmentation import Purpose, augment, draw

CASES = {
    "none": Augmentation(),
    "left-right": Augmentation(horizontal_flip=True),
    "up-down": Augmentation(vertical_flip=True),
    "crop": Augmentation(crop_padding=2),
    "all": Augmentation(horizontal_flip=True, vertical_flip=True, crop_padding=4),
    "wide crop": Augmentation(horizontal_flip=True, crop_padding=11),
    "translate": AUGMENTATIONS["translate"],
    "wide reflection": Augmentation(crop_padding=20, reflect=True),
}


def mirrored(position, length):
    """Walk back and forth between the first and the last pixel."""
    while not 0 <= position < length:
        position = -position if position < 0 else 2 * (length - 1) - position
    return position


def augment_one(image, index, augmentation, seed, epoch):
    """Flip and crop one image [H, W, C], pixel by pixel."""

    def number(purpose, below):
        return int(draw(seed, epoch, torch.tensor([index]), purpose, below))

    padding = augmentation.crop_padding
    height, width, _ = image.shape
    top = number(Purpose.PADDED_CROP_TOP, 2 * padding + 1) - padding
    left = number(Purpose.PADDED_CROP_LEFT, 2 * padding + 1) - padding
    if augmentation.reflect:
        source = [[mirrored(y + top, height), mirrored(x + left, width)] for y in range(height) for x in range(width)]
        output = torch.stack([image[y, x] for y, x in source]).view_as(image)
    else:
        output = torch.zeros_like(image)
        for y in range(height):
            for x in range(width):
                if 0 <= y + top < height and 0 <= x + left < width:
                    output[y, x] = image[y + top, x + left]
    if augmentation.vertical_flip and number(Purpose.VERTICAL_FLIP, 2):
        output = output.flip(0)
    if augmentation.alternating:
        start = int(draw(seed, 0, torch.tensor([index]), Purpose.HORIZONTAL_FLIP, 2))
        flips = (start + epoch) % 2 == 1
    else:
        flips = number(Purpose.HORIZONTAL_FLIP, 2) == 1
    if augmentation.horizontal_flip and flips:
        output = output.flip(1)
    return output


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(8, 8, 3), (7, 10, 1)])
def test_batch_equals_one_image_at_a_time(case, shape):
    images = torch.randint(0, 256, (24, *shape), dtype=torch.uint8)
    indices = torch.randperm(1000)[:24]
    fast = augment(images, indices, CASES[case], seed=3, epoch=5)
    expected = [augment_one(image, int(index), CASES[case], 3, 5) for image, index in zip(images, indices, strict=True)]
    assert torch.equal(fast, torch.stack(expected))
    if case != "none":
        assert not torch.equal(fast, images)


@pytest.fixture(scope="module")
def split():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 8, 8, 3), dtype=torch.uint8, generator=generator)
    return TensorSplit(images, torch.arange(50) % 5, Preprocessing.standard((8, 8), 3))


def test_augmentation_depends_only_on_seed_epoch_and_index(split, collect):
    augmentation = CASES["all"]
    together = collect(split, list(range(50)), epoch=2, augmentation=augmentation, seed=7)[0]
    shuffled = torch.randperm(50).tolist()
    batches = collect(split, shuffled[:1], shuffled[1:20], shuffled[20:], epoch=2, augmentation=augmentation, seed=7)
    images = torch.cat([batch.images for batch in batches])
    assert torch.equal(images, together.images[torch.tensor(shuffled)])
    for other in ({"epoch": 3, "seed": 7}, {"epoch": 2, "seed": 8}):
        changed = collect(split, list(range(50)), augmentation=augmentation, **other)[0]
        assert (changed.images != together.images).flatten(1).any(1).double().mean() > 0.9


def test_subset_is_numbered_from_zero(split, collect):
    chosen = torch.tensor([40, 3, 17])
    batch = collect(split.subset(chosen), [0, 2], augmentation=CASES["all"], seed=1)[0]
    expected = [augment_one(split._images[torch.device("cpu")][position], index, CASES["all"], 1, 0)
                for index, position in ((0, 40), (2, 17))]  # fmt: skip
    assert torch.equal(batch.images.permute(0, 2, 3, 1), (torch.stack(expected).float() - 127.5) / 128)
    assert batch.indices.tolist() == [0, 2]
    assert batch.labels.tolist() == [0, 2]


def test_empty_batch_has_shape_zero(split, collect):
    batch = collect(split, [], augmentation=CASES["all"])[0]
    assert batch.images.shape == (0, 3, 8, 8)
    assert batch.labels.shape == batch.indices.shape == (0,)


def test_named_augmentations_are_those_of_the_paper():
    assert AUGMENTATIONS[default_augmentation("cifar10")] == Augmentation(horizontal_flip=True)
    assert AUGMENTATIONS[default_augmentation("cifar100")] == Augmentation(True, True, crop_padding=4)
    assert AUGMENTATIONS[default_augmentation("folder")] == Augmentation(horizontal_flip=True, random_crop=True)
    assert AUGMENTATIONS[default_augmentation("mnist5k")] == Augmentation()
    assert AUGMENTATIONS["flip-crop"] == Augmentation(horizontal_flip=True, crop_padding=4)
    for augmentation in AUGMENTATIONS.values():
        assert Augmentation(**json.loads(json.dumps(asdict(augmentation)))) == augmentation


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"horizontal_flip": 1}, "horizontal_flip must be true or false, got 1"),
        ({"random_crop": "yes"}, "random_crop must be true or false, got 'yes'"),
        ({"crop_padding": -1}, "crop_padding must be an integer from 0 to 512, got -1"),
        ({"crop_padding": 1.5}, "crop_padding must be an integer from 0 to 512, got 1.5"),
        ({"crop_padding": True}, "crop_padding must be an integer"),
    ],
)
def test_wrong_value_is_refused(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Augmentation(**wrong)


def test_alternating_flips_show_both_sides_in_two_epochs():
    images = torch.arange(8, dtype=torch.uint8).view(1, 1, 8, 1).expand(40, 1, 8, 1)
    indices, flips = torch.arange(40), Augmentation(horizontal_flip=True, alternating=True)
    first, second, third = (augment(images, indices, flips, seed=0, epoch=epoch) for epoch in range(3))
    assert torch.equal(first, second.flip(2))
    assert torch.equal(first, third)
    assert 5 < (first[:, 0, 0, 0] == 0).sum() < 35


def test_alternating_needs_a_flip():
    with pytest.raises(ValueError, match=r"^alternating must be false without horizontal_flip, got true\.$"):
        Augmentation(alternating=True)


def test_light_changes_brightness_contrast_and_color_of_each_image_alone():
    values = torch.arange(256).to(torch.uint8)
    images = values.view(1, 16, 16, 1).repeat(200, 1, 1, 3)
    light = Augmentation(light=0.5)
    indices = torch.arange(200)
    changed = augment(images, indices, light, seed=3, epoch=1)
    assert changed.dtype == torch.uint8
    assert changed.shape == images.shape
    some = torch.tensor([7, 150, 2])
    assert torch.equal(augment(images[some], some, light, seed=3, epoch=1), changed[some])
    assert not torch.equal(augment(images, indices, light, seed=3, epoch=2), changed)
    # 127.5 + c·(b·k·p − 127.5): the value of a black pixel gives c, the slope gives b·k.
    darkest, middle = changed[:, 0, 0].double(), changed[:, 6, 4].double()
    assert (changed.view(200, 256, 3).int().diff(dim=1) >= 0).all()
    assert len(changed[:, 8, 0].unique(dim=0)) > 190
    assert darkest.max() <= 64
    slopes = (middle - darkest)[(darkest[:, 0] > 0) & (middle.amax(1) < 255)] / 100
    assert slopes.min() >= 0.5 * 0.5 * 0.75 - 0.02
    assert slopes.max() <= 1.25 * 1.5
    gray = augment(images[..., :1], indices, light, seed=3, epoch=1)
    assert gray.shape == (200, 16, 16, 1)
    assert torch.equal(augment(images, indices, Augmentation(light=0.0), seed=3, epoch=1), images)


def test_light_is_combined_with_flips_and_translation():
    images = torch.randint(0, 256, (8, 9, 9, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(8)
    for name, moved in (("light", "translate"), ("flip-light", "flip")):
        lit = augment(images, indices, Augmentation(light=0.5), seed=0, epoch=1)
        expected = augment(lit, indices, AUGMENTATIONS[moved], seed=0, epoch=1)
        assert torch.equal(augment(images, indices, AUGMENTATIONS[name], seed=0, epoch=1), expected)


@pytest.mark.parametrize("light", [-0.1, 1.5, float("nan"), "much", True])
def test_light_out_of_range_is_refused(light):
    with pytest.raises(ValueError, match=r"^light must be a number from 0 to 1, got "):
        Augmentation(light=light)
