"""Batches of image files: equal with and without workers; errors and the end of the workers."""

import multiprocessing
import os
import signal
import subprocess
import sys
from itertools import count, islice

import pytest
import torch

from spherenet.data import AUGMENTATIONS, Augmentation, check_images, load_dataset, read_image
from spherenet.data.augmentation import Purpose, augment, draw
from spherenet.data.images import decode
from spherenet.data.workers import read_ahead
from spherenet.errors import DataError

CPU = torch.device("cpu")
EVERYTHING = Augmentation(horizontal_flip=True, vertical_flip=True, crop_padding=3, random_crop=True)


@pytest.fixture
def dataset(image_folder):
    return load_dataset("folder", image_folder, image_size=21)  # resized to 24 × 24


other_processes = set()


@pytest.fixture(autouse=True)
def record_other_processes():
    other_processes.update(multiprocessing.active_children())


def children():
    """Return the running processes that this test started."""
    return [process for process in multiprocessing.active_children() if process not in other_processes]


def test_evaluation_batch_equals_read_image(dataset, collect):
    batch = collect(dataset.train, [4, 0])[0]
    for image, index in zip(batch.images, (4, 0), strict=True):
        assert torch.equal(image, read_image(dataset.train.path(index), dataset.preprocessing))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.tolist() == [int(dataset.train.labels[4]), 0]
    assert batch.indices.tolist() == [4, 0]


def test_training_batch_equals_one_image_at_a_time(dataset, collect):
    indices = list(range(len(dataset.train)))
    batch = collect(dataset.train, indices, augmentation=EVERYTHING, seed=5, epoch=2)[0]
    crops = []
    for index in indices:
        one = torch.tensor([index])
        top, left = (int(draw(5, 2, one, purpose, 4)) for purpose in (Purpose.CROP_TOP, Purpose.CROP_LEFT))
        pixels = decode(dataset.train.path(index), (24, 24), 3, keep_aspect=True)
        crops.append(torch.from_numpy(pixels[top : top + 21, left : left + 21]))
    expected = augment(torch.stack(crops), torch.tensor(indices), EVERYTHING, seed=5, epoch=2)
    assert torch.equal(batch.images, (expected.permute(0, 3, 1, 2).float() - 127.5) / 128)


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_equal_with_workers(dataset, collect, workers):
    batches = [[0, 1, 2], [14], [3, 3, 7, 9], [], [5, 6]]
    alone = collect(dataset.train, *batches, augmentation=EVERYTHING, seed=1, epoch=9)
    together = collect(dataset.train, *batches, augmentation=EVERYTHING, seed=1, epoch=9, workers=workers)
    mixed = collect(dataset.train, [9, 14, 5, 0], augmentation=EVERYTHING, seed=1, epoch=9)[0]
    assert len(alone) == len(together) == 5
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)
        assert other.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(mixed.images[1:2], alone[1].images)
    assert torch.equal(mixed.images[0], alone[2].images[3])
    assert children() == []


def test_subset_is_numbered_from_zero(dataset, collect):
    chosen = torch.tensor([8, 2])
    subset = dataset.train.subset(chosen)
    assert len(subset) == 2
    assert torch.equal(subset.labels, dataset.train.labels[chosen])
    assert subset.path(1) == dataset.train.path(2)
    assert torch.equal(collect(subset, [1])[0].images, collect(dataset.train, [2])[0].images)


