"""The verbs that use a trained network: `evaluate` and `export`."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Literal

from spherenet._util.text import plain
from spherenet.cli.option_types import add_checkpoint, add_inference, add_option, add_threads, add_tta
from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, stdout_console, warn
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from spherenet.data import Split
    from spherenet.training.evaluation import Evaluation
    from spherenet.training.saved_runs import SavedRun
    from spherenet.training.unknowns import Separation

__all__ = ["evaluate_parser", "export_parser", "run_evaluate", "run_export"]

MAX_PRINTED_CLASSES = 20
"""Largest number of classes for which the confusion matrix is printed; an image shows more."""


def evaluate_parser() -> Parser:
    """Return the parser of `spherenet evaluate`."""
    parser = Parser(
        "evaluate",
        "Evaluate a trained network on the test images of its data set: accuracy, a table of classes\n"
        "and the confusion matrix.",
        examples="""\
  spherenet evaluate runs/mnist5k-cnn-3-cosine
  spherenet evaluate runs/mnist5k-cnn-3-cosine --checkpoint best --image confusion.png
  spherenet evaluate runs/flowers --ood photos-of-cars   # does the network know what it does not know?
  spherenet evaluate runs/mnist5k-cnn-3-cosine --corrupt spot:0.85 gamma:2.2 noise:20
  spherenet evaluate runs/flowers --data-dir other-photos --allow-changes --json""",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    add_inference(parser, batch_size=256)
    splits = Literal["test", "validation", "train"]
    add_option(parser, "--split", type=splits, default="test", help="images to evaluate on")
    add_option(parser, "--data-dir", metavar="DIR", help="folder of the data set; by default the one of the training")
    parser.add_argument("--allow-changes", action="store_true", help="allow data other than the run's own")
    text = "response to images that cannot be read; skip decodes all of them first and leaves those out"
    add_option(parser, "--on-broken", type=Literal["stop", "skip"], default="stop", help=text, advanced=True)
    add_threads(parser)
    precisions = Literal["float32", "bfloat16", "float16"]
    text = "floating point format; by default the one of the training"
    add_option(parser, "--precision", type=precisions, help=text, advanced=True)
    add_tta(parser, "gives a second accuracy")
    text = "folder of images of other classes; prints how well four scores tell them from those of the run"
    add_option(parser, "--ood", metavar="DIR", help=text)
    text = (
        "corruptions of the images, each evaluated as well, e.g. spot:0.85: spot, ramp, shadow, gamma, cast, contrast, "
        "dark, bright, noise, blur or jpeg"
    )
    add_option(parser, "--corrupt", type=list[str], metavar="KIND:STRENGTH", help=text)
    add_option(parser, "--image", metavar="FILE", help="image file for the confusion matrix (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


def run_evaluate(arguments: Namespace) -> None:
    """Evaluate a run and print accuracy and tables."""
    import torch

    from spherenet.data import parse_corruption
    from spherenet.report.confusion import FIGURE_SUFFIXES, draw_confusion
    from spherenet.training import Processes, evaluate
    from spherenet.training.balance import single_class_warning
    from spherenet.training.run_format import SPLITS
    from spherenet.training.saved_runs import load_run

    if arguments.image is not None and not arguments.image.lower().endswith(FIGURE_SUFFIXES):
        raise InvalidArgument("--image", f"must end in one of {', '.join(FIGURE_SUFFIXES)}, got {arguments.image!r}.")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    unknown_files = _unknown_files(arguments)
    corruptions = [parse_corruption(text) for text in arguments.corrupt or []]
    saved = load_run(arguments.run, arguments.checkpoint)
    for message in saved.warnings:
        warn(message)
    workers = min(saved.config.workers, os.cpu_count() or 1)  # a run of somebody else does not choose it
    split, train = _splits_of(saved, arguments, workers)
    splits = [split, *(split.corrupted(corruption) for corruption in corruptions)]
    with Processes.joined(arguments.device) as processes:
        weights = [tensor.double().sum().item() for tensor in saved.model.state_dict().values()]
        processes.require_same({"the step": saved.step, "the weights": weights, "the images": split.listing_hash()})
        result, *corrupted = (
            evaluate(
                saved.model.to(processes.device),
                images,
                len(saved.classes),
                processes,
                batch_size=arguments.batch_size,
                workers=workers,
                precision=arguments.precision or saved.config.precision,  # as in the metrics of the run
                tta=arguments.tta,
            )
            for images in splits
        )
    separation = None
    if unknown_files:  # not in the block, since the processes that embed images join by themselves
        separation = _separate(saved, train, split, unknown_files, arguments, workers, processes.device)
    if warning := single_class_warning(result, saved.classes, SPLITS[arguments.split]):
        warn(warning)
    confusion = result.confusion
    if arguments.image is not None:
        if confusion is None:
            raise InvalidArgument(
                "--image", f"must be left out for more than 4,096 classes, got {len(saved.classes):,}."
            )
        draw_confusion(confusion.tolist(), saved.classes, arguments.image)
    per_class = [] if confusion is None else _per_class(confusion, saved.classes)
    if arguments.json:
        numbers: dict[str, Any] = {
            "run": arguments.run,
            "checkpoint": arguments.checkpoint,
            "step": saved.step,
            "selected_on": saved.selected_on,
            "split": arguments.split,
            "precision": arguments.precision or saved.config.precision,
            "accuracy": result.accuracy,
            "balanced_accuracy": result.balanced_accuracy,
            "tta": arguments.tta,
            "tta_accuracy": result.tta_accuracy,
            "loss": result.loss,
            "count": result.count,
            "corruptions": [
                {
                    "corruption": corruption.name,
                    "strength": corruption.strength,
                    "accuracy": one.accuracy,
                    "balanced_accuracy": one.balanced_accuracy,
                    "tta_accuracy": one.tta_accuracy,
                    "loss": one.loss,
                }
                for corruption, one in zip(corruptions, corrupted, strict=True)
            ],
            "classes": per_class,
            "confusion": None if confusion is None else confusion.tolist(),
        }
        if separation is not None:
            areas, _, unknown, neighbors = separation
            numbers["ood"] = {"folder": arguments.ood, "count": unknown, "neighbors": neighbors, "auroc": areas}
        print_json(numbers)
        return
    selection = "" if saved.selected_on is None else f", selected on the {saved.selected_on} images"
    views = "" if result.tta_accuracy is None else f", {result.tta_accuracy:.2%} with {arguments.tta}"
    print(
        f"{plain(arguments.run)}, {arguments.checkpoint} checkpoint (step {saved.step}{selection}), "
        f"{arguments.split} split: "
        f"accuracy {result.accuracy:.2%}{views} on {result.count} images, "
        f"balanced accuracy {result.balanced_accuracy:.2%}, loss {result.loss:.4f}"
    )
    if corruptions:
        names = ["clean", *map(str, corruptions)]
        _print_corruptions(dict(zip(names, [result, *corrupted], strict=True)), arguments.tta)
    if confusion is not None:
        _print_tables(per_class, confusion, saved.classes)
    if separation is not None:
        shown = ", ".join(f"{name.replace('_', ' ')} {area:.2%}" for name, area in separation.areas.items())
        print(
            f"AUROC of {separation.known} known against {separation.unknown} images of {plain(arguments.ood)}: {shown} "
            f"(k = {separation.neighbors})"
        )
    if arguments.image is not None:
        print(f"Confusion matrix: {plain(arguments.image)}")


def _unknown_files(arguments: Namespace) -> list[str]:
    """Return the images in the folder of --ood; none without it."""
    from spherenet.training.embedding import find_images

    if arguments.ood is None:
        return []
    if arguments.split == "train":
        raise InvalidArgument(
            "--split", "must be test or validation with --ood: training images are too close to themselves."
        )
    if not os.path.isdir(arguments.ood):
        raise InvalidArgument("--ood", f"must be a folder of images, got {arguments.ood!r}.")
    return find_images([arguments.ood])[0]


def _separate(
    saved: SavedRun,
    train: Split,
    known: Split,
    files: list[str],
    arguments: Namespace,
    workers: int,
    device: torch.device,
) -> Separation:
    """Return how well scores separate known from unknown images, and warn of files that cannot be read."""
    from spherenet.training.unknowns import separate_unknowns

    failures: dict[str, str] = {}
    separation = separate_unknowns(
        saved,
        train,
        known,
        files,
        device=device,
        batch_size=arguments.batch_size,
        workers=workers,
        max_megapixels=arguments.max_megapixels,
        failures=failures,
    )
    if failures:
        first = next(iter(failures.values()))
        warn(f"{len(failures)} of {len(files)} images of --ood cannot be read and are left out (first: {first})")
    return separation


def _splits_of(saved: SavedRun, arguments: Namespace, workers: int) -> tuple[Split, Split]:
    """Return the images to evaluate on, which must be those of the run unless --allow-changes is given.

    The second result is the training images.
    """
    from dataclasses import replace

    import torch

    from spherenet.data import broken_images, describe_broken, locate
    from spherenet.errors import DataError
    from spherenet.training.build import build_data
    from spherenet.training.run_format import broken_of, data_record, require_same_data

    recorded = saved.directory.config
    # A run of somebody else does not choose what is downloaded or how much memory an image takes.
    config = replace(saved.config, download=False, workers=workers, max_megapixels=arguments.max_megapixels)
    if arguments.data_dir is not None:
        data, data_dir = locate(config.data, arguments.data_dir)
        config = replace(config, data=data, data_dir=data_dir)
    dataset = build_data(config, broken=broken_of(recorded))
    try:
        same = dataset.classes == saved.classes
        remedy = "restore them" + (", or evaluate on these with --allow-changes" if same else "")
        require_same_data(recorded, dataset, data_record(dataset), remedy)
    except DataError as error:
        if not arguments.allow_changes:
            raise
        if not same:
            message = "classes must be those of the run, also with --allow-changes: its network has no others."
            raise DataError(message) from None
        warn(str(error).partition(";")[0] + ".")
    split: Split | None = getattr(dataset, arguments.split)
    if split is None:
        raise InvalidArgument(
            "--split", "must be test or train for a run without --validation-fraction, got validation."
        )
    if arguments.split == saved.selected_on == "test":
        remedy = "use --checkpoint last, or train with --validation-fraction"
        warn(f"the best checkpoint was selected on the test images, so its test accuracy is too high: {remedy}.")
    if arguments.on_broken == "skip" and (broken := broken_images(split, workers=workers)):
        warn(f"{describe_broken(broken.values(), len(split))}; they are left out.")
        if len(broken) == len(split):
            raise DataError("at least one image must be readable, got none.")
        split = split.subset(torch.tensor([index for index in range(len(split)) if index not in broken]))
    return split, dataset.train


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


def _print_corruptions(results: dict[str, Evaluation], tta: str) -> None:
    """Print the accuracy with each corruption and its difference from that of the clean images."""
    from rich.table import Table

    table = Table(title="corrupted images")
    table.add_column("corruption")
    for column in ("accuracy", "change", *([] if tta == "none" else [tta])):
        table.add_column(column, justify="right")
    clean = results["clean"].accuracy
    for name, result in results.items():
        change = "" if name == "clean" else f"{100 * (result.accuracy - clean):+.2f}"
        views = [] if result.tta_accuracy is None else [f"{result.tta_accuracy:.2%}"]
        table.add_row(name, f"{result.accuracy:.2%}", change, *views)
    stdout_console().print(table)


def _print_tables(per_class: list[dict[str, Any]], confusion: Tensor, classes: tuple[str, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = stdout_console()
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


def export_parser() -> Parser:
    """Return the parser of `spherenet export`."""
    parser = Parser(
        "export",
        "Write a trained network in a format for use elsewhere. ONNX files and PyTorch programs\n"
        "are for inference: weights are normalized and k is a constant; all steps from an image file to\n"
        "their input are written next to them as JSON. A model folder can be trained further.",
        examples="""\
  spherenet export runs/mnist5k-cnn-3-cosine digits.onnx        # ONNX, checked with onnxruntime
  spherenet export runs/mnist5k-cnn-3-cosine pixels.onnx --with-preprocessing   # takes uint8 pixels
  spherenet export runs/mnist5k-cnn-3-cosine program.pt2        # torch.export
  spherenet export runs/mnist5k-cnn-3-cosine digits             # a folder: safetensors, JSON, model card""",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run")
    parser.add_argument("target", metavar="TARGET", help="file ending in .onnx or .pt2, or a new folder")
    formats = Literal["onnx", "program", "folder"]
    add_option(parser, "--format", type=formats, help="format; by default derived from the ending of TARGET")
    add_checkpoint(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    text = "uint8 images [N, H, W, C] as input of a file, which normalizes them itself"
    parser.add_argument("--with-preprocessing", action="store_true", help=text)
    return parser


def run_export(arguments: Namespace) -> None:
    """Export the network of a run and print where it was written."""
    from spherenet.training.run_export import export_run

    written = export_run(
        arguments.run,
        arguments.target,
        format=arguments.format,
        checkpoint=arguments.checkpoint,
        overwrite=arguments.overwrite,
        with_preprocessing=arguments.with_preprocessing,
        warn=warn,
    )
    print(f"written: {plain(written)}")
