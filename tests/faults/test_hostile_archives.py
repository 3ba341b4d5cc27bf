"""Archives that are not the official ones are rejected before they are parsed."""

import gzip
import random

import pytest

from faults.children import OPTIONS
from faults.scale import ARCHIVE_FLIPS
from faults.small_sets import SMALL10, archive_of

POINT = 5
OFFICIAL = archive_of(SMALL10)


@pytest.fixture
def archive(folder):
    (folder / "data").mkdir()
    return folder / "data" / SMALL10.archive


@pytest.fixture
def assert_rejected(children, folder, archive, tried):
    """Return a function that trains on an archive, which is rejected in one sentence without writing anything."""

    def check(trial, content):
        archive.write_bytes(content)
        before = sorted(folder.rglob("*"))
        options = ["--data", "cifar10", "--data-dir", folder / "data", "--no-download"]
        done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
        assert done.code == 2, done.output
        assert "the SHA-256" in done.output
        assert len(done.output.strip().splitlines()) == 1, done.output
        assert sorted(folder.rglob("*")) == before
        tried(trial)
        return done

    return check


def test_valid_archive_is_accepted(children, folder, archive):
    archive.write_bytes(OFFICIAL)
    options = ["--data", "cifar10", "--data-dir", folder / "data", "--iterations", 2]
    done = children.run("train", *OPTIONS, *options, "--output", folder / "run", small_sets=True)
    assert done.code == 0, done.output


def test_decompression_bomb_is_not_unpacked(assert_rejected):
    bomb = gzip.compress(bytes(256 << 20), 1)
    ordinary = assert_rejected("a short archive", OFFICIAL[:1000]).peak
    assert assert_rejected("a bomb", bomb).peak - ordinary < 64 * 1024  # kilobytes


def test_corrupt_archive_is_rejected(assert_rejected):
    chance = random.Random(0)
    for number in range(ARCHIVE_FLIPS):
        at = chance.randrange(len(OFFICIAL))
        if number % 2:
            assert_rejected("an archive cut short", OFFICIAL[:at])
        else:
            flipped = bytes([OFFICIAL[at] ^ 1 << chance.randrange(8)])
            assert_rejected("an archive with one bit flipped", OFFICIAL[:at] + flipped + OFFICIAL[at + 1 :])
