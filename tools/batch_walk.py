"""Follow one batch from `spherenet train` to `metrics.jsonl` and list the functions of the package it passes through.

    python tools/batch_walk.py                            print the functions in order of their first call, and counts
    python tools/batch_walk.py --json                     the same for scripts
    python tools/batch_walk.py --write CONTRIBUTING.md    replace the list between the two markers of a page

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
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "spherenet"
STEPS = 3
COMMAND = ["train", "--iterations", str(STEPS), "--threads", "1", "--batch-size", "32", "--log-every", "1"]
BEGIN, END = "<!-- written by tools/batch_walk.py: begin -->", "<!-- written by tools/batch_walk.py: end -->"


class Function(NamedTuple):
    """A function of the walk: its file below src/spherenet and its qualified name."""

    file: str
    name: str


FIRST, LAST = Function("training/trainer.py", "Trainer._step"), Function("runs/metrics.py", "MetricsFile.append")


def walk(command: list[str]) -> list[Function]:
    """Return the functions of the walk in order of their first call."""
    from spherenet.cli import main

    names: dict[CodeType, Function | None] = {}
    functions: dict[Function, None] = {}
    started, ended = 0, False

    def name_of(code: CodeType) -> Function | None:
        if code not in names:
            path = Path(code.co_filename)
            name = getattr(code, "co_qualname", code.co_name)
            counted = PACKAGE in path.parents and not code.co_name.startswith("<")
            names[code] = Function(path.relative_to(PACKAGE).as_posix(), name) if counted else None
        return names[code]

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal started, ended
        if event not in ("call", "return"):
            return
        function = name_of(frame.f_code)
        if function == FIRST and event == "call":
            started += 1
            if started == STEPS:
                active: list[Function] = []
                caller: FrameType | None = frame.f_back
                while caller is not None:
                    calling = name_of(caller.f_code)
                    if calling is not None:
                        active.append(calling)
                    caller = caller.f_back
                functions.update(dict.fromkeys(reversed(active)))
        if started == STEPS and not ended and event == "call" and function is not None:
            functions.setdefault(function)
        if started == STEPS and function == LAST and event == "return":
            ended = True

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        # Backward passes can run in other threads.
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            status = main([*command, "--output", str(Path(folder, "run"))])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if status or not ended:
        raise SystemExit(f"The traced run ended with exit code {status} before its last row was written.")
    return list(functions)


def as_markdown(functions: list[Function]) -> str:
    """Return the walk as a numbered list with one item per visit of a file, and the counts."""
    items = []
    for number, (file, visited) in enumerate(groupby(functions, key=lambda function: function.file), 1):
        names = ", ".join(f"`{function.name}`" for function in visited)
        items.append(f"{number}. `{file}`: {names}")
    return "\n".join([*items, "", f"{counts(functions)}."])


def counts(functions: list[Function]) -> str:
    """Return the number of functions and files in words."""
    return f"{len(functions)} functions in {len({function.file for function in functions})} files"


def replace_list(text: str, functions: list[Function]) -> str:
    """Return the text of a page with the walk between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"The page must contain the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{as_markdown(functions)}\n{END}{after}"


def main() -> int:
    """Print or write the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="replace the list in a Markdown page")
    options = parser.parse_args()
    functions = walk(COMMAND)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(replace_list(page, functions), encoding="utf-8")
    if options.json:
        files = {function.file for function in functions}
        print(json.dumps({"functions": len(functions), "files": len(files), "walk": functions}))
    elif options.write is None:
        for number, (file, name) in enumerate(functions, 1):
            print(f"{number:3}  {file}: {name}")
        print(counts(functions))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
