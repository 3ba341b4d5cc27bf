"""Weights of a normalized transformer stay normalized with FSDP2 and equal those of a single process."""

import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).with_name("sharded_transformer_worker.py")


def test_sharded_weights_stay_normalized_and_equal_whole_ones(tmp_path):
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, output in enumerate(outputs):
        assert f"process {rank} of 2: all checks succeeded" in output, output
