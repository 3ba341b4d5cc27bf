"""The reader of .npy files: a matrix of floating point numbers whose header is checked before memory is allocated.

`np.load` allocates what a header states, and a sparse file of a few kilobytes may state gigabytes. It also parses the
header with Python's parser, which fails in several ways on nested or huge values.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from spherenet._util.files import open_regular
from spherenet._util.text import first_line, short
from spherenet.errors import DataError

__all__ = ["MAX_NUMBERS", "MAX_ROWS", "Matrix", "matrix_shape", "read_matrix"]

MAX_ROWS = 1 << 24  # 16.8 million images
MAX_COLUMNS = 1 << 16
MAX_NUMBERS = 1 << 30  # 4 GiB in float32
MAX_HEADER = 1 << 12  # np.save writes 128 bytes
BLOCK = 1 << 22  # bytes that are read at once

Matrix = np.ndarray[Any, np.dtype[np.float32]]


class _Header(NamedTuple):
    shape: tuple[int, int]
    by_columns: bool
    dtype: np.dtype[Any]
    size: int


def matrix_shape(path: Path) -> tuple[int, int]:
    """Return the numbers of rows and columns that the header of an .npy file states.

    Raises:
        DataError: The file cannot be read, its header or size is not that of a matrix of floating point numbers, or the
            matrix is larger than the bounds of this module.
    """
    with _opened(path) as (_, header):
        return header.shape


def read_matrix(path: Path, rows: int) -> Matrix:
    """Return the matrix of finite numbers in an .npy file as float32.

    Args:
        path: The file.
        rows: Number of rows that it must have. Memory is allocated only then.

    Raises:
        DataError: As `matrix_shape`, or the matrix has another number of rows, or numbers that are not finite.
    """
    with _opened(path) as (file, header):
        if header.shape[0] != rows:
            raise DataError(f"{str(path)!r} must have {rows} rows, got {header.shape[0]}.")
        return _read_values(path, file, header)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], _Header]]:
    """Yield an open file behind its header, which is valid and states the size of the file."""
    try:
        with open_regular(path, follow_links=True) as file:
            header = _read_header(path, file)
            size = os.fstat(file.fileno()).st_size
            expected = header.size + math.prod(header.shape) * header.dtype.itemsize
            if size != expected:
                raise DataError(f"{str(path)!r} must have {expected:,} bytes, as its header states, got {size:,}.")
            file.seek(header.size)
            yield file, header
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror or first_line(error)}.") from None


def _read_header(path: Path, file: IO[bytes]) -> _Header:
    start = io.BytesIO(file.read(MAX_HEADER))  # a header may state its own size as 4 GiB
    if start.getvalue()[:2] == b"PK":
        raise DataError(f"{str(path)!r} must hold one floating point matrix, got an archive of arrays.")
    try:
        version = np.lib.format.read_magic(start)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_columns, dtype = read(start)
        description = f"{dtype} {list(shape)}"
    except Exception as error:  # a dozen types of Python's parser and of dtypes; only kilobytes were allocated
        raise DataError(f"{str(path)!r} is not a valid .npy file: {first_line(error)}.") from None
    if len(shape) != 2 or dtype.kind != "f" or min(shape) < 1:
        got = short(description)
        raise DataError(f"{str(path)!r} must hold one floating point matrix, a row per image, got {got}.")
    if shape[0] > MAX_ROWS or shape[1] > MAX_COLUMNS or math.prod(shape) > MAX_NUMBERS:
        allowed = f"{MAX_ROWS:,} rows, {MAX_COLUMNS:,} columns and {MAX_NUMBERS:,} numbers"
        raise DataError(f"{str(path)!r} must have at most {allowed}, got {short(description)}.")
    return _Header((shape[0], shape[1]), by_columns, dtype, start.tell())


def _read_values(path: Path, file: IO[bytes], header: _Header) -> Matrix:
    """Read and convert a few lines at a time, so that the matrix is not in memory twice."""
    matrix: Matrix = np.empty(header.shape, np.float32)
    lines = matrix.T if header.by_columns else matrix
    length = lines.shape[1] * header.dtype.itemsize
    step = max(1, BLOCK // length)
    for at in range(0, len(lines), step):
        block = lines[at : at + step]
        content = file.read(len(block) * length)
        if len(content) != len(block) * length:
            raise DataError(f"{str(path)!r} became shorter while it was read.")
        with np.errstate(all="ignore"):  # of float64 numbers beyond float32, which become infinite
            block[:] = np.frombuffer(content, header.dtype).reshape(block.shape)
        if not np.isfinite(block).all():
            raise DataError(f"{str(path)!r} must hold finite numbers.")
    return matrix
