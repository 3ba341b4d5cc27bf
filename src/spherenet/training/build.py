"""Build data, model, optimizer and penalties from a `TrainConfig`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from spherenet._util.caches import use_private_compiler_cache
from spherenet._util.validation import require_one_of
from spherenet.angles import ANGLES, make_angle
from spherenet.data import AUGMENTATIONS, Augmentation, Dataset, default_augmentation, load_dataset, locate
from spherenet.errors import InvalidArgument, InvalidArgumentType
from spherenet.losses import Annealing, MarginLoss, loss_arguments, make_loss
from spherenet.models import Classifier, create_model, list_models
from spherenet.models.air import Whitening
from spherenet.regularizers import hyperspherical_energy, orthogonality, sphere_layers
from spherenet.training.balance import class_weights
from spherenet.training.config import TrainConfig
from spherenet.training.evaluation import first_batch

__all__ = [
    "build_augmentation",
    "build_data",
    "build_model",
    "build_penalty",
    "compiled",
    "lambda_setter",
    "located",
    "require_valid_choices",
    "split_folds",
    "split_validation",
    "subsample",
]


def located(config: TrainConfig, recorded: TrainConfig | None = None) -> TrainConfig:
    """Return the configuration with the name of the data set and its absolute folder, see `data.locate`.

    Args:
        config: Options of the run, in which `data` may be the path of a folder.
        recorded: Options of the run that is resumed. If the data are the same, they are not checked again.

    Raises:
        ValueError: If `data` and `data_dir` contradict each other.
    """
    if recorded is not None and (config.data, config.data_dir) == (recorded.data, recorded.data_dir):
        return config
    data, data_dir = locate(config.data, config.data_dir)
    return replace(config, data=data, data_dir=data_dir)


def build_data(
    config: TrainConfig,
    progress: Callable[[int, int], None] | None = None,
    *,
    broken: Collection[str] | None = None,
) -> Dataset:
    """Load the data set, with the folds, validation images and number of training images of the configuration.

    Args:
        config: Options of the run.
        progress: Function (done, total) that is called during a download or while all images of a folder are decoded.
        broken: Images of a folder to leave out, if they are known; None to find them if `on_broken` is "skip".
    """
    if config.folds and not (config.folds >= 2 and 0 <= config.fold < config.folds):
        raise InvalidArgument(
            "fold", f"must be from 0 to folds − 1 of at least 2, got {config.fold} of {config.folds}."
        )
    dataset = load_dataset(
        config.data,
        config.data_dir,
        image_size=config.image_size,
        channels=config.channels,
        resize=config.resize,
        standardize=config.standardize,
        test_fraction=config.test_fraction,
        seed=0,  # the held-out images must not depend on the seed of the run
        on_broken=config.on_broken,
        broken=broken,
        workers=config.workers,
        max_megapixels=config.max_megapixels,
        download=config.download,
        progress=progress,
    )
    if config.folds:
        dataset = split_folds(dataset, config.folds, config.fold)
    if config.validation_fraction:
        dataset = split_validation(dataset, config.validation_fraction)
    return dataset if config.train_images is None else subsample(dataset, config.train_images)


def split_folds(dataset: Dataset, folds: int, fold: int) -> Dataset:
    """Return a data set whose test images are one stratified, reproducible fold of the training images.

    Raises:
        ValueError: If there are more folds than images.
    """
    labels = dataset.train.labels
    if folds > len(labels):
        raise InvalidArgument("folds", f"must be at most {len(labels)}, the number of training images, got {folds}.")
    fold_of_image = torch.empty_like(labels)
    fold_of_image[_sorted_by_class(labels)] = torch.arange(len(labels)) % folds
    test, train = (fold_of_image == fold).nonzero().flatten(), (fold_of_image != fold).nonzero().flatten()
    return replace(dataset, train=dataset.train.subset(train), test=dataset.train.subset(test))


def split_validation(dataset: Dataset, fraction: float) -> Dataset:
    """Return a data set whose validation images are a fraction of the training images, which no longer contain them.

    Raises:
        ValueError: If no class has two training images, or if there are validation images.
    """
    if dataset.validation is not None:
        raise InvalidArgument("validation_fraction", f"must be 0 for a folder with val/ and test/, got {fraction}.")
    mask = dataset.train.held_out(fraction)
    if not mask.any():
        raise InvalidArgument("validation_fraction", "must be 0 if every class has a single training image.")
    train, validation = (dataset.train.subset(part.nonzero().flatten()) for part in (~mask, mask))
    return replace(dataset, train=train, validation=validation)


def subsample(dataset: Dataset, count: int) -> Dataset:
    """Return a data set with a stratified, reproducible subset of `count` training images, with all classes.

    Raises:
        ValueError: If there are fewer images, or if `count` is less than the number of classes.
    """
    labels = dataset.train.labels
    if not len(dataset.classes) <= count <= len(labels):
        allowed = f"from {len(dataset.classes)} (one image per class) to {len(labels)} (all images)"
        raise InvalidArgument("train_images", f"must be {allowed}, got {count}.")
    by_class = _sorted_by_class(labels)
    chosen = _evenly_spaced(by_class, count)
    if len(set(labels[chosen].tolist())) < len(set(labels.tolist())):
        # Classes with few images were left out: one image of each class first.
        sorted_labels = labels[by_class]
        is_first = sorted_labels != torch.cat([sorted_labels.new_full((1,), -1), sorted_labels[:-1]])
        first, others = by_class[is_first], by_class[~is_first]
        chosen = torch.cat([first, _evenly_spaced(others, count - len(first))])
    return replace(dataset, train=dataset.train.subset(chosen.sort().values))


def _evenly_spaced(indices: Tensor, count: int) -> Tensor:
    """Return `count` of the indices; of indices sorted by class, a proportional number from each class."""
    return indices[torch.arange(count) * len(indices) // max(count, 1)]


def _sorted_by_class(labels: Tensor) -> Tensor:
    """Return indices sorted by class, in a reproducible random order within each class."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return order[labels[order].argsort(stable=True)]


