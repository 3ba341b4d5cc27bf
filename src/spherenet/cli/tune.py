"""`spherenet tune`: operator, k and s by cross-validation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import ConfigParser
from spherenet.cli.output import print_json, say
from spherenet.training.config import TrainConfig

if TYPE_CHECKING:
    from spherenet.experiments.tuning import Score

EXAMPLES = """\
  spherenet tune --try-operators sigmoid linear cosine --try-k 0.1 0.3 0.7 --best best.yaml
  spherenet tune --data cifar10 --model cnn-9 --try-losses s-cosine --try-s 10 30 70 --number-of-folds 5
  spherenet train --config best.yaml"""


def parser() -> ConfigParser:
    """Return the verb's parser."""
    made = ConfigParser(
        "tune",
        "Choose operator, k, loss and s by cross-validation: every setting is trained on all folds of\n"
        "the training pictures but one and evaluated on that one; the test pictures are not looked at.\n"
        "Folds that are done are skipped: call it again until all are. Options of train hold for all.",
        TrainConfig,
        examples=EXAMPLES,
    )
    grid = made.add_argument_group("settings to try")
    grid.add_argument("--try-operators", nargs="+", type=str, default=["sigmoid", "linear", "cosine"], help="operators")
    grid.add_argument("--try-k", nargs="+", type=float, default=[], help="k of sigmoid and learnable")
    grid.add_argument("--try-losses", nargs="+", type=str, default=["softmax"], help="losses")
    grid.add_argument("--try-s", nargs="+", type=float, default=[], help="s of s-…, cosface and arcface")
    grid.add_argument("--number-of-folds", type=int, default=3, help="folds")
    run = made.add_argument_group("run")
    run.add_argument("--output", type=str, default="runs/tune", help="folder of the runs")
    run.add_argument("--best", type=str | None, default=None, help="YAML file for the chosen setting")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time")
    run.add_argument("--json", action="store_true", help="print the scores as JSON")
    return made


def run(arguments: Any) -> int:
    """Train every fold, print the scores and write the chosen setting."""
    if arguments.number_of_folds < 2:
        raise ValueError(f"--number-of-folds must be at least 2, got {arguments.number_of_folds}.")
    if arguments.jobs < 1:
        raise ValueError(f"--jobs must be at least 1, got {arguments.jobs}.")
    from spherenet.angles import OPERATORS
    from spherenet.cli.grid_progress import run_watched
    from spherenet.experiments.runner import Here, visible_gpus
    from spherenet.experiments.tuning import best_score, jobs_of_tuning, score, settings_of
    from spherenet.losses import list_losses
    from spherenet.validation import require_one_of

    for operator in arguments.try_operators:
        require_one_of("--try-operators", operator, [*OPERATORS, "none"])
    for loss in arguments.try_losses:
        require_one_of("--try-losses", loss, list_losses())
    config = TrainConfig.from_dict(parser().values(arguments))
    settings = settings_of(config, arguments.try_operators, arguments.try_k, arguments.try_losses, arguments.try_s)
    folder, folds = Path(arguments.output), arguments.number_of_folds
    launch = Here(max(1, (os.cpu_count() or 1) // arguments.jobs), gpus=visible_gpus(), at_once=arguments.jobs)
    results = run_watched("tune", jobs_of_tuning(settings, folder, folds), launch, arguments.jobs)
    scores = [score(name, chosen, folder, folds) for name, chosen in settings.items()]
    best = best_score(scores, folds)
    _print(scores, best, arguments.json)
    if best is not None and arguments.best is not None:
        import yaml  # type: ignore[import-untyped]

        from spherenet.files import write_text

        write_text(Path(arguments.best), yaml.safe_dump(best.config.as_dict(), sort_keys=False))
    failed = [result for result in results if result.failure is not None]
    for result in failed:
        say(f"spherenet tune: {result.job.name} failed: {result.failure}")
    return 130 if launch.stopped else 1 if failed else 0


def _print(scores: list[Score], best: Score | None, as_json: bool) -> None:
    done = sorted((found for found in scores if found.accuracies), key=lambda found: -found.mean)
    if as_json:
        rows = [{"setting": found.name, "accuracies": found.accuracies, "mean": found.mean} for found in done]
        print_json({"scores": rows, "best": None if best is None else best.name})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="accuracy on the fold left out", caption="the best is chosen; folds share no pictures")
    table.add_column("setting")
    for column in ("mean", "std", "folds"):
        table.add_column(column, justify="right")
    for found in done:
        deviation = "–" if found.deviation is None else f"{found.deviation:.2%}"
        row = (found.name, f"{found.mean:.2%}", deviation, str(len(found.accuracies)))
        table.add_row(*row, style="bold" if found is best else None)
    Console().print(table)
