"""Each lab from its settings to its answer: numbers for a script, tables for a person, and how to draw it.

`LABS` has them by the names that `spherenet theory` takes. All raise ValueError for a setting that is not allowed, in
one sentence, before anything long begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spherenet.data.split import Progress
from spherenet.ops.angle_functions import OPERATORS
from spherenet.ops.arguments import require_one_of
from spherenet.theory import colour as colour_lab
from spherenet.theory import conditioning_panels, tables
from spherenet.theory import features as features_lab
from spherenet.theory import operators as operators_lab
from spherenet.theory import phase as phase_lab
from spherenet.theory.conditioning import matrix_curves
from spherenet.theory.depth import depth_curves
from spherenet.theory.twins import compare_twins

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LABS", "Answer", "colour", "conditioning", "features", "operators", "phase"]


@dataclass(frozen=True)
class Answer:
    """What a lab found: `result` as JSON takes it, tables, and a function that draws it."""

    result: dict[str, Any]
    tables: list[tables.Table]
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
        tables.curve_table(f"κ at (cU, V/c), {sizes}", matrices),
        tables.curve_table(f"κ of products of N matrices (N: case), {sizes}", depth),
    ]
    twins = None
    if steps:
        twins = compare_twins(operator, steps=steps, batch_norm=batch_norm, seed=seed, progress=progress)
        shown += tables.twin_tables(twins)
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
    return Answer(result, [tables.phase_table(rebuilt)], lambda: phase_lab.draw(rebuilt))


def operators(*, k: Sequence[float], m: int, progress: Progress) -> Answer:
    """Every g and its ψ_m."""
    angles = operators_lab.operators(k)
    found = operators_lab.meetings(angles, m)
    result = {"m": m, "operators": [meeting.as_dict() for meeting in found]}
    return Answer(result, [tables.operator_table(found)], lambda: operators_lab.draw(angles, m))


def features(*, iterations: int, operator: str, m: float, seed: int, progress: Progress) -> Answer:
    """2-D features of three networks."""
    require_one_of("--operator", operator, OPERATORS)
    _require_at_least("--iterations", iterations, 1)
    found = features_lab.embed_digits(iterations, operator=operator, m=m, seed=seed, progress=progress)
    result = {"iterations": iterations, "seed": seed, "networks": [embedding.as_dict() for embedding in found]}
    return Answer(result, [tables.feature_table(found)], lambda: features_lab.draw(found))


def colour(*, operator: str, seed: int, progress: Progress) -> Answer:
    """Answers to brightness and to colour."""
    require_one_of("--operator", operator, OPERATORS)
    response = colour_lab.colour_response(operator, seed)
    return Answer(response.as_dict(), [tables.colour_table(response)], lambda: colour_lab.draw(response))


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
