"""The verb `train`: train a network from options, a YAML file or an earlier run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spherenet._util.text import finite
from spherenet.cli.option_types import add_option, add_switch
from spherenet.cli.options import ConfigParser, config_from
from spherenet.cli.output import print_message, progress_bar
from spherenet.errors import InvalidArgument
from spherenet.training.config import EXCLUSIVE, TrainConfig
from spherenet.training.recipes import RECIPES, recipe

__all__ = ["run_train", "train_parser"]

EXAMPLES = """\
  spherenet train                                              # a small SphereNet on the embedded digits
  spherenet train --operator none                              # the same network with plain convolutions
  spherenet train --data cifar10 --model cnn-9 --loss w-cosine --iterations 64000
  spherenet train --data photos --image-size 64 --model resnet-32 --validation-fraction 0.1
  spherenet train --recipe speed --data-dir cifar10            # eight epochs with Muon
  spherenet train --print-config > my.yaml
  spherenet train --config my.yaml --seed 1
  spherenet train --resume runs/cifar10-cnn-9-cosine
  torchrun --nproc-per-node 4 -m spherenet train --data cifar10 --model resnet-32 --output runs/four

exit codes: 0 success; 1 training failed; 2 wrong input, or a file or disk that cannot be used;
129, 130, 138, 143: checkpoint saved and stopped after SIGHUP, SIGINT, SIGUSR1, SIGTERM"""


class _TrainParser(ConfigParser):
    """Parser that takes its defaults from the run to resume, or from a recipe."""

    def base_layers(self, parsed: argparse.Namespace) -> list[Mapping[str, Any]]:
        layers: list[Mapping[str, Any]] = []
        parsed.resumed = None
        if parsed.resume is not None:
            from spherenet.runs import RunDirectory
            from spherenet.training.run_format import config_of

            parsed.resumed = RunDirectory.open(parsed.resume)
            values = config_of(parsed.resumed).as_dict()
            if values["epochs"] is not None:
                del values["iterations"]  # it follows from the epochs again
            layers.append(values)
        if parsed.recipe is not None:
            layers.append(recipe(parsed.recipe))
        return layers

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed = super().parse_args(args, namespace)
        parsed.command = ["spherenet", "train", *(args or [])]
        return parsed


def train_parser() -> ConfigParser:
    """Return the parser of `spherenet train`."""
    parser = _TrainParser(
        "train",
        "Train a network and write everything to one folder, from which training can be resumed\n"
        "exactly. Without options: a small SphereNet on 4,000 embedded digits, tested on 1,000.",
        TrainConfig,
        examples=EXAMPLES,
        exclusive=EXCLUSIVE,
    )
    text = f"options to start from: {', '.join(RECIPES)}; others override them"
    add_option(parser, "--recipe", metavar="NAME", help=text)
    add_option(parser, "--output", metavar="DIR", help="folder of the run; by default a new one in runs/")
    add_option(parser, "--resume", metavar="RUN", help="folder of a run to continue with its own options")
    add_switch(parser, "--allow-changes", "allow other options than the resumed run had", advanced=True)
    add_switch(parser, "--json", "print the final numbers as JSON")
    return parser


def run_train(arguments: Any) -> int:
    """Train, print the result and return the exit code."""
    given = config_from(arguments, TrainConfig)
    if arguments.output is not None and arguments.resume is not None:
        raise InvalidArgument("--output", "must be left out with --resume, which continues in the folder of the run.")
    # Otherwise torch reports a process that does not join with pages of C++ stack traces, besides our sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from spherenet._util.files import user_path
    from spherenet.cli.output import Reporters, TensorBoard, terminal_reporter
    from spherenet.errors import RunTakenError
    from spherenet.training import StopRequested
    from spherenet.training.build import located
    from spherenet.training.run import new_output, require_same_options, train
    from spherenet.training.run_format import config_of

    resumed = arguments.resumed
    config = located(given, None if resumed is None else config_of(resumed))
    is_main = os.environ.get("RANK", "0") == "0"
    if resumed is not None and resumed.finished and not arguments.allow_changes:
        require_same_options(resumed, config)
        if is_main:
            resumed.clean_finished()
            _print_summary(resumed.path, "already finished", arguments.json)
        return 0
    automatic_output = arguments.resume is None and arguments.output is None
    if os.environ.get("WORLD_SIZE", "1") != "1" and automatic_output:
        raise InvalidArgument("--output", "or --resume must be given with several processes, which share one folder.")
    try:
        while True:
            output = user_path(arguments.resume or arguments.output or new_output(config))
            # After a process has died, torchrun starts the same command again: resume the run it started.
            restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and (output / "config.json").exists()
            reporters = [terminal_reporter(f"{config.model} {config.operator or 'cnn'}")] if is_main else []
            if config.tensorboard and is_main:
                reporters.append(TensorBoard(str(output / "tensorboard")))
            try:
                is_folder = config.data == "folder"
                title = "decoding images" if is_folder else f"downloading {config.data}"
                with progress_bar(title, in_bytes=not is_folder) as progress:
                    outcome = train(
                        config,
                        output if resumed is None else resumed,
                        resume=arguments.resume is not None,
                        restarted=restarted,
                        allow_changes=arguments.allow_changes,
                        reporter=Reporters(reporters),
                        progress=progress,
                        command=arguments.command,
                    )
                break
            except RunTakenError:
                if not automatic_output:
                    raise  # otherwise another process took the name first: try the next free one
    except StopRequested as request:
        print_message("spherenet train: stopped without saving this step; earlier checkpoints are intact.")
        return 128 + request.number
    if outcome.signal is not None:
        if is_main:
            command = shlex.join(["spherenet", "train", "--resume", str(output)])
            print_message(f"spherenet train: saved at step {outcome.step} and stopped; resume with {command}")
        return 128 + outcome.signal
    if is_main:
        _print_summary(output, "done", arguments.json)
    return 0


def _print_summary(output: Path, state: str, as_json: bool) -> None:
    """Print the final numbers of a run; do nothing if stdout is closed, since the run is saved."""
    from spherenet.cli.run_text import result_text
    from spherenet.runs import RunDirectory

    summary = RunDirectory.open(output).summary
    if as_json:
        text = json.dumps(finite({"run": str(output), **summary}), indent=2, allow_nan=False)
    else:
        text = result_text(summary, output, state)
    with suppress(OSError):
        print(text, flush=True)
