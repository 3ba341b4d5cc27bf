"""Fetch one file of known length and SHA-256: resumed where it stopped, never in place before it is verified."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from spherenet.data.split import Progress
from spherenet.errors import DataError
from spherenet.files import sync_folder

__all__ = ["download"]

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 18
ATTEMPTS = 5  # connections, as long as each brings something


def download(
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    progress: Progress | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Fetch `url`, by https, to `target`.

    The bytes gather in `<target>.part`, which a later call carries on; when all `size` are there and their SHA-256 is
    right, the file is renamed. A wrong checksum removes it. Two processes that fetch the same file take turns.
    DataError, in one sentence: no network, no such file, a connection that breaks again and again, a wrong checksum,
    a disk that is full or not to be written. An address given as http is fetched; https is never left for it.
    """
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(part) as file:
            if target.exists():  # another process was quicker
                part.unlink()
                return
            for _ in range(ATTEMPTS):
                before = file.seek(0, os.SEEK_END)
                if before < size:
                    _fetch(url, file, size=size, progress=progress, timeout=timeout)
                if not before < file.tell() < size:
                    break
            _verify(url, file, part, size=size, sha256=sha256)
            os.fsync(file.fileno())
            part.replace(target)
            sync_folder(target.parent)
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(
            f"{url} was not to be had: the server answered {error.code} {error.reason}; {_by_hand(target)}"
        ) from None
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        raise DataError(
            f"{url} cannot be reached ({_one_line(reason)}): check the network; {_by_hand(target)}"
        ) from None
    except OSError as error:
        raise DataError(f"cannot write {str(error.filename or part)!r}: {error.strerror}.") from None


def _by_hand(target: Path) -> str:
    return f"a copy of the file fetched elsewhere can be put at {str(target)!r}."


def _one_line(reason: object) -> str:
    text = getattr(reason, "strerror", None) or str(reason)
    return " ".join(str(text).split())[:200]


@contextlib.contextmanager
def _alone(part: Path) -> Iterator[IO[bytes]]:
    """Open the part for appending, when no other process has it; the lock ends with its owner."""
    while True:
        with part.open("a+b") as file:
            with contextlib.suppress(ImportError, OSError):  # not on Windows, nor on every network disk
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                is_current = os.path.samestat(os.fstat(file.fileno()), part.stat())
            except FileNotFoundError:
                is_current = False
            if is_current:  # and not a file that another process renamed or removed while we waited
                try:
                    yield file
                finally:
                    with contextlib.suppress(OSError):  # renamed when all went well
                        if part.stat().st_size == 0:
                            part.unlink()
                return


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but from https to https only and never to a file or the like."""

    def redirect_request(self, request: urllib.request.Request, *arguments: Any) -> urllib.request.Request | None:
        made = super().redirect_request(request, *arguments)
        if made is not None:
            _require_scheme(made.full_url, ("https",) if request.type == "https" else ("https", "http"))
        return made


def _require_scheme(url: str, schemes: tuple[str, ...] = ("https", "http")) -> None:
    if urlsplit(url).scheme not in schemes:
        raise DataError(f"{_one_line(url)} is not fetched: its address must begin with {' or '.join(schemes)}.")


def _fetch(url: str, file: IO[bytes], *, size: int, progress: Progress | None, timeout: float) -> None:
    """Append what the server sends, until `size`, its end, or a break of the connection."""
    _require_scheme(url)
    done = file.tell()
    with _asked(url, done, timeout) as response:
        carries_on = _carries_on(response, done)
        length = response.headers.get("Content-Length", "")
        if not carries_on and length.isdigit() and int(length) != size:
            # The page of a hotel's network, say; what is there already stays.
            raise DataError(f"{url} sends {length} bytes instead of {size}: it is not the file that is looked for.")
        if done and not carries_on:
            file.truncate(0)  # the server sends it all again
            done = 0
        if progress is not None:
            progress(done, size)
        # One byte more than there may be shows a file that is too long, and stops an endless one.
        while done <= size and (chunk := _received(response, min(CHUNK, size + 1 - done))):
            file.write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(min(done, size), size)
        file.flush()


def _asked(url: str, done: int, timeout: float) -> http.client.HTTPResponse:
    """Return the server's answer: the rest of the file from `done` on, or, where it has none, all of it."""
    opener = urllib.request.build_opener(_Redirects)
    if done:
        try:
            response: http.client.HTTPResponse = opener.open(_request(url, Range=f"bytes={done}-"), timeout=timeout)
            if response.status == 200 or _carries_on(response, done):
                return response
            response.close()
        except urllib.error.HTTPError as error:
            if error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            error.close()
    answer: http.client.HTTPResponse = opener.open(_request(url), timeout=timeout)
    return answer


def _request(url: str, **headers: str) -> urllib.request.Request:
    return urllib.request.Request(url, headers={"User-Agent": "spherenet", **headers})  # noqa: S310 (scheme checked)


def _carries_on(response: http.client.HTTPResponse, done: int) -> bool:
    return response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {done}-")


def _received(response: http.client.HTTPResponse, size: int) -> bytes:
    try:
        return response.read(size)
    except http.client.IncompleteRead as error:
        return error.partial
    except (http.client.HTTPException, OSError):
        return b""  # what came so far is kept, and the next attempt carries on


def _verify(url: str, file: IO[bytes], part: Path, *, size: int, sha256: str) -> None:
    length = file.seek(0, os.SEEK_END)
    if length < size:
        raise DataError(f"{url} broke off after {length} of {size} bytes: the next try carries on from {str(part)!r}.")
    file.seek(0)
    found = hashlib.sha256()
    while chunk := file.read(CHUNK):
        found.update(chunk)
    if length > size or found.hexdigest() != sha256:
        part.unlink()
        raise DataError(
            f"what {url} sent has the wrong checksum (SHA-256 {found.hexdigest()[:16]}… instead of {sha256[:16]}…, "
            f"{length} bytes instead of {size}) and was removed: try again, or fetch it elsewhere."
        )
