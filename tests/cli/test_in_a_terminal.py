"""Terminal output: progress bars in a terminal, plain lines in a log, fast help."""

import os
import pty
import subprocess
import sys

import pytest

from command_line import TINY, command, in_other_processes
from spherenet.cli.verbs import VERBS


def in_a_terminal(*arguments):
    """Run the command line in a pseudo-terminal and return its exit code and output."""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command(*arguments), stdin=end, stdout=end, stderr=end, env=environment)
    os.close(end)
    written = b""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux raises it when the other end is closed
            break
        if not data:
            break
        written += data
    os.close(terminal)
    return running.wait(240), written.decode()


def test_training_shows_a_progress_bar(tmp_path):
    code, shown = in_a_terminal("train", *TINY, "--iterations", 40, "--eval-every", 20, "--output", tmp_path / "run")
    assert code == 0
    assert "it/s" in shown
    assert "40/40" in shown
    assert "step 20: test accuracy" in shown
    assert "\x1b[?25h" in shown  # the cursor is visible again
    assert f"in {tmp_path / 'run'}" in shown.replace("\r\n", "")


def test_log_has_plain_lines(tmp_path):
    done = in_other_processes("train", *TINY, "--output", tmp_path / "run")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr + done.stdout
    assert "step 2/6: loss" in done.stderr
    assert "s left" in done.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_and_does_not_import_torch(verb):
    code = f"import sys; from spherenet.cli import main\ntry: main(['{verb}', '--help'])\nexcept SystemExit: pass\n"
    shown = subprocess.run(
        [sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    assert f"examples:\n  spherenet {verb}" in shown.stdout
