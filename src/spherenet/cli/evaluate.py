"""The verbs that use a trained network: `evaluate`, `predict` and `export`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Literal

from spherenet.cli.options import Parser, add_option
from spherenet.cli.output import print_json, warn
from spherenet.text import plain

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["evaluate_parser", "export_parser", "predict_parser", "run_evaluate", "run_export", "run_predict"]

MAX_PRINTED_CLASSES = 20
"""Largest number of classes for which the confusion matrix is printed; an image shows more."""
PREDICTION_BATCH = 64


def _add_checkpoint(parser: Parser) -> None:
    text = "checkpoint to use: the most accurate one or the last one"
    add_option(parser, "--checkpoint", type=Literal["best", "last"], default="best", help=text)


def evaluate_parser() -> Parser:
    """Return the parser of `spherenet evaluate`."""
    parser = Parser(
        "evaluate",
        "Evaluate a trained network on the test images of its data set: accuracy, a table of classes\n"
        "and the confusion matrix.",
        examples="""\
  spherenet evaluate runs/mnist5k-cnn-3-cosine
  spherenet evaluate runs/mnist5k-cnn-3-cosine --checkpoint last --image confusion.png
  spherenet evaluate runs/flowers --data-dir other-photos --allow-changes --json""",
        aliases={"--picture": "--image"},
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    _add_checkpoint(parser)
    add_option(parser, "--split", type=Literal["test", "train"], default="test", help="images to evaluate on")
    add_option(parser, "--data-dir", metavar="DIR", help="folder of the data set; by default the one of the training")
    parser.add_argument("--allow-changes", action="store_true", help="allow data other than the run's own")
    add_option(parser, "--device", help="cpu, cuda, cuda:1, …; by default cuda if available")
    add_option(parser, "--batch-size", type=int, default=256, at_least=1, help="images per batch")
    add_option(parser, "--image", metavar="FILE", help="image file for the confusion matrix (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run_evaluate(arguments: Namespace) -> None:
    """Evaluate a run and print accuracy and tables."""
    from dataclasses import replace

    from spherenet.errors import DataError
    from spherenet.report.tables import FIGURE_SUFFIXES, draw_confusion
    from spherenet.training import Processes, evaluate
    from spherenet.training.build import build_data
    from spherenet.training.saved_runs import load_run, require_same_data

    if arguments.image is not None and not arguments.image.lower().endswith(FIGURE_SUFFIXES):
        raise ValueError(f"--image must end in one of {', '.join(FIGURE_SUFFIXES)}, got {arguments.image!r}.")
    saved = load_run(arguments.run, arguments.checkpoint)
    for message in saved.warnings:
        warn(message)
    # A run may come from somebody else: do not download for it, and do not let it choose the number of processes.
    config = replace(saved.config, download=False, workers=min(saved.config.workers, os.cpu_count() or 1))
    if arguments.data_dir is not None:
        config = replace(config, data_dir=arguments.data_dir)
    dataset = build_data(config)
    if not arguments.allow_changes:
        require_same_data(saved.directory.config, dataset, "restore them, or evaluate on these with --allow-changes")
    elif dataset.classes != saved.classes:
        raise DataError("classes must be those of the run, also with --allow-changes: its network has no others.")
    with Processes.joined(arguments.device) as processes:
        result = evaluate(
            saved.model.to(processes.device),
            getattr(dataset, arguments.split),
            len(saved.classes),
            processes,
            batch_size=arguments.batch_size,
            workers=config.workers,
        )
    if arguments.image is not None:
        draw_confusion(result.confusion.tolist(), saved.classes, arguments.image)
    per_class = _per_class(result.confusion, saved.classes)
    if arguments.json:
        numbers = {
            "run": arguments.run,
            "step": saved.step,
            "split": arguments.split,
            "accuracy": result.accuracy,
            "loss": result.loss,
            "count": result.count,
            "classes": per_class,
            "confusion": result.confusion.tolist(),
        }
        print_json(numbers)
        return
    print(
        f"{plain(arguments.run)}, {arguments.checkpoint} checkpoint (step {saved.step}), {arguments.split} split: "
        f"accuracy {result.accuracy:.2%} on {result.count} images, loss {result.loss:.4f}"
    )
    _print_tables(per_class, result.confusion, saved.classes)
    if arguments.image is not None:
        print(f"Confusion matrix: {arguments.image}")


def _per_class(confusion: Tensor, classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return count, recall and precision per class; None if there is nothing to divide by."""
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(classes):
        correct, count = int(confusion[index, index]), int(confusion[index].sum())
        predicted = int(confusion[:, index].sum())
        rows.append(
            {
                "class": name,
                "count": count,
                "recall": correct / count if count else None,
                "precision": correct / predicted if predicted else None,
            }
        )
    return rows


