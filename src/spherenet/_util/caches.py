"""Folders in the user's cache, and a private one for compilers."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from spherenet._util.files import file_kind

__all__ = ["private_folder", "use_private_compiler_cache", "user_cache"]


def user_cache(name: str) -> Path:
    """Return the path of a folder in the user's cache: XDG_CACHE_HOME/spherenet/NAME, else ~/.cache/spherenet/NAME."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "spherenet", name).expanduser()
    except RuntimeError:
        raise FileNotFoundError("the home folder of this user is unknown: set HOME or XDG_CACHE_HOME.") from None


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can access, if it is missing, and return its path without links.

    Raises:
        PermissionError: If it is a link, belongs to another user, is open to others, or can be replaced by others.
        OSError: If it cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.parent.resolve() / path.name
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if os.name != "posix":  # no owners and modes; folders of a user are private by default
        return path
    status, parent = path.lstat(), path.parent.stat()
    problem = None
    if not stat.S_ISDIR(status.st_mode):
        problem = file_kind(path)
    elif status.st_uid != os.geteuid():
        problem = "a folder of another user"
    elif status.st_mode & 0o077:
        problem = f"mode {stat.S_IMODE(status.st_mode):o}"
    elif parent.st_uid not in (0, os.geteuid()):
        problem = f"a folder in {path.parent}, which belongs to another user"
    for folder in path.parents:
        mode = folder.stat().st_mode
        if problem is None and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            problem = f"a folder in {folder}, where every user can replace it"
    if problem is not None:
        raise PermissionError(f"{path} must be a folder of this user with mode 700, got {problem}.")
    return path


def use_private_compiler_cache() -> None:
    """Let the compilers of torch and Triton use caches that only this user can access; called before their import.

    Compilers execute the content of their caches. The default of torch is a folder in the temporary directory, which
    any user of the machine can create first. Folders chosen by the user (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR)
    are kept.

    Raises:
        OSError: If the folder cannot be created or is not private.
    """
    # torch stores its default in this variable when it compiles for the first time.
    in_temporary = os.path.join(os.path.abspath(tempfile.gettempdir()), "torchinductor_")
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", in_temporary).startswith(in_temporary):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(private_folder(user_cache("compiler")) / "inductor")
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(private_folder(user_cache("compiler")) / "triton")
    # torch keeps precompiled headers in the temporary directory, whatever the folder of the cache is.
    if os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0") == "0":
        settings = sys.modules.get("torch._inductor.config")  # has read the variable, if it is imported already
        if settings is not None:
            settings.cpp_cache_precompile_headers = False  # type: ignore[attr-defined]
