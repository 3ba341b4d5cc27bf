"""Driving the command line as a user would: in this process, in another, or in several under torchrun."""

import os
import subprocess
import sys

from spherenet.cli import main

TINY = ["--widths", "4", "4", "4", "--batch-size", "32", "--iterations", "6", "--log-every", "2", "--eval-every", "3",
        "--checkpoint-every", "2", "--eval-batch-size", "500"]  # fmt: skip
"""Options of a run of seconds on the embedded digits."""


def spherenet(*arguments):
    """Call the command line here and return its exit code."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as left:
        return left.code


def command(*arguments, processes=1):
    """The command of a run in other processes."""
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [sys.executable, *launcher, "-m", "spherenet", *map(str, arguments)]


def in_other_processes(*arguments, processes=1, timeout=120):
    """Call the command line elsewhere and return what came of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments, processes=processes), capture_output=True, text=True, timeout=timeout, env=environment
    )


def one_sentence(text):
    """Whether a message is one line without a traceback."""
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text
