"""Command lines in child processes that a test can kill, started by the fork server."""

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
"""A run of half a second on 200 digits. Epochs end at steps 6 and 12, checkpoints are due at 3, 6, 9, 12 and 14."""


class Child:
    """Command line in a child process."""

    def __init__(self, server, pid, output_file):
        self.pid = pid
        self._server, self._output_file = server, output_file
        self.code = self.peak = None

    @property
    def output(self):
        """Return what the process has printed so far."""
        return self._output_file.read_text(errors="replace") if self._output_file.exists() else ""

    def signal(self, number):
        """Send a signal. The process id is not reused before `wait`."""
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self):
        """Send SIGKILL and wait for the end of the process."""
        self.signal(signal.SIGKILL)
        return self.wait()

    def has_ended(self, timeout=0):
        """Return whether the process has ended, or ends within a timeout in seconds."""
        if self.code is None:
            reply = self._server.request({"wait": self.pid, "timeout": timeout})
            self.code, self.peak = reply["code"], reply["peak"]
        return self.code is not None

    def wait(self, timeout=PATIENCE):
        """Return the exit code, −number if a signal ended the process. Fail after a timeout."""
        if not self.has_ended(timeout):
            self.signal(signal.SIGKILL)
            self.has_ended(10)
            raise AssertionError(f"the process did not end in {timeout} s; its output:\n{self.output}")
        return self.code

    def wait_for(self, text, timeout=PATIENCE):
        """Wait until the output contains a text."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            ended = self.has_ended() and text not in self.output
            assert not ended, f"the process ended with {self.code} and never printed {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"the process never printed {text!r}:\n{self.output}"
            time.sleep(0.005)


class Children:
    """Start and end child processes of one fork server."""

    def __init__(self, folder):
        self.folder, self.count = folder, 0
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C goes to the tests only; the server ends when they close its input
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def request(self, request):
        """Send a request to the server and return its reply."""
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, *arguments, environment=None, **faults):
        """Start a command line with the faults of `injections.inject`."""
        self.count += 1
        output_file = self.folder / f"{self.count}.txt"
        start = {"start": [str(argument) for argument in arguments], "output": str(output_file)}
        reply = self.request({**start, "environment": environment or {}, "faults": faults})
        return Child(self, reply["pid"], output_file)

    def run(self, *arguments, timeout=PATIENCE, **options):
        """Start a command line, wait for its end and return the child."""
        child = self.start(*arguments, **options)
        child.wait(timeout)
        return child

    def start_ranks(self, *arguments, world=2, faults=None, environments=None):
        """Start one command line in several processes, as torchrun does.

        faults: rank → faults of that process. environments: more variables of each process.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        return [
            self.start(
                *arguments,
                environment={
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    **(environments[rank] if environments else {}),
                },
                **(faults or {}).get(rank, {}),
            )
            for rank in range(world)
        ]

    def close(self):
        """End the server and all remaining children and their workers."""
        self.server.stdin.close()
        self.server.stdout.close()
        with suppress(subprocess.TimeoutExpired):
            self.server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
