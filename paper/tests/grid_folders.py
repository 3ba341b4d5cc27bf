"""Experiment folders written by hand, so that reports can be tested without training."""

import json

from made_runs import make_run
from spherenet.runs import RunDirectory


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
    (folder / "experiment.json").write_text(json.dumps(
        {"format": 1, "id": id, "title": "A table", "shows": "something", "preset": preset, "cells": described,
         "claims": claims}
    ))  # fmt: skip
    for name, (_, _, _, seeds) in cells.items():
        for seed, accuracies in seeds.items():
            make_run(folder / name / f"seed-{seed}", accuracies)
    return folder
