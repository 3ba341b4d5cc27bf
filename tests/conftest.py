"""What tests share: fixtures, one torch thread per process if several workers run, and the list of slow tests."""

import gc
import os
import signal
from collections import Counter
from pathlib import Path

import torch

pytest_plugins = ["common_fixtures", "faults.recording"]


def pytest_configure(config):
    # Shells start background commands with SIGINT ignored, nohup with SIGHUP ignored. Processes of tests inherit it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start


def pytest_collection_modifyitems(items):
    """Mark the tests of slow.txt as slow; of a line that ends in `/N`, every Nth case of a test is left."""
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    listed = dict(line.partition(" /")[::2] for line in lines if line and not line.startswith("#"))
    cases = Counter()
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        function = name.partition("[")[0]
        line = next((key for key in (name, function, name.partition("::")[0]) if key in listed), None)
        if line is not None:
            every = int(listed[line] or 0)
            if not every or cases[function] % every:
                item.add_marker("slow")
            cases[function] += 1


def pytest_collection_finish():
    """Exclude modules and collected tests, which stay until the end, from later passes of the garbage collector."""
    gc.collect()
    gc.freeze()
