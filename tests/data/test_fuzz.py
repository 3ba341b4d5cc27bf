"""Every reader over mutated files: the data, or one clean sentence. Nothing else, whatever the bytes."""

import gzip
import io
import pickle
import random
import time

import numpy as np
import pytest
from PIL import Image

from spherenet.data import Preprocessing
from spherenet.data.archives import read_members
from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.data.images import FORMATS, decode
from spherenet.data.unpickling import read_pickled_dict
from spherenet.errors import DataError


def mutated(data, generator):
    """Return the bytes with some flipped, cut, repeated, moved or overwritten."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 2, 5))):
        kind = generator.randrange(7)
        at = generator.randrange(len(changed) + 1)
        length = generator.choice((1, 2, 8, 64, 512))
        if kind == 0 and changed:
            changed[at % len(changed)] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + length]
        elif kind == 3:
            changed[at:at] = generator.randbytes(length)
        elif kind == 4:
            changed[at : at + length] = generator.choice((b"\0", b"\xff", b"\x7f", b"9")) * length
        elif kind == 5:
            changed[at:at] = changed[at : at + length]
        else:
            changed[at : at + length] = generator.randbytes(length)
    return bytes(changed)


def tried(read, data, times, seed=0):
    """Call `read` on mutations of `data`; return how often it read, and how often it refused in one sentence."""
    generator = random.Random(seed)
    answers = {"read": 0, "refused": 0}
    for _ in range(times):
        begin = time.perf_counter()
        message = refusal(read, mutated(data, generator))
        assert message is None or len(message) < 600
        assert time.perf_counter() - begin < 5
        answers["read" if message is None else "refused"] += 1
    return answers


def refusal(read, value):
    """Return the sentence with which the reader refused, or None; any other exception is a failure."""
    try:
        read(value)
    except DataError as error:
        lines = str(error).splitlines()
    else:
        return None
    assert len(lines) == 1
    return lines[0]


def test_binary_files(tmp_path, cifar10):
    cifar10.write(tmp_path, "bin")
    path = tmp_path / cifar10.form.binary_folder / "data_batch_1.bin"

    def read(data):
        path.write_bytes(data)
        train, _ = read_cifar(cifar10.form, find_cifar(cifar10.form, tmp_path))
        records = np.frombuffer(data, np.uint8).reshape(60, 3073)
        assert train.labels[:60].tolist() == records[:, 0].tolist()
        assert np.array_equal(train.pictures[:60], records[:, 1:].reshape(60, 3, 32, 32).transpose(0, 2, 3, 1))

    answers = tried(read, path.read_bytes(), 300)
    assert min(answers.values()) > 20


@pytest.mark.parametrize("protocol", [None, 2, 4, 5])
def test_pickled_files(cifar10, protocol):
    # Few pixels and many instructions, so that most mutations hit the latter.
    planes, labels = np.arange(48, dtype=np.uint8).reshape(8, 6), list(range(8))
    if protocol is None:
        data = cifar10.pickled_files()["data_batch_1"]
    else:
        data = pickle.dumps({b"data": planes, b"labels": labels, b"names": [b"x"] * 8}, protocol=protocol)

    def read(data):
        found = read_pickled_dict(data, "batch", most_instructions=2000)
        assert all(isinstance(key, str) for key in found)
        for value in found.values():
            assert not callable(value)
            assert not isinstance(value, np.ndarray) or value.dtype.kind in "iu"

    answers = tried(read, data, 400)
    assert min(answers.values()) > 10


def test_archives(tmp_path, files):
    contents = {"set/a.bin": random.Random(1).randbytes(3000), "set/b.bin": bytes(5000)}
    path = tmp_path / "set.tar.gz"
    files.write_archive(path, contents)
    longest = {name: len(data) for name, data in contents.items()}

    def read(data):
        path.write_bytes(data)
        assert read_members(path, longest) == contents

    assert tried(read, path.read_bytes(), 500)["refused"] > 400


def test_archives_inside_their_compression(tmp_path, files):
    contents = {"set/a.bin": b"a" * 300, "set/b.bin": b"b" * 600}
    path = tmp_path / "set.tar.gz"
    files.write_archive(path, contents)
    longest = {name: len(data) for name, data in contents.items()}

    def read(data):
        path.write_bytes(gzip.compress(data, 1))
        found = read_members(path, longest)
        assert sorted(found) == sorted(longest)
        assert all(len(data) <= longest[name] for name, data in found.items())

    answers = tried(read, gzip.decompress(path.read_bytes()), 500)
    assert min(answers.values()) > 20


@pytest.mark.parametrize("form", FORMATS)
def test_pictures(tmp_path, form):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    path = tmp_path / "picture.png"

    def read(data):
        path.write_bytes(data)
        found = decode(path, (10, 11), 3)
        assert found.shape == (10, 11, 3)
        assert found.dtype == np.uint8

    answers = tried(read, stream.getvalue(), 300)
    assert min(answers.values()) > 0


def test_a_png_is_read_right_or_not_at_all(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    path = tmp_path / "picture.png"

    def read(data):
        path.write_bytes(data)
        assert np.array_equal(decode(path, (12, 16), 3), pixels)

    tried(read, stream.getvalue(), 300, seed=1)


def test_preprocessing():
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
        refusal(lambda value: value == Preprocessing.from_dict(value).as_dict() or pytest.fail("changed"), changed)
