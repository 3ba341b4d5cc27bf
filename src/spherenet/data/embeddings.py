"""Files of embeddings and of pairs of images, for verification and retrieval.

`NAME.npy` holds float32 [N, D], and `NAME.files.csv` beside it one row per image with its file and label. A `.csv` file
holds both: file, label and D numbers per row. Files are not trusted: every reader returns valid data or raises
DataError.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from spherenet._util.atomic import atomic_file
from spherenet._util.files import open_regular, user_path
from spherenet._util.text import FORMULA, csv_cell, first_line, short
from spherenet.data.arrays import MAX_NUMBERS, MAX_ROWS, Matrix, matrix_shape, read_matrix
from spherenet.errors import DataError, InvalidArgument

__all__ = ["SUFFIXES", "Embeddings", "Pair", "files_beside", "read_embeddings", "read_pairs", "write_embeddings"]

SUFFIXES = (".npy", ".csv")
MAX_CSV_BYTES = 1 << 32
MAX_PAIRS_BYTES = 1 << 30
MAX_ROW = 1 << 22  # characters


class Embeddings(NamedTuple):
    """Embeddings of image files.

    Attributes:
        values: The embeddings, float32 [N, D].
        files: Path of each image.
        labels: Class of each image; "" if it has none.
    """

    values: Matrix
    files: list[str]
    labels: list[str]


class Pair(NamedTuple):
    """Two image files, and whether they show the same class."""

    first: str
    second: str
    same: bool


def require_suffix(name: str, file: str | os.PathLike[str]) -> str:
    """Return the suffix of a file of embeddings. Raises ValueError for other suffixes."""
    suffix = Path(file).suffix.lower()
    if suffix not in SUFFIXES:
        raise InvalidArgument(name, f"must end in {' or '.join(SUFFIXES)}, got {str(file)!r}.")
    return suffix


def files_beside(file: str | os.PathLike[str]) -> Path:
    """Return the file with the names and labels of embeddings in an .npy file: faces.files.csv for faces.npy."""
    return Path(file).with_suffix(".files.csv")


def write_embeddings(embeddings: Embeddings, file: str | os.PathLike[str]) -> list[Path]:
    """Write embeddings as .npy with a .files.csv beside it, or as one .csv file; return the files written.

    Raises:
        ValueError: The file has another suffix.
        OSError: A file cannot be written.
    """
    path = user_path(file)
    suffix = require_suffix("file", path)
    names = [(_as_path(name), csv_cell(label)) for name, label in zip(*embeddings[1:], strict=True)]
    if suffix == ".npy":
        # One block for both files: after a failure, names never stand beside embeddings of other images.
        with atomic_file(path) as temporary:
            files_beside(temporary).write_bytes(_as_csv([("file", "label"), *names]))
            with temporary.open("wb") as stream:
                # np.save calls array.tofile, whose error on a full disk has no reason.
                values = np.ascontiguousarray(embeddings.values)
                np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(values))
                stream.write(values.data)
        return [path, files_beside(path)]
    header = ("file", "label", *(f"x{column}" for column in range(embeddings.values.shape[1])))
    # Nine digits identify a float32.
    numbers = (map("{:.9g}".format, row) for row in embeddings.values.tolist())
    with atomic_file(path) as temporary:
        temporary.write_bytes(_as_csv([header, *((*name, *row) for name, row in zip(names, numbers, strict=True))]))
    return [path]


def _as_path(name: str) -> str:
    """Return a path that spreadsheets do not interpret as a formula."""
    return f".{os.sep}{name}" if name.startswith((*FORMULA, "\t", "\r", "\n")) else name


def _as_csv(rows: Sequence[Sequence[str]]) -> bytes:
    text = io.StringIO(newline="")
    plain = csv.writer(text, lineterminator="\n")
    quoted = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    for row in rows:  # a carriage return, which ends a line for readers, is not quoted by itself
        (quoted if any("\r" in cell for cell in row) else plain).writerow(row)
    # File names that are not valid UTF-8 are written as they are.
    return text.getvalue().encode("utf-8", errors="surrogateescape")


def read_embeddings(file: str | os.PathLike[str]) -> Embeddings:
    """Read a file that `write_embeddings` wrote, or a matrix of numbers with such a .files.csv.

    Raises:
        DataError: A file is missing or invalid, or the files do not fit together.
        ValueError: The file has another suffix.
    """
    path = user_path(file)
    if require_suffix("file", path) == ".csv":
        return _read_table(path)
    count = matrix_shape(path)[0]
    beside = files_beside(path)
    names, labels = [], []
    with _opened_rows(beside, MAX_CSV_BYTES) as rows:
        header = next(rows, (0, []))[1]
        for line, row in itertools.islice(rows, count + 1):
            _require_columns(beside, line, row, 2)
            names.append(row[0])
            labels.append(row[1])
    if len(names) != count or header != ["file", "label"]:
        text = f"the header file,label and one row for each of {count} embeddings"
        raise DataError(f"{str(beside)!r} must have {text}.")
    return Embeddings(read_matrix(path, count), names, labels)


def _read_table(path: Path) -> Embeddings:
    """Read a CSV file with file, label and the numbers of an embedding per row."""
    names, labels, numbers = [], [], array("f")
    with _opened_rows(path, MAX_CSV_BYTES) as rows:
        header = next(rows, (0, []))[1]
        for line, row in rows:
            _require_columns(path, line, row, len(header))
            try:
                numbers.extend(map(float, row[2:]))
            except ValueError as error:
                raise DataError(f"{str(path)!r} must have numbers after file and label: {first_line(error)}.") from None
            if len(numbers) > MAX_NUMBERS:
                raise DataError(f"{str(path)!r} must have at most {MAX_NUMBERS:,} numbers.")
            names.append(row[0])
            labels.append(row[1])
    if not names or header[:2] != ["file", "label"] or len(header) < 3:
        raise DataError(f"{str(path)!r} must have the header file,label,x0,… and a row per image.")
    values = np.frombuffer(numbers, np.float32).reshape(len(names), -1)
    if not np.isfinite(values).all():
        raise DataError(f"{str(path)!r} must hold finite numbers.")
    return Embeddings(values, names, labels)


def read_pairs(file: str | os.PathLike[str]) -> list[Pair]:
    """Read a file of pairs: one row per pair with two image files and 1 (same class) or 0, separated by commas or tabs.

    A first row first,second,same is skipped, and so are empty rows. The format of pairs.txt of Labeled Faces in the
    Wild is read, too: a first line with the number of folds and of pairs, or of pairs, then NAME, number, number or
    NAME, number, NAME, number, which stand for NAME/NAME_0001.jpg and so on.

    Raises:
        DataError: The file is missing, has a row of another form, no pair, or pairs of only one kind.
    """
    path = user_path(file)
    names: dict[str, str] = {}  # each name once in memory, also with millions of pairs
    pairs, of_faces = [], False
    with _opened_rows(path, MAX_PAIRS_BYTES) as rows:
        for number, (line, row) in enumerate(rows):
            if number == 0 and len(row) <= 2 and all(cell.strip().isdecimal() for cell in row):
                of_faces = True
            elif number > 0 or len(row) != 3 or row[2].strip().lower() != "same":
                first, second, same = (_face_pair if of_faces else _pair)(path, line, row)
                pairs.append(Pair(names.setdefault(first, first), names.setdefault(second, second), same))
    kinds = {pair.same for pair in pairs}
    if len(kinds) < 2:
        got = "no pairs" if not pairs else f"{len(pairs)} pairs, all {'same' if pairs[0].same else 'different'}"
        raise DataError(f"{str(path)!r} must have same and different pairs, got {got}.")
    return pairs


def _pair(path: Path, line: int, row: list[str]) -> Pair:
    if len(row) != 3:
        raise DataError(f"line {line} of {str(path)!r} must have 3 columns (file, file, 1 or 0), got {len(row)}.")
    if row[2].strip() not in ("0", "1"):
        raise DataError(f"line {line} of {str(path)!r} must end in 1 (same) or 0, got {short(row[2])!r}.")
    return Pair(row[0].strip(), row[1].strip(), row[2].strip() == "1")


def _face_pair(path: Path, line: int, row: list[str]) -> Pair:
    """Return a pair of pairs.txt of Labeled Faces in the Wild."""
    cells = [cell.strip() for cell in row]
    if len(cells) == 3:
        cells = [cells[0], cells[1], cells[0], cells[2]]
    if len(cells) != 4 or not (cells[1].isdecimal() and cells[3].isdecimal()):
        raise DataError(f"line {line} of {str(path)!r} must be NAME, number, number or NAME, number, NAME, number.")
    first, second = (f"{name}/{name}_{number.zfill(4)}.jpg" for name, number in (cells[:2], cells[2:]))
    return Pair(first, second, len(row) == 3)


@contextmanager
def _opened_rows(path: Path, largest: int) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Yield an iterator of line number and cells of the rows of a CSV file that are not empty; it is not read at once.

    Tabs separate if the first row has one, or the second if the first is a number, as in files of LFW.
    """
    try:
        with open_regular(path, follow_links=True) as file:
            size = os.fstat(file.fileno()).st_size
            if size > largest:
                raise DataError(f"{str(path)!r} must have at most {largest:,} bytes, got {size:,}.")
            with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", newline="") as text:
                yield _parsed_rows(path, text)
    except OSError as error:
        raise DataError(f"{str(path)!r} cannot be read: {error.strerror}.") from None


