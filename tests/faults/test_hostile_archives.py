"""Hostile and corrupt archives are rejected: nothing is written outside, and little memory is used."""

import gzip
import random
import tarfile
from pathlib import Path

import pytest

from faults.children import OPTIONS
from faults.scale import ARCHIVE_FLIPS
from faults.small_sets import SMALL10, member, members_of, write_archive

POINT = 5
INSIDE = SMALL10.binary_folder
FIRST = f"{INSIDE}/data_batch_1.bin"
HOSTILE = {
    "a path with ..": [member("../evil", b"x")],
    "a path with .. inside": [member(f"{INSIDE}/../../evil", b"x")],
    "an absolute path": [member("/tmp/spherenet-evil", b"x")],
    "a symbolic link": [member(f"{INSIDE}/link", member_type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a symbolic link for a batch": [member(FIRST, member_type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a symbolic link for the folder": [member(INSIDE, member_type=tarfile.SYMTYPE, linkname="/tmp")],
    "a hard link": [member(f"{INSIDE}/link", member_type=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a device": [member(f"{INSIDE}/null", member_type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a pipe": [member(f"{INSIDE}/pipe", member_type=tarfile.FIFOTYPE)],
    "a duplicate": [member(FIRST, b"x" * 100)],
    "a duplicate by another spelling": [member(f"./{FIRST}", b"x" * 100)],
    "a file that is too long": [member(f"{INSIDE}/long", bytes(64 << 20))],
    "many files": [member(f"{INSIDE}/{index}") for index in range(5000)],
}


@pytest.fixture
def assert_rejected(children, folder, tried):
    """Return a function that trains on the archive, which is rejected in one sentence without writing anything."""

    def check(trial):
        before = sorted(folder.rglob("*"))
        options = ["--data", "cifar10", "--data-dir", folder / "data", "--download", "false"]
        done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
        assert done.code == 2, done.output
        assert "Traceback" not in done.output
        assert len(done.output.strip().splitlines()) == 1, done.output
        assert sorted(folder.rglob("*")) == before
        assert not Path("/tmp/spherenet-evil").exists()
        tried(trial)
        return done

    return check


def archive(folder):
    return folder / "data" / SMALL10.archive


def test_valid_archive_is_accepted(children, folder):
    write_archive(archive(folder), members_of(SMALL10))
    options = ["--data", "cifar10", "--data-dir", folder / "data", "--iterations", 2]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 0, done.output


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_member_is_rejected(folder, assert_rejected, case):
    write_archive(archive(folder), [*HOSTILE[case], *members_of(SMALL10)])
    assert_rejected(f"an archive with {case}")


def test_decompression_bomb_is_rejected(folder, assert_rejected):
    """Four gigabytes in four megabytes are rejected before 64 MB of memory are used."""
    write_archive(archive(folder), members_of(SMALL10)[:2])
    ordinary = assert_rejected("an archive with too few files").peak
    archive(folder).unlink()
    info, _ = member(f"{INSIDE}/zeros")
    info.size = 4 << 30
    with gzip.open(archive(folder), "wb", compresslevel=1) as stream:
        stream.write(info.tobuf())
        for _ in range(256):  # a quarter of a gigabyte; the rest is never read
            stream.write(bytes(1 << 20))
    assert assert_rejected("a bomb").peak - ordinary < 64 * 1024  # kilobytes


def test_corrupt_archive_is_rejected(folder, assert_rejected):
    """The checksum of the compression reveals a flipped bit or a missing end."""
    chance = random.Random(0)
    write_archive(archive(folder), members_of(SMALL10))
    original = archive(folder).read_bytes()
    for number in range(ARCHIVE_FLIPS):
        at = chance.randrange(20, len(original) - 8)  # the first bytes contain a time and a name, without a checksum
        if number % 2:
            archive(folder).write_bytes(original[:at])
        else:
            archive(folder).write_bytes(
                original[:at] + bytes([original[at] ^ 1 << chance.randrange(8)]) + original[at + 1 :]
            )
        assert_rejected("an archive cut short" if number % 2 else "an archive with one bit flipped")
