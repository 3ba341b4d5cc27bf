"""Exception types of the library. Wrong arguments raise ValueError and TypeError, as in torch."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "CheckpointError",
    "DataError",
    "LostProcessError",
    "MissingExtraError",
    "ModelError",
    "RunError",
    "RunTakenError",
    "SphereNetError",
    "TrainingError",
    "require_extra",
]


class SphereNetError(Exception):
    """Base class of errors caused by files, data or the system. The message is one sentence."""


class DataError(SphereNetError):
    """A data set, archive or image cannot be found or read."""


class ModelError(SphereNetError):
    """A model cannot be converted, saved, loaded or exported."""


class CheckpointError(SphereNetError):
    """A checkpoint is missing, corrupt, or does not fit the model."""


class RunError(SphereNetError):
    """The folder of a run is in use, not writable, or not a run."""


class RunTakenError(RunError):
    """The folder of a run contains or is used by another run."""


class TrainingError(SphereNetError):
    """Training cannot continue, e.g. because a loss or gradient is not finite."""


class LostProcessError(TrainingError):
    """Training cannot continue: another process of the run has ended or does not respond."""


class MissingExtraError(SphereNetError, ImportError):
    """A package of an optional extra is not installed."""


def require_extra(extra: str, package: str) -> ModuleType:
    """Import and return a package of an optional extra.

    Raises:
        MissingExtraError: If the package is not installed. The message contains the install command.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        if (error.name or package).partition(".")[0] != package.partition(".")[0]:
            raise  # the package is installed, but one of its dependencies is not
        raise MissingExtraError(f"{package} is not installed: pip install 'spherenet-torch[{extra}]'.") from None
