"""The labs by the names that `spherenet theory` takes, with numbers for scripts, tables and figures.

All functions raise ValueError for an invalid argument before a long computation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spherenet.angles import OPERATORS
from spherenet.cli.plugin import require_one_of
from spherenet.data import Progress, pixel_limit
from spherenet.errors import InvalidArgument
from spherenet_paper.theory import color as color_lab
from spherenet_paper.theory import features as features_lab
from spherenet_paper.theory import operators as operators_lab
from spherenet_paper.theory import phase as phase_lab
from spherenet_paper.theory.conditioning import depth_curves, exponent_text, matrix_curves
from spherenet_paper.theory.drawing import draw_conditioning
from spherenet_paper.theory.spectra import compare_networks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spherenet_paper.theory.color import ColorResponse
    from spherenet_paper.theory.conditioning import Curve
    from spherenet_paper.theory.features import Embedding
    from spherenet_paper.theory.operators import MarginSlopes
    from spherenet_paper.theory.phase import Reconstruction
    from spherenet_paper.theory.spectra import NetworkComparison

__all__ = [
    "LABS",
    "LabResult",
    "Table",
    "color",
    "color_table",
    "conditioning",
    "curve_table",
    "feature_table",
    "features",
    "network_tables",
    "operator_table",
    "operators",
    "phase",
    "phase_table",
]


class Table(NamedTuple):
    """A title, column names and rows; the first column holds text, the others numbers."""

    title: str
    columns: list[str]
    rows: list[list[str]]


def curve_table(title: str, curves: Sequence[Curve]) -> Table:
    """Return κ at the first and last c, the number of zero eigenvalues, and the fitted, claimed and correct exponent.

    A κ that float64 does not resolve is shown as "too large".
    """
    several = len({curve.layers for curve in curves}) > 1
    rows = [
        [
            f"{curve.layers}: {curve.case}" if several else curve.case,
            *("too large" if kappa is None else f"{kappa:.3g}" for kappa in (curve.kappa[0], curve.kappa[-1])),
            str(curve.zero_eigenvalues),
            exponent_text(curve.exponent),
            curve.paper,
            "–" if curve.expected is None else f"{curve.expected:g}",
        ]
        for curve in curves
    ]
    first, last = (f"κ, c = {curves[0].c[index]:g}" for index in (0, -1))
    return Table(title, ["case", first, last, "zeros", "exponent", "paper", "correct"], rows)


def network_tables(report: NetworkComparison) -> list[Table]:
    """Return the spectra during training, and λ_max over c."""
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
        [
            case.case,
            f"{case.largest[0]:.3g}",
            f"{case.largest[-1]:.3g}",
            exponent_text(case.exponent),
            f"{case.expected:g}",
        ]
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


def phase_table(reconstruction: Reconstruction) -> Table:
    """Return the correlation of each reconstruction with the original."""
    rows = [[name, f"{value:.3f}"] for name, value in reconstruction.correlations().items()]
    return Table("correlation with the original", ["reconstructed from", "correlation"], rows)


def operator_table(slopes: Sequence[MarginSlopes]) -> Table:
    """Return the slopes of ψ where its segments meet."""
    rows = [
        [
            each.g,
            f"{each.slope_there:.3g}",
            f"{each.steepest:.3g}",
            "yes" if each.saddle else "no",
        ]
        for each in slopes
    ]
    m = slopes[0].m
    columns = ["g", "|dψ/dθ| there", "steepest |dψ/dθ|", "saddle points"]
    return Table(f"ψ with m = {m} where its segments meet: θ = jπ/{m}, j = 1 … {m - 1}", columns, rows)


def feature_table(embeddings: Sequence[Embedding]) -> Table:
    """Return accuracy and angles of each network."""
    rows = [
        [each.network, f"{each.accuracy:.1%}", f"{each.within:.1f}°", f"{each.between:.1f}°"] for each in embeddings
    ]
    columns = ["network", "test accuracy", "angle within", "angle between"]
    return Table("2-D features of test digits: mean angle to, smallest angle between class centers", columns, rows)


def color_table(response: ColorResponse) -> Table:
    """Return the relative changes of the outputs."""
    rows = [
        [
            "output, brightness 0.1 … 1",
            _percent(response.sphere_change),
            _percent(response.conv_change),
        ],
        ["output ÷ brightness, 0.1 … 1", "–", _percent(response.conv_nonlinearity)],
        [
            "output over hue, light ÷ 4",
            _percent(response.sphere_dimming),
            _percent(response.conv_dimming),
        ],
    ]
    return Table(
        "relative change of the output with brightness", ["", f"SphereConv ({response.operator})", "convolution"], rows
    )


def _percent(fraction: float) -> str:
    return f"{fraction:.1%}" if fraction >= 1e-3 else f"{fraction:.1e}"


@dataclass(frozen=True)
class LabResult:
    """The result of a lab: numbers for JSON, tables, and a function that draws the figure."""

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
) -> LabResult:
    """Compute κ of matrices over c and over depth and, if steps > 0, spectra of two networks during training."""
    require_one_of("--operator", operator, OPERATORS)
    _require_at_least("--steps", steps, 0)
    scales = sorted(set(c))
    matrices = matrix_curves(n, m, k, scales, seed)
    depth = depth_curves(n, m, k, sorted(set(depths)), scales, seed)
    sizes = f"n, m, k = {n}, {m}, {k}"
    tables = [
        curve_table(f"κ at (cU, V/c), {sizes}", matrices),
        curve_table(f"κ of products of N matrices (N: case), {sizes}", depth),
    ]
    networks = None
    if steps:
        networks = compare_networks(operator, steps=steps, batch_norm=batch_norm, seed=seed, progress=progress)
        tables += network_tables(networks)
    result = {
        "n": n,
        "m": m,
        "k": k,
        "seed": seed,
        "matrices": [curve.as_dict() for curve in matrices],
        "depth": [curve.as_dict() for curve in depth],
        "networks": None if networks is None else networks.as_dict(),
    }
    return LabResult(result, tables, lambda: draw_conditioning(matrices, depth, networks))


def phase(*, image: str, max_megapixels: float | None, seed: int, progress: Progress) -> LabResult:
    """Reconstruct an image from its phases and from its magnitudes."""
    reconstruction = phase_lab.reconstruct(phase_lab.read_image(image, max_pixels=pixel_limit(max_megapixels)), seed)
    result = {"image": image, "seed": seed, **reconstruction.as_dict()}
    return LabResult(result, [phase_table(reconstruction)], lambda: phase_lab.draw(reconstruction))


def operators(*, k: Sequence[float], m: int, progress: Progress) -> LabResult:
    """Compute the slopes of ψ_m for every g."""
    angles = operators_lab.operators(k)
    slopes = operators_lab.margin_slopes(angles, m)
    result = {"m": m, "operators": [each.as_dict() for each in slopes]}
    return LabResult(result, [operator_table(slopes)], lambda: operators_lab.draw(angles, m))


def features(*, iterations: int, operator: str, m: float, seed: int, progress: Progress) -> LabResult:
    """Train three networks and compute 2-D features of the test digits."""
    require_one_of("--operator", operator, OPERATORS)
    _require_at_least("--iterations", iterations, 1)
    embeddings = features_lab.embed_digits(iterations, operator=operator, m=m, seed=seed, progress=progress)
    result = {"iterations": iterations, "seed": seed, "networks": [embedding.as_dict() for embedding in embeddings]}
    return LabResult(result, [feature_table(embeddings)], lambda: features_lab.draw(embeddings))


def color(*, operator: str, seed: int, progress: Progress) -> LabResult:
    """Compute outputs for changing brightness and color."""
    require_one_of("--operator", operator, OPERATORS)
    response = color_lab.color_response(operator, seed)
    return LabResult(response.as_dict(), [color_table(response)], lambda: color_lab.draw(response))


def _require_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument(name, f"must be at least {least}, got {value}.")


LABS: dict[str, Callable[..., LabResult]] = {
    "conditioning": conditioning,
    "phase": phase,
    "operators": operators,
    "features": features,
    "color": color,
}
