"""Tables 1 to 4 of the paper."""

from __future__ import annotations

from typing import Any

from spherenet_paper.experiments.experiment import (
    OPERATORS,
    PRESETS,
    Cell,
    Claim,
    Experiment,
    Requirement,
    cifar_config,
    paper_margin,
)

__all__ = ["TABLE1", "TABLE2", "TABLE3", "TABLE4", "table1_cells", "table2_cells", "table3_cells", "table4_cells"]

SPHERE_OPERATORS = tuple(name for name in OPERATORS if name != "none")

TABLE1_LOSSES: dict[str, dict[str, Any]] = {
    "softmax": {"loss": "softmax"},
    "w-sigmoid-0.1": {"loss": "w-sigmoid:k=0.1"},
    "w-sigmoid-0.3": {"loss": "w-sigmoid:k=0.3"},
    "w-sigmoid-0.7": {"loss": "w-sigmoid:k=0.7"},
    "w-linear": {"loss": "w-linear"},
    "w-cosine": {"loss": "w-cosine"},
    "a": paper_margin("a"),
    "ga-linear": paper_margin("ga-linear"),
}
TABLE1_PAPER = {
    "sigmoid-0.1": (90.97, 90.91, 90.89, 90.88, 91.07, 91.13, 91.87, 91.99),
    "sigmoid-0.3": (91.08, 91.44, 91.37, 91.21, 91.34, 91.28, 92.13, 92.38),
    "sigmoid-0.7": (91.05, 91.16, 91.47, 91.07, 90.99, 91.18, 92.22, 92.36),
    "linear": (91.10, 90.93, 91.42, 90.96, 90.95, 91.24, 92.21, 92.32),
    "cosine": (90.89, 90.88, 91.08, 91.22, 91.17, 90.99, 91.94, 92.19),
    "none": (90.58, 90.58, 90.73, 90.78, 91.08, 90.68, 91.78, 91.80),
}
MARGIN_LOSSES = ("a", "ga-linear")


def table1_cells(preset: str) -> list[Cell]:
    """Table 1: every operator with every loss, cnn-9 on CIFAR-10.

    Varied: operator (6 rows) and loss (8 columns).
    Claims: SphereConv beats plain convolution, and margin losses beat softmax.

    paper preset: 48 cells of 64,000 iterations; expected accuracy 90.6 to 92.4 %. An iteration takes half a second or
    more on two cores (docs/performance.md).
    cpu preset: four operators, four losses, a quarter of the width, 500 iterations; expected accuracy (3 seeds) with
    softmax 42.7 to 44.5 %, with margin losses 22.8 to 34.5 %. One seed takes 12 minutes on one core (Intel Xeon,
    2.80 GHz).

        spherenet reproduce table1 --preset cpu --seeds 3
    """
    rows = {
        "paper": tuple(OPERATORS),
        "cpu": ("sigmoid-0.3", "linear", "cosine", "none"),
        "smoke": ("sigmoid-0.3", "none"),
    }
    columns = {
        "paper": tuple(TABLE1_LOSSES),
        "cpu": ("softmax", "w-cosine", *MARGIN_LOSSES),
        "smoke": ("softmax", "ga-linear"),
    }
    return [
        Cell(
            f"{row}_{column}",
            row,
            column,
            cifar_config(preset, model="cnn-9", **OPERATORS[row], **TABLE1_LOSSES[column]),
            TABLE1_PAPER[row][list(TABLE1_LOSSES).index(column)],
        )
        for row in rows[preset]
        for column in columns[preset]
    ]


TABLE1 = Experiment(
    "table1",
    "Operators and losses, CIFAR-10, cnn-9",
    "accuracy of each operator with each loss",
    table1_cells,
    (
        Claim(
            "operators",
            "SphereConv operators beat the plain convolution",
            "Table 1, rows",
            tuple((f"{row}_softmax", "none_softmax") for row in SPHERE_OPERATORS),
        ),
        Claim(
            "operators-with-margins",
            "SphereConv operators beat the plain convolution under margin losses",
            "Table 1, rows",
            tuple((f"{row}_{loss}", f"none_{loss}") for row in SPHERE_OPERATORS for loss in MARGIN_LOSSES),
        ),
        Claim(
            "margins",
            "Margin losses (A-Softmax, GA-Softmax) beat softmax",
            "Table 1, columns",
            tuple((f"{row}_{loss}", f"{row}_softmax") for row in OPERATORS for loss in MARGIN_LOSSES),
        ),
        Claim(
            "ga-over-a",
            "Linear GA-Softmax beats A-Softmax",
            "Table 1, last two columns",
            tuple((f"{row}_ga-linear", f"{row}_a") for row in OPERATORS),
        ),
    ),
)


