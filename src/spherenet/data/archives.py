"""Download archives of known SHA-256 and read named files from them into memory.

An archive is parsed only if its SHA-256 is the published one. Nothing is unpacked to disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from spherenet._util.caches import user_cache
from spherenet._util.files import APPEND, open_handle, open_regular, sync, user_path
from spherenet.data.splits import Progress
from spherenet.errors import DataError

__all__ = ["data_folder", "download", "read_archive"]

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 18
MAX_ATTEMPTS = 5  # connections, as long as each transfers something


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of downloaded data: `data_dir`, else SPHERENET_DATA, else a folder in the user's cache."""
    folder = data_dir if data_dir is not None else os.environ.get("SPHERENET_DATA") or None
    if folder is not None:
        return user_path(folder)
    return user_cache("data")


def read_archive(path: Path, names: Collection[str], *, size: int, sha256: str) -> dict[str, bytes]:
    """Return the content of the named files in an archive of known size and SHA-256.

    Raises:
        DataError: The archive cannot be read or is another one.
    """
    try:
        with open_regular(path, follow_links=True) as file:
            length = os.fstat(file.fileno()).st_size
            if length != size or _sha256(file) != sha256:
                raise DataError(
                    f"the archive {str(path)!r} must have {size} bytes and the SHA-256 {sha256[:16]}…, got another "
                    f"file of {length} bytes: delete it to download it again."
                )
            file.seek(0)
            contents = {}
            with tarfile.open(fileobj=file, mode="r:gz") as archive:
                for member in archive:  # in order, because seeking backwards unpacks again
                    if member.name in names and (content := archive.extractfile(member)):
                        contents[member.name] = content.read()
            return contents
    except OSError as error:
        raise DataError(f"the archive {str(path)!r} cannot be read ({error.strerror}).") from None


def download(
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Download a file of known size and SHA-256.

    The bytes are collected in `<target>.part`, which a later call continues. The file is renamed to `target` once it is
    complete and its SHA-256 matches; it is deleted if the SHA-256 does not match. Processes that download the same
    file take turns. Redirects from https to http are refused.

    Args:
        url: https or http address.
        target: Path of the file.
        size: Size in bytes.
        sha256: SHA-256 as hexadecimal digits.
        progress: Called with (done, total) bytes.
        timeout: Seconds to wait for the server.

    Raises:
        DataError: The server cannot be reached or does not have the file, the connection breaks repeatedly, the
            SHA-256 is wrong, or the disk is full or not writable.
    """
    part = target.with_name(f"{target.name}.part")
    by_hand = f"or save a copy of the file as {str(target)!r}."
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _open_exclusively(part) as file:
            if target.exists():  # another process has downloaded it
                part.unlink()
                return
            for _ in range(MAX_ATTEMPTS):
                before = file.seek(0, os.SEEK_END)
                if before < size:
                    _fetch(url, file, size=size, progress=progress, timeout=timeout)
                if not before < file.tell() < size:
                    break
            _verify(url, file, part, size=size, sha256=sha256)
            os.fsync(file.fileno())
            part.replace(target)
            sync(target.parent)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"cannot download {url}: the server returned {error.code} {error.reason}; {by_hand}") from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(f"cannot reach {url} ({_one_line(reason)}): check the network, {by_hand}") from None
    except OSError as error:
        raise DataError(f"cannot write {str(error.filename or part)!r}: {error.strerror}.") from None


def _one_line(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason)
    return " ".join(str(text).split())[:200]


@contextlib.contextmanager
def _open_exclusively(part: Path) -> Iterator[IO[bytes]]:
    """Open the partial file for appending under a lock, which the system releases when the process ends."""
    while True:
        with os.fdopen(open_handle(part, APPEND), "a+b") as file:
            with contextlib.suppress(ImportError, OSError):  # not available on Windows and some network file systems
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), part.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:  # another process may have renamed or deleted the file before the lock was acquired
                try:
                    yield file
                finally:
                    with contextlib.suppress(OSError):  # renamed on success
                        if part.stat().st_size == 0:
                            part.unlink()
                return


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to https or http, but not from https to http."""

    def redirect_request(self, request: urllib.request.Request, *arguments: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(request, *arguments)
        if redirected is not None:
            _require_scheme(redirected.full_url, ("https",) if request.type == "https" else ("https", "http"))
        return redirected


def _require_scheme(url: str, schemes: tuple[str, ...] = ("https", "http")) -> None:
    if urlsplit(url).scheme not in schemes:
        raise DataError(f"the address must start with {' or '.join(schemes)}, got {_one_line(url)}.")


def _fetch(url: str, file: IO[bytes], *, size: int, progress: Progress | None, timeout: float) -> None:
    """Append the server's data until `size` is reached, the data end or the connection breaks."""
    _require_scheme(url)
    done = file.tell()
    with _request(url, done, timeout) as response:
        continues = _continues(response, done)
        length = response.headers.get("Content-Length", "")
        if not continues and length.isdigit() and int(length) != size:
            # For example the login page of a network; the partial file is kept.
            raise DataError(f"{url} must have {size} bytes, got {length}: it is another file.")
        if done and not continues:
            file.truncate(0)  # the server sends the complete file again
            done = 0
        if progress is not None:
            progress(done, size)
        # Reading one byte more than expected detects a file that is too long and stops an endless one.
        while done <= size and (chunk := _receive(response, min(CHUNK, size + 1 - done))):
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(min(done, size), size)
        file.flush()


def _request(url: str, done: int, timeout: float) -> http.client.HTTPResponse:
    """Return the server's response: the bytes from `done`, or the complete file if it cannot resume."""
    opener = urllib.request.build_opener(_SafeRedirects)
    headers = {"User-Agent": "spherenet"}
    response: http.client.HTTPResponse
    if done:
        try:
            resume = urllib.request.Request(url, headers={**headers, "Range": f"bytes={done}-"})  # noqa: S310 (checked)
            response = opener.open(resume, timeout=timeout)
            if response.status == 200 or _continues(response, done):
                return response
            response.close()
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            error.close()
    response = opener.open(urllib.request.Request(url, headers=headers), timeout=timeout)  # noqa: S310 (checked)
    return response


def _continues(response: http.client.HTTPResponse, done: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {done}-")


def _receive(response: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return response.read(size)
    except http.client.IncompleteRead as error:
        return error.partial
    except (http.client.HTTPException, OSError):
        return b""  # the received bytes are kept and the next attempt continues


def _verify(url: str, file: IO[bytes], part: Path, *, size: int, sha256: str) -> None:
    length = file.seek(0, os.SEEK_END)
    if length < size:
        raise DataError(f"{url} stopped after {length} of {size} bytes: try again to continue from {str(part)!r}.")
    file.seek(0)
    digest = _sha256(file)
    if length > size or digest != sha256:
        part.unlink()
        raise DataError(
            f"the download of {url} has a wrong checksum (SHA-256 {digest[:16]}… instead of "
            f"{sha256[:16]}…, {length} bytes instead of {size}) and was deleted: try again or use another source."
        )


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
