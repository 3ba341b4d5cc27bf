"""Heads that are sharded by class equal unsharded ones, in two and in four processes."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("sharded_head_worker.py")


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_heads_equal_unsharded_ones(world, tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(WORKER), str(rank), str(world), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, output in enumerate(outputs):
        assert f"process {rank} of {world}: all checks succeeded" in output, output
