"""Pickles that want to do something: refused, and nothing was done."""

import collections
import os
import pickle
import pickletools
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.data.unpickling import read_pickled_dict
from spherenet.errors import DataError

MOST = 5000


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("nested", [False, True])
def test_a_call_is_refused_by_name_and_not_made(tmp_path, protocol, nested):
    proof = tmp_path / "proof"
    call = Calls(os.mkdir, str(proof))
    data = pickle.dumps({b"data": [call] if nested else call}, protocol=protocol)
    with pytest.raises(DataError, match=r"'batch' asks for posix.mkdir: only arrays, bytes, lists and dicts"):
        read_pickled_dict(data, "batch", most_instructions=MOST)
    assert not proof.exists()
    pickle.loads(data)
    assert proof.exists()  # it would have worked


def test_a_batch_with_a_call_is_not_trained_on(tmp_path, cifar10):
    cifar10.write(tmp_path, "py")
    path = tmp_path / cifar10.form.python_folder / "data_batch_2"
    proof = tmp_path / "proof"
    path.write_bytes(pickle.dumps({b"data": Calls(os.mkdir, str(proof))}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2' asks for posix.mkdir"):
        read_cifar(cifar10.form, find_cifar(cifar10.form, tmp_path))
    assert not proof.exists()


OTHERS = {
    "eval": pickle.dumps({b"data": Calls(eval, "1")}, protocol=2),
    "getattr": pickle.dumps({b"data": Calls(getattr, "x", "upper")}),
    "ordered dict": pickle.dumps(collections.OrderedDict(data=1)),
    "set": pickle.dumps({b"data": {1, 2}}),
    "object array": pickle.dumps({b"data": np.array([[1], None], dtype=object)}),
    "float": pickle.dumps({b"data": 1.5}),
    "floats": pickle.dumps({b"data": np.zeros(3)}),
    "structured": pickle.dumps({b"data": np.zeros(3, dtype=[("a", "u1")])}),
    "numpy scalar": pickle.dumps({b"data": np.uint8(3)}),
    "old instance": b"(cos\nsystem\nS'id'\nios\nsystem\n.",
    "object": b"(cos\nsystem\nS'id'\no.",
    "persistent": b"Pid\n.",
    "extension": b"\x80\x02\x82\x01.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "array called": b"\x80\x02}U\x04datacnumpy\nndarray\n(J\xff\xff\xff\x7ftRs.",
    "name as module path": b"\x80\x04\x8c\x0anumpy.core\x8c\x17multiarray._reconstruct\x93.",
    "array built twice": pickle.dumps({b"data": np.zeros(3, np.uint8)}, protocol=2).replace(b"s.", b"N\x85bs."),
    "tuple as key": b"\x80\x02}" + b"(" * 60 + b"t" + b"02" * 40 + b"K\x01s.",
    "ends early": b"\x80\x02}",
    "empties the stack": b"\x80\x020000.",
    "unmarked": b"\x80\x02t.",
    "memo": b"\x80\x02h\x07.",
    "garbage": bytes(range(256)),
    "empty": b"",
    "many digits": b"I" + b"9" * 5000 + b"\n.",
    "array of the wrong length": pickle.dumps({b"data": np.zeros(64, np.uint8)}, protocol=2).replace(b"K@", b"K\x7f"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_no_batch_holds_is_refused(case):
    with pytest.raises(DataError, match="'batch' ") as caught:
        read_pickled_dict(OTHERS[case], "batch", most_instructions=MOST)
    assert len(str(caught.value)) < 400
    assert len(str(caught.value).splitlines()) == 1


LATIN = "\xe9" * (1 << 20)
BOMBS = {
    # C's unpickler would make room for four billion entries, or for the length that is announced.
    "memo": b"\x80\x02}r\xff\xff\xff\xffK\x01.",
    "announced bytes": b"\x80\x04B\xff\xff\xff\x7f.",
    "announced long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "announced frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
    "announced shape": pickle.dumps({b"data": np.zeros((1, 1), np.uint8)}, protocol=2).replace(
        b"K\x01K\x01\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"
    ),
    "many instructions": b"\x80\x02]" + b"](" * 1_000_000 + b".",
    "one text encoded again and again": b"\x80\x02X" + struct.pack("<I", 2 << 20) + LATIN.encode()
    + b"q\x00X\x06\x00\x00\x00latin1q\x01" + b"c_codecs\nencode\nh\x00h\x01\x86R" * 1000 + b".",
    "hash of nested tuples": b"\x80\x02)" + b"2\x86" * 100 + b"}q\x00h\x00" + b"K\x01s.",
    "nested": b"\x80\x02" + b"(" * 4000 + b"t" * 4000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_do_not_go_off(case):
    with pytest.raises(DataError):
        read_pickled_dict(BOMBS[case], "batch", most_instructions=MOST)


def test_bombs_do_not_take_memory():
    # In a process of its own, whose peak is then known: torch and numpy alone take most of it.
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_hostile_pickles import BOMBS, MOST, DataError, read_pickled_dict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in BOMBS.values():
    try:
        read_pickled_dict(data, "batch", most_instructions=MOST)
    except DataError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(shown.stdout) < 64 * 1024  # kilobytes


def test_known_values_come_back():
    value = {b"a": [1, -2, 300, 70_000, 1 << 40], "b": "text é", b"c": (True, None), b"d": {b"e": b"\xff"}, b"f": b""}
    for protocol in range(6):
        data = pickle.dumps(value, protocol=protocol)
        expected = {key.decode() if isinstance(key, bytes) else key: found for key, found in value.items()}
        assert read_pickled_dict(pickletools.optimize(data), "batch", most_instructions=MOST) == expected


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i4", "<u8", ">i8"])
def test_arrays_come_back(protocol, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for value in (array, np.asfortranarray(array), array[::-1]):
        data = pickle.dumps({b"data": value}, protocol=protocol)
        found = read_pickled_dict(data, "batch", most_instructions=MOST)["data"]
        assert found.dtype == value.dtype
        assert np.array_equal(found, value)


def test_nothing_of_ours_unpickles():
    sources = (Path(__file__).parents[2] / "src" / "spherenet" / "data").glob("*.py")
    for source in sources:
        text = source.read_text()
        for forbidden in (
            "import pickle\n",
            "pickle.load",
            "Unpickler",
            "allow_pickle=True",
            "extractall",
            "torch.load",
        ):
            assert forbidden not in text, f"{source.name} uses {forbidden}"
