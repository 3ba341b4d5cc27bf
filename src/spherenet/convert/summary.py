"""Summarize which layers of a model are spherical, which are plain, and why.

A conversion records its reasons and the attribute values it replaced on the modules themselves. As plain attributes
they survive deep copies and pickling, stay when a converted model becomes part of another, and are not in the
state_dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from spherenet._util.validation import require_module
from spherenet.convert.layers import weight_modules
from spherenet.layers import AngularHead, SphereLayer, SphereMultiheadAttention

__all__ = [
    "LayerSummary",
    "SphereSummary",
    "override_attribute",
    "record_drop",
    "record_reason",
    "recorded_drop",
    "recorded_reason",
    "restore_attributes",
    "sphere_summary",
]

_REASON = "_spherenet_reason"
_OVERRIDDEN = "_spherenet_overridden"
_DROPPED = "_spherenet_dropped"


def record_reason(module: nn.Module, reason: str | None) -> None:
    """Record on a module what a conversion did to it, or why it did nothing; None deletes the record."""
    if reason is None:
        module.__dict__.pop(_REASON, None)
    else:
        module.__dict__[_REASON] = reason


def recorded_reason(module: nn.Module) -> str | None:
    """Return the recorded reason of a module, or None if there is none."""
    reason: str | None = module.__dict__.get(_REASON)
    return reason


def record_drop(identity: nn.Module, batch_norm: str, layer: str) -> None:
    """Record on an `nn.Identity` the class of the BatchNorm that it replaces and the name of the layer before it."""
    identity.__dict__[_DROPPED] = (batch_norm, layer)
    record_reason(identity, f"{batch_norm} dropped after {layer}")


def recorded_drop(module: nn.Module) -> tuple[str, str] | None:
    """Return the class of the BatchNorm that a module replaces and the name of the layer before it, or None."""
    dropped: tuple[str, str] | None = module.__dict__.get(_DROPPED)
    return dropped


def override_attribute(module: nn.Module, attribute: str, value: Any) -> None:
    """Set an attribute and record its old value for `restore_attributes`."""
    module.__dict__.setdefault(_OVERRIDDEN, {})[attribute] = getattr(module, attribute)
    setattr(module, attribute, value)


def restore_attributes(module: nn.Module) -> None:
    """Restore the attributes changed by `override_attribute` and delete the reason recorded for that."""
    old_values: dict[str, Any] = module.__dict__.pop(_OVERRIDDEN, {})
    for attribute, value in old_values.items():
        setattr(module, attribute, value)
    if old_values:
        record_reason(module, None)


@dataclass(frozen=True)
class LayerSummary:
    """Summary of one layer, or of another module that a conversion changed.

    Attributes:
        name: Dotted name; "" for the model itself.
        layer: Name of the class.
        kind: "sphere", "plain", "head" (an `AngularHead`), "norm" (a BatchNorm that `drop_batch_norm` kept), "dropped"
            (a BatchNorm replaced by `nn.Identity`) or "changed" (a module with a changed attribute).
        operator: Name of the angle function of a sphere layer; "cosine" for attention.
        k: Parameter of the angle function, a number or, if filters differ, (smallest, largest); None if it has none.
        reason: What a conversion did or why it did nothing; "as created" if no conversion looked at it.
        center: What a sphere layer centers: None, "weight" or "patch".
        magnitude: Name of the magnitude function of a sphere layer; None if it has none.
        parameter: Name of the parameter of the angle function, e.g. "k" or "p"; None if it has none.
    """

    name: str
    layer: str
    kind: str
    operator: str | None
    k: float | tuple[float, float] | None
    reason: str
    center: str | None = None
    magnitude: str | None = None
    parameter: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the row of the printed table."""
        if isinstance(self.k, tuple):
            k = f"{self.k[0]:.3g} to {self.k[1]:.3g}"
        else:
            k = "–" if self.k is None else f"{self.k:.3g}"
        if self.k is not None and self.parameter not in (None, "k"):
            k = f"{self.parameter} = {k}"
        options = (self.operator or "–", k, self.center or "–", self.magnitude or "–")
        return self.name or "(model)", self.layer, self.kind, *options, self.reason


