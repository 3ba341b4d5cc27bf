"""Networks of the paper. The operator decides whether a network is a SphereNet or its CNN twin."""

from spherenet.models.create import Classifier, create_model, list_models

__all__ = ["Classifier", "create_model", "list_models"]
