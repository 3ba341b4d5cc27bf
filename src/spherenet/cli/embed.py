"""The verbs of metric learning: `embed` writes embeddings of images, `verify` measures pairs of them."""

from __future__ import annotations

import os
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spherenet._util.text import plain
from spherenet.cli.option_types import add_inference, add_option, add_workers
from spherenet.cli.options import Parser, require_ending, require_folder
from spherenet.cli.output import print_json, print_message, progress_bar, warn
from spherenet.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from spherenet.data.embeddings import Pair

__all__ = ["embed_parser", "run_embed", "run_verify", "verify_parser"]

RECALLS = (1, 5, 10)
FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)


def embed_parser() -> Parser:
    """Return the parser of `spherenet embed`."""
    parser = Parser(
        "embed",
        "Write the embeddings of images: the features that the last layer of the network receives.\n"
        "OUTPUT.npy holds a matrix of float32, with the names and labels of the images in\n"
        "OUTPUT.files.csv beside it; OUTPUT.csv holds both. The label of an image in a folder of classes\n"
        "is its class. Images that cannot be read are named on stderr and left out (exit code 1).",
        examples="""\
  spherenet embed runs/faces photos -o faces.npy                # all images of a folder, class/name.jpg
  spherenet embed runs/faces a.jpg b.jpg -o two.csv --normalize
  spherenet embed runs/faces photos/val -o val.npy --retrieval  # and recall@k, mAP@R by class""",
    )
    parser.add_argument("model", metavar="MODEL", help="folder of a run or an exported model")
    parser.add_argument("images", nargs="+", metavar="IMAGES", help="image files or folders of them")
    add_option(parser, "-o", "--output", metavar="OUTPUT", help="file to write, ending in .npy or .csv")
    parser.add_argument("--normalize", action="store_true", help="divide each embedding by its norm")
    text = "print recall@k and mAP@R of the images, each as a query for the others of its class"
    parser.add_argument("--retrieval", action="store_true", help=text)
    add_inference(parser, batch_size=64)
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def run_embed(arguments: Namespace) -> int:
    """Write the embeddings of images and return the exit code."""
    if arguments.output is None:
        raise InvalidArgument("output", "must be a file ending in .npy or .csv, got none.")
    from spherenet.data.embeddings import Embeddings, require_suffix, write_embeddings
    from spherenet.training.embedding import find_images

    require_suffix("output", arguments.output)
    require_folder("output", arguments.output)
    files, labels = find_images(arguments.images)
    if arguments.retrieval:
        _require_classes(labels)
    failures: dict[str, str] = {}
    embeddings = _embed(arguments.model, files, arguments, normalized=arguments.normalize, failures=failures)
    readable = [index for index, file in enumerate(files) if file not in failures]
    files, labels = [files[index] for index in readable], [labels[index] for index in readable]
    written = write_embeddings(Embeddings(embeddings.numpy(), files, labels), arguments.output)
    retrieval = _retrieval(embeddings, labels) if arguments.retrieval else None
    classes = len({label for label in labels if label})
    if arguments.json:
        numbers: dict[str, Any] = {
            "written": [str(path) for path in written],
            "images": len(files),
            "dimensions": embeddings.shape[1],
            "classes": classes,
        }
        print_json(numbers | ({} if retrieval is None else {"retrieval": retrieval}))
    else:
        names = ", ".join(plain(path) for path in written)
        print(f"{len(files)} embeddings of {embeddings.shape[1]} numbers, {classes} classes: {names}")
        if retrieval is not None:
            print(", ".join(f"{name} {value:.2%}" for name, value in retrieval.items()))
    for message in failures.values():
        print_message(f"spherenet embed: {message}")
    return 1 if failures else 0