def build_augmentation(config: TrainConfig) -> Augmentation | None:
    """Return the augmentation of the training images, None if they are not changed."""
    name = default_augmentation(config.data) if config.augmentation is None else config.augmentation
    return None if name == "none" else AUGMENTATIONS[require_one_of("augmentation", name, AUGMENTATIONS)]


def build_model(config: TrainConfig, dataset: Dataset) -> Classifier:
    """Return the network for a data set, with weights initialized from the configuration's seed.

    Raises:
        ValueError: If training the network needs more memory than the machine has. Nothing is allocated then.
    """
    weight = None
    if config.class_weights is not None:
        weight = class_weights(config.class_weights, dataset.classes, dataset.train.labels)
    with torch.device("meta"):
        _require_memory(_create(config, dataset, weight), config)
    torch.manual_seed(config.seed)
    model = _create(config, dataset, weight)
    _initialize(model, config, dataset)
    return model


@torch.no_grad()
def _initialize(model: Classifier, config: TrainConfig, dataset: Dataset) -> None:
    """Set the initial weights of the configuration, and those that depend on the images."""
    for layer in model.features.modules():
        if config.initialization == "orthogonal" and isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.orthogonal_(layer.weight, gain=math.sqrt(2))  # kernels of the norm that He's have on average
        elif config.initialization == "dirac" and isinstance(layer, nn.Conv2d):
            nn.init.dirac_(layer.weight[: layer.in_channels])  # the other filters keep their weights
        if isinstance(layer, Whitening):
            batch = first_batch(dataset.train, IMAGES_FOR_WHITENING, torch.device("cpu"))
            layer.initialize_from(batch.images)


IMAGES_FOR_WHITENING = 5000
"""Training images from which the filters of a whitening layer are computed."""


def _require_memory(model: Classifier, config: TrainConfig) -> None:
    """Raise ValueError if weights, gradients, moments and the average of weights exceed the memory of the machine.

    Sharded weights and heads are divided after they are created, so that they must fit once.
    """
    is_sharded = config.shard_head or config.sharding != "ddp"
    copies = 1 if is_sharded else (3 if config.choice("optimizer").name == "sgd" else 4) + bool(config.average_weights)
    of_head = copies * sum(parameter.nbytes for parameter in model.head.parameters())
    needed = copies * sum(parameter.nbytes for parameter in model.parameters())
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not on every system
        return
    if needed > available:
        cause = "the number of classes" if 2 * of_head > needed else "widths"
        raise InvalidArgument(
            cause,
            f"must make a network that fits in memory: {'creating' if is_sharded else 'training'} this one "
            f"takes {needed / 2**30:,.0f} GB, the machine has {available / 2**30:,.0f}.",
        )


ARGUMENTS_OF_OTHERS = frozenset({"angle", "annealing", "class_weight", "ignore_index", "operator", "reduction"})
"""Arguments of losses that are no options of `--loss`: objects, and what the training loop chooses."""

