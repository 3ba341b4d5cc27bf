"""The recipes of CONTRIBUTING.md: a copy of the package gets a new angle function and a new magnitude function."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import spherenet

PACKAGE = Path(spherenet.__file__).parent
RECIPES = Path(__file__).parents[2] / "CONTRIBUTING.md"

CUBE = '''

class CubeCosineAngle(AngleFunction):
    """g = c³."""

    name = "cube-cosine"
    is_same_for_all_filters = True

    @staticmethod
    def value(cosine: Tensor, k: K = None) -> Tensor:
        """Return c³."""
        return cosine.clamp(-1, 1) ** 3
'''
ROOT = '''class RootMagnitude(Magnitude):
    """h = α·sqrt(‖x‖)."""

    name = "root"

    def value(self, norm: Tensor, radius: Tensor | float) -> Tensor:
        """Return h for each norm."""
        return self.alpha * norm.sqrt()


'''
EDITS = {
    "angle function": {
        "angles/cosine_powers.py": [(r"\Z", CUBE)],
        "angles/__init__.py": [
            ("import SharpenedCosineAngle,", "import CubeCosineAngle, SharpenedCosineAngle,"),
            (
                r"        SharpenedCosineAngle,\n    \)",
                "        SharpenedCosineAngle,\n        CubeCosineAngle,\n    )",
            ),
        ],
    },
    "magnitude function": {
        "magnitudes.py": [
            (r"(?=MAGNITUDES: dict)", ROOT),
            ("LogMagnitude, MixedMagnitude\\)\n", "LogMagnitude, MixedMagnitude, RootMagnitude)\n"),
        ],
        "training/config.py": [('"log", "mixed"\\]', '"log", "mixed", "root"]')],
    },
}

SCRIPT = """
import sys, torch, spherenet as sn
from torch import nn
from spherenet.angles import OPERATORS
from spherenet.convert import apply_conversion, conversion_record
from spherenet.magnitudes import MAGNITUDES

assert OPERATORS[-1] == "cube-cosine" and list(MAGNITUDES)[-1] == "root"
x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
layer = sn.SphereLinear(6, 4, operator="cube-cosine", magnitude="root", eps=1e-9, dtype=torch.float64)
cosine = nn.functional.cosine_similarity(x[:, None], layer.weight[None], dim=-1)
torch.testing.assert_close(layer(x), x.norm(dim=1, keepdim=True).sqrt() * cosine**3, rtol=1e-7, atol=1e-7)
assert torch.autograd.gradcheck(layer, (x,))
theta = torch.linspace(0.1, 3, 20, dtype=torch.float64)
torch.testing.assert_close(layer.angle.at(theta), theta.cos() ** 3)
torch.testing.assert_close(layer.angle.derivative(theta.cos()), 3 * theta.cos() ** 2)

images = torch.randn(2, 3, 8, 8)
plain = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Flatten(), nn.Linear(144, 4), nn.ReLU(), nn.Linear(4, 2))
sphere = sn.to_sphere(plain, "cube-cosine", magnitude="root")
apply_conversion(plain, conversion_record(sphere))
assert torch.equal(plain(images), sphere(images))
options = {"operator": "cube-cosine", "magnitude": "root", "eps": 1e-9}
assert torch.equal(sn.functional.sphere_linear(x, layer.weight, **options), layer(x))
assert sn.WSoftmaxLoss("cube-cosine").angle.name == "cube-cosine"

from spherenet.cli import main
options = ["--model", "cnn-3", "--widths", "4", "4", "4", "--iterations", "2", "--batch-size", "8", "--eval-every", "2"]
sys.exit(main(["train", "--operator", "cube-cosine", "--magnitude", "root", *options, "--output", sys.argv[1]]))
"""


def recipe(title):
    """Return a section of the recipes."""
    return re.search(rf"### A new {title}\n(.*?)\n###? ", RECIPES.read_text(encoding="utf-8"), re.DOTALL)[1]


@pytest.mark.parametrize("title", EDITS)
def test_recipe_names_the_files(title):
    """A new angle function with kernels touches at most 6 source files, a new magnitude function 4."""
    named = {name for name in re.findall(r"`((?:\w+/)*\w+\.(?:py|h))`", recipe(title)) if (PACKAGE / name).exists()}
    assert set(EDITS[title]) - {"angles/cosine_powers.py"} <= named
    assert len(named) + ("angle" in title) <= {"angle function": 6, "magnitude function": 4}[title]


def test_additions_work_everywhere(tmp_path):
    copy = tmp_path / "spherenet"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "csrc"))
    for edits in EDITS.values():
        for name, changes in edits.items():
            text = (copy / name).read_text(encoding="utf-8")
            for pattern, new in changes:
                text, count = re.subn(pattern, lambda match, new=new: new, text)
                assert count == 1, (name, pattern)
            (copy / name).write_text(text, encoding="utf-8")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "run" / "summary.json").exists()
