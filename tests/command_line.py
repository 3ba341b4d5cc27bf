"""Run the command line in this process, in another one, or in several under torchrun."""

import os
import subprocess
import sys

from spherenet.cli import main

TINY = ["--widths", "4", "4", "4", "--batch-size", "32", "--iterations", "6", "--log-every", "2", "--eval-every", "3",
        "--checkpoint-every", "2", "--eval-batch-size", "500", "--threads", "1"]  # fmt: skip
"""Options of a run of seconds on the embedded digits, with one thread so that results are the same bit for bit."""


def spherenet(*arguments):
    """Run the command line in this process and return its exit code."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def command(*arguments, processes=1):
    """Return the command line for other processes."""
    launcher = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    )
    return [sys.executable, *launcher, "-m", "spherenet", *map(str, arguments)]


def in_other_processes(*arguments, processes=1, timeout=240):
    """Run the command line in other processes and return the completed process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments, processes=processes), capture_output=True, text=True, timeout=timeout, env=environment
    )


def one_sentence(text):
    """Return whether a message is one line without a traceback."""
    return len(text.strip().splitlines()) == 1 and "Traceback" not in text
