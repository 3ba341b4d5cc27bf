"""Networks of the paper, whose operator decides whether a network is a SphereNet or its CNN twin, and transformers."""

from spherenet.models.create import Classifier, create_model, list_models
from spherenet.models.gpt import SphereGPT, sphere_gpt_tiny
from spherenet.models.networks import LayerFactory, PlainFeatures
from spherenet.models.transformer import keep_normalized, normalize_weights
from spherenet.models.vit import SphereViT

__all__ = [
    "Classifier",
    "LayerFactory",
    "PlainFeatures",
    "SphereGPT",
    "SphereViT",
    "create_model",
    "keep_normalized",
    "list_models",
    "normalize_weights",
    "sphere_gpt_tiny",
]
