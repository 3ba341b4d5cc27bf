"""Run and experiment folders written by hand, so that reports can be tested without training."""

from spherenet._util.files import write_json
from spherenet.runs import RunDirectory


def make_run(path, accuracies, *, operator="cosine", finished=True, k=None, protocols=None):
    """Write a run with these test accuracies, or those of each protocol: {"running": [0.1, 0.2], …}."""
    run = RunDirectory.create(path)
    protocols = protocols or {}
    run.write_config(
        {
            "format": 1,
            "train": {"model": "cnn-9", "operator": operator, "loss": "softmax", "bn_eval": list(protocols) or None},
            "command": ["spherenet", "train", "--output", path.name],
            "versions": {"torch": "2.13.0"},
            "hardware": {"device": "cpu"},
        }
    )
    for index, accuracy in enumerate(accuracies, 1):
        step = 10 * index
        run.metrics.append({"step": step, "split": "train", "loss": 2 / index, "accuracy": accuracy, "seconds": index})
        tests = [{"accuracy": own[index - 1], "protocol": name} for name, own in protocols.items()]
        for test in tests or [{"accuracy": accuracy}]:
            run.metrics.append({"step": step, "split": "test", "loss": 2 / index, **test, "seconds": index})
        if k is not None:
            run.metrics.append({"step": step, "split": "probes", "k": k, "seconds": index})
    if finished:
        run.write_summary(
            {"iterations": 10 * len(accuracies), "parameters": 1234, "seconds": 5.0, "peak_megabytes": 321}
        )
    return path


def finish_job(job, accuracy=0.5):
    """Write the run of a job of a grid as if it had been trained with its options."""
    run = RunDirectory.create(job.folder)
    run.write_config({"format": 1, "train": job.config.as_dict(), "command": ["spherenet", "train"]})
    run.append({"step": job.config.iterations, "split": "test", "loss": 1.0, "accuracy": accuracy, "seconds": 1.0})
    run.write_summary({"iterations": job.config.iterations, "accuracy": accuracy, "seconds": 1.0})
    return job.folder


def make_grid(folder, cells, claims=(), *, id="table1", preset="cpu"):
    """Write the folder of an experiment. cells: name → (row, column, paper, {seed: accuracies})."""
    folder.mkdir(parents=True)
    described = [
        {"name": name, "row": row, "column": column, "paper": paper, "starts_from": None}
        for name, (row, column, paper, _) in cells.items()
    ]
    claims = [
        {"text": text, "source": "Table 1", "pairs": pairs, "quantity": quantity} for text, pairs, quantity in claims
    ]
    write_json(
        folder / "experiment.json",
        {"format": 1, "id": id, "title": "A table", "shows": "something", "preset": preset, "cells": described,
         "claims": claims},
    )  # fmt: skip
    for name, (_, _, _, seeds) in cells.items():
        for seed, accuracies in seeds.items():
            make_run(folder / name / f"seed-{seed}", accuracies)
    return folder
