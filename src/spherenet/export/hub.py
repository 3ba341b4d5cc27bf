"""Models on the Hugging Face Hub: download and load them, and upload them.

A repository contains the files of a model folder; nothing is unpickled. `config.json` is downloaded and checked before
the weights, so that a repository of another library is rejected early.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from spherenet._util.files import user_path
from spherenet._util.text import first_line, plain, short
from spherenet.errors import InvalidArgument, ModelError, require_extra
from spherenet.export.card import ModelCard
from spherenet.export.folder import CONFIG_FILE, load_metadata, load_model, save_model
from spherenet.export.weights import WEIGHTS_FILE
from spherenet.models import Classifier

__all__ = ["download_model", "from_pretrained", "push_to_hub"]

M = TypeVar("M", bound=nn.Module)

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@overload
def from_pretrained(
    source: str | os.PathLike[str],
    *,
    revision: str | None = ...,
    device: str | torch.device = ...,
    model: None = ...,
    **options: Any,
) -> Classifier: ...
@overload
def from_pretrained(
    source: str | os.PathLike[str],
    *,
    revision: str | None = ...,
    device: str | torch.device = ...,
    model: M | Callable[..., M],
    **options: Any,
) -> M: ...
def from_pretrained(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    device: str | torch.device = "cpu",
    model: Any = None,
    **options: Any,
) -> nn.Module:
    """Return a model of a folder or of the Hugging Face Hub, in evaluation mode.

    A folder needs no network and no extra package. Models of the Hub need `pip install 'spherenet-torch[hub]'`, are
    cached, and are then available without a network.

    Args:
        source: Folder written by `save_model`, or the name of a repository, "user/name".
        revision: Branch, tag or commit of the repository. A commit always gives the same files.
        device: Device of the model.
        model: Module or class for a model that is not of `create_model`, as in `load_model`.
        **options: Further arguments of `download_model`.

    Raises:
        ModelError: If source is neither, the repository or revision cannot be downloaded, or a file is not valid.
        MissingExtraError: If the model is on the Hub and huggingface_hub is not installed.

    Example:
        >>> model = sn.from_pretrained("user/name", revision="0123456789abcdef0123456789abcdef01234567")
    """
    if os.fspath(source) and user_path(source).is_dir():
        if revision is not None:
            raise InvalidArgument("revision", f"must be None for a folder, got {revision!r}.")
        folder = user_path(source)
    else:
        folder = download_model(os.fspath(source), revision=revision, **options)
    return cast(nn.Module, load_model(folder, device=device, model=model))


def download_model(
    repository: str,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Path:
    """Download a model of the Hugging Face Hub and return its folder, for `load_model` and `load_metadata`.

    Args:
        repository: Name of the repository, "user/name".
        revision: Branch, tag or commit; the branch "main" by default.
        token: Access token for private repositories; by default that of `hf auth login`.
        cache_dir: Folder of the cache; by default that of huggingface_hub.
        local_files_only: Whether to use the cache only. The environment variable HF_HUB_OFFLINE=1 does the same.

    Raises:
        ModelError: If the name is not valid, the files cannot be downloaded, or they do not describe a model.
        MissingExtraError: If huggingface_hub is not installed.
    """
    _require_name(repository, "source must be an existing folder or the name of a repository")
    hub = require_extra("hub", "huggingface_hub")

    def fetch(file: str, commit: str | None) -> Path:
        try:
            path = hub.hf_hub_download(
                repository, file, revision=commit, token=token, cache_dir=cache_dir, local_files_only=local_files_only
            )
        except Exception as error:  # the library and its HTTP client raise exceptions of many types
            at = "" if revision is None else f" at revision {short(plain(revision))!r}"
            raise ModelError(f"{file} of {repository}{at} cannot be downloaded: {_reason(error)}.") from error
        return Path(path)

    folder = fetch(CONFIG_FILE, revision).parent
    load_metadata(folder)  # raises ModelError if config.json is not that of a saved model
    # The folder of the cache has the name of the commit: all files are of the same commit, even if a branch moves.
    if fetch(WEIGHTS_FILE, folder.name).parent != folder:
        raise ModelError(f"{repository} must have {WEIGHTS_FILE} beside {CONFIG_FILE}.")
    return folder


def push_to_hub(
    model: nn.Module,
    repository: str,
    *,
    metadata: Mapping[str, Any] | None = None,
    card: ModelCard | None = None,
    arguments: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """Upload a model to the Hugging Face Hub, in one commit, and return the address of the commit.

    Args:
        model: Model of `create_model`, or any module with sphere layers, as in `save_model`.
        repository: Name of the repository, "user/name". It is created if it does not exist.
        metadata: As in `save_model`.
        card: As in `save_model`.
        arguments: As in `save_model`.
        **options: Arguments of `huggingface_hub.ModelHubMixin.push_to_hub`, such as `private`, `token`, `branch`,
            `create_pr` and `commit_message`.

    Raises:
        ModelError: If the model cannot be saved as a folder, or cannot be uploaded.
        MissingExtraError: If huggingface_hub is not installed.
    """
    _require_name(repository, "repository must be a name")
    hub = require_extra("hub", "huggingface_hub")

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder, "model")
        save_model(
            model, saved, metadata=metadata, card=card, arguments=arguments
        )  # before the first request, since it may fail

        class HubModel(hub.ModelHubMixin):  # type: ignore[misc, name-defined]
            def _save_pretrained(self, save_directory: Path) -> None:
                shutil.copytree(saved, save_directory, dirs_exist_ok=True)

        try:
            return str(HubModel().push_to_hub(repository, **{"commit_message": "Upload a spherenet model", **options}))
        except TypeError:
            raise
        except Exception as error:  # as in download_model
            raise ModelError(f"the model cannot be uploaded to {repository}: {_reason(error)}.") from error


def _require_name(repository: object, requirement: str) -> None:
    """Raise ModelError for a text that is not the name of a repository, before any request is sent."""
    if not isinstance(repository, str) or REPOSITORY.fullmatch(repository) is None:
        raise ModelError(f'{requirement} such as "user/name", got {short(plain(cast(str, repository)))!r}.')


def _reason(error: Exception) -> str:
    """Return what happened in a few words: messages of the Hub have many lines."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    name = type(error).__name__
    return f"{name}, {first_line(error)}" if status is None else f"{name} (HTTP status {status})"
