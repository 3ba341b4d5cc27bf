"""Heads that are sharded by class equal unsharded ones, in two and in four processes."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("sharded_head_worker.py")


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_heads_equal_unsharded_ones(world, tmp_path):
    command = [sys.executable, "-W", "error", str(WORKER), str(world), str(tmp_path / "store")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == 0, done.stdout
    for rank in range(world):
        assert f"process {rank} of {world}: all checks succeeded" in done.stdout, done.stdout
