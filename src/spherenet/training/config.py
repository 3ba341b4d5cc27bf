"""`TrainConfig`: the options of a training run, as command line options, YAML or Python.

This module does not import torch, so that `spherenet train --help` and wrong options respond at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from spherenet.errors import InvalidArgument
from spherenet.training.choices import OPTIMIZERS, Choice, parse_choice
from spherenet.training.option_checks import check_ranges, check_type

__all__ = [
    "CHOICES",
    "EXCLUSIVE",
    "FREE",
    "LEARNING_RATE_DECAY",
    "PREDICTION_OPTIONS",
    "Group",
    "TrainConfig",
    "option_name",
]

FREE = (
    "data_dir", "on_broken", "max_megapixels", "download", "workers", "log_every", "checkpoint_every", "probes",
    "tensorboard", "timeout",
)  # fmt: skip
"""Options that do not change the result of a run. They may differ when it is resumed."""

EXCLUSIVE = (("iterations", "epochs"),)
"""Pairs of options of which only one can be given."""

CHOICES = ("operator", "magnitude", "loss", "optimizer")
"""Options that have options of their own."""

LEARNING_RATE_DECAY = 0.1
"""Factor applied to the learning rate at each milestone."""

# The paper divides the learning rate at 34K and 54K of 64K iterations.
PAPER_MILESTONES = (34 / 64, 54 / 64)


@dataclass(frozen=True)
class Group:
    """Heading of the help text under which options are listed."""

    title: str


DATA, NETWORK, LOSS, TRAINING = Group("data"), Group("network"), Group("loss"), Group("training")
EVALUATION, MACHINE, OUTPUT = Group("evaluation"), Group("machine"), Group("output")


def option_name(field_name: str) -> str:
    """Return the command line option of a field, `--batch-size` for `batch_size`; its name if it has no option."""
    config_field = TrainConfig.__dataclass_fields__.get(field_name)
    is_key = config_field is not None and config_field.metadata["tier"] == "file"
    return field_name if is_key else f"--{field_name.replace('_', '-')}"


def _basic(default: Any, group: Group, help: str) -> Any:
    """Return a field that is a common option of the command line."""
    return field(default=default, metadata={"group": group, "help": help, "tier": "basic"})


def _option(default: Any, group: Group, help: str) -> Any:
    """Return a field that is an option, which --help-all shows."""
    return field(default=default, metadata={"group": group, "help": help, "tier": "advanced"})


def _key(default: Any, group: Group, help: str) -> Any:
    """Return a field for studies: a key of --config, without an option of its own."""
    return field(default=default, metadata={"group": group, "help": help, "tier": "file"})


@dataclass(frozen=True)
class TrainConfig:
    """Options of a training run. The defaults are those of the paper, except for a shorter run.

    `loss`, `operator`, `magnitude` and `optimizer` can have options of their own, as a text or a mapping:
    `TrainConfig(loss="cosface:m=0.2,s=30")`. `choice` returns them.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range or not one of the choices.
    """

    data: str = _basic(
        "mnist5k", DATA, "data set: mnist5k (embedded), cifar10, cifar100, or a folder of images (class/name.jpg)"
    )
    data_dir: str | None = _basic(None, DATA, "folder of the data set or for its download; default: $SPHERENET_DATA")
    augmentation: str | None = _basic(
        None,
        DATA,
        "none, flip, flip-crop, flips-crop, translate, imagenet, flip-light or light; default: that of the data set",
    )
    image_size: int | None = _basic(
        None, DATA, "side length to which images are resized; default: that of the data set, 224 for a folder"
    )
    channels: int | None = _option(None, DATA, "channels of a folder's images: 1 for gray, 3 for color; default: 3")
    resize: Literal["squash", "crop"] = _option(
        "crop", DATA, "a folder's images made square: crop cuts the longer side, squash distorts"
    )
    standardize: Literal["data", "image"] = _key(
        "data", DATA, "scaling of pixels: the same for all (data), or also mean 0 and deviation 1 of each image (image)"
    )
    test_fraction: float = _option(
        0.1, DATA, "fraction of each class of a folder without val/ or test/ that is held out for testing"
    )
    validation_fraction: float = _basic(
        0.0, DATA, "fraction of the training images held out to select the best checkpoint; 0 selects on test images"
    )
    on_broken: Literal["stop", "skip"] = _option(
        "stop", DATA, "response to images of a folder that cannot be read; skip decodes all of them first"
    )
    max_megapixels: float | None = _option(
        None, DATA, "largest image file of a folder in millions of pixels, each of which takes 3 MB; default: 89"
    )
    folds: int = _key(0, DATA, "number of cross-validation folds of the training images; 0 for none")
    fold: int = _key(0, DATA, "index of the fold to evaluate on; the other folds are trained on")
    train_images: int | None = _option(
        None, DATA, "number of training images, with the same fraction of each class; default: all"
    )
    download: bool = _option(True, DATA, "download of a data set that is missing")

    model: str = _basic(
        "cnn-3",
        NETWORK,
        "network: cnn-3/9/18/45/60/69, air, air-unwhitened, resnet-32, resnet-32-wide, resnet-18 or sphere-vit-tiny",
    )
    operator: str | None = _basic(
        "cosine",
        NETWORK,
        "convolution operator: linear, cosine, sigmoid[:k=0.3], learnable[:k=0.5,k_sharing=layer], square-cosine, "
        "sharpened-cosine; none for a CNN",
    )
    rescale: Literal["learned"] | None = _key(None, NETWORK, "learned scale and offset after each sphere layer")
    widths: list[int] | None = _basic(  # noqa: RUF009
        None, NETWORK, "number of filters per stage, e.g. 64 96 128; default: those of the paper"
    )
    batch_norm: bool = _option(True, NETWORK, "BatchNorm after each convolution")
    relu: bool = _key(True, NETWORK, "ReLU after each convolution")
    shortcut: Literal["plain", "operator"] = _key(
        "plain", NETWORK, "1×1 shortcut convolutions of residual networks: plain, or with the operator"
    )
    group_norm: int = _key(
        0, NETWORK, "number of groups of GroupNorm after each convolution, without BatchNorm; 0 for none"
    )
    center: Literal["auto", "none", "weight", "patch", "first-patch"] = _option(
        "auto",
        NETWORK,
        "mean removed from kernels (weight), or also from patches (patch), or that in the first sphere layer alone "
        "(first-patch); auto: patch if no BatchNorm",
    )
    magnitude: Literal["sphere", "ball", "tanh", "linear", "segmented", "log", "mixed"] | str | None = _option(
        None,
        NETWORK,
        "function of the patch norm that multiplies the operator, e.g. ball:radius=10, radius=learned or "
        "radius=learned:10; default: sphere, a constant of 1",
    )
    feature_batch_norm: bool = _key(False, NETWORK, "BatchNorm of the features, before the class weights")
    initialization: Literal["he", "orthogonal", "dirac"] = _key(
        "he", NETWORK, "initial weights: the network's (he), orthogonal kernels, or filters that copy channels (dirac)"
    )

    loss: str = _basic(
        "softmax",
        LOSS,
        "loss: softmax; w-, ga- or s- with linear, cosine or sigmoid, e.g. w-cosine; a, cosface, arcface, sphereface2, "
        "sphereface-r1, sphereface-r2, adaface, magface, curricularface, elasticface, subcenter-arcface, uniface; with "
        "the options of its class, e.g. cosface:m=0.2,s=30 or softmax:label_smoothing=0.1",
    )
    annealing: bool | None = _key(
        None, LOSS, "gradual introduction of a margin; default: if the margin gradient is full"
    )
    lambda_floor: float = _key(5.0, LOSS, "final λ of the annealing: the margin has the weight 1/(1 + λ)")
    lambda_floor_at: float = _key(1 / 6, LOSS, "fraction of the run after which λ has its final value")
    class_weights: list[str] | None = _option(  # noqa: RUF009
        None, LOSS, "weights of classes: balanced (inverse to their numbers of images), or NAME=WEIGHT ...; default: 1"
    )
    sample_rate: float = _option(1.0, LOSS, "fraction of the classes used per step with --shard-head; 1 for all")

    iterations: int = _basic(1000, TRAINING, "number of optimizer steps (64000 in the paper)")
    epochs: float | None = _basic(
        None, TRAINING, "number of passes over the training images, instead of a number of iterations"
    )
    batch_size: int = _basic(
        128, TRAINING, "images per step, over all processes; the default is reduced for fewer training images"
    )
    sampling: Literal["shuffled", "balanced"] = _option(
        "shuffled", TRAINING, "images of an epoch: each of them once (shuffled), or each class equally often (balanced)"
    )
    accumulate: int = _option(1, TRAINING, "number of micro-batches per step and process, for less memory")
    optimizer: Literal["adam", "adamw", "sgd", "muon"] | str = _basic(
        "adam",
        TRAINING,
        "Adam, Adam with decoupled weight decay (adamw), SGD, or Muon with SGD for all but filters, e.g. "
        "sgd:momentum=0.9; options: "
        + "; ".join(f"{', '.join(options)} of {name}" for name, options in OPTIMIZERS.items() if name != "adamw"),
    )
    learning_rate: float = _basic(1e-3, TRAINING, "initial learning rate; with muon that of filters")
    schedule: Literal["step", "cosine", "linear"] = _basic(
        "step", TRAINING, "learning rate: divided by 10 at milestones (step), half a cosine to 0, or a line to 0"
    )
    warmup: int = _option(0, TRAINING, "iterations in which the learning rate increases linearly to its initial value")
    milestones: list[int] | None = _option(  # noqa: RUF009
        None, TRAINING, "iterations at which the learning rate is divided by 10; default: 34/64 and 54/64 of the run"
    )
    weight_decay: float = _basic(5e-4, TRAINING, "weight decay of plain layers; sphere layers have none")
    decay_all: bool = _key(False, TRAINING, "weight decay of all parameters, including sphere layers and k")
    orthogonality: float = _key(1e-4, TRAINING, "weight of the orthogonality penalty ‖WᵀW − I‖² of sphere layers")
    orthogonality_form: Literal["raw", "normalized"] = _key(
        "raw", TRAINING, "orthogonality of the kernels (raw) or of their directions (normalized)"
    )
    energy: float = _key(0.0, TRAINING, "weight of the hyperspherical energy of sphere layers")
    keep_norms: bool = _key(False, TRAINING, "sphere weights kept at their initial norm")
    keep_norms_mode: Literal["renormalize", "project"] = _key(
        "renormalize", TRAINING, "kept norms: weights rescaled after each step (renormalize) or only rotated (project)"
    )
    average_weights: float = _option(
        0.0, TRAINING, "decay of a moving average of weights that is evaluated and saved, e.g. 0.99; 0 for none"
    )
    init_from: str | None = _option(
        None,
        TRAINING,
        "run, saved model or safetensors checkpoint whose weights are the initial ones, as far as they fit",
    )
    on_nan: Literal["stop", "skip"] = _option("stop", TRAINING, "response to a loss or gradient that is not finite")
    seed: int = _basic(0, TRAINING, "seed of weights, order of images and augmentation")

    eval_every: int = _basic(250, EVALUATION, "iterations between evaluations")
    eval_batch_size: int = _option(256, EVALUATION, "images per batch of an evaluation")
    tta: Literal["none", "mirror", "mirror-shift"] = _key(
        "none", EVALUATION, "views of each image in the last evaluation, for a second accuracy: mirror, or also shifted"
    )
    patience: int | None = _option(
        None, EVALUATION, "evaluations without a better accuracy after which the run ends; default: it does not"
    )
    bn_eval: list[Literal["running", "lagging", "batch", "precise"]] | None = _key(  # noqa: RUF009
        None,
        EVALUATION,
        "BatchNorm statistics of evaluations, the first for best and summary: running, lagging, batch, precise; "
        "default: running",
    )
    bn_lag_momentum: float = _key(0.999, EVALUATION, "momentum of the lagging BatchNorm statistics")
    bn_lag_variance: float = _key(
        1.0, EVALUATION, "initial lagging variance: 1 as in tf.layers, 0 as in the code of the paper's authors"
    )
    bn_precise_images: int = _key(4096, EVALUATION, "training images of the precise BatchNorm statistics")

    device: str | None = _basic(None, MACHINE, "cpu, cuda, cuda:1, …; default: cuda if available, else cpu")
    precision: Literal["float32", "bfloat16", "float16"] = _basic(
        "float32", MACHINE, "precision of the forward pass; half precision uses autocast"
    )
    channels_last: bool = _key(True, MACHINE, "channels-last memory format of images and kernels")
    compile: bool = _option(False, MACHINE, "compilation of the network with torch.compile")
    engine: Literal["torch", "winograd"] = _key(
        "torch", MACHINE, "convolutions of a plain network on CPUs: torch, or winograd as in sphere layers"
    )
    sharding: Literal["ddp", "fsdp", "hsdp"] = _option(
        "ddp", MACHINE, "weights of several processes: copies (ddp), divided among all (fsdp) or per machine (hsdp)"
    )
    shard_head: bool = _option(False, MACHINE, "class weights divided among the processes, for very many classes")
    sync_batch_norm: bool = _key(True, MACHINE, "BatchNorm statistics over all GPUs of a run")
    threads: int | None = _option(None, MACHINE, "number of CPU threads per process; default: that of torch")
    workers: int = _option(2, MACHINE, "number of processes that read a folder's images")
    timeout: float = _option(120.0, MACHINE, "seconds after which an unresponsive process of the run counts as lost")

    log_every: int = _option(50, OUTPUT, "iterations between rows of training metrics")
    checkpoint_every: int = _option(250, OUTPUT, "iterations between checkpoints")
    probes: bool = _key(True, OUTPUT, "weight norms, output variances and angles of classes, logged at each evaluation")
    tensorboard: bool = _option(False, OUTPUT, "TensorBoard files in the run's folder")

    def __post_init__(self) -> None:
        for name, alias, stored in (("operator", "none", None), ("magnitude", "none", None), ("center", None, "none")):
            if getattr(self, name) == alias:
                object.__setattr__(self, name, stored)
        for name in CHOICES:
            self._set_choice(name)
        for name, hint in _hints().items():
            value = getattr(self, name)
            check_type(name, value, hint)
            if isinstance(value, tuple):  # YAML and JSON have lists
                object.__setattr__(self, name, list(value))
        check_ranges(self)

    def _set_choice(self, name: str) -> None:
        """Replace a name with options by its text with the options in alphabetical order."""
        value = getattr(self, name)
        if isinstance(value, (str, Mapping)) and value:
            choice = parse_choice(name, value)
            words = next((get_args(hint) for hint in get_args(_hints()[name]) if get_origin(hint) is Literal), ())
            if words and choice.name not in words:
                raise InvalidArgument(name, f"must be one of {', '.join(words)}, got {choice.name[:80]!r}.")
            object.__setattr__(self, name, str(choice))

    def choice(self, name: str) -> Choice:
        """Return the name and the options of `loss`, `operator`, `magnitude` or `optimizer`; the name none for None."""
        return parse_choice(name, getattr(self, name) or "none")

    @cached_property
    def resolved_milestones(self) -> tuple[int, ...]:
        """Iterations at which the learning rate is divided by 10, with the default for this length of the run."""
        if self.milestones is not None:
            return tuple(self.milestones)
        return tuple(round(fraction * self.iterations) for fraction in PAPER_MILESTONES)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0. It is a function of the step, without state to save."""
        return self.learning_rate * self.rate_factor_at(step)

    def rate_factor_at(self, step: int, until: float = 1.0) -> float:
        """Return the learning rate of a step as a fraction of the initial one.

        Args:
            step: Step, counted from 0.
            until: Fraction of the run at which the schedules "cosine" and "linear" reach 0.
        """
        last = max(until * self.iterations, self.warmup + 1)
        fraction = min(1.0, max(0, step - self.warmup) / (last - self.warmup))
        if self.schedule == "cosine":
            factor = 0.5 + 0.5 * math.cos(math.pi * fraction)
        elif self.schedule == "linear":
            factor = 1 - fraction
        else:
            factor = LEARNING_RATE_DECAY ** sum(step >= at for at in self.resolved_milestones)
        return factor * (step + 1) / self.warmup if step < self.warmup else factor

    def fitted_to(self, num_images: int) -> tuple[TrainConfig, list[str]]:
        """Return the configuration with the number of iterations and the batch size for a number of training images.

        `epochs` determines the iterations. The default batch size is reduced to the number of images if there are
        fewer. The result is unchanged if it is fitted to the same number again.

        Returns:
            The configuration, and a sentence per change that the user did not request.

        Raises:
            ValueError: If `iterations` is neither the default nor the number that `epochs` gives.
        """
        config, messages = self, []
        if self.batch_size == TrainConfig.batch_size > num_images > 0:
            config = replace(config, batch_size=num_images)
            messages.append(
                f"the batch size is {num_images}, the number of training images, instead of {self.batch_size}."
            )
        if self.epochs is None:
            return config, messages
        iterations = max(1, math.ceil(self.epochs * max(1, num_images // config.batch_size)))
        if self.iterations not in (TrainConfig.iterations, iterations):
            raise InvalidArgument(
                "iterations", f"must be left out with epochs, got {self.iterations} (epochs gives {iterations})."
            )
        if self.warmup >= iterations:
            raise InvalidArgument("warmup", f"must be less than the {iterations} iterations, got {self.warmup}.")
        return replace(config, iterations=iterations), messages

    def as_dict(self) -> dict[str, Any]:
        """Return the configuration as a dictionary of JSON values."""
        return asdict(self)

    def as_yaml(self) -> dict[str, Any]:
        """Return the configuration for a YAML file, where names with options are mappings."""
        chosen = {name: self.choice(name).as_yaml() for name in CHOICES if getattr(self, name) is not None}
        return self.as_dict() | chosen

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the configuration of a dictionary.

        Raises:
            TypeError: If a key is not an option, or a value has the wrong type.
            ValueError: If a value is out of range.
        """
        options = {option.name for option in fields(cls)}
        for name in values:
            if name not in options:
                raise TypeError(f"{name!r} is not an option of a training run.")
        return cls(**values)


PREDICTION_OPTIONS = (
    *(o.name for o in fields(TrainConfig) if o.metadata["group"] is NETWORK and o.name != "initialization"),
    "loss",
)
"""Options that decide which function the weights of a network compute."""


@cache
def _hints() -> dict[str, Any]:
    return get_type_hints(TrainConfig)
