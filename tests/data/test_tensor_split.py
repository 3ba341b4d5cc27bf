"""A split in memory: content, order and indices of its batches."""

from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image

from spherenet.data import AUGMENTATIONS, Preprocessing, TensorSplit
from spherenet.data.augmentation import Augmentation

CPU = torch.device("cpu")


@pytest.fixture
def images():
    return torch.randint(0, 256, (20, 8, 6, 3), dtype=torch.uint8)


@pytest.fixture
def split(images):
    return TensorSplit(images, torch.arange(20) % 4, Preprocessing.standard((8, 6), 3))


def test_batch_is_normalized_and_channels_last(split, images, collect):
    first, second = collect(split, [3, 3, 19], [0])
    assert first.images.dtype == torch.float32
    assert first.labels.dtype == first.indices.dtype == torch.int64
    assert first.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first.images, (images[[3, 3, 19]].permute(0, 3, 1, 2).float() - 127.5) / 128)
    assert first.labels.tolist() == [3, 3, 3]
    assert first.indices.tolist() == [3, 3, 19]
    assert second.indices.tolist() == [0]


def test_evaluation_is_independent_of_seed_and_epoch(split, collect):
    before = collect(split, [1, 2])[0].images
    collect(split, [1, 2], augmentation=AUGMENTATIONS["flips-crop"])
    assert torch.equal(before, collect(split, [1, 2], epoch=4, seed=9)[0].images)


def test_endless_order_is_read_one_batch_at_a_time(split):
    requested = []

    def endless():
        for epoch in count():
            requested.append(epoch)
            yield epoch, torch.tensor([epoch % 20])

    batches = split.batches(endless(), device=CPU, augmentation=AUGMENTATIONS["flip"])
    for index in range(50):
        assert next(batches).indices.tolist() == [index % 20]
        assert len(requested) == index + 1
    batches.close()


def test_subset_of_a_subset_selects_original_images(split, images, collect):
    inner = split.subset(torch.tensor([5, 7, 9, 11])).subset(torch.tensor([3, 1]))
    assert len(inner) == 2
    assert inner.labels.tolist() == [3, 3]
    batch = collect(inner, [1, 0])[0]
    assert torch.equal(batch.images, (images[[7, 11]].permute(0, 3, 1, 2).float() - 127.5) / 128)


WRONG_INDICES = {
    "outside": (torch.tensor([0, 20]), IndexError, "indices must be from 0 to 19, got 20"),
    "negative": (torch.tensor([-1]), IndexError, "indices must be from 0 to 19, got -1"),
    "floats": (torch.tensor([1.0]), TypeError, r"indices must be an int64 tensor \[N\], got torch.float32 \[1\]"),
    "matrix": (torch.tensor([[1]]), TypeError, r"got torch.int64 \[1, 1\]"),
    "list": ([1, 2], TypeError, "got list"),
    "other device": (torch.empty(2, dtype=torch.int64, device="meta"), TypeError, "must be on the CPU"),
}


@pytest.mark.parametrize("case", WRONG_INDICES)
def test_wrong_indices_are_refused(split, case):
    indices, error, message = WRONG_INDICES[case]
    with pytest.raises(error, match=message):
        next(split.batches([(0, indices)], device=CPU, augmentation=None))
    with pytest.raises(error, match=message):
        split.subset(indices)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(3, 4, 4, 3), torch.zeros(3, dtype=torch.int64), "images must be uint8"),
        (torch.zeros(3, 4, 4, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), r"\[N, H, W, 1 or 3\]"),
        (torch.zeros(3, 4, 4, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64), r"labels must be int64 \[3\]"),
        (torch.zeros(3, 4, 4, 3, dtype=torch.uint8), torch.zeros(3), "got torch.float32"),
        (
            torch.zeros(0, 4, 4, 3, dtype=torch.uint8),
            torch.zeros(0, dtype=torch.int64),
            "images must hold at least one image",
        ),
    ],
)
def test_wrong_tensors_are_refused(images, labels, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TensorSplit(images, labels, Preprocessing.standard((4, 4), 3))


def pixels(split):
    return split._images[CPU]


def test_gray_equals_pillow(images):
    split = TensorSplit(images, torch.zeros(20, dtype=torch.int64), Preprocessing.standard((8, 6), 1))
    expected = [np.asarray(Image.fromarray(image.numpy()).convert("L")) for image in images]
    assert torch.equal(pixels(split)[..., 0], torch.from_numpy(np.stack(expected)))


def test_gray_to_rgb_repeats_the_channel():
    gray = torch.randint(0, 256, (5, 4, 4, 1), dtype=torch.uint8)
    split = TensorSplit(gray, torch.zeros(5, dtype=torch.int64), Preprocessing.standard((4, 4), 3))
    assert torch.equal(pixels(split), gray.repeat(1, 1, 1, 3))


@pytest.mark.parametrize("size", [(16, 16), (5, 4), (7, 12)])
@pytest.mark.parametrize("channels", [1, 3])
def test_resizing_equals_pillow_to_one_level(size, channels):
    images = torch.randint(0, 256, (6, 9, 8, channels), dtype=torch.uint8)
    split = TensorSplit(images, torch.zeros(6, dtype=torch.int64), Preprocessing.standard(size, channels))
    for resized, original in zip(pixels(split), images, strict=True):
        pillow = Image.fromarray(original.squeeze(-1).numpy())
        expected = np.asarray(pillow.resize(size[::-1], Image.Resampling.BILINEAR)).reshape(*size, channels)
        assert np.abs(expected.astype(int) - resized.numpy()).max() <= 1


def test_batches_on_another_device_are_copied_without_blocking(monkeypatch):
    copies = []
    to = torch.Tensor.to

    def recording_to(tensor, *args, **kwargs):
        result = to(tensor, *args, **kwargs)
        if result.device != tensor.device:
            copies.append((tuple(tensor.shape), kwargs.get("non_blocking", False)))
        return result

    images = torch.zeros(6, 4, 4, 3, dtype=torch.uint8)
    split = TensorSplit(images, torch.zeros(6, dtype=torch.int64), Preprocessing((4, 4), 3, (1, 2, 3), (1, 2, 3), None))
    order = iter([(0, torch.arange(2)), (0, torch.arange(3))])
    batches = split.batches(order, device=torch.device("meta"), augmentation=Augmentation(horizontal_flip=True))
    next(batches)  # copies the images
    monkeypatch.setattr(torch.Tensor, "to", recording_to)
    assert next(batches).images.device.type == "meta"
    assert len(copies) == 6
    assert all(non_blocking for _, non_blocking in copies), copies
