"""Export the SphereNet that is included in the package, with a model card that states how it was trained and measured.

    python paper/tools/ship_model.py RUN src/spherenet/export/cifar10-air-cosine

RUN is a run, or a grid with checkpoints: then the run with the smallest seed is taken of the SphereNet
with the highest mean final accuracy over seeds. The second argument is the folder to write; it is replaced. The weights
are those of the last checkpoint. The card states the accuracy that is measured here, on the test images in float32 with
running BatchNorm statistics, because runs may have been evaluated in another precision.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from spherenet.data import load_dataset
from spherenet.errors import RunError
from spherenet.export import load_model, save_model
from spherenet.training import Processes, evaluate, load_run, model_card
from spherenet_paper.experiments import EXPERIMENTS
from spherenet_paper.report.grids import Grid, grid_of_runs

LARGEST = 5_000_000
"""Largest size of the folder in bytes."""


def best_run(grid: Grid) -> str:
    """Return the run to export of a grid: of the SphereNet with the highest mean final accuracy, its smallest seed.

    Raises:
        RunError: The grid has no finished run of a SphereNet.
    """
    cells = [cell for cell in grid.cells if cell.runs and cell.row != grid.baseline]
    if not cells:
        raise RunError(f"{grid.id} has no finished run of a SphereNet.")
    best = max(cells, key=lambda cell: fmean(cell.values()))
    return best.runs[min(best.runs)].path


def ship(path: str, target: Path, selection: str = "No images were used to select it.") -> str:
    """Save the last checkpoint of a finished run in half precision; return the card's statement on its accuracy.

    Args:
        path: Run to export.
        target: Folder to write.
        selection: Sentence of the card on how the run was selected.

    Raises:
        RunError: The run is not finished, or the folder is too large.
    """
    run = load_run(path, "last")
    if not run.directory.finished:
        raise RunError(f"{path} must be a finished run, got one at step {run.step:,}.")
    test = load_dataset(run.config.data, run.config.data_dir).test
    metadata = {"classes": list(run.classes), "preprocessing": run.preprocessing.as_dict()}
    with TemporaryDirectory() as folder:  # what is measured are the rounded weights
        save_model(run.model, Path(folder) / "model", half=True)
        model = load_model(Path(folder) / "model")
    with Processes.joined("cpu") as processes:
        result = evaluate(model, test, len(run.classes), processes, tta=run.config.tta)
    views = "" if result.tta_accuracy is None else f" With the views of {run.config.tta}: {result.tta_accuracy:.2%}."
    selection = (
        "Measured in float32 with running BatchNorm statistics and the stored weights, which are rounded to half "
        f"precision.{views} The weights are those of the last checkpoint (step {run.step:,}, seed {run.config.seed}). "
        f"{selection}"
    )
    card = replace(
        model_card(run), name=target.name, accuracy=result.accuracy, accuracy_n=result.count, selection=selection
    )
    save_model(run.model, target, metadata=metadata, card=card, overwrite=True, half=True)
    size = sum(file.stat().st_size for file in target.iterdir())
    if size > LARGEST:
        raise RunError(f"{target} must have at most {LARGEST:,} bytes, got {size:,}.")
    return f"{path}: accuracy {result.accuracy:.2%} on {result.count:,} images, {size:,} bytes in {target}"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, folder = sys.argv[1], Path(sys.argv[2])
    if Path(source).name in EXPERIMENTS:
        grid = grid_of_runs(EXPERIMENTS[Path(source).name], Path(source).parent.name, Path(source))
        print(ship(best_run(grid), folder, "Its network has the highest mean test accuracy of a grid of networks."))
    else:
        print(ship(source, folder))
