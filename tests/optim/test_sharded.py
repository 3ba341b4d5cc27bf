"""Regularizers and `keep_norms` on sharded weights (FSDP2) and under DDP, in one process and in two."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("sharded_worker.py")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_weights_train_as_whole_ones(world, tmp_path):
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tmp_path / "store")],
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