def _print_tables(per_class: list[dict[str, Any]], confusion: Tensor, classes: tuple[str, ...]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title="classes")
    table.add_column("class")
    for column in ("images", "recall", "precision"):
        table.add_column(column, justify="right")
    for row in per_class:
        shown = [f"{row[name]:.1%}" if row[name] is not None else "–" for name in ("recall", "precision")]
        table.add_row(Text(plain(row["class"])), str(row["count"]), *shown)
    console.print(table)
    if len(classes) > MAX_PRINTED_CLASSES:
        console.print(f"{len(classes)} classes: draw the confusion matrix with --image FILE.")
        return
    matrix = Table(title="confusion matrix: rows are true classes, columns predicted classes")
    matrix.add_column("")
    for name in classes:
        matrix.add_column(Text(plain(name)[:8]), justify="right")
    for index, name in enumerate(classes):
        cells = [str(int(count)) if count else "·" for count in confusion[index]]
        cells[index] = f"[bold]{cells[index]}[/bold]"
        matrix.add_row(Text(plain(name)), *cells)
    console.print(matrix)


def predict_parser() -> Parser:
    """Return the parser of `spherenet predict`."""
    parser = Parser(
        "predict",
        "Print the most likely classes of image files with their softmax probabilities. Without --run,\n"
        "a small SphereNet included in the package is used, trained on the ten classes of CIFAR-10.",
        examples="""\
  spherenet predict photo.jpg                                   # with the included model
  spherenet predict digit.png --run runs/mnist5k-cnn-3-cosine
  spherenet predict *.jpg --run exported-model --top 1 --json""",
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files")
    add_option(parser, "--run", metavar="RUN", help="folder of a run or an exported model")
    _add_checkpoint(parser)
    add_option(parser, "--top", type=int, default=3, at_least=1, help="classes shown per image")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run_predict(arguments: Namespace) -> None:
    """Predict the classes of image files and print them."""
    import torch

    from spherenet.data import read_image
    from spherenet.export import shipped_model
    from spherenet.training.saved_runs import load_predictor

    predictor = load_predictor(arguments.run or shipped_model(), arguments.checkpoint)
    for message in predictor.warnings:
        warn(message)
    # Read all images first, so that an unreadable one does not leave half a table.
    images = [read_image(path, predictor.preprocessing) for path in arguments.images]
    if arguments.run is None:
        classes = ", ".join(predictor.classes)
        print(f"Using the included model with the classes {classes}; --run selects another.", file=sys.stderr)
    batches = [
        torch.stack(images[first : first + PREDICTION_BATCH]) for first in range(0, len(images), PREDICTION_BATCH)
    ]
    with torch.no_grad():
        probabilities = torch.cat([predictor.model(batch) for batch in batches]).softmax(1)
    top = probabilities.topk(min(arguments.top, len(predictor.classes)))
    predictions = [
        [(predictor.classes[index], score) for score, index in zip(scores, indices, strict=True)]
        for scores, indices in zip(top.values.tolist(), top.indices.tolist(), strict=True)
    ]
    if arguments.json:
        rows = [
            {"image": path, "classes": [{"class": name, "score": score} for name, score in classes_of_image]}
            for path, classes_of_image in zip(arguments.images, predictions, strict=True)
        ]
        print_json(rows)
        return
    paths = [plain(path) for path in arguments.images]
    width = max(map(len, paths))
    for path, classes_of_image in zip(paths, predictions, strict=True):
        print(f"{path:<{width}}  " + "  ".join(f"{plain(name)} {score:.1%}" for name, score in classes_of_image))


def export_parser() -> Parser:
    """Return the parser of `spherenet export`."""
    parser = Parser(
        "export",
        "Write a trained network in a format for use elsewhere. ONNX files, PyTorch programs and\n"
        "TorchScript are for inference: weights are normalized and k is a constant. A model folder can\n"
        "be trained further.",
        examples="""\
  spherenet export runs/mnist5k-cnn-3-cosine digits.onnx        # ONNX, checked with onnxruntime
  spherenet export runs/mnist5k-cnn-3-cosine digits.pt2         # torch.export
  spherenet export runs/mnist5k-cnn-3-cosine digits             # a folder: safetensors, JSON, model card""",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("target", metavar="TARGET", help="file ending in .onnx, .pt2 or .ts, or a new folder")
    formats = Literal["onnx", "program", "torchscript", "folder"]
    add_option(parser, "--format", type=formats, help="format; by default derived from the ending of TARGET")
    _add_checkpoint(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    return parser


def run_export(arguments: Namespace) -> None:
    """Export the network of a run and print where it was written."""
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
