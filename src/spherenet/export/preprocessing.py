"""Preprocessing of exported files: a complete description as JSON, and the normalization as part of the model.

An exported file contains no image reader. `preprocessing_steps` states what a program in any language has to do with an
image file before the model sees it, with the calls of Pillow that give the same pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import PIL
import torch
from torch import Tensor, nn

from spherenet.data.images import FORMATS, center_offset, draft_side
from spherenet.data.preprocessing import SMALLEST_DEVIATION, Preprocessing

__all__ = [
    "PixelInput",
    "input_description",
    "pixel_example",
    "preprocessing_file",
    "preprocessing_record",
    "preprocessing_steps",
]

RECORD_FORMAT, RECORD_VERSION = "spherenet-preprocessing", 1


class PixelInput(nn.Module):
    """Model whose input are pixels: uint8 [N, H, W, C] of the preprocessing's size, normalized inside of the model.

    Args:
        model: Model that takes normalized images [N, C, H, W].
        preprocessing: Its preprocessing. Reading, resizing and cropping an image remain outside.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.standardize = preprocessing.standardize
        self.register_buffer("mean", torch.tensor(preprocessing.mean), persistent=False)
        self.register_buffer("std", torch.tensor(preprocessing.std), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of a batch of pixels."""
        normalized = (images.to(self.mean.dtype) - self.mean) / self.std
        if self.standardize == "image":
            normalized = normalized - normalized.mean((1, 2, 3), keepdim=True)
            deviation = (normalized * normalized).mean((1, 2, 3), keepdim=True).sqrt()
            normalized = normalized / deviation.clamp(min=SMALLEST_DEVIATION)
        scores: Tensor = self.model(normalized.permute(0, 3, 1, 2))
        return scores


def pixel_example(preprocessing: Preprocessing) -> Tensor:
    """Return two random images as a `PixelInput` takes them."""
    shape = (2, *preprocessing.size, preprocessing.channels)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def preprocessing_steps(preprocessing: Preprocessing, *, pixel_input: bool = False) -> list[dict[str, Any]]:
    """Return what happens to an image file before it enters the network, step by step, as JSON values.

    Args:
        preprocessing: The preprocessing of the network.
        pixel_input: Whether the model is a `PixelInput`, which contains the steps after the crop.

    Returns:
        One object per step, in order. `in_model` states whether the exported model contains the step.
    """
    (height, width), (outer_height, outer_width) = preprocessing.size, preprocessing.outer
    top, left = center_offset(preprocessing.outer, preprocessing.size)
    side, mode = draft_side(preprocessing.outer), "L" if preprocessing.channels == 1 else "RGB"
    target = f"(({outer_width}, {outer_height}), Image.Resampling.BILINEAR)"
    outside: list[dict[str, Any]] = [
        {
            "step": "decode",
            "formats": list(FORMATS),
            "frame": 0,
            "jpeg_draft": {
                "size": [side, side],
                "rule": "A JPEG is decoded at 1/8, 1/4 or 1/2 of its size, the smallest that is at least this size on "
                "both sides; other formats and smaller images are decoded at full size.",
            },
            "pillow": f"image = Image.open(file); image.draft(None, ({side}, {side})); image.load()",
        },
        {
            "step": "convert",
            "mode": mode,
            "transparency": "composited on white",
            "sixteen_bits": "(value + 128) // 257",
            "color_profile": "ignored",
            "pillow": f"image = image.convert({mode!r})",
        },
        {
            "step": "resize",
            "size": [outer_height, outer_width],
            "filter": "bilinear",
            "antialias": True,
            "keep_aspect": preprocessing.keep_aspect,
            "rule": "One factor for both directions, so that the image covers the size; equal parts on both sides are "
            "cut off."
            if preprocessing.keep_aspect
            else "The whole image is stretched or compressed to the size.",
            "turned_images": "Height and width of the size are exchanged if the orientation exchanges them.",
            "pillow": f"image = ImageOps.fit(image, {target[1:]}"
            if preprocessing.keep_aspect
            else f"image = image.resize{target}",
        },
        {
            "step": "orient",
            "rule": "The EXIF orientation (tag 0x0112) is applied. It is read before the image is converted.",
            "pillow": "2: FLIP_LEFT_RIGHT, 3: ROTATE_180, 4: FLIP_TOP_BOTTOM, 5: TRANSPOSE, 6: ROTATE_270, "
            "7: TRANSVERSE, 8: ROTATE_90 of Image.transpose",
        },
        {
            "step": "crop",
            "top": top,
            "left": left,
            "size": [height, width],
            "pillow": f"image = image.crop(({left}, {top}, {left + width}, {top + height}))",
        },
    ]
    inside: list[dict[str, Any]] = [
        {
            "step": "normalize",
            "rule": "(pixel - mean) / std in float32, for pixels from 0 to 255",
            "mean": list(preprocessing.mean),
            "std": list(preprocessing.std),
        },
        *(
            [
                {
                    "step": "standardize",
                    "rule": "(value - m) / max(s, smallest), with mean m and standard deviation s (divided by their "
                    "number) of all values of the image over rows, columns and channels",
                    "smallest": SMALLEST_DEVIATION,
                }
            ]
            if preprocessing.standardize == "image"
            else []
        ),
        {"step": "transpose", "from": "NHWC", "to": "NCHW"},
    ]
    steps = [step | {"in_model": False} for step in outside]
    return steps + [step | {"in_model": pixel_input} for step in inside]


def input_description(preprocessing: Preprocessing, *, pixel_input: bool = False) -> dict[str, Any]:
    """Return name, dtype, layout and shape of the input of an exported file, with or without a `PixelInput`."""
    height, width = preprocessing.size
    channels = preprocessing.channels
    shape = ["batch", height, width, channels] if pixel_input else ["batch", channels, height, width]
    dtype, layout = ("uint8", "NHWC") if pixel_input else ("float32", "NCHW")
    return {"name": "images", "dtype": dtype, "layout": layout, "shape": shape}


def preprocessing_record(
    preprocessing: Preprocessing, *, pixel_input: bool = False, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the content of the file next to an exported model: its input, its output, and all steps before it.

    Args:
        preprocessing: The preprocessing of the network.
        pixel_input: Whether the model is a `PixelInput`.
        metadata: Further JSON values, such as class names.
    """
    return {
        "format": RECORD_FORMAT,
        "format_version": RECORD_VERSION,
        "input": input_description(preprocessing, pixel_input=pixel_input),
        "output": {"name": "scores", "softmax": False},
        "pillow": PIL.__version__,
        "steps": preprocessing_steps(preprocessing, pixel_input=pixel_input),
        **(metadata or {}),
    }


def preprocessing_file(target: str | Path) -> Path:
    """Return the file with the preprocessing of an exported file: digits.preprocessing.json for digits.onnx."""
    return Path(target).with_suffix(".preprocessing.json")
