"""What a backend is: an object that knows which cases it supports, and computes output and gradients of a layer."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from spherenet._util.caches import use_private_compiler_cache
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters
from spherenet.ops.sphere_conv import sphere_conv

__all__ = [
    "Backend",
    "BackendError",
    "Case",
    "Gradients",
    "Pass",
    "PlainBackend",
    "Saved",
    "has_triton",
    "load_backend",
]

_MODULES = {
    "winograd": "sphere_conv.winograd",
    "native": "sphere_conv.native",
    "triton": "sphere_conv.triton",
    "compiled": "compiled",
}


class Case(NamedTuple):
    """What decides about the implementation of a call. It is hashable: `dispatch` chooses once per case."""

    backend: str
    """The user's choice."""

    convolution: str
    """The user's choice of the algorithm of 3×3 convolutions on CPUs."""

    threads: int
    """Number of threads of torch."""

    device_type: str
    dtype: torch.dtype
    angle: str | None
    """`AngleFunction.kernel_id`; None for a g that kernels do not know."""

    magnitude: int | None
    """`Magnitude.kernel_id`; None without a magnitude function, 0 for one that kernels do not know."""

    center: str | None
    geometry: Geometry
    x_shape: tuple[int, ...]
    x_stride: tuple[int, ...]
    weight_shape: tuple[int, ...]


class Saved(NamedTuple):
    """Results of forward that backward needs."""

    unit_weight: Tensor
    scale: Tensor
    """1/‖w‖ [filters]."""

    inverse_norm: Tensor
    """1/‖patch‖ [N, groups, *out]."""

    map: Tensor
    """Output of the layer, its cosines or, in half precision on CPUs, the output of the convolution."""

    mean: Tensor | None = None
    """Means of the patches if they are centered."""

    is_output: bool = False
    """Whether `map` is the output, from which the cosines are recovered."""


class Pass(NamedTuple):
    """What a backward pass is asked for."""

    operation: Operation
    parameters: Parameters
    saved: Saved
    needs: Sequence[bool]
    """Whether the gradients of x, weight, k, bias, β, γ and radius are needed."""

    def parameter_gradients(self, sums: Tensor) -> list[Tensor | None]:
        """Return the gradients of k, bias, β, γ and radius from the sums of `Gradients`."""
        _, bias, beta, _, _ = self.parameters
        gradients: list[Tensor | None] = []
        for name, parameter, need in zip(Parameters._fields, self.parameters, self.needs[2:], strict=True):
            if not need or not isinstance(parameter, Tensor):
                gradients.append(None)
                continue
            gradient = sums[{"k": 2, "beta": 1, "radius": 3}.get(name, 0)]
            if name == "beta":
                gradient = gradient if bias is None else gradient + sums[0] * bias
            elif name != "gamma" and beta is not None:
                gradient = gradient * beta
            if parameter.numel() == 1:
                gradient = gradient.sum().reshape(parameter.shape)
            gradients.append(gradient.to(parameter.dtype))
        return gradients


class Gradients(NamedTuple):
    """Results of a backward pass; those that are not needed are None."""

    x: Tensor | None
    weight: Tensor | None
    sums: Tensor | None
    """Four sums per filter for the gradients of the parameters: Σ grad, Σ grad·hg, Σ grad·h·∂g/∂k, Σ grad·g·∂h/∂ρ."""


class BackendError(Exception):
    """A backend cannot compute a call that it supports; `dispatch` uses the plain formula instead."""


class Backend:
    """Base class of backends.

    A backend computes whole layers. `dispatch` calls `forward` for tensors that its gate let through, in a layout of
    torch's choice, with the padding in numbers and without autocast.
    """

    name: str
    uses_autograd = False
    """Whether autograd differentiates `forward`, so that there is no `backward`."""

    def supports(self, case: Case) -> bool:
        """Return whether the backend computes such a layer."""
        raise NotImplementedError

    def prepared(self, case: Case) -> Backend:
        """Return the object that computes the layers of a supported case: the backend itself, or one with a plan."""
        return self

    def unit_weight(self, weight: Tensor, operation: Operation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return weight/‖w‖ per filter in `dtype`, and 1/‖w‖ [filters]."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, Saved | None]:
        """Return the output of a layer and what backward needs.

        Args:
            x: Batch [N, C, *spatial] or rows [N, in].
            weight: Kernels.
            operation: What the layer computes.
            parameters: Its tensors. Bias, β and γ have one value per filter.
            save_cosine: Whether to save what determines the cosines, because the output does not.
        """
        raise NotImplementedError

    def infer(self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters) -> Tensor:
        """Return the output of a layer without what backward needs; arguments as in `forward`."""
        return self.forward(x, weight, operation, parameters, False)[0]

    def backward(self, grad: Tensor, x: Tensor, dtype: torch.dtype, asked: Pass) -> Gradients:
        """Return the gradients of x and of the weight in `dtype`, and the sums if a parameter needs them.

        The last of the four sums may be absent without a radius.
        """
        raise NotImplementedError


class PlainBackend(Backend):
    """The plain differentiable formula, which computes every layer."""

    name = "plain"
    uses_autograd = True

    def supports(self, case: Case) -> bool:
        """Return True."""
        return True

    def forward(
        self, x: Tensor, weight: Tensor, operation: Operation, parameters: Parameters, save_cosine: bool
    ) -> tuple[Tensor, None]:
        """Return the output."""
        return sphere_conv(x, weight, operation, parameters), None


# --- loading -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def load_backend(name: str) -> Backend:
    """Return a backend by name; its module is imported here, because the import of a compiler is slow."""
    if name not in ("winograd", "native"):
        use_private_compiler_cache()
    loaded: Backend = importlib.import_module(f"spherenet.kernels.{_MODULES[name]}").BACKEND
    return loaded


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether the Triton kernels can be imported; called for GPU tensors only, because the import is slow."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        load_backend("triton")
    except Exception as error:  # Triton of another version, or for another system
        cause = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"spherenet runs without Triton, which cannot be imported: {cause}", RuntimeWarning, stacklevel=2)
        return False
    return True