@dataclass(frozen=True)
class SphereSummary:
    """Layers of a model in order of definition, and its number of parameters.

    Iterate over it for the layers, index it by name, or print it for a table. Shared parameters count once.

    Attributes:
        layers: Summaries of the layers.
        parameters: Number of parameters of the model.
        sphere_parameters: Number of parameters of its sphere layers.
    """

    layers: tuple[LayerSummary, ...]
    parameters: int
    sphere_parameters: int

    def __iter__(self) -> Iterator[LayerSummary]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> LayerSummary:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def count(self, kind: str) -> int:
        """Return the number of layers of a kind."""
        return sum(layer.kind == kind for layer in self.layers)

    def __str__(self) -> str:
        header = ("name", "layer", "kind", "operator", "k", "center", "magnitude", "reason")
        rows: list[Sequence[str]] = [header, *(layer.cells() for layer in self.layers)]
        # Columns of options that no layer uses are left out.
        unused = [
            name in ("center", "magnitude") and not any(getattr(layer, name) for layer in self.layers)
            for name in header
        ]
        rows = [[cell for cell, skip in zip(row, unused, strict=True) if not skip] for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        counts = [f"{self.count('sphere')} sphere", f"{self.count('plain')} plain"]
        counts += [f"{self.count(kind)} {kind}" for kind in ("head", "norm", "dropped", "changed") if self.count(kind)]
        fraction = self.sphere_parameters / self.parameters if self.parameters else 0.0
        totals = (
            f"{', '.join(counts)}; {self.parameters:,} parameters, "
            f"{self.sphere_parameters:,} of them in sphere layers ({fraction:.1%})"
        )
        return "\n".join([*lines, "", totals])


def sphere_summary(model: nn.Module) -> SphereSummary:
    """Return which layers of a model are spherical, which are plain, and why; print it for a table.

    Layers are the modules with a weight of two or more dimensions. A layer with several names is listed under the first
    one. Parameters of lazy layers are not counted until they have a shape.

    Args:
        model: Any module, whether converted by `to_sphere`, created by `create_model` or neither.

    Raises:
        TypeError: If model is not a module.

    Example:
        >>> print(sn.sphere_summary(sn.to_sphere(model)))
    """
    require_module("model", model)
    layers = {module for _, module in weight_modules(model)}
    rows = [
        _summarize(name, module)
        for name, module in model.named_modules()
        if module in layers or recorded_reason(module) is not None
    ]
    spherical = [module for module in model.modules() if isinstance(module, SphereLayer)]
    attention = [module for module in model.modules() if isinstance(module, SphereMultiheadAttention)]
    parameters = [p for module in spherical for p in module.parameters()]
    parameters += [p for module in attention for p in module.parameters(recurse=False)]
    return SphereSummary(tuple(rows), _num_parameters(model.parameters()), _num_parameters(parameters))


def _summarize(name: str, module: nn.Module) -> LayerSummary:
    description = (name, type(module).__name__, _kind_of(module))
    reason = recorded_reason(module) or "as created"
    if isinstance(module, SphereMultiheadAttention):
        return LayerSummary(*description, "cosine", None, reason)
    if not isinstance(module, SphereLayer):
        return LayerSummary(*description, None, None, reason)
    magnitude = None if module.magnitude is None else module.magnitude.name
    parameter = None if module.angle.parameter is None else module.angle.parameter.name
    k = _range_of(module.k)
    return LayerSummary(*description, module.operator, k, reason, module.center, magnitude, parameter)


def _kind_of(module: nn.Module) -> str:
    kinds = {
        SphereLayer: "sphere",
        SphereMultiheadAttention: "sphere",
        AngularHead: "head",
        _BatchNorm: "norm",
        nn.Identity: "dropped",
    }
    for cls, kind in kinds.items():
        if isinstance(module, cls):
            return kind
    return "plain" if next(weight_modules(module), ("-", module))[0] == "" else "changed"


def _range_of(k: Tensor | float | None) -> float | tuple[float, float] | None:
    if not isinstance(k, Tensor):
        return k
    if k.is_meta:
        return None
    smallest, largest = k.min().item(), k.max().item()
    return smallest if k.dim() == 0 or smallest == largest else (smallest, largest)


def _num_parameters(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in set(parameters) if not is_lazy(parameter))
