"""FastConv2d: torch's convolution on the engine of SphereConv2d."""

from __future__ import annotations

from torch import Tensor, nn

from spherenet.kernels.plain_conv import plain_conv
from spherenet.ops.geometry import Geometry, resolve_padding

__all__ = ["FastConv2d"]


class FastConv2d(nn.Conv2d):
    """`torch.nn.Conv2d` that takes Winograd's algorithm on CPUs where SphereConv2d takes it.

    Arguments, parameters and results are those of `torch.nn.Conv2d`; `spherenet.convolution` states the errors. A NaN
    or an infinity in the input reaches up to 4×4 outputs more than with torch's algorithm.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the output for a batched or unbatched input."""
        if input.dim() == 4 and input.numel():
            geometry = Geometry(
                self.kernel_size, self.stride, self.padding, self.dilation, self.groups, self.padding_mode
            )
            x, geometry = resolve_padding(input, geometry) if self.kernel_size == (3, 3) else (input, geometry)
            out = plain_conv(x, self.weight, self.bias, geometry)
            if out is not None:
                return out
        return super().forward(input)