TABLE2_NETWORKS = ("cnn-3", "cnn-9", "cnn-18", "cnn-45", "cnn-60", "resnet-32")
TABLE2_PAPER = {
    "sigmoid-0.1": (82.08, 91.13, 91.43, 89.34, 87.67, 90.94),
    "sigmoid-0.3": (81.92, 91.28, 91.55, 89.73, 87.85, 91.70),
    "sigmoid-0.7": (82.40, 91.18, 91.69, 89.85, 88.42, 91.19),
    "linear": (82.31, 91.15, 91.24, 90.15, 89.91, 91.25),
    "cosine": (82.23, 90.99, 91.23, 90.05, 89.28, 91.38),
    "none": (81.19, 90.68, 90.62, 88.23, 88.15, 90.40),
}


def table2_cells(preset: str) -> list[Cell]:
    """Table 2: the operators in networks of 3 to 60 layers and in resnet-32, CIFAR-10.

    Varied: operator (6 rows) and network (6 columns). SphereNets use cosine W-Softmax, the plain network softmax.
    Claim: SphereNets beat the plain network at every depth.

    paper preset: 36 cells of 64,000 iterations; expected accuracy 81.2 to 91.7 %.
    cpu preset: two operators, cnn-3 and cnn-18 (table1 covers cnn-9, fig-convergence-resnet covers resnet-32), 2,000
    iterations; expected accuracy (3 seeds) 52.1 and 54.7 % for cnn-3, 47.8 to 49.2 % for cnn-18. One seed takes 10
    minutes on one core (AMD EPYC).

        spherenet reproduce table2 --preset cpu --seeds 3
    """
    rows = {"paper": tuple(OPERATORS), "cpu": ("sigmoid-0.3", "none"), "smoke": ("cosine", "none")}
    columns = {"paper": TABLE2_NETWORKS, "cpu": ("cnn-3", "cnn-18"), "smoke": ("cnn-3", "resnet-32")}
    return [
        Cell(
            f"{row}_{column}",
            row,
            column,
            cifar_config(
                preset,
                model=column,
                **OPERATORS[row],
                loss="softmax" if row == "none" else "w-cosine",
                iterations_cpu=2000,
            ),
            TABLE2_PAPER[row][TABLE2_NETWORKS.index(column)],
        )
        for row in rows[preset]
        for column in columns[preset]
    ]


TABLE2 = Experiment(
    "table2",
    "Operators and depth, CIFAR-10",
    "accuracy of each operator in networks of several depths",
    table2_cells,
    tuple(
        Claim(
            f"{network}",
            f"SphereNets beat the plain network, {network}",
            "Table 2",
            tuple((f"{row}_{network}", f"none_{network}") for row in SPHERE_OPERATORS),
        )
        for network in TABLE2_NETWORKS
    ),
)


TABLE3_PAPER = {
    "sigmoid-0.1": 86.29,
    "sigmoid-0.3": 85.67,
    "sigmoid-0.7": 85.51,
    "linear": 85.34,
    "cosine": 85.25,
    "none": 80.73,
}


def table3_cells(preset: str) -> list[Cell]:
    """Table 3: cnn-18 without ReLU, with BatchNorm, CIFAR-10.

    Varied: operator (6 rows). Losses as in table 2.
    Claim: the operators are nonlinear enough to replace ReLU, while the plain network loses ten points.

    paper preset: 6 cells of 64,000 iterations; expected accuracy 85.3 to 86.3 %, 80.7 % for the plain network.
    long preset: three operators, 32 × 32 pixels, a quarter of the widths, 6,000 iterations in bfloat16. The claim
    requires 60 % of all networks. Expected accuracy (2 seeds): 76.2 % (plain), 74.1 % (cosine), 75.4 % (sigmoid). A run
    takes 16 to 29 minutes on one core with bfloat16 instructions (AMD EPYC), two at a time.
    cpu preset: three operators, 2,000 iterations; expected accuracy (3 seeds) 58.4 to 59.7 %. One seed takes 7 minutes
    on one core (AMD EPYC).

        spherenet reproduce table3 --preset cpu --seeds 3
    """
    fewer = ("sigmoid-0.3", "cosine", "none")
    rows = {"paper": tuple(TABLE3_PAPER), "long": fewer, "cpu": fewer, "smoke": ("cosine", "none")}
    return [
        Cell(
            row,
            row,
            "cnn-18 without ReLU",
            cifar_config(
                preset,
                model="cnn-18",
                relu=False,
                **OPERATORS[row],
                loss="softmax" if row == "none" else "w-cosine",
                iterations_cpu=2000,
                widths_long=(16, 24, 32),
            ),
            TABLE3_PAPER[row],
        )
        for row in rows[preset]
    ]


