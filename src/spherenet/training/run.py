"""`train`: a complete training run from its configuration, new or resumed, in one process or under torchrun."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spherenet._util.files import user_path
from spherenet.data import Dataset, Progress
from spherenet.errors import DataError, RunError
from spherenet.runs import RunDirectory
from spherenet.training.build import build_data, build_model, located, require_valid_choices
from spherenet.training.config import FREE, PREDICTION_OPTIONS, TrainConfig, option_name
from spherenet.training.distributed import Processes
from spherenet.training.effects import options_without_effect
from spherenet.training.initial_weights import start_from
from spherenet.training.reporter import Reporter
from spherenet.training.run_format import broken_of, config_of, data_record, require_same_data
from spherenet.training.run_record import describe, record_resumption, resumed_description, summarize
from spherenet.training.sharding import is_divided
from spherenet.training.signals import StopSignals
from spherenet.training.state import Outcome
from spherenet.training.trainer import Trainer

__all__ = ["new_output", "require_same_options", "train"]

PER_PROCESS = ("data_dir", "download", "workers", "tensorboard", "timeout")
"""Options that may differ between the processes of a run. All others determine the exchanges that they take part in."""


def train(
    config: TrainConfig,
    output: str | Path | RunDirectory,
    *,
    resume: bool = False,
    restarted: bool = False,
    allow_changes: bool = False,
    reporter: Reporter | None = None,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
) -> Outcome:
    """Train as configured and write the run to a folder, or resume the run in that folder.

    Nothing is written before configuration and data have been checked.

    Args:
        config: Options of the run.
        output: Folder of the run; a RunDirectory reads its config.json once, here and in the caller.
        resume: Whether to resume the run in `output`. Options that change the result (all but `FREE`), data and number
            of processes must be those that the run was started with.
        restarted: Whether a launcher started this process again. If it did so with any process, all resume the run.
        allow_changes: Whether to resume even if they differ. The differences are reported as warnings.
        reporter: Receiver of progress in the main process.
        progress: Function (done, total) that is called during a download, or while all images of a folder are decoded.
        command: Command that is recorded in the run; by default that of this process.

    Raises:
        RunError: If the folder is in use, not empty or not writable, or if the run cannot be resumed.
        DataError: If the data cannot be found or read.
        CheckpointError: If no checkpoint is valid, or it does not fit the model.
        TrainingError: If a loss, gradient or weight is not finite, or another process is lost.
        TypeError, ValueError: If an option is wrong.
    """
    if isinstance(output, RunDirectory):
        opened: RunDirectory | None = output
        output = output.path
    else:
        opened = RunDirectory.open(output) if resume else None
    config = located(config, config_of(opened) if opened is not None and resume else None)
    require_valid_choices(config)  # before data are downloaded
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with StopSignals() as stop, Processes.joined(config.device, config.timeout) as processes:
        # torchrun counts the restarts of a host only if its own processes failed, not if it waited for another host.
        any_restarted = bool(processes.total(torch.tensor(float(restarted), device=processes.device)))
        resume = resume or any_restarted
        options = {name: value for name, value in config.as_dict().items() if name not in PER_PROCESS}
        options |= {"resume": resume, "allow_changes": allow_changes}
        processes.require_same({option_name(name): value for name, value in options.items()})
        if opened is None:
            opened = RunDirectory.open(output) if resume else RunDirectory(user_path(output))
        run = opened
        recorded = config_of(run) if resume else None
        # The images that a run has skipped stay skipped, without decoding all of them again.
        is_known = recorded is not None and not allow_changes and recorded.on_broken == config.on_broken
        dataset = _load_data(config, processes, progress, broken_of(run.config) if is_known else None)
        record = data_record(dataset)
        main_reporter = reporter if reporter is not None and processes.is_main else Reporter()
        requested = config.as_dict()
        config, messages = config.fitted_to(len(dataset.train))
        for message in (*dataset.messages, *messages, *options_without_effect(config)):
            main_reporter.warned(message)

        def prepare() -> Trainer:
            model = build_model(config, dataset)
            if config.init_from is not None and not run.checkpoints.paths():
                for message in start_from(model, config.init_from):
                    main_reporter.warned(message)
            if resume and not allow_changes:
                _require_same_run(run, config, processes)
                require_same_data(run.config, dataset, record, "restore them, or add --allow-changes")
            return Trainer(model, dataset, config, processes, run, reporter=main_reporter)

        trainer = processes.in_all(prepare)
        processes.require_same(_data_state(dataset, record))
        if not resume:
            processes.require_same(_weights_state(trainer, processes))
        description = present = describe(config, dataset, record, trainer.model, processes, command)
        fitted = config.as_dict()
        description["requested"] = {name: value for name, value in requested.items() if value != fitted[name]}
        with _locked(run, None if resume else description, processes):
            if resume:
                for message in processes.in_all(trainer.resume):
                    main_reporter.warned(message)
                processes.require_same(_weights_state(trainer, processes))
                if trainer.step > config.iterations:
                    raise RunError(
                        f"--iterations must be at least the {trainer.step} that {run.path} has made, "
                        f"got {config.iterations}."
                    )
                changes = _evaluation_changes(run, config, dataset, record) if allow_changes else []
                for message in changes:
                    main_reporter.warned(message)
                forget = trainer.forget_evaluations if changes else lambda: None
                if processes.is_main:
                    description = resumed_description(
                        run.config, description, config, trainer.step, keep=not allow_changes
                    )
                    record_resumption(run, description, forget, required=allow_changes, warn=main_reporter.warned)
                    run.cut_back(trainer.step)
                else:
                    forget()
            parameters = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
            main_reporter.described(present, parameters, run.path)
            outcome = trainer.train(stop)
            if outcome.signal is None and processes.is_main:
                run.write_summary(summarize(outcome, config, dataset, trainer))
        return outcome


def _evaluation_changes(run: RunDirectory, config: TrainConfig, dataset: Dataset, record: dict[str, Any]) -> list[str]:
    """Return a warning per change of network, images or statistics since which accuracies are not comparable."""
    messages = []
    before = config_of(run)
    changed = [name for name in PREDICTION_OPTIONS if _function(before, name) != _function(config, name)]
    if changed:
        options = ", ".join(map(option_name, changed))
        messages.append(f"the network computes another function with {options}: the best checkpoint is selected anew.")
    protocols = [(options.bn_eval or ["running"])[0] for options in (before, config)]
    if protocols[0] != protocols[1]:
        messages.append(
            f"the run was evaluated with {protocols[0]} BatchNorm statistics, now with {protocols[1]} ones: the best "
            "checkpoint is selected anew."
        )
    prepared = [name for name in ("image_size", "channels", "resize") if getattr(before, name) != getattr(config, name)]
    if prepared and run.config.get("preprocessing") != dataset.preprocessing.as_dict():
        options = ", ".join(map(option_name, prepared))
        messages.append(f"images are prepared differently with {options}: the best checkpoint is selected anew.")
    try:
        require_same_data(run.config, dataset, record, "the run continues on these")
    except DataError as error:
        messages.append(str(error))
    return messages


def _function(config: TrainConfig, name: str) -> object:
    """Return the part of an option that decides which function the weights compute: of a loss its angle function."""
    loss = config.choice("loss")
    return (loss.name, loss.options.get("k")) if name == "loss" else getattr(config, name)


def _data_state(dataset: Dataset, record: dict[str, Any]) -> dict[str, Any]:
    """Return what must be the same in all processes, besides the options and the weights."""
    return {
        "the classes": dataset.classes,
        "the training data": record["train"],
        "the validation data": record.get("validation"),
        "the test data": record["test"],
        "the version of torch": torch.__version__,
    }


def _weights_state(trainer: Trainer, processes: Processes) -> dict[str, Any]:
    """Return the step and a hash of the weights, new or loaded, that must be the same in all processes."""
    if processes.world == 1:
        return {}
    weights = hashlib.sha256()
    for name, tensor in trainer.model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not is_divided(tensor):  # otherwise each process holds other rows
            weights.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {"the resumed step": trainer.step, "the weights": weights.hexdigest()}


def _load_data(
    config: TrainConfig, processes: Processes, progress: Progress | None, broken: Collection[str] | None
) -> Dataset:
    """Load the data in all processes, after the main process has downloaded or decoded them."""
    if processes.world > 1:
        first = processes.from_main(lambda: _broken_images(build_data(config, progress, broken=broken)), patient=True)
        dataset = processes.in_all(lambda: build_data(config, broken=first[0]))
        return replace(dataset, messages=first[1])
    return build_data(config, progress, broken=broken)


def _broken_images(dataset: Dataset) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return dataset.broken, dataset.messages


@contextmanager
def _locked(run: RunDirectory, description: dict[str, Any] | None, processes: Processes) -> Iterator[None]:
    """Hold the lock of the run directory in the main process, and create a new run if a description is given.

    An error is raised in all processes.
    """
    with ExitStack() as stack:

        def lock() -> None:
            if description is not None:
                RunDirectory.create(run.path)
            stack.enter_context(run.locked())
            try:
                if description is not None:
                    RunDirectory.create(run.path)  # again, because another process may have created a run meanwhile
                    run.write_config(description)
                run.clean()
            except OSError as error:
                raise RunError(f"{run.path} is not writable ({error.strerror}).") from None

        processes.from_main(lock)
        yield


def require_same_options(run: RunDirectory, config: TrainConfig) -> None:
    """Raise RunError, naming the options, if a run was started with others that change its result."""
    before = config_of(run).as_dict()
    requested = run.config.get("requested")  # options that the run fitted to its data
    requested = requested if isinstance(requested, dict) else {}
    changed = [
        name
        for name, value in config.as_dict().items()
        if name not in FREE and value not in (before[name], requested.get(name, before[name]))
    ]
    if changed:
        name = changed[0]
        finished = "finished; it " if run.finished else ""
        raise RunError(
            f"{run.path} {finished}was started with {option_name(name)} {before[name]!r}, "
            f"got {getattr(config, name)!r}: "
            f"omit the option, or add --allow-changes to resume with {', '.join(map(option_name, changed))} changed."
        )


def _require_same_run(run: RunDirectory, config: TrainConfig, processes: Processes) -> None:
    """Raise RunError if the run was started with other options or another number of processes."""
    require_same_options(run, config)
    world = run.config.get("processes")
    if world != processes.world:
        raise RunError(
            f"{run.path} was started with {world} processes, got {processes.world}: start as many, or add "
            "--allow-changes, with which the result differs by rounding."
        )


def new_output(config: TrainConfig, parent: str | Path = "runs") -> Path:
    """Return a folder that does not exist, e.g. runs/mnist5k-cnn-3-cosine, or runs/mnist5k-cnn-3-cosine-2 after it."""
    name, loss = f"{config.data}-{config.model}-{config.choice('operator').name}", config.choice("loss").name
    if loss != "softmax":
        name += f"-{loss}"
    parent = Path(parent)
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    matches = [pattern.fullmatch(entry.name) for entry in parent.iterdir()] if parent.is_dir() else []
    numbers = [int(match[1] or 1) for match in matches if match]
    return parent / (f"{name}-{max(1, *numbers) + 1}" if numbers else name)
