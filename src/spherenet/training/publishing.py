"""Texts about a run that are published with its model: they name no folder of the machine it was trained on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import PureWindowsPath
from typing import Any

from spherenet.training.config import TrainConfig

__all__ = ["commands_of", "data_title", "without_folders"]


def data_title(config: TrainConfig) -> str:
    """Return the name of the data of a run: of the data set, or of the folder of images without its path."""
    name = PureWindowsPath(config.data_dir or "").name  # separates at both kinds of slashes
    return f"the image folder {name}" if config.data == "folder" and name else config.data


def commands_of(description: Mapping[str, Any]) -> list[str]:
    """Return the commands of a run, quoted for a shell: the one that started it and those that resumed it."""
    history = description.get("history")
    commands = (
        [entry.get("command") for entry in history or [] if isinstance(entry, dict)]
        if isinstance(history, list)
        else []
    )
    return [command for command in commands if isinstance(command, str)]


def without_folders(command: str) -> str:
    """Return a command in which absolute paths and paths in home folders are replaced by their last part."""
    try:
        words = shlex.split(command)
    except ValueError:  # not a command that this library has written
        return ""
    return shlex.join(map(_last_part, words))


def _last_part(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    is_absolute = os.path.isabs(value) or PureWindowsPath(value).is_absolute() or value.startswith("~")
    return option + equals + PureWindowsPath(value).name if is_absolute else word
