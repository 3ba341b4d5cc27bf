"""Read named files out of a .tar.gz into memory; nothing is ever unpacked to disk.

What the archive says of itself is not believed: the bytes that come out of the compression, the number of members and
the length of each are bounded beforehand, and an archive with links, devices, paths that lead elsewhere or two members
of one name is refused whole. The headers are read here and not by `tarfile`, which follows extended headers without a
bound (in Python 3.11.7 their parsing takes quadratic time, and negative lengths lead it in circles).

Fetch one file of known length and SHA-256: resumed where it stopped, never in place before it is verified.
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

from spherenet.data.splits import Progress
from spherenet.errors import DataError
from spherenet.files import sync_folder

__all__ = ["download", "read_members"]

BLOCK = 512
MOST_MEMBERS = 256
SLACK = 1 << 20  # bytes for headers, padding and readme files
FILE_TYPES, FOLDER_TYPE = b"0\0", b"5"
EXTENSION_TYPES = b"xgLK"  # long names and other attributes of the next member: skipped, ours need none


class _Member(NamedTuple):
    name: str
    type: bytes
    size: int


class _Bounded:
    """A decompressed stream that ends in an error after `limit` bytes."""

    def __init__(self, stream: gzip.GzipFile, limit: int) -> None:
        self.stream, self.limit, self.left = stream, limit, limit

    def read(self, size: int) -> bytes:
        data = self.stream.read(min(size, self.left + 1))
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"unpacks to more than {self.limit} bytes")
        return data

    def read_all(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) != size:
            raise EOFError
        return data

    def skip(self, size: int) -> None:
        while size > 0:
            size -= len(self.read_all(min(size, SLACK)))


def read_members(path: Path, longest: Mapping[str, int]) -> dict[str, bytes]:
    """Return the archive's files of the names in `longest`, each of at most so many bytes.

    Every byte of the archive is read, so that its checksum (CRC-32) is compared. DataError: a file is missing or
    longer, the archive is damaged or cut short, or holds what such an archive has no use for.
    """
    try:
        with gzip.open(path) as stream:
            bounded = _Bounded(stream, sum(longest.values()) + SLACK)
            found = {}
            for member in _members(bounded):
                if member.name in longest and member.type in FILE_TYPES:
                    if member.size > longest[member.name]:
                        allowed = longest[member.name]
                        raise ValueError(f"holds {member.name!r} of {member.size} bytes; allowed are {allowed}")
                    found[member.name] = bounded.read_all(member.size)
                else:
                    bounded.skip(member.size)
                bounded.skip(-member.size % BLOCK)
            while bounded.read(SLACK):
                pass
    except ValueError as error:
        raise DataError(f"the archive {str(path)!r} {error}.") from None
    except Exception as error:  # gzip and zlib fail in many ways on damaged bytes; all mean the same
        reason = error.strerror if isinstance(error, OSError) else None
        raise DataError(
            f"the archive {str(path)!r} is damaged or cut short ({reason or type(error).__name__}): "
            "remove it to fetch it anew."
        ) from None
    for name in longest:
        if name not in found:
            raise DataError(f"the archive {str(path)!r} does not hold {name!r}.")
    return found


def _members(stream: _Bounded) -> Iterator[_Member]:
    """Yield the members; after each the stream stands at its contents, which the caller reads or skips."""
    seen: set[str] = set()
    for count in range(MOST_MEMBERS + 1):
        header = stream.read(BLOCK)
        if not header.strip(b"\0"):  # the block of zeros at the end, or the end itself
            return
        if count == MOST_MEMBERS:
            raise ValueError(f"holds more than {MOST_MEMBERS} files")
        member = _parsed(header)
        shown = f"holds {member.name[:100]!r}"
        if member.type in EXTENSION_TYPES:
            yield member._replace(name="")
            continue
        if member.type not in FILE_TYPES and member.type != FOLDER_TYPE:
            raise ValueError(f"{shown}, which is neither a file nor a folder")
        if member.name.startswith("/") or "\\" in member.name or ".." in member.name.split("/"):
            raise ValueError(f"{shown}, a path that leads out of it")
        if member.name in seen:
            raise ValueError(f"{shown} twice")
        seen.add(member.name)
        yield member


def _parsed(header: bytes) -> _Member:
    """Return name, type and size of a header in the format of 1979, ustar or GNU."""
    if len(header) != BLOCK:
        raise EOFError
    # The sum of the header's bytes, counting its own field as eight spaces.
    if sum(header[:148]) + sum(header[156:]) + 8 * ord(" ") != _octal(header[148:156]):
        raise ValueError("is damaged: a header has the wrong checksum")
    name = header[:100].split(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].split(b"\0")[0] + b"/" + name
    kind = header[156:157]
    # A folder's size, as some writers give it, has no contents behind it.
    size = 0 if kind == FOLDER_TYPE else _octal(header[124:136])
    return _Member(name.decode("latin-1").removeprefix("./"), kind, size)


def _octal(field: bytes) -> int:
    digits = field.strip(b"\0 ")
    if not digits or digits.strip(b"01234567"):
        raise ValueError("is damaged: a header holds a number that is none")
    return int(digits, 8)


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
