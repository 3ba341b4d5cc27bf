"""The base install works without the packages of extras, and a missing extra is one sentence."""

import json
import subprocess
import sys

EXTRAS = {"huggingface_hub", "jinja2", "matplotlib", "mlxtend", "onnx", "onnxruntime", "onnxscript", "pandas", "ray",
          "scipy", "sklearn", "tensorboard"}  # fmt: skip
"""Modules of all extras; pandas and mlxtend are what others install beside them."""

BLOCK_EXTRAS = """
import sys
from importlib.machinery import PathFinder
BLOCKED = {blocked!r}
class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""

BASE_RUN = """
from PIL import Image
from spherenet.cli import main
small = ["--model", "cnn-3", "--iterations", "2", "--batch-size", "8", "--train-images", "40"]
assert main(["train", *small, "--device", "cpu", "--output", folder + "/run"]) == 0
assert main(["evaluate", folder + "/run"]) == 0
Image.new("L", (28, 28)).save(folder + "/digit.png")
assert main(["predict", folder + "/digit.png", "--run", folder + "/run"]) == 0
assert not BLOCKED & set(sys.modules)
"""

MISSING = """
import json
import torch
import spherenet as sn
from spherenet.cli.output import TensorBoard
from spherenet.errors import MissingExtraError
from spherenet.export import export_onnx
from spherenet.report.page import write_page
from spherenet.report.confusion import draw_confusion
messages = []
for use in (
    lambda: write_page([], folder + "/page.html", "title"),
    lambda: draw_confusion([[1]], ["a"], folder + "/confusion.png"),
    lambda: export_onnx(sn.create_model("cnn-3", 10), folder + "/model.onnx", example=torch.zeros(1, 3, 32, 32)),
    lambda: TensorBoard(folder),
    lambda: __import__("spherenet.estimators"),
    lambda: sn.from_pretrained("user/name"),
):
    try:
        use()
    except MissingExtraError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def run_without_extras(code, folder):
    """Run code in a process in which no package of an extra can be imported, and return its output."""
    script = BLOCK_EXTRAS.replace("{blocked!r}", repr(EXTRAS)) + f"folder = {str(folder)!r}\n" + code
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_base_install_trains_evaluates_and_predicts(tmp_path):
    run_without_extras(BASE_RUN, tmp_path)


def test_missing_extra_gives_one_message_with_the_install_command(tmp_path):
    messages = json.loads(run_without_extras(MISSING, tmp_path).splitlines()[-1])
    assert messages == [
        f"{package} is not installed: pip install 'spherenet-torch[{extra}]'."
        for package, extra in (
            ("jinja2", "report"),
            ("matplotlib", "plot"),
            ("onnx", "onnx"),
            ("tensorboard", "tensorboard"),
            ("sklearn", "sklearn"),
            ("huggingface_hub", "hub"),
        )
    ]
