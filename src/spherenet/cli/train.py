"""`spherenet train`: train a network on a data set, from options, YAML or an earlier run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from spherenet.cli.options import ConfigParser
from spherenet.cli.output import progress_bar, say
from spherenet.text import as_number, finite, plain
from spherenet.training.config import TrainConfig

if TYPE_CHECKING:
    from pathlib import Path

    from spherenet.training import Outcome

EXAMPLES = """\
  spherenet train                                              # a SphereNet on the embedded digits
  spherenet train --operator none                              # its CNN twin
  spherenet train --data cifar10 --model cnn-9 --operator sigmoid --loss w-cosine --iterations 64000
  spherenet train --data folder --data-dir pictures --image-size 64 --model resnet-32
  spherenet train --config my.yaml --seed 1
  spherenet train --resume runs/cifar10-cnn-9-sigmoid
  torchrun --nproc-per-node 4 -m spherenet train --data cifar10 --model resnet-32 --output runs/four
exit codes: 0 done, 1 training could not go on, 2 wrong input or a file or disk that cannot be used;
129, 130, 138, 143: saved and left after SIGHUP, SIGINT, SIGUSR1, SIGTERM"""


class _TrainParser(ConfigParser):
    """With --resume, the options of that run are the defaults."""

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:  # type: ignore[override]
        given = list(args or [])
        for option, value in zip(given, [*given[1:], ""], strict=False):  # without options one longer than given
            if option == "--resume" or option.startswith("--resume="):
                self.start_with(_config_of_run(option.partition("=")[2] or value))
        return super().parse_args(args, *more, **options)


def parser() -> ConfigParser:
    """Return the verb's parser."""
    made = _TrainParser(
        "train",
        "Train a network. Without options: a small SphereNet on 4,000 embedded digits, tested on\n"
        "1,000. Everything is written to one folder, from which training can go on exactly.",
        TrainConfig,
        examples=EXAMPLES,
    )
    run = made.add_argument_group("run")
    run.add_argument("--output", type=str | None, default=None, help="folder of the run (a new one under runs/)")
    run.add_argument("--resume", type=str | None, default=None, metavar="RUN", help="go on with a run, as it was begun")
    run.add_argument("--allow-changes", action="store_true", help="go on although other options are given")
    run.add_argument("--json", action="store_true", help="print the final numbers as JSON")
    return made


def _config_of_run(path: str) -> dict[str, Any]:
    from spherenet.runs import RunDirectory
    from spherenet.training.saved_runs import config_of

    return config_of(RunDirectory.open(path)).as_dict()


def run(arguments: Any) -> int:
    """Train and say how it went."""
    config = TrainConfig.from_dict(parser().values(arguments))
    if arguments.output is not None and arguments.resume is not None:
        raise ValueError("--output must be left out with --resume, which goes on in the folder of its run.")
    from pathlib import Path

    from spherenet.cli.progress import Reporters, TensorBoard, reporter_for_people
    from spherenet.errors import RunTakenError
    from spherenet.runs import RunDirectory
    from spherenet.training import StopRequested
    from spherenet.training.run import new_output, train

    if arguments.resume is not None and RunDirectory.open(arguments.resume).finished and not arguments.allow_changes:
        _print(Path(arguments.resume), RunDirectory.open(arguments.resume).summary, arguments.json, "finished already")
        return 0
    is_main = os.environ.get("RANK", "0") == "0"
    if os.environ.get("WORLD_SIZE", "1") != "1" and arguments.output is None and arguments.resume is None:
        raise ValueError("--output or --resume must be given with several processes: all must name the same folder.")
    automatic = arguments.resume is None and arguments.output is None
    try:
        while True:
            output = Path(arguments.resume or arguments.output or new_output(config))
            # torchrun starts the same command again when a process has died; then the run is resumed.
            restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (output / "config.json").exists()
            reporters = [reporter_for_people(f"{config.model} {config.operator or 'cnn'}")] if is_main else []
            if config.tensorboard and is_main:
                reporters.append(TensorBoard(str(output / "tensorboard")))
            try:
                with progress_bar(f"fetching {config.data}", in_bytes=True) as fetching:
                    outcome = train(
                        config,
                        output,
                        resume=arguments.resume is not None or restarted,
                        allow_changes=arguments.allow_changes,
                        reporter=Reporters(reporters),
                        download_progress=fetching,
                    )
                break
            except RunTakenError:
                if not automatic:
                    raise  # else another process was quicker: the next free name
    except StopRequested as request:
        say("spherenet train: left before the first step, or in one, without saving; an earlier checkpoint is intact.")
        return 128 + request.number
    if outcome.signal is not None:
        if is_main:
            _say_left(output, outcome)
        return 128 + outcome.signal
    if is_main:
        _print(output, RunDirectory.open(output).summary, arguments.json, "done")
    return 0


def _say_left(output: Path, outcome: Outcome) -> None:
    say(f"spherenet train: saved at step {outcome.step} and left; go on with spherenet train --resume {output}")


def _print(output: Path, summary: dict[str, Any], as_json: bool, what: str) -> None:
    if as_json:
        text = json.dumps(finite({"run": str(output), **summary}), indent=2, allow_nan=False)
    else:
        seconds, accuracy, best = (as_number(summary.get(name)) for name in ("seconds", "accuracy", "best_accuracy"))
        shown = [f"{value:.2%}" if value is not None else "unknown" for value in (accuracy, best)]
        text = plain(
            f"{what}: {summary.get('iterations')} iterations in {seconds or 0:.0f} s, test accuracy {shown[0]} "
            f"(best {shown[1]} at {summary.get('best_step')}), in {output}"
        )
    with suppress(OSError):  # the run is saved, whoever still reads
        print(text, flush=True)
