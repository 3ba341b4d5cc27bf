"""Single statements of the paper (learned k, S-Softmax, weight decay, ImageNet) and our study of magnitudes."""

from __future__ import annotations

from typing import Any

from spherenet.training import TrainConfig
from spherenet_paper.experiments.experiment import OPERATORS, Cell, Claim, Experiment, cifar_config

__all__ = [
    "IMAGENET",
    "LEARNABLE",
    "MAGNITUDES",
    "S_SOFTMAX",
    "WEIGHT_DECAY",
    "imagenet_cells",
    "learnable_cells",
    "magnitudes_cells",
    "s_softmax_cells",
    "weight_decay_cells",
]


def learnable_cells(preset: str) -> list[Cell]:
    """Learnable k: cnn-9 with cosine W-Softmax on CIFAR-10, one k per filter initialized with 0.5.

    Varied: learned k, and the fixed sigmoid with k = 0.3.
    Claims: a learned k beats a fixed one. The paper's histograms of k in the first convolution of each stage are spread
    over 0 to 1, more concentrated, and highly concentrated near 0.8.

    paper preset: 2 cells of 64,000 iterations; expected accuracy 91.64 %. The paper compares with 91.22 %, while its
    Table 2 has 91.28 % for k = 0.3.
    cpu preset: 2,000 iterations, because k changes slowly; expected accuracy (3 seeds) 55.0 and 55.3 %. One seed takes
    6 minutes on one core (AMD EPYC).

        spherenet reproduce learnable --preset cpu --seeds 3
    """
    rows: dict[str, tuple[dict[str, Any], float]] = {
        "learnable": ({"operator": "learnable:k=0.5"}, 91.64),
        "sigmoid-0.3": (OPERATORS["sigmoid-0.3"], 91.28),
    }
    return [
        Cell(
            row,
            row,
            "w-cosine",
            cifar_config(preset, model="cnn-9", loss="w-cosine", iterations_cpu=2000, **options),
            paper,
        )
        for row, (options, paper) in rows.items()
    ]


LEARNABLE = Experiment(
    "learnable",
    "Learned k",
    "accuracy with a learned k, and the distribution of k in each stage",
    learnable_cells,
    (
        Claim("over-fixed", "A learned k beats the best fixed one", "Section 4.2", (("learnable", "sigmoid-0.3"),)),
        Claim("k-grows", "Learned k grow with depth", "Figure: learned k", (("learnable", "sigmoid-0.3"),), "rise"),
        Claim(
            "k-narrows",
            "Learned k are spread in the first stage and concentrated in the last",
            "Figure: learned k",
            (("learnable", "sigmoid-0.3"),),
            "narrowing",
        ),
    ),
)


SCALES = (1, 10, 30, 70)


def s_softmax_cells(preset: str) -> list[Cell]:
    """S-Softmax (features and weights normalized): cnn-9 with the cosine operator on CIFAR-10.

    Varied: scale s = 1, 10, 30, 70 from scratch, and s = 1 fine-tuned from a softmax network (which is then trained
    twice as long).
    Claims (Section 3.4): S-Softmax with s = 1 does not train from scratch; it does with a large s or when fine-tuned.

    paper preset: 6 cells of 64,000 iterations; the paper gives no numbers.
    cpu preset: 500 iterations; expected accuracy (3 seeds) 40.4 % with s = 1, 44.4 % with s = 10, 43.9 % fine-tuned.
    One seed takes 5 minutes on one core (Intel Xeon, 2.80 GHz).

        spherenet reproduce s-softmax --preset cpu --seeds 3
    """
    shared: dict[str, Any] = {"model": "cnn-9", "operator": "cosine"}
    scratch = "from scratch"
    cells = [
        Cell(f"s-{s}", f"s = {s}", scratch, cifar_config(preset, loss=f"s-cosine:s={s}", **shared)) for s in SCALES
    ]
    fine_tuned = cifar_config(preset, loss="s-cosine:s=1", learning_rate=1e-4, **shared)
    return [
        *cells,
        Cell("softmax", "softmax", scratch, cifar_config(preset, **shared)),
        Cell("fine-tuned", "s = 1", "fine-tuned from softmax", fine_tuned, starts_from="softmax"),
    ]


S_SOFTMAX = Experiment(
    "s-softmax",
    "S-Softmax and its scale",
    "which s trains from scratch",
    s_softmax_cells,
    (
        Claim(
            "larger-s",
            "S-Softmax from scratch is better with s from 10 to 70 than with s = 1",
            "Section 3.4",
            tuple((f"s-{s}", "s-1") for s in SCALES[1:]),
        ),
        Claim(
            "fine-tuned",
            "S-Softmax with s = 1 is better fine-tuned from softmax",
            "Section 3.4",
            (("fine-tuned", "s-1"),),
        ),
    ),
)


def weight_decay_cells(preset: str) -> list[Cell]:
    """Weight decay: cnn-9 with softmax on CIFAR-10, with and without 5e-4 on all weights.

    Varied: cosine and plain, weight decay 5e-4 and 0.
    Claim (Section 3.3): weight decay is "no longer needed in SphereNet".

    paper preset: 4 cells of 64,000 iterations; the paper gives no numbers.
    cpu preset: 500 iterations; expected accuracy (3 seeds) 43.3 to 43.6 %. One seed takes 2 minutes on one core (Intel
    Xeon, 2.80 GHz).

        spherenet reproduce weight-decay --preset cpu --seeds 3
    """
    return [
        Cell(
            f"{row}_{suffix}",
            row,
            column,
            cifar_config(
                preset, model="cnn-9", weight_decay=decay, decay_all=True, orthogonality=0.0, **OPERATORS[row]
            ),
        )
        for row in ("cosine", "none")
        for suffix, column, decay in (("decay", "5e-4 on all weights", 5e-4), ("free", "no decay", 0.0))
    ]


