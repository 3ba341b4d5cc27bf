"""Diagnostics of the kernels of sphere layers: angles, k, norms and penalties as numbers for logging.

Every function returns dictionaries of Python numbers by layer name that `json.dumps` accepts. None stands for a
quantity that does not exist or is not finite. No gradients are recorded. Angles are in radians.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypedDict

import torch
from torch import Tensor

from spherenet.errors import InvalidArgument
from spherenet.layers import SphereLayer
from spherenet.regularizers.energy import hyperspherical_energy
from spherenet.regularizers.kernels import (
    Modules,
    kernel_matrix,
    orthogonality,
    orthogonality_minimum,
    sphere_layers,
)

__all__ = [
    "Histogram",
    "KValues",
    "KernelAngles",
    "KernelNorms",
    "k_values",
    "kernel_angles",
    "layer_diagnostics",
]

_ROWS_AT_A_TIME = 1024  # a layer of 10⁵ kernels has 10¹⁰ angles, which are never all stored


class Histogram(TypedDict):
    """Counts between consecutive edges; the last bin includes its upper edge."""

    edges: list[float]
    counts: list[int]


class KernelAngles(TypedDict):
    """Angles in [0, π] between the pairs of kernels of one layer, None if there are no pairs.

    Kernels without direction are zero or not finite; they have no angles.
    """

    min: float | None
    mean: float | None
    max: float | None
    pairs: int
    kernels_without_direction: int
    histogram: Histogram


class KValues(TypedDict):
    """Values and distribution of the parameter of the angle function in one layer."""

    parameter: str
    values: list[float | None]
    min: float | None
    mean: float | None
    max: float | None
    histogram: Histogram


def kernel_angles(model: Modules, bins: int = 18) -> dict[str, KernelAngles]:
    """Return the angles between the kernels of each sphere layer: minimum, mean, maximum and a histogram over [0, π].

    Kernels are paired within their group. Angles are computed in float64, because acos turns the rounding error of a
    float32 cosine near 1 into 3e-4 radians.

    Args:
        model: A model, a layer, or several of them.
        bins: Number of bins of the histogram.

    Raises:
        ValueError: If bins is less than 1.
    """
    _require_bins(bins)
    with torch.no_grad():
        return {name: _angles_of(layer, bins) for name, layer in sphere_layers(model).items()}


def k_values(model: Modules, bins: int = 20) -> dict[str, KValues]:
    """Return the parameter (k, or p) of each sphere layer whose operator has one: its values and a histogram.

    The histogram is over [0, 1], as in the figure of the paper, or up to the largest k if that is greater. A layer
    with a single k (shared or fixed) lists one value. A k that several layers share is listed for each of them.

    Args:
        model: A model, a layer, or several of them.
        bins: Number of bins of the histogram.

    Raises:
        ValueError: If bins is less than 1.
    """
    _require_bins(bins)
    by_layer: dict[str, KValues] = {}
    for name, layer in sphere_layers(model).items():
        values = _k_of(layer)
        if values is not None:
            finite = values[values.isfinite()]
            top = max([1.0, *finite.tolist()])
            parameter = layer.angle.parameter
            by_layer[name] = {
                "parameter": "k" if parameter is None else parameter.name,
                "values": [_number(value) for value in values],
                "min": _number(values.min()),
                "mean": _number(values.mean()),
                "max": _number(values.max()),
                "histogram": _histogram(torch.histc(finite, bins, 0, top), top),
            }
    return by_layer


def layer_diagnostics(
    model: Modules, initial_norms: KernelNorms | None = None, *, form: str = "raw", s: float = 2.0
) -> dict[str, dict[str, float | None]]:
    """Return a flat dictionary of numbers for each sphere layer, for a row of a log.

    The keys are kernels, fan_in, groups; angle_min, angle_mean, angle_max; energy, half_space_energy; orthogonality,
    orthogonality_minimum, orthogonality_excess (what training can still remove); norm_min, norm_mean, norm_max;
    norm_growth (mean ratio to `initial_norms`); k_min, k_mean, k_max (of k or p; None if the operator
    has no parameter).

    Args:
        model: A model, a layer, or several of them.
        initial_norms: Norms to compare with; without them norm_growth is None.
        form: Form of `orthogonality`.
        s: Order of `hyperspherical_energy`.
    """
    layers = sphere_layers(model)
    growth = {} if initial_norms is None else initial_norms.growth(layers)
    with torch.no_grad():
        return {name: _numbers_of(layer, growth.get(name), form, s) for name, layer in layers.items()}


def _numbers_of(
    layer: SphereLayer, growth: dict[str, float | None] | None, form: str, s: float
) -> dict[str, float | None]:
    groups, kernels, fan_in = kernel_matrix(layer).shape
    angles, norms, k = _angles_of(layer, bins=1), _norms_of(layer), _k_of(layer)
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
    """Return the number, or None if JSON cannot represent it."""
    number: float = value.item()
    return number if math.isfinite(number) else None


def _require_bins(bins: int) -> None:
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise InvalidArgument("bins", f"must be an integer of at least 1, got {bins!r}.")


def _norms_of(layer: SphereLayer) -> Tensor:
    """Return ‖w‖ of each kernel of a layer, [kernels], in float64 on the CPU and without eps."""
    with torch.no_grad():
        matrix = kernel_matrix(layer).to("cpu", torch.float64)
        norms: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
        return norms.flatten()


class KernelNorms:
    """Snapshot of the kernel norms of a model's sphere layers, for comparison with later norms.

    The gradient of a scale-invariant kernel is orthogonal to it, so that every step of SGD lengthens the kernel. Its
    direction then changes less: under plain SGD by 1/growth², because the kernel is longer and its gradient is smaller.
    The snapshot holds norms by layer name and no modules.

    Args:
        model: A model, a layer, or several of them.
    """

    def __init__(self, model: Modules) -> None:
        self._norms = {name: _norms_of(layer) for name, layer in sphere_layers(model).items()}

    def growth(self, model: Modules) -> dict[str, dict[str, float | None]]:
        """Return the minimum, mean and maximum over the kernels of each layer of ‖w now‖ / ‖w of the snapshot‖.

        Kernels that were zero or are not finite are left out. Layers without other kernels have None.

        Raises:
            ValueError: If the model's layers are not those of the snapshot.
        """
        now = {name: _norms_of(layer) for name, layer in sphere_layers(model).items()}
        _require_same("model", self._norms, now)
        return {name: _spread(now[name] / before) for name, before in self._norms.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the norms by layer name, for saving."""
        return {name: norms.clone() for name, norms in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the norms of an earlier snapshot.

        Raises:
            ValueError: If they belong to other layers.
        """
        _require_same("state", self._norms, state)
        self._norms = {name: state[name].detach().to("cpu", torch.float64).clone() for name in self._norms}


def _spread(ratio: Tensor) -> dict[str, float | None]:
    ratio = ratio[ratio.isfinite()]
    if not len(ratio):
        return {"min": None, "mean": None, "max": None}
    return {"min": ratio.min().item(), "mean": ratio.mean().item(), "max": ratio.max().item()}


def _require_same(argument: str, snapshot: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> None:
    """Raise ValueError if layers have other names or sizes than those of the snapshot."""
    expected = {name: len(norms) for name, norms in snapshot.items()}
    actual = {name: len(norms) for name, norms in current.items()}
    different = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    if different:
        name = different[0]
        raise InvalidArgument(
            argument,
            f"must have the sphere layers of the snapshot, but {len(different)} differ: {name!r} has "
            f"{expected.get(name, 'no')} kernels in the snapshot and {actual.get(name, 'no')} in {argument}.",
        )
