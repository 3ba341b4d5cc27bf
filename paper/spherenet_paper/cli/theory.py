"""The verb `theory`: numerical demonstrations of the paper's arguments, as tables and figures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spherenet.cli.plugin import Parser, add_max_megapixels, add_option, plain, print_json, progress_bar, stdout_console
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from spherenet_paper.theory.labs import LabResult

__all__ = ["run_theory", "theory_parser"]

MAX_SEED = 2**63 - 1


class _LabParser(Parser):
    """Parser of one demonstration, created by argparse for `add_parser`."""

    def __init__(self, *, prog: str, **_: Any) -> None:
        super().__init__(prog.removeprefix("spherenet "), "", examples="")

    def describe(self, description: str, *examples: str) -> None:
        """Set the text above the options and the examples, given without `spherenet theory`."""
        self.description = description
        self.epilog = "examples:\n" + "\n".join(f"  spherenet theory {example}" for example in examples)

    def add_operator(self, default: str) -> None:
        """Add the option for the operator of the sphere layers."""
        add_option(self, "--operator", default=default, help="operator of the sphere layers")

    def add_seed(self, help: str) -> None:
        """Add the option for the random seed."""
        add_option(self, "--seed", type=int, default=0, help=help)


class _TheoryParser(Parser):
    """Parser with one subparser per demonstration."""

    def __init__(self) -> None:
        super().__init__(
            "theory",
            "Demonstrate arguments of the paper numerically: print a table, draw a figure, and correct\n"
            "claims that do not hold.",
            examples="""\
  spherenet theory conditioning -o conditioning.png
  spherenet theory phase photo.jpg -o phase.png
  spherenet theory operators --m 4 -o operators.svg
  spherenet theory features --iterations 300 -o features.png
  spherenet theory color -o color.png

