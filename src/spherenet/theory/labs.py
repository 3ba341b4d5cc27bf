"""What the labs found as tables of words and numbers, for whoever prints them.

Each lab from its settings to its answer: numbers for a script, tables for a person, and how to draw it.

`LABS` has them by the names that `spherenet theory` takes. All raise ValueError for a setting that is not allowed, in
one sentence, before anything long begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spherenet.angles import OPERATORS
from spherenet.data.splits import Progress
from spherenet.theory import color as colour_lab
from spherenet.theory import conditioning_panels
from spherenet.theory import features as features_lab
from spherenet.theory import operators as operators_lab
from spherenet.theory import phase as phase_lab
from spherenet.theory.conditioning import depth_curves, matrix_curves
from spherenet.theory.spectra import compare_twins
from spherenet.validation import require_one_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spherenet.theory.color import ColourResponse
    from spherenet.theory.conditioning import Curve
    from spherenet.theory.features import Embedding
    from spherenet.theory.operators import Meeting
    from spherenet.theory.phase import Rebuilt
    from spherenet.theory.spectra import TwinReport

__all__ = [
    "LABS",
    "Answer",
    "Table",
    "colour",
    "colour_table",
    "conditioning",
    "curve_table",
    "feature_table",
    "features",
    "operator_table",
    "operators",
    "phase",
    "phase_table",
    "twin_tables",
]


class Table(NamedTuple):
    """A title, the columns' names and the rows; the first column holds words, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def curve_table(title: str, curves: Sequence[Curve]) -> Table:
    """κ over c: its ends, the fitted exponent, what the paper claims and what is right (SPEC 2).

    zeros: how many eigenvalues are zero. A κ beyond what float64 resolves is too large.
    """
    several = len({curve.layers for curve in curves}) > 1
    rows = [
        [
            f"{curve.layers}: {curve.case}" if several else curve.case,
            *("too large" if kappa is None else f"{kappa:.3g}" for kappa in (curve.kappa[0], curve.kappa[-1])),
            str(curve.zero_eigenvalues),
            signed(curve.exponent),
            curve.paper,
            "–" if curve.expected is None else f"{curve.expected:g}",
        ]
        for curve in curves
    ]
    first, last = (f"κ, c = {curves[0].c[index]:g}" for index in (0, -1))
    return Table(title, ["case", first, last, "zeros", "exponent", "paper", "right"], rows)


def twin_tables(report: TwinReport) -> list[Table]:
    """The spectra during training, and λ_max over c."""
    norms = "with BatchNorm" if report.batch_norm else "without BatchNorm"
    spectra = [
        [
            point.network,
            f"{point.step}",
            f"{point.loss:.3f}",
            f"{point.spectrum.largest:.3g}",
            f"{point.spectrum.smallest:.3g}",
            f"{point.spectrum.mean_magnitude:.2g} ± {point.spectrum.mean_error:.1g}",
            f"{point.spectrum.spread:.0f}",
        ]
        for point in report.measured
    ]
    moved = [
        [case.case, f"{case.largest[0]:.3g}", f"{case.largest[-1]:.3g}", signed(case.exponent), f"{case.expected:g}"]
        for case in report.rescaled
    ]
    last = f"c = {report.rescaled[0].c[-1]:g}"
    return [
        Table(
            f"Hessian of the loss during training, {norms}, {report.operator} SphereNet",
            ["network", "iteration", "loss", "λ_max", "λ_min", "mean |λ|", "spread"],
            spectra,
        ),
        Table("λ_max at (c·W₁, W₂/c) after training", ["network", "c = 1", last, "exponent", "for large c"], moved),
    ]


def phase_table(rebuilt: Rebuilt) -> Table:
    """How each rebuilt image correlates with its original."""
    rows = [[name, f"{value:.3f}"] for name, value in rebuilt.correlations().items()]
    return Table("correlation with the original", ["rebuilt from its", "correlation"], rows)


def operator_table(meetings: Sequence[Meeting]) -> Table:
    """How steep ψ is where its pieces meet."""
    rows = [
        [
            meeting.g,
            f"{meeting.slope_there:.3g}",
            f"{meeting.steepest:.3g}",
            "yes" if meeting.saddle else "no",
        ]
        for meeting in meetings
    ]
    m = meetings[0].m
    columns = ["g", "|dψ/dθ| there", "steepest |dψ/dθ|", "saddle points"]
    return Table(f"ψ with m = {m} where its pieces meet: θ = jπ/{m}, j = 1 … {m - 1}", columns, rows)


