"""`spherenet export`: a run's model for use elsewhere."""

from __future__ import annotations

from argparse import Namespace

from spherenet.cli.options import Parser
from spherenet.cli.output import warn

EXAMPLES = """\
  spherenet export runs/mnist5k-cnn-3-sigmoid digits.onnx       # ONNX, checked with onnxruntime
  spherenet export runs/mnist5k-cnn-3-sigmoid digits.pt2        # torch.export
  spherenet export runs/mnist5k-cnn-3-sigmoid digits            # a folder: safetensors, JSON, model card"""


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "export",
        "Write the model of a run in a form that others read. ONNX, torch programs and TorchScript\n"
        "have their weights normalised and k folded in; the folder can be trained further.",
        examples=EXAMPLES,
    )
    made.add_argument("run", metavar="RUN", help="folder of a run")
    made.add_argument("target", metavar="TARGET", help="file ending in .onnx, .pt2 or .ts, or a new folder")
    made.add_argument(
        "--format",
        choices=["onnx", "program", "torchscript", "folder"],
        help="default: by the ending of TARGET",
    )
    made.add_argument("--checkpoint", choices=["best", "last"], default="best", help="default: best")
    made.add_argument("--overwrite", action="store_true", help="replace a target that exists")
    return made


def run(arguments: Namespace) -> None:
    """Export and say where."""
    from spherenet.training.saved_runs import export_run

    written = export_run(
        arguments.run,
        arguments.target,
        format=arguments.format,
        checkpoint=arguments.checkpoint,
        overwrite=arguments.overwrite,
        warn=warn,
    )
    print(f"written: {written}")
