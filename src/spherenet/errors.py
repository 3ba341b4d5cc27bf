"""The few exception types of the library; wrong arguments raise ValueError and TypeError as torch's do."""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DataError",
    "LostProcessError",
    "ModelError",
    "RunError",
    "RunTakenError",
    "SphereNetError",
    "TrainingError",
]


class SphereNetError(Exception):
    """Something outside the program is not as it must be: one sentence that names it and what is allowed."""


class DataError(SphereNetError):
    """A data set, archive or picture cannot be found or read."""


class ModelError(SphereNetError):
    """A model cannot be converted, saved, loaded or exported."""


class CheckpointError(SphereNetError):
    """A checkpoint is missing, damaged or not of this run."""


class RunError(SphereNetError):
    """A run folder is in use, not writable, or not a run."""


class RunTakenError(RunError):
    """A new run cannot have a folder because another run has it."""


class TrainingError(SphereNetError):
    """Training cannot go on: its loss or gradient is no longer a number."""


class LostProcessError(TrainingError):
    """Training cannot continue: another process of the run has ended or does not answer."""
