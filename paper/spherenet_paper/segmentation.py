"""Train a small U-Net at batches of 1 and 2 with each normalization: a part of Q3 of results/PLAN.md.

    python -m spherenet_paper.segmentation run FOLDER      # about half an hour on one core of an AMD EPYC
    python -m spherenet_paper.segmentation table FOLDER -o paper/results/segmentation.csv
    python -m spherenet_paper.segmentation judge paper/results/segmentation.csv

Images are generated: disks, squares and triangles of random colors on a background of blocks of random colors, with
noise. Colors say nothing about the class, so that a network has to see shapes. All networks see the same images; the
learning rate of each is chosen on other images with another seed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from torch.nn import functional as F

import spherenet as sn
from spherenet_paper.comparisons import Comparison, compare
from spherenet_paper.question import Question, verdicts

__all__ = ["ARMS", "BATCHES", "QUESTION", "SEEDS", "Score", "UNet", "judge", "make_images", "train"]

CLASSES = ("background", "disk", "square", "triangle")
SIZE, BLOCK, WIDTHS = 32, 4, (16, 32, 64)
TRAIN_IMAGES, TEST_IMAGES = 3000, 400
BATCHES, SEEDS, RATES = (1, 2), range(5), (3e-4, 1e-3, 3e-3)
SEARCH_SEED = 100
"""Seed of weights and images of the search for learning rates, which no result uses."""


class StandardizedConv2d(nn.Conv2d):
    """Convolution whose filters have mean 0 and variance 1/entries, times a learned gain if `scaled`.

    Without a gain it is weight standardization (Qiao et al., 2019), which a normalization follows. With one it is the
    scaled weight standardization of networks without normalization (Brock et al., 2021).
    """

    def __init__(self, channels_in: int, channels_out: int, kernel: int, scaled: bool) -> None:
        super().__init__(channels_in, channels_out, kernel, padding=kernel // 2)
        self.gain = nn.Parameter(torch.ones(channels_out, 1, 1, 1)) if scaled else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution with standardized filters."""
        entries = self.weight[0].numel()
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (variance * entries + 1e-4).rsqrt()
        return F.conv2d(x, weight if self.gain is None else weight * self.gain, self.bias, padding=self.padding)


class ScaledReLU(nn.Module):
    """ReLU times the constant that gives its output variance 1 for a standard normal input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled ReLU."""
        return F.relu(x) * math.sqrt(2 / (1 - 1 / math.pi))


def _plain(channels_in: int, channels_out: int, norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), norm, nn.ReLU())


def _sphere(channels_in: int, channels_out: int, center: str) -> nn.Sequential:
    layer = sn.SphereConv2d(channels_in, channels_out, 3, padding=1, center=center, rescale="learned")
    return nn.Sequential(layer, nn.ReLU())


def _head(arm: str) -> nn.Module:
    """Return the 1×1 convolution at the end: cosines times 10 in a SphereNet, whose features are small."""
    channels, classes = WIDTHS[0], len(CLASSES)
    if arm.startswith("sphere"):
        return sn.SphereConv2d(channels, classes, 1, rescale=(10.0, 0.0))
    return nn.Conv2d(channels, classes, 1)


GROUPS = 8
ARMS: dict[str, Callable[[int, int], nn.Module]] = {
    "sphere-patch": lambda x, y: _sphere(x, y, "patch"),
    "sphere-weight": lambda x, y: _sphere(x, y, "weight"),
    "batchnorm": lambda x, y: _plain(x, y, nn.BatchNorm2d(y)),
    "groupnorm": lambda x, y: _plain(x, y, nn.GroupNorm(GROUPS, y)),
    "groupnorm-ws": lambda x, y: nn.Sequential(
        StandardizedConv2d(x, y, 3, scaled=False), nn.GroupNorm(GROUPS, y), nn.ReLU()
    ),
    "layernorm": lambda x, y: _plain(x, y, nn.GroupNorm(1, y)),
    "scaled-ws": lambda x, y: nn.Sequential(StandardizedConv2d(x, y, 3, scaled=True), ScaledReLU()),
}
"""Convolution with normalization and activation of each network: the SphereNets have no normalization layer."""

BASELINES = ("batchnorm", "groupnorm", "groupnorm-ws", "layernorm", "scaled-ws")


