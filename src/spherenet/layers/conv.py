"""SphereConv1d, SphereConv2d, SphereConv3d and SphereLinear: replacements for torch.nn's layers that compute angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from spherenet.kernels.dispatch import sphere_layer
from spherenet.layers.base import Proxy, SphereLayer, getting_weight, make_lazy, record_as_leaf
from spherenet.layers.options import SphereKeywords, SphereOptions
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters, require_center

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LazySphereConv1d",
    "LazySphereConv2d",
    "LazySphereConv3d",
    "LazySphereLinear",
    "SphereConv1d",
    "SphereConv2d",
    "SphereConv3d",
    "SphereLinear",
]

Size = int | Sequence[int]
_FULLY_CONNECTED = Geometry()


class _SphereConv(SphereLayer):
    """Constructor and forward of the three convolutions.

    The attributes of the geometry come from torch's convolution class, the next base of each subclass.
    """

    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

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
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SphereKeywords],
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
        self._set_up_sphere(out_channels, SphereOptions(**options), device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output for a batched or unbatched input."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input)
        geometry = Geometry(self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode)
        operation = Operation(self.angle, geometry, self.eps, self.center, self.magnitude)
        return sphere_layer(input, self.weight, operation, Parameters(None, self.bias, self.beta, self.gamma))


class SphereConv1d(_SphereConv, nn.Conv1d):
    """Convolution over sequences that computes angles: out = β·(g(θ(w, patch)) + b) + γ (Eq. 1 and 3).

    Arguments are those of `SphereConv2d`, with the geometry of `torch.nn.Conv1d`.

    Shape:
        [N, C, L] or [C, L]; `weight` [out_channels, in_channels/groups, K].
    """


class SphereConv2d(_SphereConv, nn.Conv2d):
    """Convolution over images that computes angles: out = β·(g(θ(w, patch)) + b) + γ (Eq. 1 and 3).

    Weights are initialized as in `torch.nn.Conv2d`.

    Args:
        in_channels: As in `torch.nn.Conv2d`.
        out_channels: As in `torch.nn.Conv2d`.
        kernel_size: As in `torch.nn.Conv2d`.
        stride: As in `torch.nn.Conv2d`.
        padding: As in `torch.nn.Conv2d`.
        dilation: As in `torch.nn.Conv2d`.
        groups: As in `torch.nn.Conv2d`.
        bias: As in `torch.nn.Conv2d`, but False by default.
        padding_mode: As in `torch.nn.Conv2d`.
        operator: A name of `spherenet.angles.OPERATORS`, e.g. "cosine", "linear", "sigmoid" or "learnable", or an
            `AngleFunction` object.
        k: Parameter of the sigmoid (default 0.3), or initial value of a learned one (default 0.5).
        k_sharing: One learned k per "filter" or one for the "layer". To share one k in a network, pass the same
            `LearnableSigmoidAngle()` to all layers as operator.
        rescale: None, "learned" (β and γ start at 1 and 0) or a pair of numbers (β, γ).
        eps: Number added under both square roots of the norms.
        center: None, "weight" to remove the mean of each kernel, or "patch" to remove that of each patch too (Eq. 14).
        magnitude: Magnitude function h that multiplies g: "ball", "tanh", "linear", "segmented", "log", "mixed" or a
            `Magnitude` object; None or "sphere" for h = 1 (Eq. 15).
        radius: Radius of h, 1 by default; "learned" for one learned radius per filter that starts at 1, or
            "learned:10" for one that starts at 10. Patch norms grow with the square root of the kernel size; far above
            the radius, h is almost constant and a learned radius has almost no gradient.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If an argument has the wrong type; in forward for a wrong dtype.
        ValueError: If an argument is not allowed; in forward for a wrong number of dimensions or channels.

    Shape:
        [N, C, H, W] or [C, H, W]; `weight` [out_channels, in_channels/groups, KH, KW].
    """


class SphereConv3d(_SphereConv, nn.Conv3d):
    """Convolution over volumes that computes angles: out = β·(g(θ(w, patch)) + b) + γ (Eq. 1 and 3).

    Arguments are those of `SphereConv2d`, with the geometry of `torch.nn.Conv3d`.

    Shape:
        [N, C, D, H, W] or [C, D, H, W]; `weight` [out_channels, in_channels/groups, KD, KH, KW].
    """


class SphereLinear(SphereLayer, nn.Linear):
    """Fully connected layer that computes angles: out_j = β_j·(g(θ(w_j, x)) + b_j) + γ_j (Eq. 10).

    Args:
        in_features: As in `torch.nn.Linear`.
        out_features: As in `torch.nn.Linear`.
        bias: As in `torch.nn.Linear`, but False by default.
        operator: As in `SphereConv2d`.
        k: As in `SphereConv2d`.
        k_sharing: As in `SphereConv2d`.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        center: As in `SphereConv2d`.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Shape:
        [*, in_features] → [*, out_features]; `weight` [out_features, in_features].
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SphereKeywords],
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self._set_up_sphere(out_features, SphereOptions(**options), device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output for an input [*, in_features]."""
        if isinstance(input, Proxy):
            return record_as_leaf(self, input)
        operation = Operation(self.angle, _FULLY_CONNECTED, self.eps, self.center, self.magnitude)
        return sphere_layer(input, self.weight, operation, Parameters(None, self.bias, self.beta, self.gamma))


class _LazySphereConv(nn.Module):
    """Constructor of the lazy convolutions."""

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
        **sphere: Unpack[SphereKeywords],
    ) -> None:
        geometry = (groups, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode)
        # Skip the constructor of torch's lazy class, which does not accept an operator.
        super(self._lazy_class, self).__init__(*geometry, device=device, dtype=dtype, **sphere)  # type: ignore[call-arg, misc]
        self.in_channels = 0
        make_lazy(self, device, dtype)

    def initialize_parameters(self, input: Tensor) -> None:
        """Create weight and bias for the channels of the first input."""
        layer: Any = self
        with getting_weight(layer):
            super().initialize_parameters(input)  # type: ignore[misc]
        require_center(layer.center, layer.weight[0].numel())


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


class LazySphereLinear(nn.LazyLinear, SphereLinear):
    """A `SphereLinear` that takes `in_features` from its first input."""

    cls_to_become = SphereLinear  # type: ignore[assignment]

    def __init__(
        self,
        out_features: int,
        bias: bool = False,
        *,
        device: Any = None,
        dtype: Any = None,
        **sphere: Unpack[SphereKeywords],
    ) -> None:
        # Skip the constructor of nn.LazyLinear, which does not accept an operator.
        super(nn.LazyLinear, self).__init__(1, out_features, bias, device=device, dtype=dtype, **sphere)
        self.in_features = 0
        make_lazy(self, device, dtype)

    def initialize_parameters(self, input: Tensor) -> None:
        """Create weight and bias for the features of the first input."""
        with getting_weight(self):
            super().initialize_parameters(input)
        require_center(self.center, self.weight.shape[1])
