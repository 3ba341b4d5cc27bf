"""SphereConv1d, SphereConv2d, SphereConv3d: drop-ins for torch.nn's convolutions that answer with angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from spherenet.angles import AngleFunction
from spherenet.functional import sphere_conv1d, sphere_conv2d, sphere_conv3d
from spherenet.layers.base import SphereLayer, forget_inputs
from spherenet.ops.norms import DEFAULT_EPS

__all__ = ["LazySphereConv1d", "LazySphereConv2d", "LazySphereConv3d", "SphereConv1d", "SphereConv2d", "SphereConv3d"]

Size = int | Sequence[int]


class _SphereConv(SphereLayer):
    """The constructor and forward that the three convolutions share.

    It reads its geometry from torch's own convolution class, which follows it among a subclass's bases.
    """

    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]
    _reversed_padding_repeated_twice: list[int]
    _function: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        operator: str | AngleFunction = "cosine",
        k: float | None = None,
        k_sharing: str = "filter",
        rescale: str | Sequence[float] | None = None,
        eps: float = DEFAULT_EPS,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._set_up_sphere(out_channels, operator, k, k_sharing, rescale, eps, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output for a batched or unbatched input."""
        padding: str | tuple[int, ...] = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0,) * len(self.kernel_size)
        return type(self)._function(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            operator=self.angle,
            beta=self.beta,
            gamma=self.gamma,
            eps=self.eps,
        )


class SphereConv1d(_SphereConv, nn.Conv1d):
    """A convolution over sequences on angles: out = β·(g(θ(w, patch)) + b) + γ (SPEC 1 (1), (2)).

    Arguments as in `SphereConv2d`, geometry as in `torch.nn.Conv1d`.
    Shapes: [N, C, L] or [C, L]; `weight` [out_channels, in_channels/groups, K].
    """

    _function = staticmethod(sphere_conv1d)


class SphereConv2d(_SphereConv, nn.Conv2d):
    """A convolution over images on angles: out = β·(g(θ(w, patch)) + b) + γ (SPEC 1 (1), (2)).

    Arguments up to `padding_mode` mean what they mean in `torch.nn.Conv2d`, whose initialisation it keeps.
    operator: "linear", "cosine", "sigmoid", "learnable" or an `AngleFunction` object.
    k: of the sigmoid (0.3) or where the learned one starts (0.5).
    k_sharing: one learned k a "filter" or one for the "layer"; for one in a whole network pass the same
        `LearnableSigmoidAngle()` to its layers as operator.
    rescale: None, "learned" (β, γ start at 1, 0) or a pair of numbers (β, γ): SphereNorm, SPEC 1 (2).
    eps: added under both square roots of the norms.
    Raises ValueError or TypeError for a wrong argument, or in forward for a wrong rank, channels or dtype.
    Shapes: [N, C, H, W] or [C, H, W]; `weight` [out_channels, in_channels/groups, KH, KW].
    """

    _function = staticmethod(sphere_conv2d)


class SphereConv3d(_SphereConv, nn.Conv3d):
    """A convolution over volumes on angles: out = β·(g(θ(w, patch)) + b) + γ (SPEC 1 (1), (2)).

    Arguments as in `SphereConv2d`, geometry as in `torch.nn.Conv3d`.
    Shapes: [N, C, D, H, W] or [C, D, H, W]; `weight` [out_channels, in_channels/groups, KD, KH, KW].
    """

    _function = staticmethod(sphere_conv3d)


class _LazySphereConv(nn.Module):
    """The constructor that the lazy convolutions share."""

    _lazy_class: type[nn.Module]

    def __init__(
        self,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        *,
        device: Any = None,
        dtype: Any = None,
        **sphere: Any,
    ) -> None:
        geometry = (groups, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        # Past torch's lazy constructor, which knows no operator; what it does after is done here.
        super(self._lazy_class, self).__init__(*geometry, device=device, dtype=dtype, **sphere)  # type: ignore[call-arg]
        self.in_channels = 0
        forget_inputs(self, device, dtype)


class LazySphereConv1d(_LazySphereConv, nn.LazyConv1d, SphereConv1d):  # type: ignore[misc]
    """A `SphereConv1d` that takes `in_channels` from its first input."""

    cls_to_become = SphereConv1d  # type: ignore[assignment]
    _lazy_class = nn.LazyConv1d


class LazySphereConv2d(_LazySphereConv, nn.LazyConv2d, SphereConv2d):  # type: ignore[misc]
    """A `SphereConv2d` that takes `in_channels` from its first input."""

    cls_to_become = SphereConv2d  # type: ignore[assignment]
    _lazy_class = nn.LazyConv2d


class LazySphereConv3d(_LazySphereConv, nn.LazyConv3d, SphereConv3d):  # type: ignore[misc]
    """A `SphereConv3d` that takes `in_channels` from its first input."""

    cls_to_become = SphereConv3d  # type: ignore[assignment]
    _lazy_class = nn.LazyConv3d
