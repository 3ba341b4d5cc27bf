"""`spherenet predict`: the classes of pictures."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import Any

from spherenet.cli.options import Parser
from spherenet.cli.output import print_json, warn
from spherenet.text import plain

EXAMPLES = """\
  spherenet predict picture.jpg                                 # the shipped model: ten kinds of things
  spherenet predict digit.png --run runs/mnist5k-cnn-3-sigmoid
  spherenet predict *.jpg --run exported-model --top 1 --json"""

BATCH = 64


def parser() -> Parser:
    """Return the verb's parser."""
    made = Parser(
        "predict",
        "Say what is in pictures: the most likely classes with their scores, which are the softmax\n"
        "of the network's answers. RUN is the folder of a run or of an exported model; without it a small\n"
        "SphereNet that comes with the package answers, which knows the ten kinds of things of CIFAR-10.",
        examples=EXAMPLES,
    )
    made.add_argument("images", nargs="+", metavar="IMAGE", help="picture files")
    made.add_argument("--run", metavar="RUN", help="folder of a run or an exported model (the shipped one)")
    made.add_argument("--checkpoint", choices=["best", "last"], default="best", help="of a run (default: best)")
    made.add_argument("--top", type=int, default=3, metavar="N", help="classes shown a picture (default: 3)")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def run(arguments: Namespace) -> None:
    """Predict and print."""
    if arguments.top < 1:
        raise ValueError(f"--top must be at least 1, got {arguments.top}.")
    import torch

    from spherenet.data import read_image
    from spherenet.export import shipped_model
    from spherenet.training.saved_runs import load_predictor

    predictor = load_predictor(arguments.run or shipped_model(), arguments.checkpoint)
    for message in predictor.warnings:
        warn(message)
    # All pictures are read before the first answer: a wrong one must not leave half a table.
    pictures = [read_image(path, predictor.preprocessing) for path in arguments.images]
    if arguments.run is None:
        known = ", ".join(predictor.classes)
        print(f"with the shipped model, which knows {known}; --run names another.", file=sys.stderr)
    with torch.no_grad():
        scores = torch.cat(
            [predictor.model(torch.stack(pictures[first : first + BATCH])) for first in range(0, len(pictures), BATCH)]
        ).softmax(1)
    best = scores.topk(min(arguments.top, len(predictor.classes)))
    answers = [
        [(predictor.classes[index], score) for score, index in zip(values, indices, strict=True)]
        for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    if arguments.json:
        print_json([_as_json(path, found) for path, found in zip(arguments.images, answers, strict=True)])
        return
    shown = [plain(path) for path in arguments.images]
    width = max(map(len, shown))
    for path, found in zip(shown, answers, strict=True):
        print(f"{path:<{width}}  " + "  ".join(f"{plain(name)} {score:.1%}" for name, score in found))


def _as_json(path: str, found: list[tuple[str, float]]) -> dict[str, Any]:
    return {"image": path, "classes": [{"class": name, "score": score} for name, score in found]}
