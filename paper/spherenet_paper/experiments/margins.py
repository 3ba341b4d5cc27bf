"""Our own studies of margins: schedules of the margin, scale of the logits and gradient through the margin."""

from __future__ import annotations

from typing import Any

from spherenet_paper.experiments.experiment import Cell, Claim, Experiment, cifar_config, paper_margin

__all__ = ["MARGIN_FORMS", "MARGIN_SCHEDULE", "margin_forms_cells", "margin_schedule_cells"]

SCHEDULES: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "w-linear": {"loss": "w-linear"},
    "m4-floor5": paper_margin("ga-linear"),
    "m4-floor20": {**paper_margin("ga-linear"), "lambda_floor": 20.0},
    "m4-floor50": {**paper_margin("ga-linear"), "lambda_floor": 50.0},
    "m4-floor5-late": {**paper_margin("ga-linear"), "lambda_floor_at": 0.9},
    "m2-floor5": paper_margin("ga-linear", m=2),
    "m2-floor5-late": {**paper_margin("ga-linear", m=2), "lambda_floor_at": 0.9},
    "s10": {"loss": "s-cosine:s=10"},
    "s10-m0.1": {"loss": "cosface:m=0.1,s=10"},
    "s10-m0.2": {"loss": "cosface:m=0.2,s=10"},
}
"""Loss options by name: the name states m, the final λ, whether λ reaches it late, and s."""

FEW_IMAGES = 2_000
"""Size of the reduced training set. In the cpu preset each of its images is used 32 times."""


def margin_schedule_cells(preset: str) -> list[Cell]:
    """Margin schedules (our study): cnn-9 with the cosine operator on CIFAR-10.

    Without annealing, linear GA-Softmax with m = 4 collapses; with the published schedule it costs accuracy in short
    runs (Eq. 7 of docs/concepts.md).
    Varied: final λ (5, 20, 50), when λ reaches it (after a sixth or nine tenths of the run), m (2, 4); and, for
    features of fixed length, S-Softmax with s = 10 and CosFace with margins 0.1 and 0.2. All of it with all training
    images and with 2,000, which the network can fit, as margins are meant for networks that overfit.
    Claims: a margin beats the same loss without a margin.

    paper preset: 22 cells of 64,000 iterations; not in the paper.
    cpu preset: 500 iterations with all images, 1,000 with few; fixed scale with all images only. Expected accuracy (3
    seeds) 34.4 to 41.4 % with GA-Softmax, 41.6 % without a margin, 44.3 to 44.9 % with a fixed scale. One seed takes 21
    minutes on one core (Intel Xeon, 2.80 GHz).

        spherenet reproduce margin-schedule --preset cpu --seeds 3
    """
    names = ("w-linear", "m4-floor20") if preset == "smoke" else tuple(SCHEDULES)
    few = 400 if preset == "smoke" else FEW_IMAGES
    return [
        Cell(
            f"{name}_{count or 'all'}",
            name,
            f"{count:,} images" if count else "all images",
            cifar_config(
                preset,
                model="cnn-9",
                operator="cosine",
                train_images=count,
                iterations_cpu=iterations,
                **SCHEDULES[name],
            ),
        )
        for count, iterations in ((None, 500), (few, 1000))
        for name in names
        if not (preset == "cpu" and count and name.startswith("s10"))
    ]


MARGIN_NAMES = tuple(name for name in SCHEDULES if name.startswith("m"))
FIXED_SCALE_NAMES = ("s10-m0.1", "s10-m0.2")

MARGIN_SCHEDULE = Experiment(
    "margin-schedule",
    "Schedules of the margin",
    "which annealing or which scale makes a margin improve accuracy",
    margin_schedule_cells,
    (
        Claim(
            "all-images",
            "With all images a margin beats the same loss without one",
            "Table 1, for short runs",
            tuple((f"{name}_all", "w-linear_all") for name in MARGIN_NAMES),
        ),
        Claim(
            "few-images",
            "With few images a margin beats the same loss without one",
            "Table 1, for few images",
            tuple((f"{name}_{FEW_IMAGES}", f"w-linear_{FEW_IMAGES}") for name in MARGIN_NAMES),
        ),
        Claim(
            "few-images-over-softmax",
            "With few images a margin beats softmax",
            "Table 1, for few images",
            tuple((f"{name}_{FEW_IMAGES}", f"softmax_{FEW_IMAGES}") for name in MARGIN_NAMES),
        ),
        *(
            Claim(
                f"fixed-scale-{images.replace(' ', '-')}",
                f"At a fixed scale, with {images}, a margin beats the same loss without one",
                "Table 1, for S-Softmax",
                tuple((f"{name}_{suffix}", f"s10_{suffix}") for name in FIXED_SCALE_NAMES),
            )
            for images, suffix in (("all images", "all"), ("few images", FEW_IMAGES))
        ),
    ),
)


