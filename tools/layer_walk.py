"""Follow one call of a layer through the package, forward and backward, and list the functions it passes through.

    python tools/layer_walk.py                            print the functions in order, and counts
    python tools/layer_walk.py --operator learnable       the same for another operator
    python tools/layer_walk.py --write CONTRIBUTING.md    replace the list between the two markers of a page

The layer is the default `SphereConv2d` with the native kernels. One call of it fills the caches first. Every call of a
Python function of the package is counted, except comprehensions; a change of file is a call in another file than that
of the call before.
"""

from __future__ import annotations

import argparse
import sys
import threading
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "spherenet"
BEGIN, END = "<!-- written by tools/layer_walk.py: begin -->", "<!-- written by tools/layer_walk.py: end -->"


class Function(NamedTuple):
    """A function of the walk: its file below src/spherenet and its qualified name."""

    file: str
    name: str


def walk(**options: Any) -> list[Function]:
    """Return the calls of forward and backward of a layer, in order."""
    import torch

    import spherenet as sn

    layer, x = sn.SphereConv2d(3, 8, 3, **options), torch.randn(2, 3, 8, 8, requires_grad=True)
    layer(x).sum().backward()
    calls = []

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        path, code = Path(frame.f_code.co_filename), frame.f_code
        is_comprehension = code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>")  # inlined from Python 3.12 on
        if event == "call" and PACKAGE in path.parents and not is_comprehension:
            name = getattr(code, "co_qualname", code.co_name)
            calls.append(Function(path.relative_to(PACKAGE).as_posix(), name))

    threading.setprofile(trace)  # backward can run in another thread
    sys.setprofile(trace)
    try:
        layer(x).sum().backward()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def counts(calls: list[Function]) -> tuple[int, int, int, int]:
    """Return the numbers of calls, functions, files and changes of file."""
    changes = sum(first.file != second.file for first, second in pairwise(calls))
    return len(calls), len(set(calls)), len({call.file for call in calls}), changes


def as_markdown(calls: list[Function]) -> str:
    """Return the walk as a numbered list with one item per visit of a file, and the counts."""
    items = []
    for number, (file, visited) in enumerate(groupby(calls, key=lambda call: call.file), 1):
        items.append(f"{number}. `{file}`: " + ", ".join(f"`{call.name}`" for call in visited))
    total, functions, files, changes = counts(calls)
    return "\n".join(
        [*items, "", f"{total} calls of {functions} functions in {files} files with {changes} changes of file."]
    )


def replace_list(text: str, calls: list[Function]) -> str:
    """Return the text of a page with the walk between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"The page must contain the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{as_markdown(calls)}\n{END}{after}"


def main() -> int:
    """Print or write the walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operator", default="cosine", help="operator of the layer")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="replace the list of this page")
    arguments = parser.parse_args()
    calls = walk(operator=arguments.operator)
    if arguments.write:
        arguments.write.write_text(replace_list(arguments.write.read_text("utf-8"), calls), "utf-8")
    else:
        print(as_markdown(calls))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
