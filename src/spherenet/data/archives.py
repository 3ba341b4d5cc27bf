"""Download archives and read named files from them into memory; nothing is unpacked to disk.

Archives are not trusted. The decompressed size, the number of members and the size of each are bounded, and an archive
with links, devices, paths that leave it or duplicate names is refused. The headers are parsed here because `tarfile`
follows extended headers without a bound (in Python 3.11.7 parsing them takes quadratic time, and negative sizes make it
loop).
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from spherenet._util.caches import user_cache
from spherenet._util.files import APPEND, open_handle, open_regular, sync, user_path
from spherenet.data.splits import Progress
from spherenet.errors import DataError

__all__ = ["data_folder", "download", "read_members"]

BLOCK = 512
MAX_MEMBERS = 256
MARGIN = 1 << 20  # bytes for headers, padding and readme files
FILE_TYPES, FOLDER_TYPE = b"0\0", b"5"
EXTENSION_TYPES = b"xgLK"  # long names and attributes of the next member: skipped, our archives do not need them

TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 18
MAX_ATTEMPTS = 5  # connections, as long as each transfers something


def data_folder(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of downloaded data: `data_dir`, else SPHERENET_DATA, else a folder in the user's cache."""
    folder = data_dir if data_dir is not None else os.environ.get("SPHERENET_DATA") or None
    if folder is not None:
        return user_path(folder)
    return user_cache("data")


class _Member(NamedTuple):
    name: str
    type: bytes
    size: int


class _BoundedStream:
    """A decompressed stream that raises ValueError after `limit` bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit, self.remaining = stream, limit, limit

    def read(self, size: int) -> bytes:
        """Read at most `size` bytes."""
        data = self.stream.read(min(size, self.remaining + 1))
        self.remaining -= len(data)
        if self.remaining < 0:
            raise ValueError(f"must unpack to at most {self.limit} bytes")
        return data

    def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes or raise EOFError."""
        data = self.read(size)
        if len(data) != size:
            raise EOFError
        return data

    def skip(self, size: int) -> None:
        """Skip `size` bytes or raise EOFError."""
        while size > 0:
            size -= len(self.read_exactly(min(size, MARGIN)))


def read_members(path: Path, max_sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Return the content of the files named in `max_sizes`, each of at most that many bytes.

    The archive is read to its end, so that its CRC-32 is compared.

    Raises:
        DataError: A file is missing or too long, or the archive is corrupt or holds links, devices and the like.
    """
    contents = {}
    try:
        with open_regular(path, follow_links=True) as file, gzip.GzipFile(fileobj=file) as stream:
            bounded = _BoundedStream(stream, sum(max_sizes.values()) + MARGIN)
            for member in _members(bounded):
                if member.name in max_sizes and member.type in FILE_TYPES:
                    if member.size > max_sizes[member.name]:
                        limit = max_sizes[member.name]
                        raise ValueError(f"must hold {member.name!r} of at most {limit} bytes, got {member.size}")
                    contents[member.name] = bounded.read_exactly(member.size)
                else:
                    bounded.skip(member.size)
                bounded.skip(-member.size % BLOCK)
            while bounded.read(MARGIN):
                pass
    except ValueError as error:
        raise DataError(f"the archive {str(path)!r} {error}.") from None
    except Exception as error:  # gzip and zlib raise many types of exceptions on corrupt data
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            f"the archive {str(path)!r} is corrupt or truncated ({reason or type(error).__name__}): "
            "delete it to download it again."
        ) from None
    for name in max_sizes:
        if name not in contents:
            raise DataError(f"the archive {str(path)!r} does not hold {name!r}.")
    return contents


def _members(stream: _BoundedStream) -> Iterator[_Member]:
    """Yield the members; the caller then reads or skips the content, at which the stream is positioned."""
    names: set[str] = set()
    for count in range(MAX_MEMBERS + 1):
        header = stream.read(BLOCK)
        if not header.strip(b"\0"):  # the block of zeros at the end, or the end itself
            return
        if count == MAX_MEMBERS:
            raise ValueError(f"must hold at most {MAX_MEMBERS} files")
        member = _parse_header(header)
        shown = f"holds {member.name[:100]!r}"
        if member.type in EXTENSION_TYPES:
            yield member._replace(name="")
            continue
        if member.type not in FILE_TYPES and member.type != FOLDER_TYPE:
            raise ValueError(f"{shown}, which is neither a file nor a folder")
        if member.name.startswith("/") or "\\" in member.name or ".." in member.name.split("/"):
            raise ValueError(f"{shown}, a path outside the archive")
        if member.name in names:
            raise ValueError(f"{shown} twice")
        names.add(member.name)
        yield member


def _parse_header(header: bytes) -> _Member:
    """Return name, type and size of a header in V7, ustar or GNU format."""
    if len(header) != BLOCK:
        raise EOFError
    # The checksum is the sum of the header's bytes, with its own field counted as eight spaces.
    if sum(header[:148]) + sum(header[156:]) + 8 * ord(" ") != _parse_octal(header[148:156]):
        raise ValueError("is corrupt: a header has a wrong checksum")
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0")[0] + b"/" + name
    member_type = header[156:157]
    # Some writers state a size for folders, although no content follows.
    size = 0 if member_type == FOLDER_TYPE else _parse_octal(header[124:136])
    return _Member(name.decode("latin-1").removeprefix("./"), member_type, size)


def _parse_octal(field: bytes) -> int:
    digits = field.strip(b"\0 ")
    if not digits or digits.strip(b"01234567"):
        raise ValueError("is corrupt: a header holds an invalid number")
    return int(digits, 8)


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
    digest = hashlib.sha256()
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    if length > size or digest.hexdigest() != sha256:
        part.unlink()
        raise DataError(
            f"the download of {url} has a wrong checksum (SHA-256 {digest.hexdigest()[:16]}… instead of "
            f"{sha256[:16]}…, {length} bytes instead of {size}) and was deleted: try again or use another source."
        )
