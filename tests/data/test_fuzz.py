"""Every reader on mutated files: it returns valid data or raises DataError with one line."""

import io
import random
import time

import numpy as np
import pytest
from PIL import Image

from spherenet.data import Preprocessing
from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.data.images import FORMATS, decode
from spherenet.errors import DataError


def mutate(data, generator):
    """Return the bytes with some flipped, deleted, repeated, inserted or overwritten."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        mutation = generator.randrange(7)
        at = generator.randrange(len(changed) + 1)
        length = generator.choice((1, 2, 8, 64, 512))
        if mutation == 0 and changed:
            changed[at % len(changed)] ^= 1 << generator.randrange(8)
        elif mutation == 1:
            del changed[at:]
        elif mutation == 2:
            del changed[at : at + length]
        elif mutation == 3:
            changed[at:at] = generator.randbytes(length)
        elif mutation == 4:
            changed[at : at + length] = generator.choice((b"\0", b"\xff", b"\x7f", b"9")) * length
        elif mutation == 5:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + length] = generator.randbytes(length)
    return bytes(changed)


def fuzz(read, data, times, seed=0):
    """Call `read` on mutations of `data`; return how often it succeeded and how often it raised DataError."""
    generator = random.Random(seed)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(times):
        start = time.process_time()  # of this process: other processes on the machine do not count
        message = error_message(read, mutate(data, generator))
        assert message is None or len(message) < 600
        assert time.process_time() - start < 20
        outcomes["read" if message is None else "refused"] += 1
    return outcomes


def error_message(read, value):
    """Return the message of a DataError, or None; any other exception is a failure."""
    try:
        read(value)
    except DataError as error:
        lines = str(error).splitlines()
    else:
        return None
    assert len(lines) == 1
    return lines[0]


def test_mutated_binary_files(tmp_path, cifar10):
    path = cifar10.write_folder(tmp_path) / "data_batch_1.bin"

    def read(data):
        path.write_bytes(data)
        train, _ = read_cifar(cifar10.form, find_cifar(cifar10.form, tmp_path))
        records = np.frombuffer(data, np.uint8).reshape(60, 3073)
        assert train.labels[:60].tolist() == records[:, 0].tolist()
        assert np.array_equal(train.images[:60], records[:, 1:].reshape(60, 3, 32, 32).transpose(0, 2, 3, 1))

    outcomes = fuzz(read, path.read_bytes(), 300)
    assert min(outcomes.values()) > 20


@pytest.mark.parametrize("image_format", FORMATS)
def test_mutated_images(tmp_path, image_format):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, image_format)
    path = tmp_path / "image.png"

    def read(data):
        path.write_bytes(data)
        decoded = decode(path, (10, 11), 3)
        assert decoded.shape == (10, 11, 3)
        assert decoded.dtype == np.uint8

    outcomes = fuzz(read, stream.getvalue(), 300)
    assert min(outcomes.values()) > 0


def test_mutated_png_is_decoded_correctly_or_refused(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    path = tmp_path / "image.png"

    def read(data):
        path.write_bytes(data)
        assert np.array_equal(decode(path, (12, 16), 3), pixels)

    fuzz(read, stream.getvalue(), 300, seed=1)


def test_mutated_preprocessing():
    generator = random.Random(0)
    good = Preprocessing.standard((32, 32), 3).as_dict()
    odd = [
        None,
        True,
        -1,
        0,
        1,
        10**400,
        1.5,
        float("nan"),
        float("inf"),
        "x",
        [],
        [[]],
        {},
        [1, 2],
        [1.0] * 3,
        {"a": 1},
    ]
    for _ in range(500):
        changed = dict(good)
        for _ in range(generator.randint(1, 3)):
            changed[generator.choice([*good, "extra"])] = generator.choice(odd)
        error_message(
            lambda value: value == Preprocessing.from_dict(value).as_dict() or pytest.fail("changed"), changed
        )
