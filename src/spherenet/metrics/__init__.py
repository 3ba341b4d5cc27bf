"""Metrics of embeddings: verification and retrieval, their spread over the sphere, and scores for unknown inputs.

Scores are similarities: a larger score means "more likely the same". Scores, labels and embeddings may be tensors,
numpy arrays or lists. Rates are computed in float64. `docs/verification.md` shows their use. The scores for unknown
inputs are large for images like those of the training; `roc_auc` measures how well they separate others.
"""

from spherenet.metrics.spread import NeuralCollapse, alignment, neural_collapse, uniformity
from spherenet.metrics.unknowns import energy_score, knn_cosine_score, max_cosine_score, max_softmax_score
from spherenet.metrics.verification import (
    RocCurve,
    VerificationAccuracy,
    equal_error_rate,
    mean_average_precision_at_r,
    pair_similarities,
    recall_at_k,
    roc_auc,
    roc_curve,
    true_positive_rate_at,
    verification_accuracy,
)

__all__ = [
    "NeuralCollapse",
    "RocCurve",
    "VerificationAccuracy",
    "alignment",
    "energy_score",
    "equal_error_rate",
    "knn_cosine_score",
    "max_cosine_score",
    "max_softmax_score",
    "mean_average_precision_at_r",
    "neural_collapse",
    "pair_similarities",
    "recall_at_k",
    "roc_auc",
    "roc_curve",
    "true_positive_rate_at",
    "uniformity",
    "verification_accuracy",
]
