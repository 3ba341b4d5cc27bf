"""The run directory: the only code that writes or reads it (SPEC 8)."""

from spherenet.runlog.checkpoints import Checkpoint, Checkpoints
from spherenet.runlog.directory import RunDirectory
from spherenet.runlog.metrics import MetricsFile

__all__ = ["Checkpoint", "Checkpoints", "MetricsFile", "RunDirectory"]
