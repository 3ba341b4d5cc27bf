"""Measure how well networks of Q1 tell unknown images from known ones: Q4 of results/PLAN.md.

    python -m spherenet_paper.unknown run FOLDER --data-dir DATA       # evaluates the runs of spherenet_paper.light
    python -m spherenet_paper.unknown table FOLDER -o paper/results/unknown.csv
    python -m spherenet_paper.unknown judge paper/results/unknown.csv

FOLDER is that of `python -m spherenet_paper.light run`. The unknown images are written there once, from fixed seeds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from spherenet.data import load_dataset
from spherenet_paper.comparisons import Comparison, compare
from spherenet_paper.question import Question, evaluate, verdicts

__all__ = ["ARMS", "KINDS", "QUESTION", "SCORES", "Area", "judge"]

ARMS = ("cnn", "cosine", "patch")
SEEDS = range(3)
SCORES = ("max_cosine", "knn_cosine", "energy", "max_softmax")
COUNT, SIZE, BLOCK = 2000, 32, 4


class Area(NamedTuple):
    """Area under the ROC curve of known against unknown images of one network and score, as a fraction."""

    arm: str
    seed: int
    unknown: str
    score: str
    auroc: float


def digits() -> np.ndarray:
    """Return digits of the package as color images, uint8 [N, 32, 32, 3]."""
    dataset = load_dataset("mnist5k", image_size=SIZE, channels=3)
    chosen = torch.from_numpy(np.random.default_rng(0).permutation(len(dataset.train))[:COUNT])
    [batch] = dataset.train.batches([(0, chosen)], device=torch.device("cpu"), augmentation=None)
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (dataset.preprocessing.mean, dataset.preprocessing.std)
    )
    pixels = (batch.images * std + mean).round().clamp(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).numpy()


def noise() -> np.ndarray:
    """Return images of uniform noise in blocks of pixels, uint8 [N, 32, 32, 3]."""
    blocks = np.random.default_rng(0).integers(0, 256, (COUNT, SIZE // BLOCK, SIZE // BLOCK, 3), dtype=np.uint8)
    return blocks.repeat(BLOCK, 1).repeat(BLOCK, 2)


KINDS = {"digits": digits, "noise": noise}
"""Unknown images by name."""


def run_all(folder: Path, data_dir: str | None, arms: Sequence[str] = ARMS, dry_run: bool = False) -> int:
    """Write the unknown images and evaluate what is missing; return 1 if a run is missing or an evaluation fails."""
    failed = 0
    for unknown, images in KINDS.items():
        target = folder / f"unknown-{unknown}"
        if not dry_run and len(list(target.glob("*.png"))) != COUNT:
            target.mkdir(parents=True, exist_ok=True)
            for index, image in enumerate(images()):
                Image.fromarray(image).save(target / f"{index:04d}.png")
        for arm, seed in ((arm, seed) for arm in arms for seed in SEEDS):
            numbers = _numbers(folder, arm, seed, unknown)
            failed += not evaluate(folder / f"{arm}-seed{seed}", ["--ood", str(target)], numbers, data_dir, dry_run)
    return int(failed > 0 and not dry_run)


def _numbers(folder: Path, arm: str, seed: int, unknown: str) -> Path:
    return folder / f"{arm}-seed{seed}-{unknown}.json"


def collect(folder: Path) -> Iterator[Area]:
    """Return the areas of all evaluated runs of a folder."""
    for arm, seed, unknown in ((arm, seed, unknown) for arm in ARMS for seed in SEEDS for unknown in KINDS):
        path = _numbers(folder, arm, seed, unknown)
        if path.exists():
            areas = json.loads(path.read_text())["ood"]["auroc"]
            yield from (Area(arm, seed, unknown, score, areas[score]) for score in SCORES)


def judge(areas: Sequence[Area]) -> list[Comparison]:
    """Return the four comparisons of the plan, none if a planned evaluation is missing."""
    points = {area[:4]: 100 * area.auroc for area in areas}
    differences = {}
    for arm, unknown in ((arm, unknown) for unknown in KINDS for arm in ARMS[1:]):
        ours = [points.get((arm, seed, unknown, "max_cosine")) for seed in SEEDS]
        theirs = [points.get(("cnn", seed, unknown, "max_softmax")) for seed in SEEDS]
        pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x is not None and y is not None]
        if len(pairs) != len(SEEDS):
            return []
        differences[f"{arm} − cnn on {unknown}"] = [x - y for x, y in pairs]
    return compare(differences)


QUESTION = Question(
    module="spherenet_paper.unknown",
    description=__doc__,
    run=lambda options: run_all(options.folder, options.data_dir, options.arms, options.dry_run),
    collect=collect,
    arms=ARMS,
    row=Area,
    judge=lambda areas, table: verdicts(judge(areas), table),
)

if __name__ == "__main__":
    sys.exit(QUESTION.main())