def _embed(
    model: str,
    files: Sequence[str],
    arguments: Namespace,
    *,
    normalized: bool = False,
    failures: dict[str, str] | None = None,
) -> Tensor:
    """Return the embeddings of image files by the model of a run or an exported folder."""
    from spherenet.training.embedding import embed_images
    from spherenet.training.saved_runs import load_predictor

    predictor = load_predictor(model, arguments.checkpoint)
    for message in predictor.warnings:
        warn(message)
    with progress_bar("images") as progress:
        return embed_images(
            predictor,
            files,
            normalized=normalized,
            batch_size=arguments.batch_size,
            device=arguments.device,
            workers=arguments.workers,
            max_megapixels=arguments.max_megapixels,
            progress=progress,
            failures=failures,
        )


def _require_classes(labels: Sequence[str]) -> None:
    """Raise DataError unless all images have a class and one class has two images."""
    from spherenet.errors import DataError

    if any(not label for label in labels) or max(Counter(labels).values(), default=0) < 2:
        raise DataError("--retrieval requires folders of classes (class/name.jpg), one with at least two images.")


def _retrieval(embeddings: Tensor, labels: Sequence[str]) -> dict[str, float]:
    """Return recall@k, for k up to the number of images, and mAP@R."""
    from spherenet.metrics import mean_average_precision_at_r, recall_at_k

    _require_classes(labels)  # images that cannot be read are missing
    recalls = {f"recall@{k}": recall_at_k(embeddings, labels, k) for k in RECALLS if k < len(labels)}
    return recalls | {"mAP@R": mean_average_precision_at_r(embeddings, labels)}


