"""From a configuration to the objects that the engine takes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spherenet.data import AUGMENTATIONS, Augmentation, Dataset, default_augmentation, load_dataset
from spherenet.losses import Annealing, GASoftmaxLoss
from spherenet.models import Classifier, create_model
from spherenet.regularizers import hyperspherical_energy, orthogonality, sphere_layers
from spherenet.training import Settings
from spherenet.training.config import TrainConfig
from spherenet.validation import require_one_of

__all__ = ["augmentation_of", "build_data", "build_model", "build_penalty", "build_settings", "iteration_setter"]

# The paper divides the learning rate at 34K and 54K of 64K iterations.
PAPER_MILESTONES = (34 / 64, 54 / 64)


def build_data(config: TrainConfig, progress: Callable[[int, int], None] | None = None) -> Dataset:
    """Load the configuration's data set; of a cross-validation, the parts of its fold."""
    if config.folds and not (config.folds >= 2 and 0 <= config.fold < config.folds):
        raise ValueError(f"fold must be from 0 to folds − 1 of at least 2, got {config.fold} of {config.folds}.")
    dataset = load_dataset(
        config.data,
        config.data_dir,
        image_size=config.image_size,
        channels=config.channels,
        val_fraction=config.val_fraction,
        seed=0,  # which pictures are held out must not change with the seed of the run
        download=config.download,
        progress=progress,
    )
    if config.folds:
        dataset = in_folds(dataset, config.folds, config.fold)
    return dataset if config.train_pictures is None else with_fewer(dataset, config.train_pictures)


def in_folds(dataset: Dataset, folds: int, fold: int) -> Dataset:
    """The data set whose test pictures are one part of the training pictures, stratified and always the same."""
    labels = dataset.train.labels
    part = torch.empty_like(labels)
    part[_class_by_class(labels)] = torch.arange(len(labels)) % folds
    held_out, rest = (part == fold).nonzero().flatten(), (part != fold).nonzero().flatten()
    return replace(dataset, train=dataset.train.subset(rest), test=dataset.train.subset(held_out))


def with_fewer(dataset: Dataset, pictures: int) -> Dataset:
    """The data set with so many training pictures, stratified and always the same; ValueError if there are fewer."""
    labels = dataset.train.labels
    if not len(dataset.classes) <= pictures <= len(labels):
        allowed = f"from {len(dataset.classes)}, one of each class, to the {len(labels)} there are"
        raise ValueError(f"train_pictures must be {allowed}, got {pictures}.")
    # Evenly spaced through the classes one after the other: of each class its share, rounded.
    spaced = torch.arange(pictures) * len(labels) // pictures
    return replace(dataset, train=dataset.train.subset(_class_by_class(labels)[spaced].sort().values))


def _class_by_class(labels: Tensor) -> Tensor:
    """The indices of one class after the other, each class in a random order that is always the same."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return order[labels[order].argsort(stable=True)]


def augmentation_of(config: TrainConfig) -> Augmentation:
    """What training does to the pictures."""
    name = default_augmentation(config.data) if config.augmentation is None else config.augmentation
    return AUGMENTATIONS[require_one_of("augmentation", name, AUGMENTATIONS)]


def build_model(config: TrainConfig, dataset: Dataset) -> Classifier:
    """Make the network for a data set, its weights drawn by the configuration's seed.

    Raises ValueError, before any memory is taken, if training the network needs more than the machine has.
    """
    with torch.device("meta"):
        _require_memory(_create(config, dataset))
    torch.manual_seed(config.seed)
    return _create(config, dataset)


def _require_memory(model: Classifier) -> None:
    """Refuse a network whose weights, with gradients and the two moments of Adam, are larger than the memory."""
    needed = 4 * sum(parameter.nbytes for parameter in model.parameters())
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return
    if needed > there:
        raise ValueError(
            f"widths must make a network that fits in memory: training this one takes {needed / 2**30:,.0f} GB, "
            f"the machine has {there / 2**30:,.0f}."
        )


def _create(config: TrainConfig, dataset: Dataset) -> Classifier:
    return create_model(
        config.model,
        num_classes=len(dataset.classes),
        operator=config.operator,
        k=config.k,
        loss=config.loss,
        loss_options=_loss_options(config),
        k_sharing=config.k_sharing,
        rescale=config.rescale,
        batch_norm=config.batch_norm,
        relu=config.relu,
        widths=config.widths,
        in_channels=dataset.preprocessing.channels,
        input_size=dataset.preprocessing.size,
        shortcut=config.shortcut,
    )


def _loss_options(config: TrainConfig) -> dict[str, Any]:
    given = {"m": config.m, "s": config.s, "k": config.loss_k}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if config.label_smoothing:
        options["label_smoothing"] = config.label_smoothing
    return options


def iteration_setter(config: TrainConfig, model: Classifier) -> Callable[[int], None] | None:
    """Fit a margin's annealing to the run; return what tells the loss which step it is, None without one.

    The caller sets λ once per step, however many batches a step has.
    """
    criterion = model.criterion
    if not isinstance(criterion, GASoftmaxLoss):
        return None
    criterion.annealing = None
    if config.annealing:
        criterion.annealing = Annealing.for_run(
            config.iterations,
            start=max(100.0, config.lambda_floor),
            floor=config.lambda_floor,
            floor_at=config.lambda_floor_at,
        )
    return criterion.set_step


def build_settings(config: TrainConfig) -> Settings:
    """The engine's settings."""
    milestones = config.milestones
    if milestones is None:
        milestones = [round(fraction * config.iterations) for fraction in PAPER_MILESTONES]
    shared = {name: getattr(config, name) for name in Settings.__dataclass_fields__ if hasattr(config, name)}
    return Settings(**{**shared, "milestones": tuple(milestones)})


def build_penalty(config: TrainConfig, model: Classifier) -> Callable[[nn.Module], Tensor] | None:
    """The regularisers of the sphere layers; None where the network has none or they weigh nothing."""
    if not sphere_layers(model) or not (config.orthogonality or config.energy):
        return None

    def penalty(module: nn.Module) -> Tensor:
        terms = []
        if config.orthogonality:
            terms.append(config.orthogonality * orthogonality(module, config.orthogonality_form))
        if config.energy:
            terms.append(config.energy * hyperspherical_energy(module))
        return torch.stack(terms).sum()

    return penalty
