"""Run the checks of the Triton kernels in Triton's interpreter, which needs a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("every", [4, 1])
def test_kernels_in_the_interpreter(every):
    """In `make test` every fourth case runs, besides the first of each test."""
    # The interpreter of Triton 3.6, which torch 2.10 requires, converts arrays to scalars as NumPy deprecates.
    pytest.importorskip("triton", "3.7", reason="needs pip install triton==3.7.1 (Linux, x86-64)")
    tests = FOLDER.parent.parent
    command = [sys.executable, "-m", "pytest", FOLDER, "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py",
               "-o", f"pythonpath={tests} {FOLDER}", "-p", "quick_interpreter", "--durations=5"]  # fmt: skip
    search = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": search, "SPHERENET_EVERY": str(every)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tests.parent)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
    assert " passed" in done.stdout


def test_cpu_forward_does_not_import_triton():
    code = (
        "import sys, torch, spherenet as sn; sn.SphereConv2d(3, 4, 3)(torch.randn(1, 3, 5, 5)).sum().backward();"
        "assert 'spherenet.kernels.sphere_conv.triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
