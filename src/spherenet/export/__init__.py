"""Save and load models, and export them for inference with torch.export or ONNX."""

from spherenet.export.card import ModelCard, library_versions
from spherenet.export.folder import load_metadata, load_model, save_model, shipped_model
from spherenet.export.freeze import freeze
from spherenet.export.hub import download_model, from_pretrained, push_to_hub
from spherenet.export.onnx import FORMATS, export_model, export_onnx, format_of
from spherenet.export.preprocessing import PixelInput, preprocessing_record, preprocessing_steps
from spherenet.export.pretrained import load_pretrained, save_pretrained
from spherenet.export.programs import export_program
from spherenet.export.weights import Match, load_matching, load_weights, save_weights

__all__ = [
    "FORMATS",
    "Match",
    "ModelCard",
    "PixelInput",
    "download_model",
    "export_model",
    "export_onnx",
    "export_program",
    "format_of",
    "freeze",
    "from_pretrained",
    "library_versions",
    "load_matching",
    "load_metadata",
    "load_model",
    "load_pretrained",
    "load_weights",
    "preprocessing_record",
    "preprocessing_steps",
    "push_to_hub",
    "save_model",
    "save_pretrained",
    "save_weights",
    "shipped_model",
]
