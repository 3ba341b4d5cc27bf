"""The verbs that this package adds to `spherenet`, as entry points of the group spherenet.verbs."""

from spherenet.cli.verbs import Verb

__all__ = ["REPRODUCE", "THEORY", "TUNE"]

REPRODUCE = Verb(
    "run the paper's experiments and compare with the published numbers",
    "spherenet_paper.cli.experiments:reproduce_parser",
    "spherenet_paper.cli.experiments:run_reproduce",
)
TUNE = Verb(
    "choose operator, loss and their parameters by cross-validation",
    "spherenet_paper.cli.experiments:tune_parser",
    "spherenet_paper.cli.experiments:run_tune",
)
THEORY = Verb(
    "demonstrate arguments of the paper numerically",
    "spherenet_paper.cli.theory:theory_parser",
    "spherenet_paper.cli.theory:run_theory",
)
