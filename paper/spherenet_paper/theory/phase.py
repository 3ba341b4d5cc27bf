"""Images reconstructed from their Fourier phases, and from their magnitudes (Eq. 13 of docs/concepts.md).

An image is reconstructed with its phases and the magnitudes of noise, and with its magnitudes and the phases of noise.
Noise is a real image too, so both spectra have the symmetry X(−f) = conj X(f) of real images, and so has their mixture:
the result is real without discarding anything. The means are kept.

Periodic patterns are an exception: their few frequencies are in the magnitudes, and the reconstruction from magnitudes
shows the pattern shifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spherenet.data import MAX_PIXELS, decode, oriented_size
from spherenet.errors import InvalidArgument
from spherenet_paper.theory import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Reconstruction", "correlation", "draw", "mixed_spectrum", "read_image", "reconstruct"]

LONGEST_SIDE = 1024


@dataclass(frozen=True)
class Reconstruction:
    """An image [C, H, W] and its reconstructions.

    Attributes:
        original: The image.
        phases_white: Its phases with the magnitudes of white noise, which are equal at all frequencies on average.
        phases_pink: Its phases with magnitudes that fall as 1/f, as those of most photographs do.
        magnitudes: Its magnitudes with the phases of noise.
    """

    original: Tensor
    phases_white: Tensor
    phases_pink: Tensor
    magnitudes: Tensor

    def correlations(self) -> dict[str, float]:
        """Return the correlation of each reconstruction with the original."""
        return {
            "phases, white magnitudes": correlation(self.phases_white, self.original),
            "phases, 1/f magnitudes": correlation(self.phases_pink, self.original),
            "magnitudes, random phases": correlation(self.magnitudes, self.original),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        channels, height, width = self.original.shape
        return {"height": height, "width": width, "channels": channels, "correlations": self.correlations()}


def read_image(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Return an image in its original size, at most 1024 pixels per side: float64 [1 or 3, H, W] in [0, 1].

    An image with equal channels is returned as a gray image.

    Raises:
        DataError: The image cannot be read.
    """
    decoded = decode(path, _bounded_size(path, max_pixels), 3, max_pixels=max_pixels)
    pixels = torch.from_numpy(decoded).permute(2, 0, 1).to(torch.float64) / 255
    return pixels[:1] if bool((pixels == pixels[:1]).all()) else pixels


def _bounded_size(path: str | Path, max_pixels: int) -> tuple[int, int]:
    """Return height and width to decode to."""
    height, width = oriented_size(path, max_pixels=max_pixels)
    shrink = min(1.0, LONGEST_SIDE / max(height, width))
    return max(1, round(height * shrink)), max(1, round(width * shrink))


def mixed_spectrum(magnitudes_of: Tensor, phases_of: Tensor) -> Tensor:
    """Return the complex spectrum |A|·e^{i·arg B} of two spectra [*, H, W]."""
    return torch.polar(magnitudes_of.abs(), phases_of.angle())


def reconstruct(original: Tensor, seed: int = 0) -> Reconstruction:
    """Reconstruct an image [C, H, W], channel by channel, from its phases and from its magnitudes.

    Raises:
        ValueError: The image has a single color, hence no phases, or fewer than 2 × 2 pixels.
    """
    if original.dim() != 3 or min(original.shape[1:]) < 2:
        raise InvalidArgument(
            "image", f"must be [channels, height, width] with at least 2 × 2 pixels, got {list(original.shape)}."
        )
    means = original.mean((1, 2), keepdim=True)
    centered = original.to(torch.float64) - means
    varies = (centered.abs() > 1e-9).any(2).any(1)
    if not bool(varies.any()):
        raise InvalidArgument("image", "must have more than a single color, because a constant has no phases.")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.fft.fft2(torch.randn(original.shape, generator=generator, dtype=torch.float64))
    spectrum = torch.fft.fft2(centered)

    def image_of(mixed: Tensor) -> Tensor:
        mixed = mixed.clone()
        mixed[:, 0, 0] = 0
        mixed[~varies] = 0  # the phases of a constant channel are rounding errors
        image: Tensor = torch.fft.ifft2(mixed).real
        return image + means

    return Reconstruction(
        original,
        image_of(mixed_spectrum(noise, spectrum)),
        image_of(mixed_spectrum(noise / _frequencies(*original.shape[1:]), spectrum)),
        image_of(mixed_spectrum(spectrum, noise)),
    )


def _frequencies(height: int, width: int) -> Tensor:
    """Return |f| of every coefficient [H, W], with 1 for the mean, which is not used."""
    rows = torch.fft.fftfreq(height, dtype=torch.float64).unsqueeze(1)
    frequencies = torch.hypot(rows, torch.fft.fftfreq(width, dtype=torch.float64))
    frequencies[0, 0] = 1
    return frequencies


def correlation(first: Tensor, second: Tensor) -> float:
    """Return the correlation of two images [C, H, W] over all pixels, after subtracting the mean of each channel."""
    first, second = (image - image.mean((1, 2), keepdim=True) for image in (first, second))
    return float((first * second).sum() / (first.norm() * second.norm()))


def draw(reconstruction: Reconstruction) -> Figure:
    """Draw the image and its three reconstructions side by side."""
    _, height, width = reconstruction.original.shape
    figure, axes = drawing.new_figure(1, 4, width=12, height=min(8.0, max(2.0, 2.95 * height / width)) + 0.6)
    correlations = list(reconstruction.correlations().values())
    titles = [
        "original",
        f"its phases, random magnitudes\n(white), correlation {correlations[0]:.2f}",
        f"its phases, random magnitudes\n(1/f), correlation {correlations[1]:.2f}",
        f"its magnitudes, random phases\ncorrelation {correlations[2]:.2f}",
    ]
    images = [
        reconstruction.original,
        reconstruction.phases_white,
        reconstruction.phases_pink,
        reconstruction.magnitudes,
    ]
    for axis, title, image in zip(axes, titles, images, strict=True):
        pixels = image if image is reconstruction.original else _stretched(image)
        axis.imshow(pixels.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    return figure


def _stretched(image: Tensor) -> Tensor:
    """Map the middle 98 % of all values to [0, 1] and clip the others."""
    values = image.flatten().sort().values
    low, high = values[int(0.01 * (len(values) - 1))], values[int(0.99 * (len(values) - 1))]
    return ((image - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