def _parsed_rows(path: Path, text: IO[str]) -> Iterator[tuple[int, list[str]]]:
    rest = MAX_ROW  # characters that the current row may still have

    def lines() -> Iterator[str]:
        nonlocal rest
        while line := text.readline(rest + 1):
            rest -= len(line)
            if rest < 0:
                raise csv.Error(f"a row must have at most {MAX_ROW:,} characters")
            yield line

    source = lines()
    reader, count = None, 0
    try:
        start = list(itertools.islice(source, 2))
        header = start[-1] if start and start[0].strip().isdecimal() else "".join(start[:1])
        reader = csv.reader(itertools.chain(start, source), delimiter="\t" if "\t" in header else ",", strict=True)
        for row in reader:
            rest = MAX_ROW
            count += 1
            if count > MAX_ROWS + 1:
                raise csv.Error(f"a file must have at most {MAX_ROWS:,} rows")
            if row:
                yield reader.line_num, row
    except csv.Error as error:
        line = 1 if reader is None else reader.line_num
        raise DataError(f"line {line} of {str(path)!r} is not valid CSV: {first_line(error)}.") from None


def _require_columns(path: Path, line: int, row: Sequence[str], count: int) -> None:
    if len(row) != count:
        raise DataError(f"line {line} of {str(path)!r} must have {count} columns, got {len(row)}.")
