"""Readers of mutated embeddings and pairs raise an error of one sentence or return the exact content."""

import csv
import io
import os
import random

import numpy as np
import pytest

from command_line import one_sentence
from faults.mutation import call_reader, mutated_bytes
from faults.scale import FUZZ_INPUTS
from spherenet.data.embeddings import Embeddings, read_embeddings, read_pairs, write_embeddings
from spherenet.errors import DataError

POINT = 11
NAMES = [f"class {number % 3}/{number}.jpg" for number in range(12)]
VALUES = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
PAIRS = "first,second,same\n" + "".join(f"{NAMES[i]},{NAMES[i - 3]},{i % 2}\n" for i in range(12))


@pytest.fixture
def saved(tmp_path):
    for name in ("x.npy", "x.csv"):
        write_embeddings(Embeddings(VALUES, NAMES, [name.split("/")[0] for name in NAMES]), tmp_path / name)
    (tmp_path / "pairs.csv").write_text(PAIRS)
    return tmp_path


def rows_of(path):
    """Return the rows of a CSV file by another path than that of the reader."""
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    return [row for row in csv.reader(io.StringIO(text, newline="")) if row]


def check_matrix(folder):
    embeddings = read_embeddings(folder / "x.npy")
    expected = np.load(folder / "x.npy", allow_pickle=False)
    with np.errstate(all="ignore"):
        assert np.array_equal(embeddings.values, expected.astype(np.float32))
    assert embeddings.files == [row[0] for row in rows_of(folder / "x.files.csv")[1:]]


def check_table(folder):
    embeddings = read_embeddings(folder / "x.csv")
    rows = rows_of(folder / "x.csv")[1:]
    assert np.array_equal(embeddings.values, [[np.float32(cell) for cell in row[2:]] for row in rows])
    assert embeddings.files == [row[0] for row in rows]


def check_pairs(folder):
    pairs = read_pairs(folder / "pairs.csv")
    assert {pair.same for pair in pairs} == {False, True}


def mutate_header(data, chance):
    """Change the header of an .npy file and keep its length and the numbers."""
    header = mutated_bytes(data[10:127], chance)[:117]
    return data[:10] + header.ljust(117) + data[127:]


CASES = {
    "a fuzzed matrix of embeddings": ("x.npy", mutated_bytes, check_matrix),
    "a matrix with a fuzzed header": ("x.npy", mutate_header, check_matrix),
    "a fuzzed file of names": ("x.files.csv", mutated_bytes, check_matrix),
    "a fuzzed table of embeddings": ("x.csv", mutated_bytes, check_table),
    "a fuzzed file of pairs": ("pairs.csv", mutated_bytes, check_pairs),
}


@pytest.mark.parametrize("what", CASES)
def test_mutated_embeddings(saved, tried, what):
    name, mutate, check = CASES[what]
    chance, rejected = random.Random(0), 0
    original = (saved / name).read_bytes()
    for _ in range(FUZZ_INPUTS):
        (saved / name).write_bytes(mutate(original, chance))
        _, message = call_reader(check, saved, DataError)
        rejected += message is not None
        tried(what)
    assert rejected > FUZZ_INPUTS // 10


def header_of(description, version=1, length=None):
    """Return the start of an .npy file with any description of its array."""
    text = description.encode() + b"\n"
    stated = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + stated.to_bytes(2 if version == 1 else 4, "little") + text


def array(shape, descr="'<f4'", **options):
    return header_of(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}", **options)


HOSTILE = {
    "a sparse file of more rows than names": (array((1 << 14, 1 << 16)), len(array((1 << 14, 1 << 16))) + (1 << 32)),
    "a sparse file of too many rows": (array((1 << 30, 1)), len(array((1 << 30, 1))) + (1 << 32)),
    "a sparse file of too many columns": (array((12, 1 << 26)), len(array((12, 1 << 26))) + (3 << 30)),
    "a file without its numbers": (array((12, 1 << 16), "'<f8'"), None),
    "a header of 4 GiB": (array((12, 5), version=2, length=(1 << 32) - 1), 1 << 32),
    "a header of 4 GiB in UTF-8": (array((12, 5), version=3, length=(1 << 32) - 1), 1 << 32),
    "an unknown version": (array((12, 5), version=9, length=100), 1 << 20),
    "nested parentheses": (header_of("(" * 3_000 + ")" * 3_000), None),
    "nested lists of types": (array((12, 5), "[('a', " * 400 + "'<f4'" + ")]" * 400), None),
    "nested tuples of types": (array((12, 5), "('<f4', " * 90 + "'<f4'" + ")" * 90), None),
    "minus signs": (header_of("-" * 3_000 + "1"), None),
    "a shape beyond 64 bits": (array((1 << 70, 5)), None),
    "a negative shape": (array((-12, -5)), None),
    "a type beyond 64 bits": (array((12, 5), f"'<f{1 << 70}'"), None),
    "a type of subarrays": (array((12, 5), f"('<f4', ({1 << 40}, {1 << 40}))"), None),
    "a long number": (array(f"({'9' * 5_000}, 5)"), None),
    "objects": (array((12, 5), "'|O'"), None),
    "an archive": (b"PK\x03\x04", 1 << 32),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_matrix_ends_with_one_sentence(saved, children, tried, case):
    """In a child process, which may crash: one sentence of bounded length, and little memory."""
    (saved / "y.npy").write_bytes((saved / "x.npy").read_bytes())
    ordinary = children.run("verify", saved / "y.npy", saved / "pairs.csv", "--folds", "2").peak
    content, size = HOSTILE[case]
    (saved / "x.npy").write_bytes(content)
    if size is not None:
        os.truncate(saved / "x.npy", size)
    done = children.run("verify", saved / "x.npy", saved / "pairs.csv", "--folds", "2", timeout=240)
    assert done.code == 2, (done.code, done.output[-500:])
    assert one_sentence(done.output), done.output[:500]
    assert len(done.output) < 1_000, done.output[:500]
    assert done.peak - ordinary < 64 * 1024  # kilobytes
    tried("a matrix of embeddings designed to do harm")


LARGE = {
    "names of zero bytes": ("x.files.csv", b"file,label\n"),
    "a table of zero bytes": ("x.csv", b"file,label,x0\n"),
    "pairs of zero bytes": ("pairs.csv", b""),
}


@pytest.mark.parametrize("case", LARGE)
def test_sparse_text_ends_with_one_sentence(saved, children, tried, case):
    name, start = LARGE[case]
    model = saved / ("x.csv" if name == "x.csv" else "x.npy")
    ordinary = children.run("verify", model, saved / "nowhere.csv").peak
    (saved / name).write_bytes(start)
    os.truncate(saved / name, 1 << 30)
    done = children.run("verify", model, saved / "pairs.csv", "--folds", "2", timeout=240)
    assert done.code == 2, (done.code, done.output[-500:])
    assert one_sentence(done.output), done.output[:500]
    assert done.peak - ordinary < 128 * 1024  # kilobytes
    tried("a sparse file of names, pairs or embeddings")
