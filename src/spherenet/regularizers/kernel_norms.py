"""How far the norms of sphere kernels have grown since a moment one remembers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spherenet.layers import SphereLayer
from spherenet.regularizers.sphere_layers import Modules, kernel_matrix, sphere_layers

__all__ = ["KernelNorms", "norms_of"]


def norms_of(layer: SphereLayer) -> Tensor:
    """Return ‖w‖ of each kernel of a layer, [kernels], in float64 on the CPU (no eps: the norm itself)."""
    with torch.no_grad():
        matrix = kernel_matrix(layer).to("cpu", torch.float64)
        norms: Tensor = torch.linalg.vector_norm(matrix, dim=-1)
        return norms.flatten()


class KernelNorms:
    """The kernel norms of a model's sphere layers at one moment, to compare later ones with.

    The gradient of a scale-invariant kernel is orthogonal to it, so every step of SGD lengthens it, and its
    direction then turns by less: under plain SGD by 1/growth², once for the longer kernel and once for its
    smaller gradient. The snapshot holds norms by layer name, no module.
    """

    def __init__(self, model: Modules) -> None:
        """model: a model, a layer, or several; its norms are taken now."""
        self._norms = {name: norms_of(layer) for name, layer in sphere_layers(model).items()}

    def growth(self, model: Modules) -> dict[str, dict[str, float | None]]:
        """Return for each layer the min, mean and max over kernels of ‖w now‖ / ‖w then‖.

        A kernel that was zero, or is not finite, is left out; a layer with no other kernels has None. Raises
        ValueError where the model's layers are not those of the snapshot.
        """
        layers = sphere_layers(model)
        now = {name: norms_of(layer) for name, layer in layers.items()}
        _require_same("model", self._norms, now)
        return {name: _spread(now[name] / then) for name, then in self._norms.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the norms by layer name, to be saved beside the model."""
        return {name: norms.clone() for name, norms in self._norms.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the norms of an earlier snapshot; ValueError where they are of other layers."""
        _require_same("state", self._norms, state)
        self._norms = {name: state[name].detach().to("cpu", torch.float64).clone() for name in self._norms}


def _spread(ratio: Tensor) -> dict[str, float | None]:
    ratio = ratio[ratio.isfinite()]
    if not len(ratio):
        return {"min": None, "mean": None, "max": None}
    return {"min": ratio.min().item(), "mean": ratio.mean().item(), "max": ratio.max().item()}


def _require_same(argument: str, snapshot: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse layers of other names or sizes than the snapshot's."""
    expected = {name: len(norms) for name, norms in snapshot.items()}
    found = {name: len(norms) for name, norms in given.items()}
    different = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if different:
        name = different[0]
        raise ValueError(
            f"{argument} must have the sphere layers of the snapshot, but {len(different)} differ: {name!r} has "
            f"{expected.get(name, 'no')} kernels in the snapshot and {found.get(name, 'no')} in {argument}."
        )