FORM_LOSSES = {"linear": "ga-linear", "cosine": "ga-cosine"}
FORM_SCALES = {"norm": "norm", "s10": "10", "s30": "30"}
FORM_MARGINS = {"m1.2": 1.2, "m1.5": 1.5, "m4-annealed": 4}
GRADIENTS = ("full", "detached")


def margin_forms_cells(preset: str) -> list[Cell]:
    """Forms of the margin (our study): cnn-9 with the cosine operator and GA-Softmax on CIFAR-10.

    Varied: scale of the logits (feature norm, 10, 30), gradient of the margin (full, or detached: that of m = 1, Eq.
    16), and m (1, 1.2, 1.5, and 4 with annealing), for the linear and the cosine g; softmax for comparison. With m = 1
    both gradients are equal, so that there is one cell.
    Claims, stated before the runs: a margin beats m = 1 at the same scale, with the full gradient (the paper's form)
    and with the detached one; the detached gradient beats the full one; a detached margin beats softmax. Added after
    the first seed, which differed between scales: the same for fixed scales.

    paper preset: 43 cells of 64,000 iterations; not in the paper.
    cpu preset: 1,500 iterations; expected accuracy (3 seeds) 50.5 to 52.6 % with m = 1 and 53.0 % with softmax; 50.5 to
    53.5 % detached at a fixed scale, 30.5 to 49.8 % with the full gradient. One seed takes about 40 minutes on one core
    (AMD EPYC).

        spherenet reproduce margin-forms --preset cpu --seeds 3
    """
    names = ("linear",) if preset == "smoke" else tuple(FORM_LOSSES)
    scales = ("s10",) if preset == "smoke" else tuple(FORM_SCALES)
    size: dict[str, Any] = {"model": "cnn-9", "operator": "cosine", "iterations_cpu": 1500}
    cells = [Cell("softmax", "softmax", "–", cifar_config(preset, **size))]
    for name in names:
        for scale in scales:
            row = f"{name}, scale {'‖x‖' if scale == 'norm' else FORM_SCALES[scale]}"
            loss = f"{FORM_LOSSES[name]}:scale={FORM_SCALES[scale]},"
            no_margin = cifar_config(preset, loss=f"{loss}m=1,margin_gradient=full", annealing=False, **size)
            cells.append(Cell(f"{name}_{scale}_m1", row, "m = 1", no_margin))
            for margin, m in FORM_MARGINS.items():
                for gradient in GRADIENTS:
                    text = f"{loss}m={m},margin_gradient={gradient}"
                    config = cifar_config(preset, loss=text, annealing=m == 4, **size)
                    column = f"m = {margin[1:].replace('-', ', ')}, {gradient}"
                    cells.append(Cell(f"{name}_{scale}_{margin}_{gradient}", row, column, config))
    return cells


FORM_ROWS = tuple(f"{name}_{scale}" for name in FORM_LOSSES for scale in FORM_SCALES)
FIXED_SCALE_ROWS = tuple(row for row in FORM_ROWS if not row.endswith("norm"))

MARGIN_FORMS = Experiment(
    "margin-forms",
    "Forms of the margin",
    "which scale and which gradient make a margin improve accuracy",
    margin_forms_cells,
    (
        *(
            Claim(
                f"{gradient}-gradient",
                f"With the {gradient} gradient a margin beats m = 1 at the same scale",
                "Table 1, for short runs" if gradient == "full" else "ours",
                tuple((f"{row}_{margin}_{gradient}", f"{row}_m1") for row in FORM_ROWS for margin in FORM_MARGINS),
            )
            for gradient in GRADIENTS
        ),
        Claim(
            "detached-over-full",
            "A margin with the detached gradient beats the same margin with the full one",
            "ours",
            tuple((f"{row}_{margin}_detached", f"{row}_{margin}_full") for row in FORM_ROWS for margin in FORM_MARGINS),
        ),
        Claim(
            "detached-over-softmax",
            "A margin with the detached gradient beats softmax",
            "ours",
            tuple((f"{row}_{margin}_detached", "softmax") for row in FORM_ROWS for margin in FORM_MARGINS),
        ),
        Claim(
            "fixed-scale",
            "At a fixed scale a margin with the detached gradient beats m = 1",
            "ours, added after the first seed",
            tuple((f"{row}_{margin}_detached", f"{row}_m1") for row in FIXED_SCALE_ROWS for margin in FORM_MARGINS),
        ),
        Claim(
            "scale-10-over-softmax",
            "At a scale of 10 a margin with the detached gradient beats softmax",
            "ours, added after the first seed",
            tuple((f"{name}_s10_{margin}_detached", "softmax") for name in FORM_LOSSES for margin in FORM_MARGINS),
        ),
    ),
)
