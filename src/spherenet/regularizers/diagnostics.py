"""Numbers about the kernels of a model's sphere layers, ready for logging.

Every function returns plain dicts of Python numbers by layer name, that `json.dumps` takes as they are: None
stands for a quantity that does not exist or is not finite. Nothing is differentiated. Angles are in radians.
"""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

from spherenet.layers import SphereLayer
from spherenet.regularizers.energy import hyperspherical_energy
from spherenet.regularizers.kernel_norms import KernelNorms, norms_of
from spherenet.regularizers.orthogonality import orthogonality, orthogonality_minimum
from spherenet.regularizers.sphere_layers import Modules, kernel_matrix, sphere_layers

__all__ = ["Histogram", "KValues", "KernelAngles", "k_values", "kernel_angles", "layer_diagnostics"]

_ROWS_AT_A_TIME = 1024  # a layer of 10⁵ kernels has 10¹⁰ angles: they are counted, never all kept


class Histogram(TypedDict):
    """Counts between consecutive edges; the last bin includes its upper edge."""

    edges: list[float]
    counts: list[int]


class KernelAngles(TypedDict):
    """Angles between the pairs of kernels of one layer, in [0, π]; None without a pair.

    kernels_without_direction: those that are zero or not finite; they have no angles.
    """

    min: float | None
    mean: float | None
    max: float | None
    pairs: int
    kernels_without_direction: int
    histogram: Histogram


class KValues(TypedDict):
    """The sigmoid's k of one layer: each one, and how they are spread."""

    values: list[float | None]
    min: float | None
    mean: float | None
    max: float | None
    histogram: Histogram


def kernel_angles(model: Modules, bins: int = 18) -> dict[str, KernelAngles]:
    """Return the angles between the kernels of each sphere layer: min, mean, max and a histogram over [0, π].

    Of a grouped convolution only pairs within a group count. Computed in float64, for acos turns float32's
    rounding of a cosine near 1 into 3e-4 radians. Raises ValueError for bins < 1.
    """
    _require_bins(bins)
    with torch.no_grad():
        return {name: _angles_of(layer, bins) for name, layer in sphere_layers(model).items()}


def k_values(model: Modules, bins: int = 20) -> dict[str, KValues]:
    """Return the k of each sphere layer whose operator has one: its values and a histogram from 0.

    The histogram reaches to 1, as in the paper's figure, or to the largest k where that is more. A layer with
    a single k (shared or fixed) lists one value; a k shared by several layers stands under each of them.
    Raises ValueError for bins < 1.
    """
    _require_bins(bins)
    found: dict[str, KValues] = {}
    for name, layer in sphere_layers(model).items():
        values = _k_of(layer)
        if values is not None:
            finite = values[values.isfinite()]
            top = max([1.0, *finite.tolist()])
            found[name] = {
                "values": [_number(value) for value in values],
                "min": _number(values.min()),
                "mean": _number(values.mean()),
                "max": _number(values.max()),
                "histogram": _histogram(torch.histc(finite, bins, 0, top), top),
            }
    return found


def layer_diagnostics(
    model: Modules, initial_norms: KernelNorms | None = None, *, form: str = "raw", s: float = 2.0
) -> dict[str, dict[str, float | None]]:
    """Return one flat dict of numbers for each sphere layer, for a line of a log.

    kernels, fan_in, groups · angle_min, angle_mean, angle_max · energy, half_space_energy (of order s) ·
    orthogonality (in `form`), orthogonality_minimum, orthogonality_excess (what training could still remove) ·
    norm_min, norm_mean, norm_max · norm_growth (mean ratio to `initial_norms`, None without them) ·
    k_min, k_mean, k_max (None where the operator has no k).
    """
    layers = sphere_layers(model)
    growth = {} if initial_norms is None else initial_norms.growth(layers)
    with torch.no_grad():
        return {name: _numbers_of(layer, growth.get(name), form, s) for name, layer in layers.items()}


def _numbers_of(
    layer: SphereLayer, growth: dict[str, float | None] | None, form: str, s: float
) -> dict[str, float | None]:
    groups, kernels, fan_in = kernel_matrix(layer).shape
    angles, norms, k = _angles_of(layer, bins=1), norms_of(layer), _k_of(layer)
    has_pairs, value, minimum = kernels > 1, orthogonality(layer, form), orthogonality_minimum(layer, form)
    return {
        "kernels": groups * kernels,
        "fan_in": fan_in,
        "groups": groups,
        "angle_min": angles["min"],
        "angle_mean": angles["mean"],
        "angle_max": angles["max"],
        "energy": _number(hyperspherical_energy(layer, s)) if has_pairs else None,
        "half_space_energy": _number(hyperspherical_energy(layer, s, half_space=True)) if has_pairs else None,
        "orthogonality": _number(value),
        "orthogonality_minimum": minimum,
        "orthogonality_excess": _number((value - minimum).clamp_min(0)),  # rounding may leave −1e-7
        "norm_min": _number(norms.min()),
        "norm_mean": _number(norms.mean()),
        "norm_max": _number(norms.max()),
        "norm_growth": None if growth is None else growth["mean"],
        "k_min": None if k is None else _number(k.min()),
        "k_mean": None if k is None else _number(k.mean()),
        "k_max": None if k is None else _number(k.max()),
    }


def _angles_of(layer: SphereLayer, bins: int) -> KernelAngles:
    smallest, largest, total, pairs, without_direction = math.inf, -math.inf, 0.0, 0, 0
    counts = torch.zeros(bins, dtype=torch.float64)
    for group in kernel_matrix(layer).to("cpu", torch.float64):
        norms = torch.linalg.vector_norm(group, dim=1)
        directed = norms.isfinite() & (norms > 0)
        units = group[directed] / norms[directed].unsqueeze(1)
        without_direction += len(group) - len(units)
        for start in range(0, len(units), _ROWS_AT_A_TIME):
            cosine = units[start : start + _ROWS_AT_A_TIME] @ units[start:].mT
            rows, columns = torch.triu_indices(cosine.shape[0], cosine.shape[1], offset=1)
            angles = cosine[rows, columns].clamp(-1, 1).acos()
            if len(angles):
                smallest, largest = min(smallest, angles.min().item()), max(largest, angles.max().item())
                total, pairs = total + angles.sum().item(), pairs + len(angles)
                counts += torch.histc(angles, bins, 0, math.pi)
    return {
        "min": smallest if pairs else None,
        "mean": total / pairs if pairs else None,
        "max": largest if pairs else None,
        "pairs": pairs,
        "kernels_without_direction": without_direction,
        "histogram": _histogram(counts, math.pi),
    }


def _k_of(layer: SphereLayer) -> Tensor | None:
    k = layer.k
    if k is None:
        return None
    return (
        k.detach().to("cpu", torch.float64).reshape(-1)
        if isinstance(k, Tensor)
        else torch.tensor([k], dtype=torch.float64)
    )


def _histogram(counts: Tensor, top: float) -> Histogram:
    edges = torch.linspace(0, top, len(counts) + 1, dtype=torch.float64)
    return {"edges": edges.tolist(), "counts": [int(count) for count in counts]}


def _number(value: Tensor) -> float | None:
    """The number, or None where JSON has no word for it."""
    number: float = value.item()
    return number if math.isfinite(number) else None


def _require_bins(bins: int) -> None:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a whole number of at least 1, got {bins!r}.")