class UNet(nn.Module):
    """U-Net of two units per level, with nearest-neighbor upsampling and a 1×1 convolution at the end.

    Args:
        arm: Name of the normalization.

    Shape:
        images [N, 3, H, W], H and W divisible by 4 → scores [N, 4, H, W].
    """

    def __init__(self, arm: str) -> None:
        super().__init__()
        unit = ARMS[arm]
        fine, middle, coarse = WIDTHS
        self.down = nn.ModuleList(
            nn.Sequential(unit(before, after), unit(after, after)) for before, after in ((3, fine), (fine, middle))
        )
        self.bottom = nn.Sequential(unit(middle, coarse), unit(coarse, coarse))
        self.up = nn.ModuleList(
            nn.Sequential(unit(before + after, after), unit(after, after))
            for before, after in ((coarse, middle), (middle, fine))
        )
        self.classify = _head(arm)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores of each pixel."""
        x, skipped = images, []
        for level in self.down:
            skipped.append(level(x))
            x = F.max_pool2d(skipped[-1], 2)
        x = self.bottom(x)
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2), skipped.pop()], 1))
        scores: Tensor = self.classify(x)
        return scores


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images [N, 3, H, W] with values of about ±2, and the class of each pixel [N, H, W]."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images = random.uniform(-1.5, 1.5, (count, SIZE // BLOCK, SIZE // BLOCK, 3)).repeat(BLOCK, 1).repeat(BLOCK, 2)
    labels = np.zeros((count, SIZE, SIZE), np.int64)
    for image, label in zip(images, labels, strict=True):
        for _ in range(random.integers(2, 5)):
            kind, radius = int(random.integers(1, 4)), random.uniform(4, 8)
            y, x = random.uniform(radius, SIZE - radius, 2)
            down, right = rows - y, columns - x
            inside = (
                down**2 + right**2 < radius**2,
                np.maximum(abs(down), abs(right)) < 0.9 * radius,
                (down < 0.8 * radius) & (2 * abs(right) < down + radius),
            )[kind - 1]
            image[inside], label[inside] = random.uniform(-1.5, 1.5, 3), kind
    images += random.normal(0, 0.3, images.shape)
    return torch.from_numpy(images).permute(0, 3, 1, 2).float().contiguous(), torch.from_numpy(labels)


class Score(NamedTuple):
    """Mean intersection over union of the classes on test images, as a fraction; NaN losses score 0."""

    arm: str
    seed: int
    batch: int
    learning_rate: float
    score: float


def train(arm: str, seed: int, batch: int, rate: float, images: int = TRAIN_IMAGES) -> float:
    """Train a network on as many images, and return its score on other ones."""
    torch.manual_seed(seed)
    network = UNet(arm)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=images // batch)
    pixels, labels = make_images(images, 2 * seed)
    for start in range(0, images - batch + 1, batch):
        loss = F.cross_entropy(network(pixels[start : start + batch]), labels[start : start + batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return _score(network.eval(), *make_images(TEST_IMAGES, 2 * seed + 1))


def _score(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the mean intersection over union."""
    with torch.inference_mode():
        scores = torch.cat([network(part) for part in torch.split(images, 50)])
    if not scores.isfinite().all():
        return 0.0
    predicted = scores.argmax(1)
    unions = [((predicted == k) | (labels == k)).sum() for k in range(len(CLASSES))]
    both = [((predicted == k) & (labels == k)).sum() for k in range(len(CLASSES))]
    return fmean(float(x / y.clamp(min=1)) for x, y in zip(both, unions, strict=True))


def run_all(options: argparse.Namespace) -> int:
    """Train what is missing: all rates with the seed of the search, then all seeds with the best one."""
    torch.set_num_threads(1)
    options.folder.mkdir(parents=True, exist_ok=True)
    for arm, batch in ((arm, batch) for arm in options.arms for batch in BATCHES):
        with suppress(Timeout), FileLock(options.folder / f"{arm}-{batch}.lock", timeout=0):
            if options.dry_run:
                print(
                    f"{arm}, batch {batch}: rates {', '.join(f'{rate:g}' for rate in RATES)}, then {len(SEEDS)} seeds"
                )
                continue
            found = [_stored(options.folder, arm, SEARCH_SEED, batch, rate) for rate in RATES]
            rate = max(found, key=lambda score: score.score).learning_rate
            for seed in SEEDS:
                print(_stored(options.folder, arm, seed, batch, rate), flush=True)
    return 0


def _stored(folder: Path, arm: str, seed: int, batch: int, rate: float) -> Score:
    """Return the score of a training, which is run unless its file exists."""
    path = folder / f"{arm}-batch{batch}-rate{rate:g}-seed{seed}.json"
    if not path.exists():
        path.write_text(json.dumps(Score(arm, seed, batch, rate, round(train(arm, seed, batch, rate), 4))))
    return Score(*json.loads(path.read_text()))


def collect(folder: Path) -> Iterator[Score]:
    """Return the scores of all trainings of a folder, those of the search included."""
    scores = [Score(*json.loads(path.read_text())) for path in sorted(folder.glob("*-seed*.json"))]
    return iter(sorted(scores, key=lambda score: (list(ARMS).index(score.arm), score.seed, score.batch)))


def judge(scores: Sequence[Score]) -> list[Comparison]:
    """Return the centered SphereNet's lead over each baseline, none if a planned training is missing."""
    points = {(one.arm, one.seed, one.batch): 100 * one.score for one in scores}
    planned = [(arm, seed, batch) for arm in ARMS for seed in SEEDS for batch in BATCHES]
    if any(one not in points for one in planned):
        return []
    means = {(arm, seed): fmean(points[arm, seed, batch] for batch in BATCHES) for arm in ARMS for seed in SEEDS}
    return compare({arm: [means["sphere-patch", seed] - means[arm, seed] for seed in SEEDS] for arm in BASELINES})


QUESTION = Question(
    module="spherenet_paper.segmentation",
    description=__doc__,
    run=run_all,
    collect=collect,
    arms=list(ARMS),
    row=Score,
    judge=lambda scores, table: verdicts(judge(scores), table, "sphere-patch − {}"),
)

if __name__ == "__main__":
    sys.exit(QUESTION.main())
