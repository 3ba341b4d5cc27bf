"""Use an installed package as its first user does: train, predict, measure. Run with "native" or "pure".

The script needs the base install only and no compiler. cibuildwheel runs it with every wheel, and test_wheel.py with
the wheels built here.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image

import spherenet
from spherenet.cli import main
from spherenet.kernels import library

ROOT = Path(__file__).parents[1]


def pools():
    """Return the OpenMP libraries of this process, where the system lists them."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return sorted({line.split()[-1] for line in lines if "libgomp" in line})


def check(expected):
    """Run the package and return what was found."""
    assert ROOT not in Path(spherenet.__file__).parents, f"{spherenet.__file__} is not an installed package"
    assert library.available() == (expected == "native"), f"the wheel must be {expected}"
    if expected == "native":
        library.instruction_set()
    assert len(pools()) <= 1, f"the library must share torch's threads, got {pools()}"
    with tempfile.TemporaryDirectory() as folder:
        run, image = str(Path(folder, "run")), str(Path(folder, "digit.png"))
        Image.linear_gradient("L").resize((28, 28)).save(image)
        small = ["--widths", "4", "4", "4", "--threads", "1"]
        steps = ["--iterations", "2", "--batch-size", "8", "--train-images", "40"]
        assert main(["train", *small, *steps, "--output", run]) == 0
        assert main(["predict", image, "--run", run, "--json"]) == 0
        assert main(["predict", image, "--json"]) == 0  # with the included model
        rounds = ["--rounds", "2", "--warmup", "1", "--batch-size", "2", "--operators", "cosine"]
        assert main(["bench", "--network", "cnn-3", *small, *rounds, "--json"]) == 0
    return {"version": spherenet.__version__, "torch": torch.__version__, "kernels": expected, "pools": pools()}


if __name__ == "__main__":
    print(json.dumps(check(sys.argv[1])))
