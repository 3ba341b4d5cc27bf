"""Valid and hostile archives: nothing is unpacked to disk, and memory is bounded."""

import gzip
import io
import os
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from spherenet.data.archives import read_members
from spherenet.errors import DataError

MAX_SIZES = {"set/a.bin": 1000, "set/b.bin": 2000}


def member(name, data=b"", member_type=tarfile.REGTYPE, **fields):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), member_type
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


GOOD = [member("set", member_type=tarfile.DIRTYPE), member("set/a.bin", b"a" * 1000), member("set/b.bin", b"b" * 1500)]


def write_archive(path, members, tar_format=tarfile.GNU_FORMAT):
    with tarfile.open(path, "w:gz", format=tar_format) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def test_pipe_is_refused(tmp_path):
    """Opening a pipe would wait for a writer."""
    os.mkfifo(tmp_path / "set.tar.gz")
    with pytest.raises(DataError, match="must be a regular file, got a pipe"):
        read_members(tmp_path / "set.tar.gz", MAX_SIZES)


@pytest.mark.parametrize("tar_format", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT])
def test_named_files_are_returned(tmp_path, tar_format):
    extra = [
        member("set/readme é.html", b"r" * 700, mtime=1.5),  # adds a pax header
        member("set/" + "long" * 20 + "/" + "name" * 20, b"l" * 10),
        member("./set/hidden/._a", b"x"),
    ]
    path = write_archive(tmp_path / "good.tar.gz", [*extra, *GOOD], tar_format)
    assert read_members(path, MAX_SIZES) == {"set/a.bin": b"a" * 1000, "set/b.bin": b"b" * 1500}


def test_names_with_leading_dot_are_found(tmp_path):
    path = write_archive(tmp_path / "dot.tar.gz", [(info, data) for info, data in map(with_dot, GOOD)])
    assert sorted(read_members(path, MAX_SIZES)) == ["set/a.bin", "set/b.bin"]


def with_dot(entry):
    info, data = entry
    return member(f"./{info.name}", data, info.type)


HOSTILE = {
    "parent": ([member("../evil", b"x")], r"holds '../evil', a path outside the archive"),
    "parent inside a path": ([member("set/../../evil", b"x")], "a path outside the archive"),
    "absolute": ([member("/evil", b"x")], "holds '/evil', a path outside the archive"),
    "backslash": ([member("set\\..\\evil", b"x")], "a path outside the archive"),
    "symbolic link": (
        [member("set/link", member_type=tarfile.SYMTYPE, linkname="/etc/passwd")],
        "neither a file nor a folder",
    ),
    "link in place of a file": (
        [member("set/a.bin", member_type=tarfile.SYMTYPE, linkname="/etc/passwd")],
        "neither a file nor",
    ),
    "hard link": (
        [member("set/link", member_type=tarfile.LNKTYPE, linkname="set/a.bin")],
        "neither a file nor a folder",
    ),
    "device": (
        [member("set/null", member_type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
        "neither a file nor a folder",
    ),
    "block device": ([member("set/disk", member_type=tarfile.BLKTYPE)], "neither a file nor a folder"),
    "pipe": ([member("set/pipe", member_type=tarfile.FIFOTYPE)], "neither a file nor a folder"),
    "sparse": ([member("set/sparse", member_type=tarfile.GNUTYPE_SPARSE)], "neither a file nor a folder"),
    "twice": ([member("set/a.bin", b"first")], "holds 'set/a.bin' twice"),
    "twice with a dot": ([member("./set/a.bin", b"first")], "holds 'set/a.bin' twice"),
    "too long": ([member("set/a.bin", b"a" * 1001)], "must hold 'set/a.bin' of at most 1000 bytes, got 1001"),
    "many": ([member(f"set/{index}", b"x") for index in range(300)], "must hold at most 256 files"),
    "large": ([member("set/zeros", bytes(5 << 20))], "must unpack to at most 1051576 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_archive_is_refused(tmp_path, case, monkeypatch):
    members, message = HOSTILE[case]
    path = write_archive(tmp_path / "hostile.tar.gz", [*members, *GOOD])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=message):
        read_members(path, MAX_SIZES)
    assert sorted(tmp_path.iterdir()) == [path]
    assert not Path("/evil").exists()


def test_decompression_bomb_uses_little_memory(tmp_path):
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", compresslevel=9) as stream:
        info, _ = member("set/zeros")
        info.size = 1 << 30
        stream.write(info.tobuf())
        for _ in range(64):
            stream.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 17
    tracemalloc.start()
    with pytest.raises(DataError, match="must unpack to at most"):
        read_members(path, MAX_SIZES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def raw_header(name, size, member_type=b"0", with_checksum=True):
    """Return a header with the given bytes as its size field."""
    info, _ = member(name)
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[156:157], header[148:156] = size.ljust(12, b"\0"), member_type, b" " * 8
    if with_checksum:
        header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


BROKEN = {
    "negative size": raw_header("set/a.bin", b"-0000000100"),
    "binary size": raw_header("set/a.bin", b"\x80" + bytes(10) + b"\x05"),
    "negative binary size": raw_header("set/a.bin", b"\xff" * 12),
    "no size": raw_header("set/a.bin", b""),
    "size of text": raw_header("set/a.bin", b"elephants"),
    "size beyond the end": raw_header("set/a.bin", b"%011o" % 1000) + b"short",
    "huge size": raw_header("set/zeros", b"77777777777"),
    "huge extended header": raw_header("x", b"77777777777", b"x") + bytes(10_000),
    "half a header": raw_header("set/a.bin", b"%011o" % 5)[:100],
    "wrong checksum": raw_header("set/a.bin", b"%011o" % 5, with_checksum=False),
    "endless extended headers": raw_header("x", b"%011o" % 0, b"x") * 300,
    "nothing": b"",
    "zeros": bytes(10_240),
    "text": b"hello " * 1000,
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_header_is_refused(tmp_path, case):
    (tmp_path / "broken.tar.gz").write_bytes(gzip.compress(BROKEN[case]))
    with pytest.raises(DataError, match=r"the archive '.*broken.tar.gz' "):
        read_members(tmp_path / "broken.tar.gz", MAX_SIZES)


def test_truncation_at_every_byte_is_refused(tmp_path):
    path = write_archive(tmp_path / "good.tar.gz", GOOD)
    complete = path.read_bytes()
    for length in range(0, len(complete)):
        path.write_bytes(complete[:length])
        with pytest.raises(DataError):
            read_members(path, MAX_SIZES)


def test_wrong_crc_is_refused(tmp_path):
    path = write_archive(tmp_path / "good.tar.gz", GOOD)
    data = bytearray(path.read_bytes())
    data[-6] ^= 1  # in the CRC
    path.write_bytes(data)
    with pytest.raises(DataError, match="corrupt or truncated"):
        read_members(path, MAX_SIZES)


def test_missing_archive_and_missing_file_are_reported(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_members(tmp_path / "nowhere.tar.gz", MAX_SIZES)
    path = write_archive(tmp_path / "short.tar.gz", GOOD[:2])
    with pytest.raises(DataError, match=r"does not hold 'set/b.bin'"):
        read_members(path, MAX_SIZES)
