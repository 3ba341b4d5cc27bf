"""Options of a training run that have an effect only together with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from spherenet.training.config import TrainConfig, option_name

__all__ = ["options_without_effect"]

_SETS = ("mnist5k", "cifar10", "cifar100")
_WITHOUT_ANNEALING = (
    *("softmax", "w-", "cosface", "arcface", "sphereface2", "adaface", "magface", "curricularface", "elasticface"),
    *("subcenter-arcface", "uniface"),
)


def _is_annealed(config: TrainConfig) -> bool:
    """Return whether λ changes: by default if the margin gradient is full, which no loss has unless it is set."""
    is_full = config.choice("loss").options.get("margin_gradient") == "full"
    annealing = is_full if config.annealing is None else config.annealing
    return annealing and not config.loss.startswith(_WITHOUT_ANNEALING)


CONDITIONS: tuple[tuple[tuple[str, ...], Callable[[TrainConfig], bool], str], ...] = (
    (("test_fraction", "resize", "on_broken", "max_megapixels"), lambda c: c.data not in _SETS,
     "on this data set"),
    (("fold",), lambda c: c.folds > 0, "without folds"),
    (("orthogonality", "energy", "keep_norms"), lambda c: c.operator is not None, "without sphere layers"),
    (("engine",), lambda c: c.operator is None, "on a SphereNet, whose layers have it anyway"),
    (("keep_norms_mode",), lambda c: c.keep_norms, "without keep_norms"),
    (("shortcut",), lambda c: c.model.startswith("resnet"), "on a network without shortcuts"),
    (("group_norm", "initialization"), lambda c: c.model != "sphere-vit-tiny", "on a network without convolutions"),
    (("annealing",), lambda c: not c.loss.startswith(_WITHOUT_ANNEALING), "on this loss"),
    (("lambda_floor", "lambda_floor_at"), _is_annealed, "without annealing and a margin loss"),
    (("bn_lag_momentum", "bn_lag_variance"), lambda c: "lagging" in (c.bn_eval or []), "without lagging in bn_eval"),
    (("bn_precise_images",), lambda c: "precise" in (c.bn_eval or []), "without precise in bn_eval"),
)  # fmt: skip
"""Options that have an effect only under a condition, and the end of the sentence if it is not met."""


def options_without_effect(config: TrainConfig) -> list[str]:
    """Return a sentence per option that was set, to another value than its default, and has no effect."""
    defaults = {option.name: option.default for option in fields(config)}
    late = [str(step) for step in config.milestones or [] if step >= config.iterations]
    beyond = f"--milestones {' '.join(late[:5])} has no effect in a run of {config.iterations} iterations."
    return [beyond] * bool(late) + [
        f"{option_name(name)} has no effect {reason}."
        for names, has_effect, reason in CONDITIONS
        for name in names
        if getattr(config, name) not in (defaults[name], 0) and not has_effect(config)
    ]
