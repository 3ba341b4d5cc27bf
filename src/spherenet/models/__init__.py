"""The paper's networks; each is a SphereNet or its CNN twin by its operator alone."""

from spherenet.models.classifier import Classifier
from spherenet.models.create import create_model, list_models

__all__ = ["Classifier", "create_model", "list_models"]