@pytest.mark.parametrize("workers", [0, 2])
def test_endless_order_is_read_a_few_batches_ahead(dataset, workers):
    requested = []

    def endless():
        for epoch in count():
            requested.append(epoch)
            yield epoch, torch.tensor([epoch % 15])

    batches = dataset.train.batches(endless(), device=CPU, augmentation=AUGMENTATIONS["imagenet"], workers=workers)
    for index in range(12):
        assert next(batches).indices.tolist() == [index % 15]
        assert len(requested) <= index + 1 + 2 * workers + 1
    assert len(children()) == workers
    batches.close()
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_global_generator_is_unchanged(dataset, collect, workers):
    before = torch.get_rng_state()
    collect(dataset.train, [0], [1], augmentation=EVERYTHING, workers=workers)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_raises_when_it_is_due(dataset, workers):
    dataset.train.path(7).write_bytes(b"broken")
    order = [(0, torch.tensor([index])) for index in range(15)]
    batches = dataset.train.batches(order, device=CPU, augmentation=None, workers=workers)
    for index in range(7):
        assert next(batches).indices.tolist() == [index]
    with pytest.raises(DataError) as caught:
        next(batches)
    reason = "it is not a JPEG, PNG, BMP, GIF, WebP, TIFF or AVIF image"
    remedy = "--on-broken skip leaves such images out, spherenet data lists them"
    assert str(caught.value) == f"the image {str(dataset.train.path(7))!r} cannot be read: {reason}; {remedy}."
    assert caught.value.__cause__ is None
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_wrong_index_is_refused(dataset, workers):
    order = [(0, torch.tensor([0])), (0, torch.tensor([15]))]
    batches = dataset.train.batches(order, device=CPU, augmentation=None, workers=workers)
    with pytest.raises(IndexError, match="indices must be from 0 to 14, got 15"):
        list(batches)
    assert children() == []


def test_killed_worker_raises_without_waiting(dataset):
    handler = signal.getsignal(signal.SIGCHLD)
    order = ((0, torch.tensor([index % 15])) for index in count())
    batches = dataset.train.batches(order, device=CPU, augmentation=None, workers=1)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is handler
    os.kill(children()[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"^a process that reads images ended \(.*\): use fewer --workers\.$"):
        list(islice(batches, 100))
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
def test_error_of_the_order_is_raised(dataset, workers, error):
    def order():
        yield 0, torch.tensor([0])
        raise error("of the order")

    with pytest.raises(error, match="of the order"):
        list(dataset.train.batches(order(), device=CPU, augmentation=None, workers=workers))
    assert children() == []


def test_signals_for_the_training_do_not_stop_workers(dataset):
    order = ((0, torch.tensor([index % 15])) for index in count())
    batches = dataset.train.batches(order, device=CPU, augmentation=None, workers=2)
    next(batches)
    for process in children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
    for _ in range(20):
        next(batches)
    assert len(children()) == 2
    batches.close()
    assert children() == []


def test_python_exits_with_running_workers(image_folder):
    code = f"""
import torch
from itertools import count, islice
from spherenet.data import load_dataset
split = load_dataset("folder", {str(image_folder)!r}, image_size=8).train
order = ((0, torch.tensor([index % 15])) for index in count())
batches = split.batches(order, device=torch.device("cpu"), augmentation=None, workers=2)
next(batches)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_other_errors_of_a_reader_are_raised():
    with pytest.raises(ZeroDivisionError):
        list(read_ahead(lambda key: 1 // key, [1, 0], workers=0))


def test_check_images_lists_all_broken_images(dataset):
    assert check_images(dataset.train) == []
    for index in (2, 11):
        dataset.train.path(index).write_bytes(b"broken")
    for workers in (0, 2):
        calls = []
        broken = check_images(dataset.train, lambda *numbers, calls=calls: calls.append(numbers), workers=workers)
        assert len(broken) == 2
        for index, message in zip((2, 11), broken, strict=True):
            assert str(dataset.train.path(index)) in message
        assert calls == [(number, 15) for number in range(1, 16)]
    assert check_images(load_dataset("mnist5k").test) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_many_batches_leave_no_open_files(dataset, collect):
    before = len(os.listdir("/proc/self/fd"))
    kept = collect(dataset.train, *([[0, 1]] * 40), workers=2)
    assert len(os.listdir("/proc/self/fd")) - before < 10
    assert len(kept) == 40
