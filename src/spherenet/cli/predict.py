"""The verb `predict`: classify image files, folders of them, or a list of paths."""

from __future__ import annotations

import csv
import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from spherenet._util.text import csv_cell, plain
from spherenet.cli.option_types import add_inference, add_option, add_tta
from spherenet.cli.options import Parser, require_ending
from spherenet.cli.output import print_json, print_message, warn
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from spherenet.training.prediction import Prediction

__all__ = ["predict_parser", "run_predict"]

SOME_FAILED, ALL_FAILED = 1, 2  # exit codes


def predict_parser() -> Parser:
    """Return the parser of `spherenet predict`."""
    parser = Parser(
        "predict",
        "Print the most likely classes of image files with their softmax probabilities. Without --run,\n"
        "a small SphereNet included in the package is used, trained on the ten classes of CIFAR-10.\n"
        "Images that cannot be read are named on stderr, and the others are classified (exit code 1).",
        examples="""\
  spherenet predict photo.jpg                                   # with the included model
  spherenet predict digit.png --run runs/mnist5k-cnn-3-cosine
  spherenet predict photos --run runs/flowers --csv classes.csv # all images in a folder
  find photos -newer last | spherenet predict - --run runs/flowers
  spherenet predict *.jpg --run exported-model --top 1 --json""",
    )
    text = "image files, folders of them, or - for a list of paths on stdin, one per line"
    parser.add_argument("images", nargs="+", metavar="IMAGE", help=text)
    add_option(parser, "--run", metavar="RUN", help="folder of a run or an exported model")
    add_inference(parser, batch_size=64)
    add_option(parser, "--top", type=int, default=3, at_least=1, help="classes shown per image")
    add_tta(parser, "is used")
    add_option(parser, "--csv", metavar="FILE", help="CSV file to write instead of a table")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def run_predict(arguments: Namespace) -> int:
    """Predict the classes of image files, print them and return the exit code."""
    if arguments.csv is not None and arguments.json:
        raise InvalidArgument("--json", "must be left out with --csv, which is written instead.")
    require_ending("--csv", arguments.csv, ".csv")
    from spherenet._util.atomic import write_text
    from spherenet.export import shipped_model
    from spherenet.training import Processes
    from spherenet.training.prediction import iterate_predictions
    from spherenet.training.saved_runs import load_predictor

    predictor = load_predictor(arguments.run or shipped_model(), arguments.checkpoint)
    for message in predictor.warnings:
        warn(message)
    failures: list[str] = []
    paths = list(_paths(arguments.images, failures))
    shown: list[Prediction] = []
    width = max((len(plain(path)) for path in paths), default=0)
    with Processes.joined(arguments.device) as processes:
        predictor.model.to(processes.device)
        for prediction in iterate_predictions(
            predictor,
            paths,
            top=arguments.top,
            batch_size=arguments.batch_size,
            max_megapixels=arguments.max_megapixels,
            failures=failures,
            tta=arguments.tta,
        ):
            if arguments.run is None and not shown:  # not before an error, which is then one sentence
                classes = ", ".join(predictor.classes)
                print(f"Using the included model with the classes {classes}; --run selects another.", file=sys.stderr)
            shown.append(prediction)
            if not arguments.json and arguments.csv is None:
                texts = [f"{plain(name)} {score:.1%}" for name, score in prediction.classes]
                print(f"{plain(prediction.image):<{width}}  " + "  ".join(texts))
    if arguments.json and (shown or not failures):
        print_json(
            [
                {"image": path, "classes": [{"class": name, "score": score} for name, score in classes]}
                for path, classes in shown
            ]
        )
    if arguments.csv is not None and shown:
        write_text(Path(arguments.csv), _as_csv(shown))
        print(f"{len(shown)} images: {plain(arguments.csv)}")
    for message in failures:
        print_message(f"spherenet predict: {message}")
    return 0 if not failures else SOME_FAILED if shown else ALL_FAILED


def _paths(images: list[str], failures: list[str]) -> Iterator[str]:
    """Yield the paths of all images, and append a message per folder without images to `failures`."""
    from spherenet.data.listing import image_files

    for image in images:
        if image == "-":
            if sys.stdin is None:
                raise InvalidArgument("stdin", "must be open to read a list of paths from it (-), got a closed one.")
            yield from (os.fsdecode(line) for line in sys.stdin.buffer.read().splitlines() if line)
        elif os.path.isdir(image):
            files = sorted(image_files(Path(image), links=1))  # folders of classes may be links, as in training
            unused = [path for path, is_image in files if not is_image]
            if unused:
                warn(f"files in {image!r} that are not images: {len(unused)} (first: {unused[0]!r}).")
            if len(unused) == len(files):
                failures.append(f"the folder {image!r} has no images.")
            yield from (path for path, is_image in files if is_image)
        else:
            yield image


def _as_csv(predictions: list[Prediction]) -> str:
    """Return one line per image: its path, and per class a name and a probability."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = range(1, len(predictions[0].classes) + 1)
    writer.writerow(["image", *(f"{title}_{number}" for number in numbers for title in ("class", "score"))])
    for path, classes in predictions:
        writer.writerow([csv_cell(value) for value in (path, *(value for pair in classes for value in pair))])
    return text.getvalue()
