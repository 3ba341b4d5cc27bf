"""List functions with many parameters: a function with eight parameters is a missing type.

    python tools/count_parameters.py [--at-least 8] [FOLDER ...]

Named parameters count, without `self` and `cls`; `**options` stands for a list that is defined elsewhere, once. Kernels
of Triton (`@triton.jit`) and the signatures of `@overload` do not count.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "spherenet"


class Function(NamedTuple):
    """A function, the place where it is defined, and its number of parameters."""

    place: str
    name: str
    parameters: int
    is_public: bool
    """Whether no part of its name starts with an underscore, special methods and bases of public classes aside."""


def functions_of(path: Path, root: Path) -> Iterator[Function]:
    """Yield all counted functions of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    inherited = {base.id for node in classes if not node.name.startswith("_") for base in node.bases
                 if isinstance(base, ast.Name)}  # fmt: skip
    for place, name, parameters in _functions_in(tree, "", str(path.relative_to(root))):
        parts = name.split(".")
        private = [part for part in parts if part.startswith("_") and not part.endswith("__")]
        yield Function(place, name, parameters, set(private) <= inherited)


def _functions_in(node: ast.AST, prefix: str, file: str) -> Iterator[tuple[str, str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions_in(child, f"{prefix}{child.name}.", file)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not any(mark in ast.unparse(d) for d in child.decorator_list for mark in ("triton", "jit", "overload")):
                yield f"{file}:{child.lineno}", prefix + child.name, _parameters(child.args)
            yield from _functions_in(child, f"{prefix}{child.name}.", file)
        else:
            yield from _functions_in(child, prefix, file)


def _parameters(arguments: ast.arguments) -> int:
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return sum(name not in ("self", "cls") for name in names)


def main() -> None:
    """Print the functions with at least so many parameters, and how many there are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, default=[SOURCE], metavar="FOLDER")
    parser.add_argument("--at-least", type=int, default=8, metavar="N")
    arguments = parser.parse_args()
    rows = sorted(
        (function.parameters, function)
        for folder in arguments.folders
        for path in sorted(folder.rglob("*.py"))
        for function in functions_of(path, folder)
        if function.parameters >= arguments.at_least
    )
    for count, function in reversed(rows):
        print(f"{count:3d}  {'public ' if function.is_public else 'private'}  {function.name}  ({function.place})")
    public = sum(function.is_public for _, function in rows)
    print(f"{len(rows)} functions with {arguments.at_least} or more parameters, {public} of them public.")


if __name__ == "__main__":
    main()
