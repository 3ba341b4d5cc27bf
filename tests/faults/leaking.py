"""Train for long and print the resources in use: python leaking.py STEPS RUNS READERS."""

import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parents[1]))

import spherenet as sn  # noqa: E402
from faults.small_sets import write_images  # noqa: E402
from spherenet.data import load_dataset  # noqa: E402
from spherenet.training import run as training  # noqa: E402
from spherenet.training.config import TrainConfig  # noqa: E402

SIZES = (1, 2, 5, 12, 30, 70, 130, 200, 150, 90, 40, 17, 7, 3)
"""Batch sizes, growing and shrinking."""


def resources():
    """Return the memory in kilobytes and the numbers of threads, open files and child processes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = os.listdir("/proc/self/task")
    return {
        "kilobytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "threads": len(tasks),
        "files": len(os.listdir("/proc/self/fd")),
        "processes": sum(map(_children, tasks)),
    }


def _children(task):
    try:
        return len(Path(f"/proc/self/task/{task}/children").read_text().split())
    except FileNotFoundError:  # the thread has just ended
        return 0


def settled(first):
    """Return the resources when ending threads have ended, i.e. when the counts have fallen to those of `first`."""
    current = resources()
    for _ in range(100):
        if first is None or all(current[name] <= first[name] for name in ("threads", "files", "processes")):
            break
        time.sleep(0.1)
        current = resources()
    return current


def batches(steps):
    """Train on batches of every size and return the resources after each round of sizes."""
    model = sn.create_model("cnn-3", 10, operator="learnable", loss="ga-linear", widths=(4, 4, 4), in_channels=1,
                            input_size=20)  # fmt: skip
    optimizer = torch.optim.Adam(sn.param_groups(model, 5e-4), fused=True)
    generator = torch.Generator().manual_seed(0)
    measured = []
    for step in range(steps):
        size = SIZES[step % len(SIZES)]
        images = torch.randn(size, 1, 20, 20, generator=generator)
        if size == 1:
            model.eval()  # BatchNorm needs more than one image
        loss, _ = model(images, torch.randint(10, (size,), generator=generator))
        model.train()
        optimizer.zero_grad()
        (loss + 1e-4 * sn.orthogonality(model)).backward()
        optimizer.step()
        if step % len(SIZES) == len(SIZES) - 1:
            measured.append(resources())
    return measured


def runs(count, folder):
    """Train complete runs, with evaluations and checkpoints, and return the resources after each."""
    digits = load_dataset("mnist5k", image_size=12)
    train, test = digits.train.subset(torch.arange(0, 4000, 20)), digits.test.subset(torch.arange(0, 1000, 10))
    few = replace(digits, train=train, test=test)
    training.build_data = lambda config, progress=None, **options: few
    config = TrainConfig(widths=[4, 4, 4], iterations=10, batch_size=32, eval_every=5, checkpoint_every=3, log_every=2)
    measured = []
    for number in range(count + 1):
        training.train(config, folder / str(number))
        measured.append(resources())
    return measured


def readers(count, folder):
    """Open loaders with workers that are read to the end, closed early or dropped; return the resources after each."""
    write_images(folder / "images", per_class=12)
    split = load_dataset("folder", folder / "images", image_size=12).train
    measured = []
    for number in range(count + 1):
        order = [(0, torch.arange(first, first + 4)) for first in range(0, 20, 4)]
        loader = split.batches(order, device=torch.device("cpu"), augmentation=None, workers=2)
        for _ in zip(range(2 if number % 3 else 10), loader, strict=False):
            pass
        if number % 3 == 1:
            loader.close()
        del loader
        measured.append(settled(measured[0] if measured else None))
    return measured


if __name__ == "__main__":
    steps, run_count, reader_count = map(int, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "runs").mkdir()
        print(json.dumps({
            "batches": batches(steps),
            "runs": runs(run_count, Path(folder) / "runs"),
            "readers": readers(reader_count, Path(folder)),
        }))  # fmt: skip
