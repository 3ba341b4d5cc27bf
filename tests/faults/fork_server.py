"""Server process with torch and a few digits in memory that forks a child for each requested command line.

Starting Python with torch takes seconds, a fork milliseconds, so that tests can kill hundreds of runs. Everything runs
on one thread, so that runs are bit-identical and a fork copies the complete process.

A request is a line of JSON on stdin, its reply a line of JSON on stdout:
    {"start": [arguments of spherenet], "output": file, "environment": {}, "faults": {}} → {"pid": 1}
    {"wait": pid, "timeout": seconds} → {"code": exit code, −number of a signal, or null, "peak": kilobytes}
"""

import atexit
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import injections  # noqa: E402
from spherenet.cli import main  # noqa: E402
from spherenet.data import load_dataset  # noqa: E402
from spherenet.training import build  # noqa: E402
from spherenet.training import run as training  # noqa: E402

TRAIN, TEST = 200, 100
"""Number of embedded digits, of size 12 × 12. With a batch size of 32 an epoch has 6 steps."""


@cache
def few_digits():
    digits = load_dataset("mnist5k", image_size=12)
    # Every twentieth or tenth image, because they are sorted by class.
    chosen = [split.subset(torch.arange(0, len(split), len(split) // count))
              for split, count in ((digits.train, TRAIN), (digits.test, TEST))]  # fmt: skip
    return replace(digits, train=chosen[0], test=chosen[1])


def build_data(config, progress=None, **options):
    return few_digits() if config.data == "mnist5k" else build.build_data(config, progress, **options)


def call(arguments):
    """Run a command line and return its exit code."""
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def warm_up():
    """Load everything that is loaded on first use."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--widths", "4", "4", "4", "--iterations", "1", "--eval-batch-size", "100", "--threads", "1"]
        assert call(["train", *options, "--batch-size", "32", "--output", f"{folder}/run"]) == 0
    sys.stdout.flush()  # otherwise every child would print it again


def child(request):
    """Run the command line of a request in a forked child, with its output file and faults."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["environment"])
    injections.inject(**request["faults"])
    code = call(request["start"])
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid, timeout):
    deadline = time.monotonic() + timeout
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return {"code": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss}
        if time.monotonic() > deadline:
            return {"code": None, "peak": 0}
        time.sleep(0.002)


def serve():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of the warm-up out of the replies
    training.build_data = build_data
    warm_up()
    living = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            reply = wait(request["wait"], request["timeout"])
            if reply["code"] is not None:
                living.discard(request["wait"])
        else:
            pid = os.fork()
            if pid == 0:
                child(request)
            living.add(pid)
            reply = {"pid": pid}
        print(json.dumps(reply), file=replies, flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()