NETWORK_OPTIONS = (
    *("rescale", "center", "batch_norm", "relu", "widths", "shortcut", "feature_batch_norm", "group_norm", "engine"),
)
"""Options of a run that are arguments of `create_model` with the same name."""

MODEL_ARGUMENTS = {"input_size": "image_size", "in_channels": "channels"}
"""Arguments of `create_model` whose options have other names."""

CHOICE_ARGUMENTS = {"k": "operator", "k_sharing": "operator", "radius": "magnitude"}
"""Arguments of `create_model` that are options of an option."""


def require_valid_choices(config: TrainConfig) -> None:
    """Raise ValueError, naming the option, if a name is unknown or does not have its options."""
    require_one_of("model", config.model, list_models())
    if config.augmentation is not None:
        require_one_of("augmentation", config.augmentation, AUGMENTATIONS)
    loss, operator, magnitude = (config.choice(name) for name in ("loss", "operator", "magnitude"))
    arguments = loss_arguments(loss.name)
    loss.require_options("loss", [name for name in arguments if name not in ARGUMENTS_OF_OTHERS])
    if config.class_weights is not None and "class_weight" not in arguments:
        problem = f"must be left out with --loss {loss.name}, got {' '.join(config.class_weights[:3])}."
        raise InvalidArgument("class_weights", problem)
    try:
        make_loss(loss.name, **loss.options)
    except (InvalidArgument, InvalidArgumentType) as error:
        raise InvalidArgument("loss", f"{loss.name}: {error.argument} {error.problem}") from None
    if operator.name == "none":
        operator.require_options("operator", [])
    else:
        angle = ANGLES[require_one_of("operator", operator.name, ANGLES)]
        operator.require_options("operator", ["k"] * angle.has_k() + ["k_sharing"] * angle.is_learned)
        try:
            make_angle(operator.name, operator.options.get("k"))  # type: ignore[arg-type]
        except (InvalidArgument, InvalidArgumentType) as error:
            raise InvalidArgument("operator", f"{operator.name}: {error.argument} {error.problem}") from None
    magnitude.require_options("magnitude", [] if config.magnitude is None else ["radius"])


def _create(config: TrainConfig, dataset: Dataset, class_weight: Tensor | None = None) -> Classifier:
    loss, operator, magnitude = (config.choice(name) for name in ("loss", "operator", "magnitude"))
    options: dict[str, Any] = {**operator.options, **magnitude.options}
    require_valid_choices(config)
    try:
        return create_model(
            config.model,
            num_classes=len(dataset.classes),
            operator=None if config.operator is None else operator.name,
            magnitude=None if config.magnitude is None else magnitude.name,
            loss=loss.name,
            loss_options={**loss.options, **({} if class_weight is None else {"class_weight": class_weight})},
            in_channels=dataset.preprocessing.channels,
            input_size=dataset.preprocessing.size,
            **{name: getattr(config, name) for name in NETWORK_OPTIONS},
            **options,
        )
    except (InvalidArgument, InvalidArgumentType) as error:
        if error.argument in CHOICE_ARGUMENTS:
            name = CHOICE_ARGUMENTS[error.argument]
            problem = f"{config.choice(name).name}: {error.argument} {error.problem}"
            raise InvalidArgument(name, problem) from None
        raise type(error)(MODEL_ARGUMENTS.get(error.argument, error.argument), error.problem) from None


def lambda_setter(config: TrainConfig, model: nn.Module) -> Callable[[int], None] | None:
    """Fit the annealing of a margin loss to the run (Eq. 7).

    Returns:
        Function that sets λ for a step, called once before the step; None if the model's loss has no annealed margin.
    """
    criterion = getattr(model, "criterion", None)
    if not isinstance(criterion, MarginLoss):
        return None
    criterion.annealing = None
    if criterion.margin_gradient == "full" if config.annealing is None else config.annealing:
        criterion.annealing = Annealing.for_run(
            config.iterations,
            start=max(100.0, config.lambda_floor),
            floor=config.lambda_floor,
            floor_at=config.lambda_floor_at,
        )
    return criterion.set_step


def build_penalty(config: TrainConfig, model: nn.Module) -> Callable[[nn.Module], Tensor] | None:
    """Return the weighted regularizers of the sphere layers, None if there are none or their weights are 0."""
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


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Return a model compiled with torch.compile. Raises OSError if there is no private folder for compiled code."""
    use_private_compiler_cache()
    return torch.compile(model)
