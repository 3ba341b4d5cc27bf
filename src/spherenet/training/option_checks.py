"""Checks of the options of a training run: types, choices and ranges. Each error states the option and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.training.choices import OPTIMIZERS, Choice

if TYPE_CHECKING:
    from spherenet.training.config import TrainConfig

__all__ = ["check_ranges", "check_type"]

LIMITS = {
    "image_size": 4096,
    "max_megapixels": 1e4,
    "widths": 1 << 16,
    "batch_size": 1 << 20,
    "eval_batch_size": 1 << 20,
    "accumulate": 1 << 16,
    "iterations": 1 << 40,
    "epochs": 1e9,
    "warmup": 1 << 40,
    "patience": 1 << 40,
    "bn_precise_images": 1 << 30,
    "bn_lag_variance": 1e6,
    "folds": 1000,
    "workers": 256,
    "threads": 1024,
    "timeout": 1e6,
    "lambda_floor": 1e6,
    "group_norm": 1 << 16,
}
"""Largest allowed values. Larger ones are mistakes, or come from a file written to exhaust the machine."""

AT_LEAST_ONE = ("iterations", "batch_size", "accumulate", "threads", "log_every", "eval_every", "eval_batch_size",
                "checkpoint_every", "patience", "bn_precise_images")  # fmt: skip
AT_LEAST_ZERO = ("learning_rate", "weight_decay", "orthogonality", "energy", "workers", "seed", "group_norm", "warmup",
                 "bn_lag_variance", "average_weights")  # fmt: skip


def check_type(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError if a value is not one of the choices of its type, TypeError if it is not of the type at all."""
    choices = _choices(hint)
    for entry in value if isinstance(value, (list, tuple)) else [value]:
        if choices and isinstance(entry, str) and entry not in choices:
            raise InvalidArgument(name, f"must be one of {', '.join(choices)}, got {entry[:80]!r}.")
        if isinstance(entry, str) and not entry.strip():  # as a path it would be the current folder
            raise InvalidArgument(name, f"must not be empty, got {entry[:80]!r}.")
    if not _is_of(value, hint):
        raise InvalidArgumentType(name, f"must be {_type_name(hint)}, got {repr(value)[:80]}.")


def check_ranges(config: TrainConfig) -> None:
    """Raise ValueError if an option is out of its range. The types have been checked."""
    for name, value in vars(config).items():
        for number in value if isinstance(value, list) else [value]:
            if name in LIMITS and isinstance(number, (int, float)) and not number <= LIMITS[name]:
                raise InvalidArgument(name, f"must be at most {LIMITS[name]:,}, got {str(number)[:40]}.")
            if isinstance(number, int) and abs(number) >= 1 << 63:  # neither torch nor the command line takes it
                raise InvalidArgument(name, f"must be below 2^63 in magnitude, got {str(number)[:40]}.")
    for name in AT_LEAST_ONE:
        if (value := getattr(config, name)) is not None and value < 1:
            raise InvalidArgument(name, f"must be at least 1, got {str(value)[:40]}.")
    for name in AT_LEAST_ZERO:
        if not 0 <= (value := getattr(config, name)) < float("inf"):
            raise InvalidArgument(name, f"must be a finite number of at least 0, got {str(value)[:40]}.")
    if not 0 <= config.validation_fraction < 1:
        raise InvalidArgument(
            "validation_fraction", f"must be from 0 to less than 1, got {config.validation_fraction}."
        )
    if not 0 < config.sample_rate <= 1:
        raise InvalidArgument("sample_rate", f"must be greater than 0 and at most 1, got {config.sample_rate}.")
    if config.max_megapixels is not None and not config.max_megapixels > 0:
        raise InvalidArgument("max_megapixels", f"must be greater than 0, got {config.max_megapixels}.")
    if config.shard_head and config.tta != "none":
        raise InvalidArgument(
            "tta", f"must be none with --shard-head, whose scores are not gathered, got {config.tta}."
        )
    if not config.timeout > 0:
        raise InvalidArgument("timeout", f"must be greater than 0, got {config.timeout}.")
    if config.epochs is not None and not config.epochs > 0:
        raise InvalidArgument("epochs", f"must be greater than 0, got {config.epochs}.")
    if config.class_weights == ["balanced"] and config.sampling == "balanced":
        raise InvalidArgument(
            "class_weights", "must be left out with sampling balanced, which balances them, got balanced."
        )
    if config.class_weights is not None and config.shard_head:
        raise InvalidArgument("class_weights", f"must be left out with --shard-head, got {config.class_weights[:3]}.")
    if not 0 <= config.bn_lag_momentum < 1:
        raise InvalidArgument("bn_lag_momentum", f"must be at least 0 and below 1, got {config.bn_lag_momentum}.")
    if config.bn_eval is not None and len(set(config.bn_eval)) != len(config.bn_eval or [""]):
        raise InvalidArgument(
            "bn_eval", f"must be different names of statistics, got {' '.join(config.bn_eval) or 'none'}."
        )
    if config.schedule != "step" and config.milestones is not None:
        raise InvalidArgument(
            "milestones", f"must be none with the schedule {config.schedule}, got {config.milestones[:5]}."
        )
    if config.epochs is None and config.warmup and config.warmup >= config.iterations:
        raise InvalidArgument("warmup", f"must be less than the {config.iterations} iterations, got {config.warmup}.")
    if not config.average_weights < 1:
        raise InvalidArgument("average_weights", f"must be less than 1, got {config.average_weights}.")
    _check_optimizer(config.choice("optimizer"))
    if any(milestone < 1 for milestone in config.milestones or []):
        raise InvalidArgument("milestones", f"must be at least 1, got {min(config.milestones or [])}.")
    if not config.lambda_floor > 0:
        raise InvalidArgument("lambda_floor", f"must be greater than 0, got {config.lambda_floor}.")
    if not 0 < config.lambda_floor_at <= 1:
        raise InvalidArgument("lambda_floor_at", f"must be greater than 0 and at most 1, got {config.lambda_floor_at}.")


def _check_optimizer(optimizer: Choice) -> None:
    optimizer.require_options("optimizer", OPTIMIZERS[optimizer.name])
    for key, value in optimizer.options.items():
        limit = 1.0 if "momentum" in key or "beta" in key else float("inf")
        if not (isinstance(value, (int, float)) and 0 <= value < limit):
            allowed = "from 0 to less than 1" if limit == 1 else "a finite number of at least 0"
            raise InvalidArgument("optimizer", f"{optimizer.name}: {key} must be {allowed}, got {value!r}.")


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the words that an option accepts if it accepts nothing else, or lists of nothing else."""
    if get_origin(hint) is list or (get_args(hint) and get_origin(get_args(hint)[0]) is list):
        return _choices(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) is Literal else ()


def _is_of(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an option: a plain type, a list, a choice, or a union of them."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, (list, tuple)) and all(_is_of(entry, get_args(hint)[0]) for entry in value)
    if get_args(hint):
        return any(_is_of(value, choice) for choice in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is not list and get_args(hint):
        return " or ".join(repr(part) if isinstance(part, str) else _type_name(part) for part in get_args(hint))
    name = hint.__name__ if isinstance(hint, type) else str(hint)
    return "None" if name == "NoneType" else name.replace("typing.", "")
