"""Runs in processes that a test can kill: command lines in children of the fork server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from faults.scale import PATIENCE

OPTIONS = ["--widths", "4", "4", "4", "--batch-size", "32", "--iterations", "14", "--log-every", "2", "--eval-every",
           "4", "--checkpoint-every", "3", "--eval-batch-size", "100", "--threads", "1"]  # fmt: skip
"""A run of half a second on 200 digits: epochs end at 6 and 12, checkpoints are due at 3, 6, 9, 12 and 14."""


class Child:
    """One command line in a process of its own; `pid` is its id, `said` what it printed so far."""

    def __init__(self, server, pid, output):
        self.pid = pid
        self._server, self._output = server, output
        self.code = self.peak = None

    @property
    def said(self):
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def signal(self, number):
        """Send it a signal; its id stays its own until it is waited for."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self):
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def has_ended(self, timeout=0):
        """Whether it has ended, or ends within some seconds."""
        if self.code is None:
            answer = self._server.ask({"wait": self.pid, "timeout": timeout})
            self.code, self.peak = answer["code"], answer["peak"]
        return self.code is not None

    def wait(self, timeout=PATIENCE):
        """Return its exit code, negative for the signal it died of; fail where it hangs."""
        if not self.has_ended(timeout):
            self.signal(signal.SIGKILL)
            self.has_ended(10)
            raise AssertionError(f"the process did not end in {timeout} s; it said:\n{self.said}")
        return self.code

    def wait_for(self, words, timeout=PATIENCE):
        """Wait until it has said something."""
        ends = time.monotonic() + timeout
        while words not in self.said:
            ended = self.has_ended() and words not in self.said
            assert not ended, f"it ended with {self.code} and never said {words!r}, but:\n{self.said}"
            assert time.monotonic() < ends, f"it never said {words!r}, but:\n{self.said}"
            time.sleep(0.005)


class Children:
    """Starts and ends children of one fork server."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the tests; the server ends when they close its input
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, request):
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, *arguments, environment=None, **faults):
        """Start a command line, with the faults that `injections.inject` takes."""
        self.count += 1
        output = self.folder / f"{self.count}.txt"
        start = {"start": [str(argument) for argument in arguments], "said": str(output)}
        answer = self.ask({**start, "environment": environment or {}, "faults": faults})
        return Child(self, answer["pid"], output)

    def run(self, *arguments, timeout=PATIENCE, **options):
        """Start a command line and wait for its end."""
        child = self.start(*arguments, **options)
        child.wait(timeout)
        return child

    def start_ranks(self, *arguments, world=2, faults=None):
        """Start one command line as the processes of a run, as torchrun would; faults: those of each rank."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        return [
            self.start(
                *arguments,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                **(faults or {}).get(rank, {}),
            )
            for rank in range(world)
        ]

    def close(self):
        """End the server, and with it every child that is left, and theirs."""
        self.server.stdin.close()
        self.server.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
