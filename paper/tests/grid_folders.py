"""Experiments with runs written by hand, so that reports can be tested without training."""

from dataclasses import dataclass, replace
from pathlib import Path

from made_runs import make_run
from spherenet.runs import RunDirectory
from spherenet.training import TrainConfig
from spherenet_paper.experiments.experiment import PRESETS, Cell, Claim, Experiment
from spherenet_paper.report.grids import grid_of_runs


@dataclass
class MadeGrid:
    """An experiment, and the folder of its runs."""

    experiment: Experiment
    preset: str
    folder: Path

    def __truediv__(self, name):
        return self.folder / name

    def change(self, **fields):
        """Replace fields of the experiment."""
        self.experiment = replace(self.experiment, **fields)

    def change_claims(self, **fields):
        """Replace fields of all claims."""
        self.change(claims=tuple(replace(claim, **fields) for claim in self.experiment.claims))

    def read(self, seeds=0):
        return grid_of_runs(self.experiment, self.preset, self.folder, seeds)


def finish_job(job, accuracy=0.5):
    """Write the run of a job of a grid as if it had been trained with its options."""
    run = RunDirectory.create(job.folder)
    run.write_config({"format": 1, "train": job.config.as_dict(), "command": ["spherenet", "train"]})
    run.append({"step": job.config.iterations, "split": "test", "loss": 1.0, "accuracy": accuracy, "seconds": 1.0})
    run.write_summary({"iterations": job.config.iterations, "accuracy": accuracy, "seconds": 1.0})
    return job.folder


def make_grid(folder, cells, claims=(), *, id="table1", preset="cpu", **fields):
    """Write the runs of an experiment. cells: name → (row, column, paper, {seed: accuracies})."""
    described = [Cell(name, row, column, TrainConfig(), paper) for name, (row, column, paper, _) in cells.items()]
    stated = tuple(
        Claim(f"claim-{number}", text, "Table 1", tuple(map(tuple, pairs)), quantity)
        for number, (text, pairs, quantity) in enumerate(claims)
    )
    experiment = Experiment(id, "A table", "something", lambda _: described, stated, presets=PRESETS, **fields)
    for name, (_, _, _, seeds) in cells.items():
        for seed, accuracies in seeds.items():
            make_run(folder / name / f"seed-{seed}", accuracies)
    return MadeGrid(experiment, preset, folder)
