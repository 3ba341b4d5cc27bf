"""Batches of picture files: the same with and without workers, clean errors, clean ends."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
def pictures(picture_folder):
    return load_dataset("folder", picture_folder, image_size=21)  # resized to 24 × 24


others = set()


@pytest.fixture(autouse=True)
def know_other_processes():
    others.update(multiprocessing.active_children())


def children():
    """Return the processes that this test started and that still run."""
    return [process for process in multiprocessing.active_children() if process not in others]


def test_evaluation_is_the_centre_and_what_read_image_gives(pictures, collect):
    batch = collect(pictures.train, [4, 0])[0]
    for image, index in zip(batch.images, (4, 0), strict=True):
        assert torch.equal(image, read_image(pictures.train.path(index), pictures.preprocessing))
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.tolist() == [int(pictures.train.labels[4]), 0]
    assert batch.indices.tolist() == [4, 0]


def test_training_equals_one_picture_at_a_time(pictures, collect):
    indices = list(range(len(pictures.train)))
    batch = collect(pictures.train, indices, augmentation=EVERYTHING, seed=5, epoch=2)[0]
    cut = []
    for index in indices:
        one = torch.tensor([index])
        top, left = (int(draw(5, 2, one, purpose, 4)) for purpose in (Purpose.CROP_TOP, Purpose.CROP_LEFT))
        cut.append(torch.from_numpy(decode(pictures.train.path(index), (24, 24), 3)[top : top + 21, left : left + 21]))
    expected = augment(torch.stack(cut), torch.tensor(indices), EVERYTHING, seed=5, epoch=2)
    assert torch.equal(batch.images, (expected.permute(0, 3, 1, 2).float() - 127.5) / 128)


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(pictures, collect, workers):
    batches = [[0, 1, 2], [14], [3, 3, 7, 9], [], [5, 6]]
    alone = collect(pictures.train, *batches, augmentation=EVERYTHING, seed=1, epoch=9)
    together = collect(pictures.train, *batches, augmentation=EVERYTHING, seed=1, epoch=9, workers=workers)
    mixed = collect(pictures.train, [9, 14, 5, 0], augmentation=EVERYTHING, seed=1, epoch=9)[0]
    assert len(alone) == len(together) == 5
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert torch.equal(one.indices, other.indices)
        assert other.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(mixed.images[1:2], alone[1].images)
    assert torch.equal(mixed.images[0], alone[2].images[3])
    assert children() == []


def test_a_subset_counts_anew(pictures, collect):
    chosen = torch.tensor([8, 2])
    subset = pictures.train.subset(chosen)
    assert len(subset) == 2
    assert torch.equal(subset.labels, pictures.train.labels[chosen])
    assert subset.path(1) == pictures.train.path(2)
    assert torch.equal(collect(subset, [1])[0].images, collect(pictures.train, [2])[0].images)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_endless_order_is_not_read_far_ahead(pictures, workers):
    asked = []

    def endless():
        for epoch in count():
            asked.append(epoch)
            yield epoch, torch.tensor([epoch % 15])

    batches = pictures.train.batches(endless(), device=CPU, augmentation=AUGMENTATIONS["imagenet"], workers=workers)
    for index in range(12):
        assert next(batches).indices.tolist() == [index % 15]
        assert len(asked) <= index + 1 + 2 * workers + 1
    assert len(children()) == workers
    begin = time.perf_counter()
    batches.close()
    assert children() == []
    assert time.perf_counter() - begin < 10


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_generator_is_left_alone(pictures, collect, workers):
    before = torch.get_rng_state()
    collect(pictures.train, [0], [1], augmentation=EVERYTHING, workers=workers)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_picture_is_one_sentence_at_its_turn(pictures, workers):
    pictures.train.path(7).write_bytes(b"broken")
    order = [(0, torch.tensor([index])) for index in range(15)]
    batches = pictures.train.batches(order, device=CPU, augmentation=None, workers=workers)
    for index in range(7):
        assert next(batches).indices.tolist() == [index]
    with pytest.raises(DataError) as caught:
        next(batches)
    reason = "it is not a JPEG, PNG, BMP, GIF, WebP or TIFF picture"
    assert str(caught.value) == f"the picture {str(pictures.train.path(7))!r} cannot be read: {reason}."
    assert caught.value.__cause__ is None
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrong_index_is_named(pictures, workers):
    order = [(0, torch.tensor([0])), (0, torch.tensor([15]))]
    batches = pictures.train.batches(order, device=CPU, augmentation=None, workers=workers)
    with pytest.raises(IndexError, match="indices must be from 0 to 14, got 15"):
        list(batches)
    assert children() == []


def test_a_killed_worker_is_one_sentence_and_not_a_wait(pictures):
    at_a_child = signal.getsignal(signal.SIGCHLD)
    order = ((0, torch.tensor([index % 15])) for index in count())
    batches = pictures.train.batches(order, device=CPU, augmentation=None, workers=1)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) is at_a_child
    os.kill(children()[0].pid, signal.SIGKILL)
    with pytest.raises(DataError, match=r"^a process that reads pictures ended \(.*\): try fewer workers\.$"):
        list(islice(batches, 100))
    assert children() == []


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [OSError, RuntimeError, ValueError])
def test_errors_of_the_order_come_through(pictures, workers, kind):
    def order():
        yield 0, torch.tensor([0])
        raise kind("of the order")

    with pytest.raises(kind, match="of the order"):
        list(pictures.train.batches(order(), device=CPU, augmentation=None, workers=workers))
    assert children() == []


def test_signals_for_the_training_leave_the_workers_alone(pictures):
    order = ((0, torch.tensor([index % 15])) for index in count())
    batches = pictures.train.batches(order, device=CPU, augmentation=None, workers=2)
    next(batches)
    for process in children():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(process.pid, number)
    for _ in range(20):
        next(batches)
    assert len(children()) == 2
    batches.close()
    assert children() == []


def test_leaving_python_with_workers_at_work(picture_folder):
    code = f"""
import torch
from itertools import count, islice
from spherenet.data import load_dataset
split = load_dataset("folder", {str(picture_folder)!r}, image_size=8).train
order = ((0, torch.tensor([index % 15])) for index in count())
batches = split.batches(order, device=torch.device("cpu"), augmentation=None, workers=2)
next(batches)
"""
    begin = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert time.perf_counter() - begin < 25


def test_other_errors_of_a_reader_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        list(read_ahead(lambda key: 1 // key, [1, 0], workers=0))


def test_check_images_lists_all_broken_ones(pictures):
    assert check_images(pictures.train) == []
    for index in (2, 11):
        pictures.train.path(index).write_bytes(b"broken")
    for workers in (0, 2):
        done = []
        broken = check_images(pictures.train, lambda *numbers, seen=done: seen.append(numbers), workers=workers)
        assert len(broken) == 2
        for index, message in zip((2, 11), broken, strict=True):
            assert str(pictures.train.path(index)) in message
        assert done == [(number, 15) for number in range(1, 16)]
    assert check_images(load_dataset("mnist5k").test) == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files as Linux shows them")
def test_many_batches_leave_no_open_files(pictures, collect):
    before = len(os.listdir("/proc/self/fd"))
    kept = collect(pictures.train, *([[0, 1]] * 40), workers=2)
    assert len(os.listdir("/proc/self/fd")) - before < 10
    assert len(kept) == 40
