"""What a conversion leaves on the modules it met: a reason to read, and attribute values to give back.

Both live on the module itself, not in a list at the root: they survive deep copies, pickling, and a converted network
that becomes a part of another. They are plain attributes, so no state_dict knows them.

Which layers of a model are spherical, which are plain, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from spherenet.convert.layers import weight_modules
from spherenet.layers import AngularHead, SphereLayer

__all__ = ["LayerSummary", "SphereSummary", "give_back", "put_note", "read_note", "set_aside", "sphere_summary"]

_NOTE = "_spherenet_note"
_SET_ASIDE = "_spherenet_set_aside"


def put_note(module: nn.Module, text: str | None) -> None:
    """Say on a module what was done to it, or why nothing was; None takes the note away."""
    if text is None:
        module.__dict__.pop(_NOTE, None)
    else:
        module.__dict__[_NOTE] = text


def read_note(module: nn.Module) -> str | None:
    """Return the note of a module, None where no conversion met it."""
    note: str | None = module.__dict__.get(_NOTE)
    return note


def set_aside(module: nn.Module, attribute: str, value: Any) -> None:
    """Give an attribute a new value; the old one waits for `give_back`."""
    module.__dict__.setdefault(_SET_ASIDE, {})[attribute] = getattr(module, attribute)
    setattr(module, attribute, value)


def give_back(module: nn.Module) -> None:
    """Restore every attribute that was set aside; the note about it goes too."""
    waiting: dict[str, Any] = module.__dict__.pop(_SET_ASIDE, {})
    for attribute, value in waiting.items():
        setattr(module, attribute, value)
    if waiting:
        put_note(module, None)


@dataclass(frozen=True)
class LayerSummary:
    """One layer, or one other module that a conversion changed.

    kind: "sphere", "plain", "head" (an `AngularHead`), "norm" (a BatchNorm that was looked at), "dropped" or "changed".
    k: a number, the least and the greatest where each filter has its own, None where there is none.
    reason: what a conversion did or why it did nothing; "as built" where none did anything.
    """

    name: str
    layer: str
    kind: str
    operator: str | None
    k: float | tuple[float, float] | None
    reason: str

    def cells(self) -> tuple[str, ...]:
        """The columns of the printed table."""
        return self.name or "(model)", self.layer, self.kind, self.operator or "–", self._k_text(), self.reason

    def _k_text(self) -> str:
        if isinstance(self.k, tuple):
            return f"{self.k[0]:.3g} to {self.k[1]:.3g}"
        return "–" if self.k is None else f"{self.k:.3g}"


@dataclass(frozen=True)
class SphereSummary:
    """The layers of a model in the order of their definition, and its number of parameters, shared ones once.

    Iterating gives the layers; printing it gives a table.
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
        """Return how many layers are of this kind."""
        return sum(layer.kind == kind for layer in self.layers)

    def __str__(self) -> str:
        rows = [("name", "layer", "kind", "operator", "k", "reason"), *(layer.cells() for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", self._totals()])

    def _totals(self) -> str:
        counts = [f"{self.count('sphere')} sphere", f"{self.count('plain')} plain"]
        counts += [f"{self.count(kind)} {kind}" for kind in ("head", "norm", "dropped", "changed") if self.count(kind)]
        share = self.sphere_parameters / self.parameters if self.parameters else 0.0
        return (
            f"{', '.join(counts)}; {self.parameters:,} parameters, "
            f"{self.sphere_parameters:,} of them in sphere layers ({share:.1%})"
        )


def sphere_summary(model: nn.Module) -> SphereSummary:
    """Return what is spherical in a model, what is plain, and why; print it for a table.

    Works for any model, converted by `to_sphere`, built by `create_model` or neither. Layers are the modules that own a
    weight of two dimensions or more; a layer with several names is listed under its first. Parameters of lazy layers
    are not counted yet. Raises TypeError for anything but a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, got {model!r} of type {type(model).__name__}.")
    layers = {module for _, module in weight_modules(model)}
    rows = [
        _summarise(name, module)
        for name, module in model.named_modules()
        if module in layers or read_note(module) is not None
    ]
    spherical = [m for m in model.modules() if isinstance(m, SphereLayer)]
    return SphereSummary(tuple(rows), _count([model]), _count(spherical))


def _summarise(name: str, module: nn.Module) -> LayerSummary:
    operator, k = (module.operator, _range(module.k)) if isinstance(module, SphereLayer) else (None, None)
    return LayerSummary(name, type(module).__name__, _kind(module), operator, k, read_note(module) or "as built")


def _kind(module: nn.Module) -> str:
    kinds = {SphereLayer: "sphere", AngularHead: "head", _BatchNorm: "norm", nn.Identity: "dropped"}
    for cls, kind in kinds.items():
        if isinstance(module, cls):
            return kind
    return "plain" if next(weight_modules(module), ("-", module))[0] == "" else "changed"


def _range(k: Tensor | float | None) -> float | tuple[float, float] | None:
    if not isinstance(k, Tensor):
        return k
    if k.is_meta:
        return None
    least, greatest = k.min().item(), k.max().item()
    return least if k.dim() == 0 or least == greatest else (least, greatest)


def _count(modules: Sequence[nn.Module]) -> int:
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))
