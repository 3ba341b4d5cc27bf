"""A resumed run reads config.json once, and hashes its weights and images at most once."""

import pytest

from command_line import TINY, spherenet
from spherenet.data.splits import Split
from spherenet.runs import directory


@pytest.fixture
def counted(monkeypatch):
    """Count what is read and hashed."""
    counts = {"config.json": 0, "listing_hash": 0}

    def read_json(path, *arguments, **options):
        counts["config.json"] += path.name == "config.json"
        return original_read(path, *arguments, **options)

    def listing_hash(split):
        counts["listing_hash"] += 1
        return original_hash(split)

    original_read, original_hash = directory.read_json, Split.listing_hash
    monkeypatch.setattr(directory, "read_json", read_json)
    monkeypatch.setattr(Split, "listing_hash", listing_hash)
    return counts


@pytest.mark.parametrize("changes", [[], ["--allow-changes", "--iterations", "8"]], ids=["same", "changed"])
def test_resume_reads_the_configuration_and_hashes_the_images_once(tmp_path, counted, changes):
    run = tmp_path / "run"
    assert spherenet("train", *TINY, "--output", run) == 0
    (run / "summary.json").unlink()
    counted.update({"config.json": 0, "listing_hash": 0})
    assert spherenet("train", "--resume", run, *changes) == 0
    assert counted == {"config.json": 1, "listing_hash": 2}  # of the training and of the test images
