"""SphereConvTranspose1d, SphereConvTranspose2d and SphereConvTranspose3d: transposed convolutions on angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from spherenet.errors import InvalidArgumentType
from spherenet.kernels.dispatch import sphere_layer
from spherenet.layers.base import Proxy, SphereLayer, record_as_leaf
from spherenet.layers.options import SphereKeywords, SphereOptions
from spherenet.ops.geometry import Geometry
from spherenet.ops.operation import Operation, Parameters

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SphereConvTranspose1d", "SphereConvTranspose2d", "SphereConvTranspose3d"]

Size = int | Sequence[int]


class _SphereConvTranspose(SphereLayer):
    """Constructor and forward of the three transposed convolutions.

    The attributes of the geometry come from torch's class, the next base of each subclass.
    """

    weight: Tensor
    bias: Tensor | None
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        bias: bool = False,
        dilation: Size = 1,
        padding_mode: str = "zeros",
        *,
        device: Any = None,
        dtype: Any = None,
        **options: Unpack[SphereKeywords],
    ) -> None:
        _reject_padding_word(padding)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        self._set_up_sphere(out_channels, SphereOptions(**options), device, dtype)

    def forward(self, input: Tensor, output_size: Sequence[int] | None = None) -> Tensor:
        """Return the output for a batched or unbatched input.

        Args:
            input: The input.
            output_size: Spatial size of the output, as in `torch.nn.ConvTranspose2d`; it replaces `output_padding`.
        """
        if isinstance(input, Proxy):
            return record_as_leaf(self, input, output_size)
        dims = len(self.kernel_size)
        output_padding = tuple(
            self._output_padding(  # type: ignore[operator]
                input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
            )
        )
        geometry = Geometry(
            self.kernel_size, self.stride, self.padding, self.dilation, self.groups, "zeros", True, output_padding
        )
        operation = Operation(self.angle, geometry, self.eps, self.center, self.magnitude)
        return sphere_layer(input, self.weight, operation, Parameters(None, self.bias, self.beta, self.gamma))


def _reject_padding_word(padding: object) -> None:
    """Raise TypeError for "same" and "valid", whose letters torch would store as four sizes."""
    if isinstance(padding, str):
        raise InvalidArgumentType("padding", f"must be a number or a sequence of numbers, got {padding!r}.")


class SphereConvTranspose1d(_SphereConvTranspose, nn.ConvTranspose1d):
    """Transposed convolution over sequences that computes angles (Eq. 1 and 3).

    Arguments are those of `SphereConvTranspose2d`, with the geometry of `torch.nn.ConvTranspose1d`.

    Shape:
        [N, C, L] or [C, L]; `weight` [in_channels, out_channels/groups, K].
    """


class SphereConvTranspose2d(_SphereConvTranspose, nn.ConvTranspose2d):
    """Transposed convolution over images that computes angles: out = β·(g(θ(w, patch)) + b) + γ (Eq. 1 and 3).

    The patch of an output pixel contains the input values that contribute to it, and the kernel of filter o is
    w[:, o]. This is the `SphereConv2d` of the input with stride − 1 zeros between its pixels and the flipped kernels. A
    pixel that no input value reaches has a zero patch. Weights are initialized as in `torch.nn.ConvTranspose2d`.

    Args:
        in_channels: As in `torch.nn.ConvTranspose2d`.
        out_channels: As in `torch.nn.ConvTranspose2d`.
        kernel_size: As in `torch.nn.ConvTranspose2d`.
        stride: As in `torch.nn.ConvTranspose2d`.
        padding: As in `torch.nn.ConvTranspose2d`.
        output_padding: As in `torch.nn.ConvTranspose2d`.
        groups: As in `torch.nn.ConvTranspose2d`.
        bias: As in `torch.nn.ConvTranspose2d`, but False by default.
        dilation: As in `torch.nn.ConvTranspose2d`.
        padding_mode: "zeros", as in `torch.nn.ConvTranspose2d`.
        operator: As in `SphereConv2d`.
        k: As in `SphereConv2d`.
        k_sharing: As in `SphereConv2d`.
        rescale: As in `SphereConv2d`.
        eps: As in `SphereConv2d`.
        center: As in `SphereConv2d`. The mean of a patch includes the zeros between the pixels.
        magnitude: As in `SphereConv2d`.
        radius: As in `SphereConv2d`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        TypeError: If an argument has the wrong type; in forward for a wrong dtype.
        ValueError: If an argument is not allowed; in forward for a wrong number of dimensions or channels.

    Shape:
        [N, C, H, W] or [C, H, W]; `weight` [in_channels, out_channels/groups, KH, KW].
    """


class SphereConvTranspose3d(_SphereConvTranspose, nn.ConvTranspose3d):
    """Transposed convolution over volumes that computes angles (Eq. 1 and 3).

    Arguments are those of `SphereConvTranspose2d`, with the geometry of `torch.nn.ConvTranspose3d`.

    Shape:
        [N, C, D, H, W] or [C, D, H, W]; `weight` [in_channels, out_channels/groups, KD, KH, KW].
    """