def feature_table(embeddings: Sequence[Embedding]) -> Table:
    """How the classes lie in the plane."""
    rows = [
        [each.network, f"{each.accuracy:.1%}", f"{each.within:.1f}°", f"{each.between:.1f}°"] for each in embeddings
    ]
    columns = ["network", "test accuracy", "angle within", "angle between"]
    return Table("2-D features of test digits: mean angle to, smallest between class centres", columns, rows)


def colour_table(response: ColourResponse) -> Table:
    """How far each answer moves."""
    rows = [
        ["answer over brightness 0.1 … 1, change", _percent(response.sphere_change), _percent(response.conv_change)],
        ["answer ÷ brightness, change", "–", _percent(response.conv_nonlinearity)],
        [
            "answer over hue, light ÷ 4, of its range",
            _percent(response.sphere_dimming),
            _percent(response.conv_dimming),
        ],
    ]
    return Table("brightness and colour", ["", f"SphereConv ({response.operator})", "convolution"], rows)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 1e-3 else f"{share:.1e}"


def signed(exponent: float) -> str:
    """An exponent to two digits, never −0.00."""
    return f"{exponent:.2f}" if abs(exponent) >= 0.005 else "0.00"


@dataclass(frozen=True)
class Answer:
    """What a lab found: `result` as JSON takes it, tables, and a function that draws it."""

    result: dict[str, Any]
    tables: list[Table]
    draw: Callable[[], Figure]


def conditioning(
    *,
    n: int,
    m: int,
    k: int,
    c: Sequence[float],
    depths: Sequence[int],
    steps: int,
    operator: str,
    batch_norm: bool,
    seed: int,
    progress: Progress,
) -> Answer:
    """κ of matrices over c and over depth; with steps > 0 also the spectra of two networks on the way of so many."""
    require_one_of("--operator", operator, OPERATORS)
    _require_at_least("--steps", steps, 0)
    scales = sorted(set(c))
    matrices = matrix_curves(n, m, k, scales, seed)
    depth = depth_curves(n, m, k, sorted(set(depths)), scales, seed)
    sizes = f"n, m, k = {n}, {m}, {k}"
    shown = [
        curve_table(f"κ at (cU, V/c), {sizes}", matrices),
        curve_table(f"κ of products of N matrices (N: case), {sizes}", depth),
    ]
    twins = None
    if steps:
        twins = compare_twins(operator, steps=steps, batch_norm=batch_norm, seed=seed, progress=progress)
        shown += twin_tables(twins)
    result = {
        "n": n,
        "m": m,
        "k": k,
        "seed": seed,
        "matrices": [curve.as_dict() for curve in matrices],
        "depth": [curve.as_dict() for curve in depth],
        "networks": None if twins is None else twins.as_dict(),
    }
    return Answer(result, shown, lambda: conditioning_panels.draw(matrices, depth, twins))


def phase(*, image: str, seed: int, progress: Progress) -> Answer:
    """An image rebuilt from its phases and from its magnitudes."""
    rebuilt = phase_lab.rebuild(phase_lab.read_picture(image), seed)
    result = {"image": image, "seed": seed, **rebuilt.as_dict()}
    return Answer(result, [phase_table(rebuilt)], lambda: phase_lab.draw(rebuilt))


def operators(*, k: Sequence[float], m: int, progress: Progress) -> Answer:
    """Every g and its ψ_m."""
    angles = operators_lab.operators(k)
    found = operators_lab.meetings(angles, m)
    result = {"m": m, "operators": [meeting.as_dict() for meeting in found]}
    return Answer(result, [operator_table(found)], lambda: operators_lab.draw(angles, m))


def features(*, iterations: int, operator: str, m: float, seed: int, progress: Progress) -> Answer:
    """2-D features of three networks."""
    require_one_of("--operator", operator, OPERATORS)
    _require_at_least("--iterations", iterations, 1)
    found = features_lab.embed_digits(iterations, operator=operator, m=m, seed=seed, progress=progress)
    result = {"iterations": iterations, "seed": seed, "networks": [embedding.as_dict() for embedding in found]}
    return Answer(result, [feature_table(found)], lambda: features_lab.draw(found))


def colour(*, operator: str, seed: int, progress: Progress) -> Answer:
    """Answers to brightness and to colour."""
    require_one_of("--operator", operator, OPERATORS)
    response = colour_lab.colour_response(operator, seed)
    return Answer(response.as_dict(), [colour_table(response)], lambda: colour_lab.draw(response))


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}.")


LABS: dict[str, Callable[..., Answer]] = {
    "conditioning": conditioning,
    "phase": phase,
    "operators": operators,
    "features": features,
    "colour": colour,
}
