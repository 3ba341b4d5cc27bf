"""Archives made to do harm, or damaged: nothing is written outside, little memory taken, and nothing trained on."""

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
    "a symbolic link": [member(f"{INSIDE}/link", kind=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a symbolic link for a batch": [member(FIRST, kind=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a symbolic link for the folder": [member(INSIDE, kind=tarfile.SYMTYPE, linkname="/tmp")],
    "a hard link": [member(f"{INSIDE}/link", kind=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a device": [member(f"{INSIDE}/null", kind=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "a pipe": [member(f"{INSIDE}/pipe", kind=tarfile.FIFOTYPE)],
    "a duplicate": [member(FIRST, b"x" * 100)],
    "a duplicate by another spelling": [member(f"./{FIRST}", b"x" * 100)],
    "a file that is too long": [member(f"{INSIDE}/long", bytes(64 << 20))],
    "many files": [member(f"{INSIDE}/{index}") for index in range(5000)],
}


@pytest.fixture
def refused(children, folder, tried):
    """Train on the archive of a folder: refused in one sentence, nothing written anywhere."""

    def check(what):
        before = sorted(folder.rglob("*"))
        options = ["--data", "cifar10", "--data-dir", folder / "data", "--download", "false"]
        done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
        assert done.code == 2, done.said
        assert "Traceback" not in done.said
        assert len(done.said.strip().splitlines()) == 1, done.said
        assert sorted(folder.rglob("*")) == before
        assert not Path("/tmp/spherenet-evil").exists()
        tried(what)
        return done

    return check


def archive(folder):
    return folder / "data" / SMALL10.archive


def test_a_good_archive_is_trained_on(children, folder):
    write_archive(archive(folder), members_of(SMALL10))
    options = ["--data", "cifar10", "--data-dir", folder / "data", "--iterations", 2]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 0, done.said


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members(folder, refused, case):
    write_archive(archive(folder), [*HOSTILE[case], *members_of(SMALL10)])
    refused(f"an archive with {case}")


def test_a_bomb(folder, refused):
    """Four gigabytes in four megabytes: refused before 64 MB are taken."""
    write_archive(archive(folder), members_of(SMALL10)[:2])
    ordinary = refused("an archive with too few files").peak
    archive(folder).unlink()
    info, _ = member(f"{INSIDE}/zeros")
    info.size = 4 << 30
    with gzip.open(archive(folder), "wb", compresslevel=1) as stream:
        stream.write(info.tobuf())
        for _ in range(256):  # a quarter of a gigabyte of them; the rest is never reached
            stream.write(bytes(1 << 20))
    assert refused("a bomb").peak - ordinary < 64 * 1024  # kilobytes


def test_damaged_archives(folder, refused):
    """A bit flipped or an end missing: the checksum of the compression notices."""
    chance = random.Random(0)
    write_archive(archive(folder), members_of(SMALL10))
    whole = archive(folder).read_bytes()
    for number in range(ARCHIVE_FLIPS):
        at = chance.randrange(20, len(whole) - 8)  # the first bytes may say the time and a name, nobody's checksum
        if number % 2:
            archive(folder).write_bytes(whole[:at])
        else:
            archive(folder).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        refused("an archive cut short" if number % 2 else "an archive with one bit flipped")
