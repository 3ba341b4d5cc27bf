"""Hostile pickles: no code is executed, and memory and time are bounded."""

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

from spherenet.data import unpickling
from spherenet.data.cifar import find_cifar, read_cifar
from spherenet.data.unpickling import read_pickled_dict
from spherenet.errors import DataError

MAX_OPCODES = 5000


class Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("nested", [False, True])
def test_call_is_refused_and_not_executed(tmp_path, protocol, nested):
    proof = tmp_path / "proof"
    call = Calls(os.mkdir, str(proof))
    data = pickle.dumps({b"data": [call] if nested else call}, protocol=protocol)
    with pytest.raises(DataError, match=r"'batch' .* uses posix.mkdir, but only arrays, strings, lists and dicts"):
        read_pickled_dict(data, "batch", max_opcodes=MAX_OPCODES)
    assert not proof.exists()
    pickle.loads(data)
    assert proof.exists()  # the call works in an ordinary unpickler


def test_file_with_call_is_refused(tmp_path, cifar10):
    cifar10.write(tmp_path, "py")
    path = tmp_path / cifar10.form.python_folder / "data_batch_2"
    proof = tmp_path / "proof"
    path.write_bytes(pickle.dumps({b"data": Calls(os.mkdir, str(proof))}, protocol=2))
    with pytest.raises(DataError, match=r"data_batch_2' .* uses posix.mkdir"):
        read_cifar(cifar10.form, find_cifar(cifar10.form, tmp_path))
    assert not proof.exists()


REFUSED = {
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
    "function as value": b"\x80\x02}U\x04datac_codecs\nencode\ns.",
    "function changed": b"\x80\x02c_codecs\nencode\n}U\x08functionK\x01sb.",
    "function changed by slots": b"\x80\x02c_codecs\nencode\nN}U\x08functionK\x01s\x86b.",
    "array called by dtype": b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02O8\x85Rs.",
    "number as key": b"\x80\x02}K\x01K\x02s.",
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


@pytest.mark.parametrize("case", REFUSED)
def test_other_content_is_refused(case):
    with pytest.raises(DataError, match="'batch' ") as caught:
        read_pickled_dict(REFUSED[case], "batch", max_opcodes=MAX_OPCODES)
    assert len(str(caught.value)) < 400
    assert len(str(caught.value).splitlines()) == 1


LATIN = "\xe9" * (1 << 20)
BOMBS = {
    # The unpickler would allocate four billion memo entries, or the stated length.
    "memo": b"\x80\x02}r\xff\xff\xff\xffK\x01.",
    "stated bytes": b"\x80\x04B\xff\xff\xff\x7f.",
    "stated long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "stated frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b".",
    "stated shape": pickle.dumps({b"data": np.zeros((1, 1), np.uint8)}, protocol=2).replace(
        b"K\x01K\x01\x86", b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86"
    ),
    "many opcodes": b"\x80\x02]" + b"](" * 1_000_000 + b".",
    "same text encoded many times": b"\x80\x02X" + struct.pack("<I", 2 << 20) + LATIN.encode()
    + b"q\x00X\x06\x00\x00\x00latin1q\x01" + b"c_codecs\nencode\nh\x00h\x01\x86R" * 1000 + b".",
    "hash of nested tuples": b"\x80\x02)" + b"2\x86" * 100 + b"}q\x00h\x00" + b"K\x01s.",
    "hash of shared tuples": b"\x80\x02})q\x00" + b"".join(
        b"h%ch%c\x86q%c" % (index, index, index + 1) for index in range(100)
    ) + b"K\x01s.",
    "hash of shared tuples after BUILD": b"\x80\x02})Nbq\x00" + b"".join(
        b"h%ch%c\x86Nbq%c" % (index, index, index + 1) for index in range(100)
    ) + b"K\x01s.",
    "hash of deep tuples": b"\x80\x02})" + b"\x85" * 4000 + b"K\x01s.",
    "nested": b"\x80\x02" + b"(" * 4000 + b"t" * 4000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("case", BOMBS)
def test_bomb_is_refused(case):
    with pytest.raises(DataError):
        read_pickled_dict(BOMBS[case], "batch", max_opcodes=MAX_OPCODES)


def test_bombs_take_little_memory_and_time():
    # In a separate process, whose peak memory is known.
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_hostile_pickles import BOMBS, MAX_OPCODES, DataError, read_pickled_dict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for data in BOMBS.values():
    try:
        read_pickled_dict(data, "batch", max_opcodes=MAX_OPCODES)
    except DataError:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert int(completed.stdout) < 64 * 1024  # kilobytes


def test_values_round_trip():
    value = {b"a": [1, -2, 300, 70_000, 1 << 40], "b": "text é", b"c": (True, None), b"d": {b"e": b"\xff"}, b"f": b""}
    for protocol in range(6):
        data = pickle.dumps(value, protocol=protocol)
        expected = {key.decode() if isinstance(key, bytes) else key: entry for key, entry in value.items()}
        assert read_pickled_dict(pickletools.optimize(data), "batch", max_opcodes=MAX_OPCODES) == expected


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i4", "<u8", ">i8"])
def test_arrays_round_trip(protocol, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    for value in (array, np.asfortranarray(array), array[::-1]):
        data = pickle.dumps({b"data": value}, protocol=protocol)
        array = read_pickled_dict(data, "batch", max_opcodes=MAX_OPCODES)["data"]
        assert array.dtype == value.dtype
        assert np.array_equal(array, value)


def test_only_the_restricted_unpickler_uses_pickle():
    for source in (Path(__file__).parents[2] / "src" / "spherenet").rglob("*.py"):
        text = source.read_text("utf-8")
        for forbidden in ("pickle.load", "allow_pickle=True", "extractall", "torch.load"):
            assert forbidden not in text, f"{source.name} uses {forbidden}"
        if source.name != "unpickling.py":
            for forbidden in ("import pickle\n", "from pickle ", "Unpickler"):
                assert forbidden not in text, f"{source.name} uses {forbidden}"


@pytest.mark.parametrize("module", ["numpy", "os", "builtins", "numpy.core.multiarray"])
def test_find_class_never_imports(module):
    unpickler = unpickling._BatchUnpickler(b".")
    for name in ("ndarray", "dtype", "_reconstruct", "system", "eval", "multiarray._reconstruct"):
        try:
            stand_in = unpickler.find_class(module, name)
        except ValueError:
            continue
        assert type(stand_in) is unpickling._Function
        assert stand_in.function.__module__ == unpickling.__name__
