"""The run directory: the only package that writes or reads it."""

from spherenet.runs.checkpoints import Checkpoint, Checkpoints
from spherenet.runs.directory import RunDirectory
from spherenet.runs.metrics import MetricsFile

__all__ = ["Checkpoint", "Checkpoints", "MetricsFile", "RunDirectory"]
