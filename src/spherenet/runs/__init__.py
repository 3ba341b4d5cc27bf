"""The run directory: configuration, metrics and checkpoints. No other package reads or writes it directly."""

from spherenet.runs.checkpoints import Checkpoint, Checkpoints
from spherenet.runs.directory import RunDirectory
from spherenet.runs.metrics import MetricsFile

__all__ = ["Checkpoint", "Checkpoints", "MetricsFile", "RunDirectory"]
