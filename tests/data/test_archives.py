"""Archives as they should be, and as an attacker would make them: nothing unpacked, nothing unbounded."""

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from spherenet.data.archives import read_members
from spherenet.errors import DataError

WANTED = {"set/a.bin": 1000, "set/b.bin": 2000}


def member(name, data=b"", kind=tarfile.REGTYPE, **fields):
    made = tarfile.TarInfo(name)
    made.size, made.type = len(data), kind
    for field, value in fields.items():
        setattr(made, field, value)
    return made, data


GOOD = [member("set", kind=tarfile.DIRTYPE), member("set/a.bin", b"a" * 1000), member("set/b.bin", b"b" * 1500)]


def written(path, members, form=tarfile.GNU_FORMAT):
    with tarfile.open(path, "w:gz", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_the_files_asked_for_come_back(tmp_path, form):
    extra = [
        member("set/readme é.html", b"r" * 700, mtime=1.5),  # a pax header of its own
        member("set/" + "long" * 20 + "/" + "name" * 20, b"l" * 10),
        member("./set/hidden/._a", b"x"),
    ]
    path = written(tmp_path / "good.tar.gz", [*extra, *GOOD], form)
    assert read_members(path, WANTED) == {"set/a.bin": b"a" * 1000, "set/b.bin": b"b" * 1500}


def test_names_may_begin_with_a_dot(tmp_path):
    path = written(tmp_path / "dot.tar.gz", [(info, data) for info, data in map(dotted, GOOD)])
    assert sorted(read_members(path, WANTED)) == ["set/a.bin", "set/b.bin"]


def dotted(entry):
    info, data = entry
    return member(f"./{info.name}", data, info.type)


HOSTILE = {
    "parent": ([member("../evil", b"x")], r"holds '../evil', a path that leads out of it"),
    "parent inside": ([member("set/../../evil", b"x")], "leads out of it"),
    "absolute": ([member("/evil", b"x")], "holds '/evil', a path that leads out of it"),
    "backslash": ([member("set\\..\\evil", b"x")], "leads out of it"),
    "symbolic link": (
        [member("set/link", kind=tarfile.SYMTYPE, linkname="/etc/passwd")],
        "neither a file nor a folder",
    ),
    "link for a file": ([member("set/a.bin", kind=tarfile.SYMTYPE, linkname="/etc/passwd")], "neither a file nor"),
    "hard link": ([member("set/link", kind=tarfile.LNKTYPE, linkname="set/a.bin")], "neither a file nor a folder"),
    "device": ([member("set/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)], "neither a file nor a folder"),
    "block device": ([member("set/disk", kind=tarfile.BLKTYPE)], "neither a file nor a folder"),
    "pipe": ([member("set/pipe", kind=tarfile.FIFOTYPE)], "neither a file nor a folder"),
    "sparse": ([member("set/sparse", kind=tarfile.GNUTYPE_SPARSE)], "neither a file nor a folder"),
    "twice": ([member("set/a.bin", b"first")], "holds 'set/a.bin' twice"),
    "twice by a dot": ([member("./set/a.bin", b"first")], "holds 'set/a.bin' twice"),
    "too long": ([member("set/a.bin", b"a" * 1001)], "holds 'set/a.bin' of 1001 bytes; allowed are 1000"),
    "many": ([member(f"set/{index}", b"x") for index in range(300)], "holds more than 256 files"),
    "unpacks to much": ([member("set/zeros", bytes(5 << 20))], "unpacks to more than 1051576 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archives_are_refused_whole(tmp_path, case, monkeypatch):
    members, message = HOSTILE[case]
    path = written(tmp_path / "hostile.tar.gz", [*members, *GOOD])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        read_members(path, WANTED)
    assert sorted(tmp_path.iterdir()) == [path]
    assert not Path("/evil").exists()


def test_a_bomb_stays_small(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=9) as stream:
        info, _ = member("set/zeros")
        info.size = 1 << 30
        stream.write(info.tobuf())
        for _ in range(64):
            stream.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    with pytest.raises(DataError, match="unpacks to more than"):
        read_members(path, WANTED)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def raw(name, size, kind=b"0", check=True):
    """Return a header whose size field is given as bytes."""
    info, _ = member(name)
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[156:157], header[148:156] = size.ljust(12, b"\0"), kind, b" " * 8
    if check:
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


BROKEN = {
    "negative size": raw("set/a.bin", b"-0000000100"),
    "binary size": raw("set/a.bin", b"\x80" + bytes(10) + b"\x05"),
    "negative binary size": raw("set/a.bin", b"\xff" * 12),
    "no size": raw("set/a.bin", b""),
    "size of text": raw("set/a.bin", b"elephants"),
    "size beyond the end": raw("set/a.bin", b"%011o" % 1000) + b"short",
    "huge size": raw("set/zeros", b"77777777777"),
    "huge extended header": raw("x", b"77777777777", b"x") + bytes(10_000),
    "half a header": raw("set/a.bin", b"%011o" % 5)[:100],
    "wrong sum": raw("set/a.bin", b"%011o" % 5, check=False),
    "extended headers without end": raw("x", b"%011o" % 0, b"x") * 300,
    "nothing": b"",
    "zeros": bytes(10_240),
    "text": b"hello " * 1000,
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_headers_are_refused(tmp_path, case):
    (tmp_path / "broken.tar.gz").write_bytes(gzip.compress(BROKEN[case]))
    with pytest.raises(DataError, match=r"the archive '.*broken.tar.gz' "):
        read_members(tmp_path / "broken.tar.gz", WANTED)


def test_every_single_cut_is_noticed(tmp_path):
    path = written(tmp_path / "good.tar.gz", GOOD)
    whole = path.read_bytes()
    for length in range(0, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_members(path, WANTED)


def test_the_checksum_is_compared(tmp_path):
    path = written(tmp_path / "good.tar.gz", GOOD)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # in the CRC
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged or cut short"):
        read_members(path, WANTED)


def test_missing_and_unreadable_archives(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_members(tmp_path / "nowhere.tar.gz", WANTED)
    path = written(tmp_path / "short.tar.gz", GOOD[:2])
    with pytest.raises(DataError, match=r"does not hold 'set/b.bin'"):
        read_members(path, WANTED)
