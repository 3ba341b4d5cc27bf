"""Follow one batch from `spherenet train` to `metrics.jsonl` and list the functions of the package it passes through.

    python tools/batch_walk.py            # numbered list in order of first call, with counts at the end
    python tools/batch_walk.py --json     # the same for scripts

A run on the embedded digits is traced. The walk consists of the functions that are active when the last training step
starts (from `main` down to the training loop) and of those that are called from then on until the step's row is in
`metrics.jsonl`. Evaluation and checkpoints come after it. Lambdas, comprehensions and generated methods of dataclasses
are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "spherenet"
STEPS = 3
COMMAND = ["train", "--iterations", str(STEPS), "--threads", "1", "--batch-size", "32", "--log-every", "1"]
START, END = ("training/trainer.py", "Trainer._step"), ("runs/metrics.py", "MetricsFile.append")


def walk(command: list[str]) -> list[tuple[str, str]]:
    """Return (file, qualified name) of each function of the walk in order of its first call."""
    from spherenet.cli import main

    names: dict[CodeType, tuple[str, str] | None] = {}
    steps: dict[tuple[str, str], None] = {}
    started = ended = 0

    def name_of(code: CodeType) -> tuple[str, str] | None:
        if code not in names:
            path = Path(code.co_filename)
            name = getattr(code, "co_qualname", code.co_name)
            counted = PACKAGE in path.parents and not code.co_name.startswith("<")
            names[code] = (path.relative_to(PACKAGE).as_posix(), name) if counted else None
        return names[code]

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal started, ended
        if event not in ("call", "return"):
            return
        name = name_of(frame.f_code)
        if name == START and event == "call":
            started += 1
            if started == STEPS:
                stack: list[tuple[str, str]] = []
                caller: FrameType | None = frame.f_back
                while caller is not None:
                    above = name_of(caller.f_code)
                    if above is not None:
                        stack.append(above)
                    caller = caller.f_back
                steps.update(dict.fromkeys(reversed(stack)))
        if started == STEPS and not ended and event == "call" and name is not None:
            steps.setdefault(name)
        if started == STEPS and name == END and event == "return":
            ended = 1

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # Backward passes run in threads of their own.
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            status = main([*command, "--output", str(Path(folder, "run"))])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if status or not ended:
        raise SystemExit(f"The traced run ended with exit code {status} before its last row was written.")
    return list(steps)


def main() -> int:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    steps = walk(COMMAND)
    files = {file for file, _ in steps}
    if options.json:
        print(json.dumps({"functions": len(steps), "files": len(files), "walk": steps}))
    else:
        for number, (file, name) in enumerate(steps, 1):
            print(f"{number:3}  {file}: {name}")
        print(f"{len(steps)} functions in {len(files)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
