"""What of an image lies in its Fourier phases, and what in its magnitudes (SPEC 1 (9)).

An image is rebuilt with its own phases and the magnitudes of noise, and with its own magnitudes and the phases of
noise. Noise is a real image too, so both halves have the symmetry X(−f) = conj X(f) of real images, and so have their
mixtures: what comes out is real without anything being thrown away. Means are kept; they are neither.

The exception proves the rule: a pattern that repeats has its few frequencies in its magnitudes, and is found again in
what they rebuild, only moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from spherenet.data.images import FORMATS, ORIENTATION, decode
from spherenet.theory import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Rebuilt", "correlation", "draw", "mixed_spectrum", "read_picture", "rebuild"]

LONGEST_SIDE = 1024
SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that turn a picture by a quarter


@dataclass(frozen=True)
class Rebuilt:
    """An image [C, H, W] and what was rebuilt from halves of its spectrum.

    phases_white: its phases, the magnitudes of white noise, the same at all frequencies on average. phases_pink: its
    phases, magnitudes of noise that falls as 1/f as those of most photographs do. magnitudes: its magnitudes, the
    phases of noise.
    """

    original: Tensor
    phases_white: Tensor
    phases_pink: Tensor
    magnitudes: Tensor

    def correlations(self) -> dict[str, float]:
        """Return the correlation of each with the original."""
        return {
            "phases, white magnitudes": correlation(self.phases_white, self.original),
            "phases, 1/f magnitudes": correlation(self.phases_pink, self.original),
            "magnitudes, random phases": correlation(self.magnitudes, self.original),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON takes."""
        channels, height, width = self.original.shape
        return {"height": height, "width": width, "channels": channels, "correlations": self.correlations()}


def read_picture(path: str | Path) -> Tensor:
    """Return a picture in its own size, scaled down to 1024 pixels a side at most: float64 [1 or 3, H, W] in [0, 1].

    A picture whose channels are equal is read as grey. DataError for one that cannot be read (see `decode`).
    """
    pixels = torch.from_numpy(decode(path, _bounded_size(path), 3)).permute(2, 0, 1).to(torch.float64) / 255
    return pixels[:1] if bool((pixels == pixels[:1]).all()) else pixels


def _bounded_size(path: str | Path) -> tuple[int, int]:
    """Height and width to decode to; any, where `decode` will refuse the picture."""
    if not Path(path).is_file():
        return 2, 2
    try:
        with Image.open(path, formats=FORMATS) as image:  # reads the head alone
            width, height = image.size
            if image.getexif().get(ORIENTATION) in SIDEWAYS:
                width, height = height, width
    except Exception:  # whatever it is, `decode` names it
        return 2, 2
    shrink = min(1.0, LONGEST_SIDE / max(height, width))
    return max(1, round(height * shrink)), max(1, round(width * shrink))


def mixed_spectrum(magnitudes_of: Tensor, phases_of: Tensor) -> Tensor:
    """The complex spectrum |A|·e^{i·arg B} of two spectra [*, H, W]."""
    return torch.polar(magnitudes_of.abs(), phases_of.angle())


def rebuild(picture: Tensor, seed: int = 0) -> Rebuilt:
    """Rebuild a picture [C, H, W], channel by channel, from halves of its spectrum.

    ValueError for a picture of a single colour, which has no phases, and for one of fewer than 2 × 2 pixels.
    """
    if picture.dim() != 3 or min(picture.shape[1:]) < 2:
        raise ValueError(
            f"picture must be [channels, height, width] of 2 × 2 pixels or more, got {list(picture.shape)}."
        )
    means = picture.mean((1, 2), keepdim=True)
    centred = picture.to(torch.float64) - means
    shows_something = (centred.abs() > 1e-9).any(2).any(1)
    if not bool(shows_something.any()):
        raise ValueError("the picture has a single colour, hence no phases; allowed are pictures that show something.")
    generator = torch.Generator().manual_seed(seed)
    noise = torch.fft.fft2(torch.randn(picture.shape, generator=generator, dtype=torch.float64))
    spectrum = torch.fft.fft2(centred)

    def image(mixed: Tensor) -> Tensor:
        mixed = mixed.clone()
        mixed[:, 0, 0] = 0
        mixed[~shows_something] = 0  # the phases of a channel of one value are those of rounding errors
        made: Tensor = torch.fft.ifft2(mixed).real
        return made + means

    return Rebuilt(
        picture,
        image(mixed_spectrum(noise, spectrum)),
        image(mixed_spectrum(noise / _frequencies(picture), spectrum)),
        image(mixed_spectrum(spectrum, noise)),
    )


def _frequencies(picture: Tensor) -> Tensor:
    """|f| of every coefficient [H, W]; that of the mean, which is left out, is 1."""
    height, width = picture.shape[1:]
    rows = torch.fft.fftfreq(height, dtype=torch.float64).unsqueeze(1)
    frequencies = torch.hypot(rows, torch.fft.fftfreq(width, dtype=torch.float64))
    frequencies[0, 0] = 1
    return frequencies


def correlation(first: Tensor, second: Tensor) -> float:
    """The correlation of two images [C, H, W] over all pixels, each channel about its own mean."""
    first, second = (image - image.mean((1, 2), keepdim=True) for image in (first, second))
    return float((first * second).sum() / (first.norm() * second.norm()))


def draw(rebuilt: Rebuilt) -> Figure:
    """The picture and the three that were rebuilt, side by side."""
    _, height, width = rebuilt.original.shape
    figure, axes = drawing.new_figure(1, 4, width=12, height=min(8.0, max(2.0, 2.95 * height / width)) + 0.6)
    found = list(rebuilt.correlations().values())
    titles = [
        "original",
        f"its phases, random magnitudes\n(white), correlation {found[0]:.2f}",
        f"its phases, random magnitudes\n(1/f), correlation {found[1]:.2f}",
        f"its magnitudes, random phases\ncorrelation {found[2]:.2f}",
    ]
    images = [rebuilt.original, rebuilt.phases_white, rebuilt.phases_pink, rebuilt.magnitudes]
    for axis, title, image in zip(axes, titles, images, strict=True):
        shown = image if image is rebuilt.original else _stretched(image)
        axis.imshow(shown.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    return figure


def _stretched(image: Tensor) -> Tensor:
    """The middle 98 % of all values spread over [0, 1]; what noise adds beyond is cut."""
    values = image.flatten().sort().values
    low, high = values[int(0.01 * (len(values) - 1))], values[int(0.99 * (len(values) - 1))]
    return ((image - low) / (high - low).clamp_min(1e-12)).clamp(0, 1)
