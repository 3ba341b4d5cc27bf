"""What the page shows of an image: probabilities and angles of classes, and the patches with the largest responses."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from spherenet.data.corruptions import Corruption, corrupt
from spherenet.data.images import MAX_PIXELS, center_offset, decode, read_pixels
from spherenet.data.preprocessing import normalize
from spherenet.errors import InvalidArgument, ModelError
from spherenet.kernels.settings import convolution
from spherenet.models import Classifier
from spherenet.training.saved_runs import Predictor

__all__ = ["Analyzer", "Layer"]

SHOWN_CLASSES = 10
SHOWN_PATCHES = 5
SHOWN_LAYERS = 12
LIGHTS = ("spot", "ramp", "cast", "contrast")
"""Corruptions that the page offers, with strengths from 0 to 1."""

DISPLAY_SIDE = 384
"""Longest side of the displayed image in pixels, if the image of the network is smaller."""


class Layer(NamedTuple):
    """A convolution whose responses can be shown, and the part of the image that one of its outputs depends on."""

    name: str
    description: str
    height: int
    width: int


class Analyzer:
    """Network of a predictor with hooks for the outputs of its convolutions.

    Args:
        predictor: Model with classes and preprocessing.
        max_pixels: Largest number of pixels of an image file.

    Raises:
        ModelError: If the model is not a `Classifier`, or has no convolution.
    """

    def __init__(self, predictor: Predictor, *, max_pixels: int = MAX_PIXELS) -> None:
        if not isinstance(predictor.model, Classifier):
            raise ModelError(f"model must be a Classifier of create_model, got {type(predictor.model).__name__}.")
        self.predictor, self.max_pixels = predictor, max_pixels
        self.model = predictor.model.eval().requires_grad_(False)
        self.layers = self._find_layers()
        if not self.layers:
            raise ModelError("model must have a convolution, got none.")
        goal = 0.35 * predictor.preprocessing.size[0]  # larger than an edge, smaller than an object
        self.default_layer = min(self.layers, key=lambda layer: abs(layer.height - goal)).name

    @property
    def lights(self) -> tuple[str, ...]:
        """Names of the corruptions that apply to the images of this network."""
        return tuple(name for name in LIGHTS if name != "cast" or self.predictor.preprocessing.channels == 3)

    def classify(self, path: str | Path, lights: Sequence[Corruption] = ()) -> list[dict[str, Any]]:
        """Return the most probable classes of an image file with their probabilities and angles; see `analyze`."""
        with torch.no_grad():
            return self._classes(self._read(path, lights))

    def analyze(self, path: str | Path, layer: str, lights: Sequence[Corruption] = ()) -> dict[str, Any]:
        """Return the values that the page shows for an image file, as JSON.

        Args:
            path: The file.
            layer: Name of the layer whose strongest patches are shown.
            lights: Corruptions that change the pixels first, one after the other.

        Raises:
            DataError: If the file cannot be read.
            ValueError: If the layer is unknown, or an output of the network is not finite.
        """
        reach = next((candidate for candidate in self.layers if candidate.name == layer), None)
        if reach is None:
            raise InvalidArgument(
                "layer", f"must be one of {', '.join(known.name for known in self.layers)}, got {layer!r}."
            )
        pixels = self._read(path, lights).requires_grad_()
        with self._recording() as outputs:
            classes = self._classes(pixels)
        return {
            "image": self._display(path, lights),
            "size": list(self.predictor.preprocessing.size),
            "classes": classes,
            "patches": _strongest_patches(outputs[layer][0], pixels, reach),
        }

    def _read(self, path: str | Path, lights: Sequence[Corruption]) -> Tensor:
        """Return the network's input [1, C, H, W] for an image file under other light."""
        pixels = _change_light(read_pixels(path, self.predictor.preprocessing, max_pixels=self.max_pixels), lights)
        return normalize(torch.from_numpy(pixels).unsqueeze(0), self.predictor.preprocessing)

    def _classes(self, pixels: Tensor) -> list[dict[str, Any]]:
        """Return the most probable classes of an input, with their probabilities and angles."""
        angular = self.model.head(self.model.features(pixels))
        probabilities = self.model.criterion.logits(angular).softmax(1)[0].tolist()
        angles = angular.cosine[0].clamp(-1, 1).acos().rad2deg().tolist()
        if not all(map(math.isfinite, probabilities + angles)):
            raise ValueError("the outputs of the network must be finite, got infinity or NaN for this image.")
        order = sorted(range(len(probabilities)), key=lambda index: -probabilities[index])[:SHOWN_CLASSES]
        return [
            {"class": self.predictor.classes[at], "probability": probabilities[at], "angle": angles[at]} for at in order
        ]

    def _find_layers(self) -> list[Layer]:
        """Return the convolutions in order of execution, at most `SHOWN_LAYERS`, that do not see the whole image."""
        height, width = self.predictor.preprocessing.size
        pixels = torch.rand(1, self.predictor.preprocessing.channels, height, width, requires_grad=True)
        with self._recording() as outputs:
            self.model.features(pixels)
        names = list(outputs)
        chosen = names[:: math.ceil(len(names) / SHOWN_LAYERS)] if names else []
        layers = []
        for name in chosen:
            output = outputs[name][0]
            # The sum over filters: a single one may be 0 behind a ReLU.
            box = _box(output[:, output.shape[1] // 2, output.shape[2] // 2].sum(), pixels)
            if box is not None:
                module = self.model.features.get_submodule(name)
                description = f"{name}: {output.shape[0]} filters, {box[2]}×{box[3]} pixels"
                layers.append(Layer(name, f"{description} ({_operator(module)})", box[2], box[3]))
        local = [layer for layer in layers if layer.height * layer.width < height * width]
        return local or layers[:1]

    @contextmanager
    def _recording(self) -> Iterator[dict[str, Tensor]]:
        """Collect the outputs of all convolutions by name while the network runs."""
        outputs: dict[str, Tensor] = {}

        def record(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
                outputs[name] = output

            return hook

        modules = self.model.features.named_modules()
        handles = [module.register_forward_hook(record(name)) for name, module in modules if _is_convolution(module)]
        try:
            # The gradients of other algorithms have rounding errors where the exact ones are 0, which `_box` would see.
            with convolution("direct"):
                yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _display(self, path: str | Path, lights: Sequence[Corruption]) -> str:
        """Return the window of the image that the network sees, at a higher resolution, as a data URL."""
        preprocessing = self.predictor.preprocessing
        height, width = preprocessing.size
        scale = max(1, DISPLAY_SIDE // max(height, width))
        outer = preprocessing.resize or preprocessing.size
        larger = outer[0] * scale, outer[1] * scale
        pixels = decode(path, larger, preprocessing.channels, preprocessing.keep_aspect, max_pixels=self.max_pixels)
        top, left = (scale * offset for offset in center_offset(outer, preprocessing.size))
        window = _change_light(pixels[top : top + height * scale, left : left + width * scale], lights)
        stream = io.BytesIO()
        Image.fromarray(window[..., 0] if preprocessing.channels == 1 else window).save(stream, "PNG")
        return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _change_light(pixels: np.ndarray, lights: Sequence[Corruption]) -> np.ndarray:
    """Return 8-bit pixels [H, W, C] under other light; positions are fractions of the size, the same at every size."""
    images = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).unsqueeze(0)
    for light in lights:
        images = corrupt(images, light)
    return images[0].permute(1, 2, 0).numpy()


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d)


def _operator(module: nn.Module) -> str:
    return str(getattr(module, "operator", "plain"))


def _strongest_patches(output: Tensor, pixels: Tensor, reach: Layer) -> list[dict[str, Any]]:
    """Return the patches with the largest outputs of a layer [filters, H, W], largest first.

    Positions that are less than half a patch from a stronger one are skipped.
    """
    _, height, width = output.shape
    step_y, step_x = pixels.shape[2] / height, pixels.shape[3] / width
    strongest, indices = output.detach().max(0)
    chosen: list[tuple[int, int]] = []
    patches: list[dict[str, Any]] = []
    for position in strongest.flatten().argsort(descending=True).tolist():
        y, x = divmod(position, width)
        if any(
            abs(y - other_y) * step_y < reach.height / 2 and abs(x - other_x) * step_x < reach.width / 2
            for other_y, other_x in chosen
        ):
            continue
        index = int(indices[y, x])
        box = _box(output[index, y, x], pixels)
        chosen.append((y, x))
        if box is None:  # e.g. a black patch behind a ReLU
            continue
        top, left, tall, wide = box
        response = float(strongest[y, x])
        patches.append({"top": top, "left": left, "height": tall, "width": wide, "filter": index, "response": response})
        if len(patches) == SHOWN_PATCHES:
            break
    return patches


def _box(value: Tensor, pixels: Tensor) -> tuple[int, int, int, int] | None:
    """Return top, left, height and width of the pixels that influence a value; None if there are none.

    The gradient gives the exact region for any architecture.
    """
    (gradient,) = torch.autograd.grad(value, pixels, retain_graph=True)
    used = gradient[0].ne(0).any(0)
    rows, columns = used.any(1).nonzero().flatten().tolist(), used.any(0).nonzero().flatten().tolist()
    if not rows:
        return None
    return rows[0], columns[0], rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
