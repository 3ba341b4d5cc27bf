"""The optimizer of a run: Adam, AdamW, SGD, or Muon for filters with SGD for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spherenet.layers import AngularHead
from spherenet.models.air import Whitening
from spherenet.optim import MixedOptimizer, param_groups
from spherenet.training.choices import OPTIMIZERS
from spherenet.training.config import TrainConfig
from spherenet.training.sharding import is_divided, split_by_mesh

__all__ = ["build_optimizer", "set_learning_rates"]

MUON = {"norm": "frobenius", "steps": 3}
"""Fixed options of Muon: those of the speed recipe."""


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a run. Sphere layers have no weight decay unless `decay_all` is set."""
    choice = config.choice("optimizer")
    options: Mapping[str, Any] = {**OPTIMIZERS[choice.name], **choice.options}
    if choice.name == "muon":
        return MixedOptimizer(split_by_mesh(_muon_groups(config, model, options)))
    groups: list[dict[str, Any]] = param_groups(model, config.weight_decay)
    if config.decay_all:
        for group in groups:
            group["weight_decay"] = config.weight_decay
    groups = split_by_mesh(groups)
    if choice.name != "sgd":
        adam = torch.optim.AdamW if choice.name == "adamw" else torch.optim.Adam
        betas = (options["beta1"], options["beta2"])
        return adam(groups, lr=config.learning_rate, betas=betas, eps=options["eps"], fused=True)
    fused = not any(is_divided(parameter) for group in groups for parameter in group["params"])  # not of DTensors
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=options["momentum"], fused=fused)


def set_learning_rates(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int) -> None:
    """Set the learning rates of a step; a group may have its own initial rate and its own end."""
    for group in optimizer.param_groups:
        factor = config.rate_factor_at(step, group.get("until", 1.0))
        group["lr"] = group.get("rate", config.learning_rate) * factor


def _muon_groups(config: TrainConfig, model: nn.Module, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the filters for Muon, and all other parameters for SGD with the learning rates of their kind.

    Learning rates and weight decay of the latter are per image of a batch, since their best values grow with the batch;
    those of class weights are divided by the number of features, with which the squared norm of the features grows, and
    so what a step does to the logits.
    The decay is relative to a step of the initial rate, whatever that is: SGD multiplies it by the rate.
    """
    filters, *others = param_groups(model, config.weight_decay, filters="muon", rest="sgd")
    filters |= {"rate": config.learning_rate, "lr": config.learning_rate, "momentum": options["momentum"], **MUON}
    images, rest_rate = config.batch_size, options["rest_learning_rate"] * config.batch_size
    rates: dict[nn.Parameter, float] = {}
    ends: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, AngularHead):
            rate = options["head_learning_rate"] * images / module.in_features
            rates |= dict.fromkeys(module.parameters(), rate)
        if isinstance(module, Whitening):
            ends |= dict.fromkeys(module.parameters(), module.trained_until)
    groups = [filters] if filters["params"] else []
    for group in others:
        decay = images * (config.weight_decay if config.decay_all else group["weight_decay"])
        by_rate: dict[tuple[float, float], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            key = (rates.get(parameter, rest_rate), ends.get(parameter, 1.0))
            by_rate.setdefault(key, []).append(parameter)
        for (rate, until), parameters in by_rate.items():
            settings = {"rate": rate, "lr": rate, "until": until, "weight_decay": decay / rate if rate else 0.0}
            settings |= {"momentum": options["rest_momentum"], "nesterov": options["rest_momentum"] > 0}
            groups.append({**group, **settings, "params": parameters})
    return groups
