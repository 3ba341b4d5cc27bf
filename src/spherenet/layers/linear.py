"""SphereLinear: a drop-in for `torch.nn.Linear` that answers with angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from spherenet.angles import AngleFunction
from spherenet.functional import sphere_linear
from spherenet.layers.base import SphereLayer, forget_inputs
from spherenet.ops.norms import DEFAULT_EPS

__all__ = ["LazySphereLinear", "SphereLinear"]


class SphereLinear(SphereLayer, nn.Linear):
    """A fully connected layer on angles: out_j = β_j·(g(θ(w_j, x)) + b_j) + γ_j (SPEC 1 (7)).

    Arguments up to `bias` mean what they mean in `torch.nn.Linear`; the rest as in `SphereConv2d`.
    Shapes: [*, in_features] → [*, out_features]; `weight` [out_features, in_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        operator: str | AngleFunction = "cosine",
        k: float | None = None,
        k_sharing: str = "filter",
        rescale: str | Sequence[float] | None = None,
        eps: float = DEFAULT_EPS,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up_sphere(out_features, operator, k, k_sharing, rescale, eps, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for input [*, in_features]."""
        return sphere_linear(
            input,
            self.weight,
            self.bias,
            operator=self.angle,
            beta=self.beta,
            gamma=self.gamma,
            eps=self.eps,
        )


class LazySphereLinear(nn.LazyLinear, SphereLinear):
    """A `SphereLinear` that takes `in_features` from its first input."""

    cls_to_become = SphereLinear  # type: ignore[assignment]

    def __init__(self, out_features: int, bias: bool = False, *, device: Any = None, dtype: Any = None, **sphere: Any):
        # Past nn.LazyLinear's constructor, which knows no operator; what it does after is done here.
        super(nn.LazyLinear, self).__init__(1, out_features, bias, device=device, dtype=dtype, **sphere)
        self.in_features = 0
        forget_inputs(self, device, dtype)
