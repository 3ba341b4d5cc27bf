"""A resumed run reads config.json once, and hashes the files of its checkpoint and its images once."""

from collections import Counter

import pytest

from command_line import TINY, spherenet
from spherenet.data.splits import Split
from spherenet.runs import checkpoints, directory


@pytest.fixture
def counted(monkeypatch):
    """Count what is read and hashed."""
    counts = Counter()

    def read_json(path, *arguments, **options):
        counts["config.json"] += path.name == "config.json"
        return original_read(path, *arguments, **options)

    def listing_hash(split):
        counts["listing_hash"] += 1
        return original_hash(split)

    def file_digest(path):
        counts[f"{path.parent.name}/{path.name}"] += 1
        return original_digest(path)

    original_read, original_hash, original_digest = directory.read_json, Split.listing_hash, checkpoints.file_digest
    monkeypatch.setattr(checkpoints, "file_digest", file_digest)
    monkeypatch.setattr(directory, "read_json", read_json)
    monkeypatch.setattr(Split, "listing_hash", listing_hash)
    return counts


@pytest.mark.parametrize("changes", [[], ["--allow-changes", "--iterations", "8"]], ids=["same", "changed"])
def test_resume_reads_the_configuration_and_hashes_the_images_once(tmp_path, counted, changes):
    run = tmp_path / "run"
    assert spherenet("train", *TINY, "--output", run) == 0
    (run / "summary.json").unlink()
    counted.clear()
    assert spherenet("train", "--resume", run, *changes) == 0
    hashed = {name: count for name, count in counted.items() if name.startswith("step-00000006/")}
    assert hashed == dict.fromkeys(
        [f"step-00000006/{name}" for name in ("model.safetensors", "optimizer.safetensors", "state.json")], 1
    )
    assert (counted["config.json"], counted["listing_hash"]) == (1, 2)  # the training and the test images
