"""Write the networks and images of docs/demo.md into docs/assets/demo from two runs.

    OPTIONS="--recipe speed --model air-unwhitened --widths 24 48 48 --seed 0 --threads 1 --set tta=none"
    spherenet train $OPTIONS --operator cosine --center patch --output runs/spherenet
    spherenet train $OPTIONS --operator none --output runs/cnn
    python docs/demo.py runs/spherenet runs/cnn [DATA_DIR]

Weights are rounded to half precision, and the accuracies are those of the rounded networks, in float32. Samples are
the images of examples/images, all of them. `tests/docs/test_live_demo.py` compares the page with PyTorch.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import spherenet as sn
from spherenet.data import load_dataset, parse_corruption
from spherenet.training import Processes, evaluate

HERE = Path(__file__).parent
FOLDER = HERE / "assets" / "demo"
SAMPLES = HERE.parent / "examples" / "images"
LIGHTS = {
    "as they are": None,
    "spot light 0.85": "spot:0.85",
    "ramp 0.95": "ramp:0.95",
    "shadow 0.7": "shadow:0.7",
    "color cast 0.7": "cast:0.7",
    "less contrast 0.75": "contrast:0.75",
}


def network(run: str, title: str, data_dir: str | None) -> dict[str, Any]:
    """Return the saved folder of a run's model with rounded weights, and its accuracies on the test images."""
    saved = sn.load_run(run)
    with tempfile.TemporaryDirectory() as folder:
        metadata = {"classes": list(saved.classes), "preprocessing": saved.preprocessing.as_dict()}
        sn.save_model(saved.model, folder, metadata=metadata, half=True)
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        weights = base64.b64encode(Path(folder, "model.safetensors").read_bytes()).decode()
        model = sn.load_model(folder)
    test = load_dataset("cifar10", data_dir).test
    accuracy = {}
    with Processes.joined("cpu") as processes:
        for name, light in LIGHTS.items():
            split = test if light is None else test.corrupted(parse_corruption(light))
            accuracy[name] = evaluate(model, split, len(saved.classes), processes, batch_size=1000).accuracy
    return {"title": title, "accuracy": accuracy, "config": config, "weights": weights}


def samples() -> list[dict[str, str]]:
    """Return name and pixels of the sample images in the order of the classes, which is that of their names."""
    images = {path.stem: np.asarray(Image.open(path).convert("RGB")) for path in sorted(SAMPLES.glob("*.png"))}
    return [{"name": name, "pixels": base64.b64encode(pixels.tobytes()).decode()} for name, pixels in images.items()]


def write(name: str, array: str, values: list[dict[str, Any]]) -> None:
    """Write a script that adds values to an array of network.js."""
    lines = ",\n".join(json.dumps(value) for value in values)
    text = f"// Written by docs/demo.py.\nspherenet.{array}.push(\n{lines}\n);\n"
    (FOLDER / name).write_text(text, encoding="utf-8")


def main(spherenet: str, cnn: str, data_dir: str | None = None) -> None:
    """Write the three files."""
    write("spherenet.js", "networks", [network(spherenet, "SphereNet", data_dir)])
    write("cnn.js", "networks", [network(cnn, "CNN", data_dir)])
    write("samples.js", "samples", samples())


if __name__ == "__main__":
    main(*sys.argv[1:])
