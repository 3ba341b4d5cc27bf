"""A classifier: features, a head that owns the class weights, and a loss that owns none."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor, nn

from spherenet.layers import AngularHead
from spherenet.losses import AngularLoss

__all__ = ["Classifier"]


class Classifier(nn.Module):
    """Images to scores, and with labels to the loss too: one call for training, so that DDP and compile see it whole.

    `features(images)` → [N, F], `head(features)` → `AngularOutput`, `criterion(output, labels)` → loss.
    `config` holds the arguments of `create_model`, from which the network can be made again.
    """

    def __init__(self, features: nn.Module, head: AngularHead, criterion: AngularLoss, config: dict[str, Any]) -> None:
        super().__init__()
        self.features = features
        self.head = head
        self.criterion = criterion
        self.config = config
        # Where the loss ignores ‖w‖, weight decay of the class weights would regularise nothing.
        head.scale_invariant = not criterion.uses_weight_norm

    @overload
    def forward(self, images: Tensor) -> Tensor: ...
    @overload
    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return scores [N, classes]; with labels, the pair (loss, scores)."""
        output = self.head(self.features(images))
        scores = self.criterion.logits(output)
        return scores if labels is None else (self.criterion(output, labels), scores)