spherenet theory NAME --help shows the options of a demonstration.""",
        )
        labs = self.add_subparsers(dest="name", metavar="NAME", required=True, parser_class=_LabParser)
        self.labs = [labs.add_parser(name, help=summary) for name, (summary, _) in LABS.items()]
        for lab, (_, add_options) in zip(self.labs, LABS.values(), strict=True):
            add_options(lab)
            add_option(lab, "-o", "--output", metavar="FILE", help="figure to write (.png, .svg or .pdf)")
            lab.add_argument("--json", action="store_true", help="print JSON instead of a table")

    def option_names(self) -> list[str]:
        """Return the options of all demonstrations."""
        return [name for lab in self.labs for name in lab.option_names()]


def theory_parser() -> Parser:
    """Return the parser of `spherenet theory`."""
    return _TheoryParser()


def run_theory(arguments: Namespace) -> None:
    """Run one demonstration, write its figure and print its numbers."""
    settings = vars(arguments).copy()
    name, output, as_json = (settings.pop(key) for key in ("name", "output", "json"))
    if not 0 <= settings.get("seed", 0) <= MAX_SEED:
        raise InvalidArgument("--seed", f"must be from 0 to {MAX_SEED}, got {settings['seed']}.")
    target = None
    if output is not None:
        from spherenet_paper.theory.drawing import require_output

        target = require_output(output)  # fail before the computation
    from spherenet_paper.theory.labs import LABS as RUNS

    with progress_bar(name) as progress:
        result = RUNS[name](**settings, progress=progress)
    if target is not None:
        from spherenet_paper.theory.drawing import write

        write(result.draw(), target)
    if as_json:
        print_json(result.result)
    else:
        _print_tables(result, output)


def _print_tables(result: LabResult, output: str | None) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
    for title, columns, rows in result.tables:
        table = Table(title=Text(title))
        for index, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if index else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    if output is not None:
        console.print(f"Figure: {plain(output)}", soft_wrap=True, highlight=False, markup=False)


def _conditioning(lab: _LabParser) -> None:
    lab.describe(
        "Compute exact Hessians of ½‖F − UVᵀ‖² and of its normalized form at (cU, V/c) (Eq. 12): condition\n"
        "numbers as functions of c and of the depth, with fitted exponents next to the paper's claims; then\n"
        "Hessian spectra of a small CNN and a SphereNet during training on digits (half a minute).",
        "conditioning -o conditioning.png",
        "conditioning --n 3 --m 4 --k 3 --steps 0          # k = n: the condition number of G does not grow",
        "conditioning --batch-norm --operator sigmoid --json",
    )
    add_option(lab, "--n", type=int, default=5, help="rows of U")
    add_option(lab, "--m", type=int, default=4, help="rows of V")
    add_option(lab, "--k", type=int, default=3, help="columns of U and V, which is their rank")
    scales = [1, 2, 3, 4, 6, 8, 12, 16]
    add_option(lab, "--c", type=list[float], default=scales, help="scales c")
    add_option(lab, "--depths", type=list[int], default=[2, 3, 4, 5], help="numbers of factors")
    add_option(lab, "--steps", type=int, default=60, help="training steps of the networks; 0 for no networks")
    lab.add_operator("cosine")
    lab.add_argument("--batch-norm", action="store_true", help="use BatchNorm in both networks")
    lab.add_seed("seed of matrices, networks and random vectors")


def _phase(lab: _LabParser) -> None:
    lab.describe(
        "Rebuild an image from the phases of its 2-D Fourier transform with random magnitudes (Eq. 13), and\n"
        "from its magnitudes with random phases. Large images are reduced to 1024 pixels per side.",
        "phase photo.jpg -o phase.png",
        "phase photo.jpg --seed 3 --json",
    )
    lab.add_argument("image", metavar="IMAGE", help="image file, gray or color")
    add_max_megapixels(lab)
    lab.add_seed("seed of the noise")


def _operators(lab: _LabParser) -> None:
    lab.describe(
        "Draw the angle functions g(θ) (Eq. 1) and the margin functions ψ(θ) built from them (Eq. 6), with\n"
        "their derivatives, and print the slope of ψ where its segments meet, at θ = jπ/m.",
        "operators -o operators.svg",
        "operators --m 3 --k 0.05 0.5 --json",
    )
    add_option(lab, "--k", type=list[float], default=[0.1, 0.3, 0.7], help="parameters k of the sigmoid")
    add_option(lab, "--m", type=int, default=4, help="margin, a whole number of at least 2")


def _features(lab: _LabParser) -> None:
    lab.describe(
        "Train three small networks with two-dimensional features on the embedded digits (a CNN, a\n"
        "SphereNet, and a SphereNet with a GA-Softmax margin) and draw the features of the test digits\n"
        "(one or two minutes).",
        "features -o features.png",
        "features --iterations 600 --m 2 --seed 1 --json",
    )
    add_option(lab, "--iterations", type=int, default=300, help="training steps per network")
    lab.add_operator("sigmoid")
    add_option(lab, "--m", type=float, default=4, help="margin of GA-Softmax")
    lab.add_seed("seed of networks and batches")


def _color(lab: _LabParser) -> None:
    lab.describe(
        "Compare the outputs of a SphereConv and a convolution with the same kernel for a patch of growing\n"
        "brightness, and for a patch whose ratio of red, green and blue changes.",
        "color -o color.png",
        "color --operator sigmoid --json",
    )
    lab.add_operator("cosine")
    lab.add_seed("seed of the kernel")


LABS: dict[str, tuple[str, Callable[[_LabParser], None]]] = {
    "conditioning": ("condition numbers of matrix products and small networks under scaling", _conditioning),
    "phase": ("an image rebuilt from its Fourier phases, and from its magnitudes", _phase),
    "operators": ("angle functions g(θ), margin functions ψ(θ) and their slopes", _operators),
    "features": ("2-D features of digits: CNN, SphereNet, SphereNet with a margin", _features),
    "color": ("outputs for changing brightness and changing color", _color),
}
"""Summary of each demonstration and the function that adds its options."""
