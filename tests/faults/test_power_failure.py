"""After a simulated power failure all rows and checkpoints that were saved are on the disk."""

import subprocess
import sys
from pathlib import Path

import pytest

from faults.power_failure import NOT_ALLOWED
from faults.scale import POWER_FAILURES

POINT = 16


def test_run_is_valid_after_power_failure(tried):
    """Requires loop devices. tests/runs/test_lost_rows.py checks the order of calls on all systems."""
    script = Path(__file__).with_name("power_failure.py")
    done = subprocess.run([sys.executable, str(script), str(POWER_FAILURES)], capture_output=True, text=True)
    if done.returncode == NOT_ALLOWED:
        pytest.skip("mounting loop devices is not allowed")
    assert done.returncode == 0, done.stdout
    tried("a power failure while a run is trained", POWER_FAILURES)