TABLE3 = Experiment(
    "table3",
    "Without ReLU, CIFAR-10, cnn-18",
    "accuracy of networks whose only nonlinearity is the operator",
    table3_cells,
    (
        Claim(
            "without-relu",
            "SphereNets work without ReLU better than a plain network",
            "Table 3",
            tuple((row, "none") for row in SPHERE_OPERATORS),
            requires=Requirement("accuracy", 60.0),
        ),
    ),
    presets=PRESETS,
    seeds={"*": 2},
)


TABLE4_ROWS: dict[str, dict[str, Any]] = {
    "none_softmax": {"operator": None},
    "sigmoid-0.3_w-sigmoid-0.3": {"operator": "sigmoid:k=0.3", "loss": "w-sigmoid:k=0.3"},
    "linear_w-linear": {"operator": "linear", "loss": "w-linear"},
    "cosine_w-cosine": {"operator": "cosine", "loss": "w-cosine"},
    "sigmoid-0.3_ga-linear": {"operator": "sigmoid:k=0.3", **paper_margin("ga-linear")},
}
TABLE4_PAPER = {
    "cifar10": dict(zip(TABLE4_ROWS, (93.26, 94.47, 94.33, 94.64, 95.01), strict=True)),
    "cifar100": dict(zip(TABLE4_ROWS, (72.85, 76.02, 75.62, 74.92, 76.39), strict=True)),
}
TABLE4_COLUMNS = {"cifar10": "CIFAR-10+", "cifar100": "CIFAR-100"}


def table4_cells(preset: str) -> list[Cell]:
    """Table 4: resnet-32-wide on CIFAR-10+ (flips in both directions and crops) and CIFAR-100.

    Varied: pairs of operator and loss (5 rows), and the data (2 columns).
    Claims: SphereNets with W-Softmax and with GA-Softmax beat the plain residual network. The paper quotes for
    comparison: ELU 94.16 / 72.34, LSUV 93.45 / 65.72, ResNet-1001 95.38 / 77.29.

    paper preset: 10 cells of 64,000 iterations; expected accuracy 93.3 to 95.0 % and 72.9 to 76.4 %. CIFAR-100 must be
    downloaded first: `spherenet data cifar100 --download`.
    cpu preset: CIFAR-10+ only, without the linear operator, 300 iterations; expected accuracy (3 seeds) 31.2 to 31.4 %,
    21.2 % with GA-Softmax. One seed takes 17 minutes on one core (AMD EPYC).

        spherenet reproduce table4 --preset cpu --seeds 3
    """
    names = tuple(TABLE4_COLUMNS) if preset == "paper" else ("cifar10",)
    rows = [row for row in TABLE4_ROWS if not (preset == "cpu" and row == "linear_w-linear")]
    return [
        Cell(
            f"{row}_{data}",
            row,
            TABLE4_COLUMNS[data],
            cifar_config(
                preset,
                model="resnet-32-wide",
                augmentation="flips-crop",
                iterations_cpu=300,
                widths_cpu=(24, 48, 96),
                data=data,
                **TABLE4_ROWS[row],
            ),
            TABLE4_PAPER[data][row],
        )
        for data in names
        for row in rows
    ]


TABLE4 = Experiment(
    "table4",
    "Wide residual networks, CIFAR-10+ and CIFAR-100",
    "accuracy of resnet-32-wide for five pairs of operator and loss",
    table4_cells,
    tuple(
        Claim(
            f"{loss.lower()}",
            f"SphereNets with {loss} beat the plain residual network",
            "Table 4",
            tuple(
                (f"{row}_{data}", f"none_softmax_{data}")
                for row in TABLE4_ROWS
                if infix in row
                for data in TABLE4_PAPER
            ),
        )
        for loss, infix in (("W-Softmax", "_w-"), ("GA-Softmax", "_ga-"))
    ),
)
