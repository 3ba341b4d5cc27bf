"""Made-up tables of the questions of results/PLAN.md."""

from spherenet_paper import accuracy, segmentation, unknown
from spherenet_paper.accuracy import Accuracy
from spherenet_paper.light import BASELINES, CLAIM_SEEDS, CONTROLS, LIGHT, Row
from spherenet_paper.segmentation import Score
from spherenet_paper.unknown import KINDS, SCORES, Area

ARMS = dict(zip(("patch", *BASELINES), (0.7, 0.5, 0.6, 0.62, 0.64), strict=True))


def made_rows(**changed):
    """Return rows with the accuracy of the arm, changed a little by seed and by 2 points per strength."""
    return [
        Row(arm, seed, name, f"{strength:g}" if strength else "", accuracy + 0.001 * seed * (arm == "patch") - 0.02 * i)
        for arm, accuracy in (ARMS | changed).items()
        for seed in CLAIM_SEEDS
        for name, strengths in ({"clean": (0,)} | LIGHT | CONTROLS).items()
        for i, strength in enumerate(strengths)
    ]


def areas(lead):
    """Made-up areas in which the cosine of both SphereNets has a lead over the probability of the CNN."""
    return [
        Area(arm, seed, kind, score, 0.8 + (lead + 0.001 * (seed - 1)) * (arm != "cnn" and score == "max_cosine"))
        for arm in unknown.ARMS
        for seed in unknown.SEEDS
        for kind in KINDS
        for score in SCORES
    ]


def accuracies(lead):
    """Made-up runs at full width in which the SphereNet has a lead over the CNN."""
    return [
        Accuracy(arm, seed, 0.93 + (lead + 0.0001 * (seed - 2)) * (arm != "cnn"), 0.94, 1800.0, 2600, 1972792)
        for arm in accuracy.ARMS
        for seed in accuracy.SEEDS
    ]


def segmentation_scores(lead):
    """Made-up scores in which the SphereNet has a lead over all others."""
    return [
        Score(arm, seed, batch, 1e-3, 0.5 + (lead + 0.001 * (seed - 2)) * (arm == "sphere-patch"))
        for arm in segmentation.ARMS
        for seed in segmentation.SEEDS
        for batch in segmentation.BATCHES
    ]
