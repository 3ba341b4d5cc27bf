"""`spherenet theory`: the paper's arguments, computed and drawn."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json

if TYPE_CHECKING:
    from spherenet.data.splits import Progress
    from spherenet.theory.labs import Answer

EXAMPLES = """\
  spherenet theory conditioning -o conditioning.png
  spherenet theory phase photo.jpg -o phase.png
  spherenet theory operators --m 4 -o operators.svg
  spherenet theory features --iterations 300 -o features.png
  spherenet theory colour -o colour.png

spherenet theory NAME --help shows the options of each."""

LARGEST_SEED = 2**63 - 1


def parser() -> Parser:
    """Return the verb's parser, with one below it for each lab."""
    made = Parser(
        "theory",
        "What the paper argues with, computed, drawn and corrected where it is wrong.",
        examples=EXAMPLES,
    )
    below = made.add_subparsers(dest="name", metavar="NAME", required=True, parser_class=_Lab)
    for name, (summary, add_options) in LABS.items():
        lab = below.add_parser(name, help=summary)
        add_options(lab)
        lab.add_argument("-o", "--output", metavar="FILE", help="write a figure (.png, .svg or .pdf)")
        lab.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def run(arguments: Namespace) -> None:
    """Run one lab: write its figure, then print its numbers."""
    settings = vars(arguments).copy()
    name, output, as_json = (settings.pop(key) for key in ("name", "output", "json"))
    if not 0 <= settings.get("seed", 0) <= LARGEST_SEED:
        raise ValueError(f"--seed must be from 0 to {LARGEST_SEED}, got {settings['seed']}.")
    target = None
    if output is not None:
        from spherenet.theory.drawing import require_output

        target = require_output(output)  # before the work, not after
    from spherenet.theory.labs import LABS as RUNS

    with _bar(name) as progress:
        answer = RUNS[name](**settings, progress=progress)
    if target is not None:
        from spherenet.theory.drawing import write

        write(answer.draw(), target)
    if as_json:
        print_json(answer.result)
    else:
        _print(answer, output)


def _print(answer: Answer, output: str | None) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, columns, rows in answer.tables:
        table = Table(title=Text(title))
        for index, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if index else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    if output is not None:
        console.print(f"The figure: {output}", soft_wrap=True, highlight=False, markup=False)


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """Give a `progress(done, total)` that draws a bar on stderr, from its first call on and in a terminal alone."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    console = Console(stderr=True)  # so that what is printed can be piped
    task: TaskID | None = None
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:

        def progress(done: int, total: int) -> None:
            nonlocal task
            task = bar.add_task(what) if task is None else task
            bar.update(task, completed=done, total=total)

        yield progress


class _Lab(Parser):
    """A parser below the verb's, as argparse makes them; its words come with its options."""

    def __init__(self, *, prog: str, **_: Any) -> None:
        super().__init__(prog.removeprefix("spherenet "), "", examples="")

    def describe(self, description: str, *examples: str) -> None:
        """Set the words above and below the options; examples as they follow `spherenet theory`."""
        self.description = description
        self.epilog = "examples:\n" + "\n".join(f"  spherenet theory {example}" for example in examples)

    def add_number(self, name: str, default: int, what: str) -> None:
        """Add an option that is a whole number."""
        self.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")

    def add_operator(self, default: str) -> None:
        """Add the SphereNet's operator."""
        self.add_argument("--operator", default=default, metavar="NAME", help=f"of the SphereNet (default: {default})")


def _conditioning(lab: _Lab) -> None:
    lab.describe(
        "Exact Hessians of ½‖F − UVᵀ‖² and of its normalised form at (cU, V/c): restricted condition\n"
        "numbers over c and over depth, with fitted exponents beside the paper's claims; then Hessian\n"
        "spectra of a small CNN and its SphereNet twin while they learn digits (half a minute).",
        "conditioning -o conditioning.png",
        "conditioning --n 3 --m 4 --k 3 --steps 0          # k = n: κ of G does not grow",
        "conditioning --batch-norm --operator sigmoid --json",
    )
    lab.add_number("n", 5, "rows of U")
    lab.add_number("m", 4, "rows of V")
    lab.add_number("k", 3, "columns of both, their rank")
    scales, depths = [1, 2, 3, 4, 6, 8, 12, 16], [2, 3, 4, 5]
    lab.add_argument(
        "--c", type=float, nargs="+", default=scales, metavar="C", help="scales (default: 1 2 3 4 6 8 12 16)"
    )
    lab.add_argument("--depths", type=int, nargs="+", default=depths, metavar="N", help="layers (default: 2 3 4 5)")
    lab.add_number("steps", 60, "iterations of the networks' training; 0: no networks")
    lab.add_operator("cosine")
    lab.add_argument("--batch-norm", action="store_true", help="give both networks BatchNorm")
    lab.add_number("seed", 0, "of matrices, networks and probes")


def _phase(lab: _Lab) -> None:
    lab.describe(
        "Rebuild an image from its 2-D Fourier phases with random magnitudes, and from its magnitudes\n"
        "with random phases, beside the original. Pictures are scaled down to 1024 pixels a side.",
        "phase photo.jpg -o phase.png",
        "phase photo.jpg --seed 3 --json",
    )
    lab.add_argument("image", metavar="IMAGE", help="a picture file, grey or colour")
    lab.add_number("seed", 0, "of the noise")


def _operators(lab: _Lab) -> None:
    lab.describe(
        "Draw every operator g and the margin ψ made of it, with their slopes, and say how steep ψ is\n"
        "where its pieces meet: at θ = jπ/m.",
        "operators -o operators.svg",
        "operators --m 3 --k 0.05 0.5 --json",
    )
    k = [0.1, 0.3, 0.7]
    lab.add_argument("--k", type=float, nargs="+", default=k, metavar="K", help="of sigmoids (default: 0.1 0.3 0.7)")
    lab.add_number("m", 4, "the margin, a whole number of at least 2")


def _features(lab: _Lab) -> None:
    lab.describe(
        "Train three small networks that end in two features on the embedded digits, a CNN and a\n"
        "SphereNet with softmax and a SphereNet with GA-Softmax, and draw where they put the test\n"
        "digits (a minute or two).",
        "features -o features.png",
        "features --iterations 600 --m 2 --seed 1 --json",
    )
    lab.add_number("iterations", 300, "of each training")
    lab.add_operator("sigmoid")
    lab.add_argument("--m", type=float, default=4, metavar="M", help="margin of GA-Softmax (default: 4)")
    lab.add_number("seed", 0, "of networks and batches")


def _colour(lab: _Lab) -> None:
    lab.describe(
        "Compare the answers of one SphereConv and one convolution with the same kernel to a patch that\n"
        "becomes brighter, and to one whose ratio of R, G and B changes.",
        "colour -o colour.png",
        "colour --operator sigmoid --json",
    )
    lab.add_operator("cosine")
    lab.add_number("seed", 0, "of the kernel")


LABS: dict[str, tuple[str, Callable[[_Lab], None]]] = {
    "conditioning": ("how scales condition products of matrices and small networks", _conditioning),
    "phase": ("an image rebuilt from its Fourier phases, and from its magnitudes", _phase),
    "operators": ("g(θ), ψ(θ), their slopes, and where a margin is flat", _operators),
    "features": ("2-D features of digits: CNN, SphereNet, SphereNet with a margin", _features),
    "colour": ("answers to brightness and to the ratio of R, G, B", _colour),
}
"""What each name does, and how its options are added."""
