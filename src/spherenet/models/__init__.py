"""Networks of the paper. The operator alone makes each of them a SphereNet or its CNN twin."""

from spherenet.models.create import Classifier, create_model, list_models

__all__ = ["Classifier", "create_model", "list_models"]
