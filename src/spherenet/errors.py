"""Exception types of the library. Those of wrong arguments are also a ValueError or a TypeError, as in torch."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = [
    "CheckpointError",
    "DataError",
    "InvalidArgument",
    "InvalidArgumentType",
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
    """Base class of errors caused by arguments, files, data or the system. The message is one sentence."""


class _ArgumentError(SphereNetError):
    """Common part of both errors of arguments: the name of the argument and what is wrong with it."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(argument, problem)
        self.argument = argument
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.argument} {self.problem}"


class InvalidArgument(_ArgumentError, ValueError):  # noqa: N818 - what is invalid, not the kind of failure
    """An argument has a value that is not allowed; also a ValueError.

    Args:
        argument: Name of the argument, the first word of the message.
        problem: The rest of the message, e.g. "must be at least 1, got 0."

    Example:
        >>> raise InvalidArgument("k", f"must be greater than 0, got {k}.")
    """


class InvalidArgumentType(_ArgumentError, TypeError):  # noqa: N818
    """An argument has a type that is not allowed; also a TypeError.

    Args:
        argument: Name of the argument, the first word of the message.
        problem: The rest of the message.
    """


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
