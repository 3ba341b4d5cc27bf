"""Read named files out of a .tar.gz into memory; nothing is ever unpacked to disk.

What the archive says of itself is not believed: the bytes that come out of the compression, the number of members and
the length of each are bounded beforehand, and an archive with links, devices, paths that lead elsewhere or two members
of one name is refused whole. The headers are read here and not by `tarfile`, which follows extended headers without a
bound (in Python 3.11.7 their parsing takes quadratic time, and negative lengths lead it in circles).
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from spherenet.errors import DataError

__all__ = ["read_members"]

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
