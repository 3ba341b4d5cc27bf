"""Power that fails while a run is trained: rows and checkpoints that were promised are on the disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from faults.power_failure import NOT_ALLOWED
from faults.scale import POWER_FAILURES

POINT = 16


def test_power_failures(tried):
    """On a disk of one's own; the order of calls is tested everywhere (tests/runlog/test_lost_rows.py)."""
    tool = Path(__file__).with_name("power_failure.py")
    done = subprocess.run([sys.executable, str(tool), str(POWER_FAILURES)], capture_output=True, text=True)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("mounting loop devices is not allowed here")
    assert done.returncode == 0, done.stdout
    tried("a power failure while a run is trained", POWER_FAILURES)