def verify_parser() -> Parser:
    """Return the parser of `spherenet verify`."""
    parser = Parser(
        "verify",
        "Measure how well the cosine of two embeddings tells whether two images show the same class.\n"
        "PAIRS is a CSV file with one row per pair: file, file, and 1 (same) or 0 (different), or\n"
        "pairs.txt of Labeled Faces in the Wild. The accuracy is that of a cross-validation: each fold\n"
        "uses the best threshold of the other folds.",
        examples="""\
  spherenet verify runs/faces pairs.csv --root photos           # embeds the images of the pairs
  spherenet verify faces.npy pairs.csv --root photos            # with embeddings of spherenet embed
  spherenet verify runs/faces lfw/pairs.txt --root lfw          # Labeled Faces in the Wild
  spherenet verify runs/faces pairs.csv --fpr 0.01 0.0001 --roc roc.csv --json""",
    )
    text = "folder of a run or an exported model, or a file of embeddings (.npy or .csv)"
    parser.add_argument("model", metavar="MODEL", help=text)
    parser.add_argument("pairs", metavar="PAIRS", help="CSV file of pairs")
    add_option(
        parser, "--root", metavar="DIR", help="folder that the files of PAIRS are in; by default the current one"
    )
    add_option(parser, "--folds", type=int, default=10, at_least=2, help="folds of the cross-validation")
    text = "false positive rates at which the true positive rate is stated"
    add_option(parser, "--fpr", type=list[float], default=FALSE_POSITIVE_RATES, at_least=0, at_most=1, help=text)
    add_option(parser, "--roc", metavar="FILE", help="CSV file for the points of the ROC curve")
    add_inference(parser, batch_size=64)
    add_workers(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def run_verify(arguments: Namespace) -> None:
    """Measure the verification of pairs."""
    require_ending("--roc", arguments.roc, ".csv", inputs=[arguments.pairs, arguments.model])
    require_folder("--roc", arguments.roc)
    import torch

    from spherenet import metrics
    from spherenet.data.embeddings import read_pairs

    pairs = read_pairs(arguments.pairs)
    same = torch.tensor([pair.same for pair in pairs])
    counts = int(same.sum()), int((~same).sum())
    if min(counts) < 2:
        raise InvalidArgument(
            "PAIRS", f"must have at least 2 same and 2 different pairs, got {counts[0]} and {counts[1]}."
        )
    if arguments.folds > min(counts):  # before the images are embedded
        raise InvalidArgument(
            "folds",
            f"must be at most {min(counts)}, the number of {'same' if counts[0] <= counts[1] else 'different'} "
            f"pairs in {arguments.pairs!r}, got {arguments.folds}.",
        )
    scores = _scores(arguments, pairs)
    accuracy = metrics.verification_accuracy(scores, same, arguments.folds)
    rates = {rate: metrics.true_positive_rate_at(scores, same, rate) for rate in arguments.fpr}
    area, equal_error = metrics.roc_auc(scores, same), metrics.equal_error_rate(scores, same)
    if arguments.roc is not None:
        _write_roc(metrics.roc_curve(scores, same), arguments.roc)
    if arguments.json:
        print_json(
            {
                "same": counts[0],
                "different": counts[1],
                "accuracy": accuracy.mean,
                "standard_error": accuracy.standard_error,
                "accuracies": accuracy.accuracies,
                "thresholds": accuracy.thresholds,
                "auc": area,
                "eer": equal_error,
                "tpr_at_fpr": {f"{rate:g}": value for rate, value in rates.items()},
            }
        )
        return
    print(f"{plain(arguments.pairs)}: {counts[0]} same and {counts[1]} different pairs")
    thresholds = min(accuracy.thresholds), max(accuracy.thresholds)
    print(
        f"accuracy {accuracy.mean:.2%} ± {accuracy.standard_error:.2%} (standard error of {arguments.folds} folds), "
        f"thresholds {thresholds[0]:.3f} to {thresholds[1]:.3f}"
    )
    print(f"AUC {area:.4f}, equal error rate {equal_error:.2%}")
    print(", ".join(f"TPR {value:.2%} at FPR {rate:g}" for rate, value in rates.items()))


def _scores(arguments: Namespace, pairs: Sequence[Pair]) -> Tensor:
    """Return the cosine of each pair."""
    import torch

    from spherenet.errors import DataError
    from spherenet.metrics import pair_similarities

    if not os.path.isdir(arguments.model) and not arguments.model.lower().endswith((".npy", ".csv")):
        raise InvalidArgument(
            "MODEL",
            f"must be the folder of a run or a model, or a file ending in .npy or .csv, got {arguments.model!r}.",
        )
    root = arguments.root or ""
    paths = {name: os.path.normpath(os.path.join(root, name)) for pair in pairs for name in pair[:2]}
    wanted = dict.fromkeys(paths.values())
    if os.path.isdir(arguments.model):
        missing = [name for name in wanted if not os.path.isfile(name)]
        source = "do not exist"
    else:
        from spherenet.data.embeddings import read_embeddings

        for option in ("checkpoint", "device"):
            if (value := getattr(arguments, option)) not in (None, "last"):
                raise InvalidArgument(f"--{option}", f"must be left out for a file of embeddings, got {value}.")
        embeddings = read_embeddings(arguments.model)
        rows = {os.path.normpath(name): row for row, name in enumerate(embeddings.files)}
        missing = [name for name in wanted if name not in rows]
        source = f"are not in {arguments.model!r}"
    if missing:
        raise DataError(
            f"{arguments.pairs!r} names {len(missing)} images that {source} (first: {missing[0]!r}); "
            "--root states the folder that they are in."
        )
    if os.path.isdir(arguments.model):
        rows, values = {name: row for row, name in enumerate(wanted)}, _embed(arguments.model, list(wanted), arguments)
    else:
        values = torch.from_numpy(embeddings.values)
    first = torch.tensor([rows[paths[pair.first]] for pair in pairs])
    second = torch.tensor([rows[paths[pair.second]] for pair in pairs])
    return pair_similarities(values[first], values[second])


def _write_roc(curve: Any, file: str) -> None:
    from spherenet._util.atomic import write_text
    from spherenet._util.files import user_path

    rows = zip(*(column.tolist() for column in curve), strict=True)
    lines = [",".join(map(repr, row)) for row in rows]
    write_text(user_path(file), "\n".join(["false_positive_rate,true_positive_rate,threshold", *lines]) + "\n")