WEIGHT_DECAY = Experiment(
    "weight-decay",
    "Weight decay",
    "accuracy with and without L2 decay",
    weight_decay_cells,
    (
        Claim(
            "without-decay",
            "A SphereNet without decay beats one with it",
            "Section 3.3",
            (("cosine_free", "cosine_decay"),),
        ),
    ),
)


IMAGENET_VARIANTS: dict[str, dict[str, Any]] = {
    "none": {"operator": None},
    "v1": {"operator": "cosine", "loss": "w-cosine", "shortcut": "operator"},
    "v2": {"operator": "cosine"},
}
IMAGENET_RECIPE: dict[str, Any] = {
    "data": "folder",
    "model": "resnet-18",
    "center": "none",
    "resize": "squash",  # the paper resizes to 256 × 256
    "augmentation": "imagenet",
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "milestones": [200_000, 375_000],
    "iterations": 550_000,
    "batch_size": 40,
    "workers": 8,
    "eval_every": 5000,
    "checkpoint_every": 5000,
}


def imagenet_cells(preset: str) -> list[Cell]:
    """Figure "ImageNet": resnet-18, single-crop validation accuracy.

    Varied: plain; v1: cosine (shortcuts too) with cosine W-Softmax; v2: cosine with softmax.
    Claim: SphereNets beat the plain residual network.

    paper preset: 3 cells; SGD with momentum 0.9, learning rate 0.1 divided by ten at 200K and 375K of 550K iterations,
    batch size 40, images resized to 256 × 256, random 224 × 224 crops, horizontal flips. The paper shows curves. A run
    takes days on a GPU. `--data-dir` names the folder with train/ and val/.
    cpu preset: no cells, because the data are not freely available.

        spherenet reproduce imagenet --preset paper --data-dir imagenet
    """
    if preset == "cpu":
        return []
    smoke: dict[str, Any] = {"model": "resnet-18", "widths_cpu": (4, 4, 4, 4), "optimizer": "sgd"}
    return [
        Cell(
            name,
            name,
            "resnet-18",
            cifar_config(preset, **smoke, **options)
            if preset == "smoke"
            else TrainConfig(**IMAGENET_RECIPE, **options),
        )
        for name, options in IMAGENET_VARIANTS.items()
    ]


IMAGENET = Experiment(
    "imagenet",
    "ImageNet, resnet-18",
    "single-crop validation accuracy over iterations",
    imagenet_cells,
    (
        Claim(
            "higher",
            "SphereNets beat the plain residual network on ImageNet",
            "Figure: ImageNet",
            (("v1", "none"), ("v2", "none")),
        ),
    ),
)


RADIUS = 10
"""Radius of the study: about the norm of a patch of 9 · 16 to 9 · 32 values after BatchNorm and ReLU."""

MAGNITUDE_ROWS: dict[str, dict[str, Any]] = {
    "none": {"operator": None},
    "sphere": {"operator": "cosine"},
    "ball": {"operator": "cosine", "magnitude": f"ball:radius={RADIUS}"},
    "tanh": {"operator": "cosine", "magnitude": f"tanh:radius={RADIUS}"},
    "linear": {"operator": "cosine", "magnitude": "linear"},
}
"""Networks by magnitude function; "none" is the CNN twin."""


def magnitudes_cells(preset: str) -> list[Cell]:
    """Magnitude functions (our study): resnet-32 with the cosine operator and softmax on CIFAR-10.

    A narrow residual SphereNet ends below its CNN twin (fig-convergence-resnet). The hypothesis is that its units lack
    the magnitude of the patch.
    Varied: h(‖x‖) of Eq. 15: sphere (h = 1, the paper), ball and tanh with a radius of 10, linear; and the CNN twin.
    Claims, stated before the runs: a magnitude function improves the SphereNet, which is then above its CNN twin.

    paper preset: 5 cells of 64,000 iterations; not in the paper.
    cpu preset: 800 iterations, as in fig-convergence-resnet; expected accuracy (3 seeds) 44.2 % with h = 1, 45.7 to
    46.8 % with the others, 47.3 % for the CNN twin. One seed takes about 10 minutes on one core (AMD EPYC).

        spherenet reproduce magnitudes --preset cpu --seeds 3
    """
    rows = ("none", "sphere", "ball") if preset == "smoke" else tuple(MAGNITUDE_ROWS)
    return [
        Cell(row, row, "resnet-32", cifar_config(preset, model="resnet-32", iterations_cpu=800, **MAGNITUDE_ROWS[row]))
        for row in rows
    ]


WITH_MAGNITUDE = ("ball", "tanh", "linear")

MAGNITUDES = Experiment(
    "magnitudes",
    "Magnitude functions in residual networks",
    "whether the norm of the patch closes the gap between a narrow SphereResNet and its CNN twin",
    magnitudes_cells,
    (
        Claim(
            "over-sphere",
            "A magnitude function improves a narrow residual SphereNet",
            "ours",
            tuple((row, "sphere") for row in WITH_MAGNITUDE),
        ),
        Claim(
            "over-cnn",
            "With a magnitude function a narrow residual SphereNet beats its CNN twin",
            "ours",
            tuple((row, "none") for row in WITH_MAGNITUDE),
        ),
    ),
)
