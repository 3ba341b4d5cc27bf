"""What `spherenet train` can be told: one flat, typed configuration, as options, YAML or Python.

Nothing here imports torch, so that help and wrong options answer at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["FREE", "Group", "TrainConfig"]

FREE = ("data_dir", "download", "workers", "log_every", "checkpoint_every", "observe", "tensorboard",
        "timeout")  # fmt: skip
"""What may differ when a run goes on, for it changes no result."""


LIMITS = {
    "image_size": 4096,
    "widths": 1 << 16,
    "batch_size": 1 << 20,
    "eval_batch_size": 1 << 20,
    "accumulate": 1 << 16,
    "iterations": 1 << 40,
    "folds": 1000,
    "workers": 256,
    "threads": 1024,
    "timeout": 1e6,
    "lambda_floor": 1e6,
    "m": 1e6,
    "s": 1e6,
}
"""The largest value of each option: more is a mistake, or a stranger's configuration made to exhaust the machine."""


@dataclass(frozen=True)
class Group:
    """A heading in the help text, in the order of the fields."""

    title: str


DATA, NETWORK, LOSS, TRAINING = Group("data"), Group("network"), Group("loss"), Group("training")
MACHINE, OUTPUT = Group("machine"), Group("output")


def _option(default: Any, group: Group, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes; SPEC 4 gives the defaults but for the length of the run."""

    data: str = _option("mnist5k", DATA, "mnist5k (embedded), cifar10, cifar100, or folder (class/name.jpg)")
    data_dir: str | None = _option(None, DATA, "where the data are, or are downloaded to; else SPHERENET_DATA")
    augmentation: str | None = _option(None, DATA, "none, flip, flip-crop, flips-crop or imagenet; else the set's own")
    image_size: int | None = _option(None, DATA, "side to which pictures are brought (the set's own; folders 224)")
    channels: int | None = _option(None, DATA, "1 for grey, 3 for colour; of a folder's pictures (3)")
    val_fraction: float = _option(0.1, DATA, "share of a folder without val/ that is kept for evaluation")
    folds: int = _option(0, DATA, "cross-validation: parts that the training pictures are shared out to (0: none)")
    fold: int = _option(0, DATA, "the part that is evaluated on, the others being trained on; from 0")
    train_pictures: int | None = _option(None, DATA, "train on so many pictures only, of each class alike (all)")
    download: bool = _option(True, DATA, "fetch what is not there")

    model: str = _option("cnn-3", NETWORK, "cnn-3/9/18/45/60/69, resnet-32, resnet-32-wide, resnet-18")
    operator: str | None = _option("sigmoid", NETWORK, "linear, cosine, sigmoid, learnable; none for a plain CNN")
    k: float | None = _option(None, NETWORK, "of the sigmoid (0.3), or where a learned one starts (0.5)")
    k_sharing: Literal["filter", "layer", "network"] = _option("filter", NETWORK, "one learned k for each of these")
    rescale: Literal["learned"] | None = _option(None, NETWORK, "learned: β and γ after each sphere layer")
    widths: list[int] | None = _option(None, NETWORK, "filters of each stage, as 64 96 128 (the paper's)")  # noqa: RUF009
    batch_norm: bool = _option(True, NETWORK, "BatchNorm after each convolution")
    relu: bool = _option(True, NETWORK, "ReLU after each convolution")
    shortcut: Literal["plain", "operator"] = _option("plain", NETWORK, "1×1 convolutions of residual networks")

    loss: str = _option("softmax", LOSS, "softmax, w-cosine, w-linear, ga-linear, a, s-cosine, arcface, …")
    m: float | None = _option(None, LOSS, "margin of ga-…, a, cosface, arcface")
    s: float | None = _option(None, LOSS, "scale of s-…, cosface, arcface (by the number of classes)")
    loss_k: float | None = _option(None, LOSS, "k of a loss with the sigmoid (0.3)")
    annealing: bool = _option(True, LOSS, "let a margin in by a schedule over the run; without it m = 4 may collapse")
    lambda_floor: float = _option(5.0, LOSS, "what annealing ends at: the margin counts 1/(1 + this)")
    lambda_floor_at: float = _option(1 / 6, LOSS, "part of the run after which annealing has come to its end")
    label_smoothing: float = _option(0.0, LOSS, "from 0 to 1")

    iterations: int = _option(1000, TRAINING, "steps of the optimiser (the paper: 64000)")
    batch_size: int = _option(128, TRAINING, "pictures a step, over all processes together")
    accumulate: int = _option(1, TRAINING, "pieces in which each process takes its share of a batch")
    optimizer: Literal["adam", "sgd"] = _option("adam", TRAINING, "adam, or sgd with momentum")
    learning_rate: float = _option(1e-3, TRAINING, "at the start")
    momentum: float = _option(0.9, TRAINING, "of sgd")
    milestones: list[int] | None = _option(  # noqa: RUF009
        None, TRAINING, "iterations at which the learning rate falls tenfold (34/64 and 54/64 of the run)"
    )
    weight_decay: float = _option(5e-4, TRAINING, "L2 on plain weights; sphere weights have none")
    decay_all: bool = _option(False, TRAINING, "weight decay on every parameter, sphere weights and k included")
    orthogonality: float = _option(1e-4, TRAINING, "weight of ‖WᵀW − I‖² over the sphere layers")
    orthogonality_form: Literal["raw", "normalized"] = _option("raw", TRAINING, "of kernels as they are, or unit ones")
    energy: float = _option(0.0, TRAINING, "weight of the hyperspherical energy")
    keep_norms: bool = _option(False, TRAINING, "hold sphere weights at their initial norm")
    init_from: str | None = _option(None, TRAINING, "run or saved model whose weights to start from, where they fit")
    on_nan: Literal["stop", "skip"] = _option("stop", TRAINING, "at a step whose loss is not finite")
    seed: int = _option(0, TRAINING, "of weights, order and augmentation")

    device: str | None = _option(None, MACHINE, "cpu, cuda, cuda:1, … (cuda where it is there)")
    precision: Literal["float32", "bfloat16", "float16"] = _option("float32", MACHINE, "half precision is autocast")
    channels_last: bool = _option(True, MACHINE, "memory format of pictures and kernels")
    compile: bool = _option(False, MACHINE, "compile the network with torch.compile")
    sync_batch_norm: bool = _option(True, MACHINE, "BatchNorm over all GPUs of a run")
    threads: int | None = _option(None, MACHINE, "of torch, in each process")
    workers: int = _option(2, MACHINE, "processes that read a folder's pictures")
    timeout: float = _option(120.0, MACHINE, "seconds after which another process of the run counts as lost")

    log_every: int = _option(50, OUTPUT, "iterations between rows of training numbers")
    eval_every: int = _option(250, OUTPUT, "iterations between evaluations")
    eval_batch_size: int = _option(256, OUTPUT, "pictures a batch of an evaluation")
    checkpoint_every: int = _option(250, OUTPUT, "iterations between checkpoints")
    observe: bool = _option(True, OUTPUT, "log weight norms and the variance of each layer at evaluations")
    tensorboard: bool = _option(False, OUTPUT, "write TensorBoard files into the run's folder too")

    def __post_init__(self) -> None:
        """Raise ValueError for a number beyond its limit."""
        for name, largest in LIMITS.items():
            value = getattr(self, name)
            for number in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(number, (int, float)) and not number <= largest:
                    raise ValueError(f"{name} must be at most {largest:,}, got {str(number)[:40]}.")
        if isinstance(self.timeout, (int, float)) and not self.timeout > 0:
            raise ValueError(f"timeout must be greater than 0, got {self.timeout}.")

    def as_dict(self) -> dict[str, Any]:
        """The configuration as JSON and YAML take it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """The configuration of a dictionary; TypeError for a key that is none of its options."""
        known = {made.name for made in fields(cls)}
        unknown = [name for name in values if name not in known]
        if unknown:
            raise TypeError(f"{unknown[0]!r} is no option of a training run.")
        hints = get_type_hints(cls)
        for name, value in values.items():
            if not _is_of(value, hints[name]):
                raise TypeError(f"{name} must be {_words(hints[name])}, got {repr(value)[:80]}.")
        return cls(**values)


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as the options have them: plain types, lists of them, choices, and unions."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, (list, tuple)) and all(_is_of(entry, get_args(hint)[0]) for entry in value)
    if get_args(hint):
        return any(_is_of(value, choice) for choice in get_args(hint))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _words(hint: Any) -> str:
    return str(hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint).replace("typing.", "")
