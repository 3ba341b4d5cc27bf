"""What a person sees: a live line in a terminal, plain lines where there is none, help at once."""

import os
import pty
import subprocess
import sys
import time

import pytest

from command_line import TINY, command, in_other_processes
from spherenet.cli.main import VERBS


def in_a_terminal(*arguments):
    """Run the command line on a terminal of its own; return its exit code and all it wrote there."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command(*arguments), stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    written = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # what Linux says when the other end is closed
            break
        if not part:
            break
        written += part
    os.close(terminal)
    return running.wait(60), written.decode()


def test_training_shows_a_live_line(tmp_path):
    code, seen = in_a_terminal("train", *TINY, "--iterations", 40, "--eval-every", 20, "--output", tmp_path / "run")
    assert code == 0
    assert "it/s" in seen
    assert "40/40" in seen
    assert "step 20: test accuracy" in seen
    assert "\x1b[?25h" in seen  # the cursor is there again
    assert f"in {tmp_path / 'run'}" in seen.replace("\r\n", "")


def test_a_grid_shows_bars(tmp_path):
    code, seen = in_a_terminal("reproduce", "weight-decay", "--preset", "smoke", "--only", "none", "--output", tmp_path)
    assert code == 0
    assert "weight-decay: " in seen
    assert "none_free seed 0" in seen


def test_a_log_gets_plain_lines(tmp_path):
    done = in_other_processes("train", *TINY, "--output", tmp_path / "run")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr + done.stdout
    assert "step 2/6: loss" in done.stderr
    assert "s left" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_comes_at_once_with_examples_and_without_torch(verb):
    code = f"import sys; from spherenet.cli import main\ntry: main(['{verb}', '--help'])\nexcept SystemExit: pass\n"
    began = time.perf_counter()
    shown = subprocess.run(
        [sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert time.perf_counter() - began < 3  # a loaded machine; alone it is a quarter of a second
    assert f"examples:\n  spherenet {verb}" in shown.stdout
