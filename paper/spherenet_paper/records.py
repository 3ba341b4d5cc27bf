"""Finished runs as records: those of the study in compact tables, those of `spherenet reproduce` in run directories.

The tables are CSV files in `paper/results`; the first four columns name the run:

- runs.csv: options that are not the default, command, versions, hardware, parameters, seconds and memory
- curves.csv: a row per split and BatchNorm protocol, with steps, losses, accuracies and seconds separated by spaces
- probes.csv: the last measurements inside the network, a row per quantity and layer

Losses have six significant digits; all other numbers are those that the run recorded.
"""

from __future__ import annotations

import csv
import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from spherenet.errors import RunError
from spherenet.report import ReportedRun, read_run
from spherenet.training import TrainConfig

__all__ = ["RESULTS", "TABLES", "Key", "Record", "append_records", "read_records", "read_runs", "write_records"]

RESULTS = Path(__file__).parents[1] / "results"
"""Folder of the tables in a clone of the repository."""

COSTS = ("iterations", "accuracy", "parameters", "seconds", "peak_megabytes")
MEDIAN = "median"
"""Layer of quantities that are stored as the median over layers."""

TABLES = {
    "runs.csv": ("options", *COSTS, "command", "changes", "versions", "hardware"),
    "curves.csv": ("split", "protocol", "steps", "loss", "accuracy", "seconds"),
    "probes.csv": ("quantity", "layer", "values"),
}
"""Columns of each table after those of `Key`."""


class Key(NamedTuple):
    """What names a run."""

    preset: str
    experiment: str
    cell: str
    seed: int


@dataclass(frozen=True)
class Record:
    """A finished run."""

    key: Key
    run: ReportedRun


def read_runs(folder: Path, preset: str, experiment: str) -> tuple[list[Record], list[tuple[Key, str]]]:
    """Return the finished runs of an experiment in FOLDER/CELL/seed-N, and a message for each other run."""
    records: list[Record] = []
    problems: list[tuple[Key, str]] = []
    for path in sorted(folder.glob("*/seed-*")):
        seed = path.name.removeprefix("seed-")
        if not path.is_dir() or not seed.isdecimal():
            continue
        key = Key(preset, experiment, path.parent.name, int(seed))
        try:
            run = read_run(path)
            if run.summary is None:
                raise RunError(f"{path} has not finished.")
            records.append(Record(key, run))
        except RunError as error:
            problems.append((key, str(error)))
    return records, problems


def read_records(folder: Path = RESULTS) -> list[Record]:
    """Return the runs in the tables of a folder.

    Raises:
        RunError: A table is missing or invalid.
    """
    tables = {name: _rows(folder / name) for name in TABLES}
    try:
        return [_as_record(key, table[0], tables) for key, table in tables["runs.csv"].items()]
    except (KeyError, ValueError, TypeError) as error:
        raise RunError(f"{folder} must contain the tables of records.py, got an invalid row ({error!r}).") from None


def write_records(records: Iterable[Record], folder: Path) -> None:
    """Write the tables, sorted by the key of the runs."""
    ordered = sorted(records, key=lambda record: record.key)
    contents: dict[str, Any] = {"runs.csv": _run_rows, "curves.csv": _curve_rows, "probes.csv": _probe_rows}
    for name, columns in TABLES.items():
        with (folder / name).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([*Key._fields, *columns])
            writer.writerows([*record.key, *row] for record in ordered for row in contents[name](record.run))


def append_records(records: Iterable[Record], folder: Path = RESULTS) -> None:
    """Add runs to the tables of a folder, or replace those with the same key."""
    stored = {record.key: record for record in read_records(folder)}
    write_records({**stored, **{record.key: record for record in records}}.values(), folder)


def _rows(path: Path) -> dict[Key, list[dict[str, str]]]:
    """Return the rows of a table by run."""
    rows: dict[Key, list[dict[str, str]]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                key = Key(row["preset"], row["experiment"], row["cell"], int(row["seed"]))
                rows.setdefault(key, []).append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} must be a table of records.py ({error}).") from None
    return rows


def _as_record(key: Key, row: dict[str, str], tables: dict[str, dict[Key, list[dict[str, str]]]]) -> Record:
    versions, hardware = json.loads(row["versions"]), json.loads(row["hardware"])
    changes = [{"command": command, "changes": True} for command in json.loads(row["changes"] or "[]")]
    config = {
        "train": replace(TrainConfig(), seed=key.seed, **json.loads(row["options"])).as_dict(),
        "command": shlex.split(row["command"]),
        "versions": versions,
        "hardware": hardware,
        "history": [{}, *changes],
    }
    rows = [entry for curve in tables["curves.csv"].get(key, []) for entry in _entries(curve)]
    rows.sort(key=lambda entry: entry["step"])  # stable: training before evaluations
    probes: dict[str, dict[str, Any]] = {}
    for entry in tables["probes.csv"].get(key, []):
        values = [float(value) for value in entry["values"].split()]
        probes.setdefault(entry["quantity"], {})[entry["layer"]] = values if entry["quantity"] == "k" else values[0]
    if probes:
        rows.insert(len(rows) - 1, {"step": rows[-1]["step"], "split": "probes", **probes})
    summary = {name: json.loads(row[name]) for name in COSTS if row[name]}
    return Record(key, ReportedRun(f"seed-{key.seed}", "/".join(map(str, key)), config, rows, summary))


def _entries(curve: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of metrics of a curve."""
    own = {"split": curve["split"], **({"protocol": curve["protocol"]} if curve["protocol"] else {})}
    columns = [_steps(curve["steps"]), *(map(float, curve[name].split()) for name in ("loss", "accuracy", "seconds"))]
    for step, loss, accuracy, seconds in zip(*columns, strict=True):
        yield {"step": step, **own, "loss": loss, "accuracy": accuracy, "seconds": seconds}


def _run_rows(run: ReportedRun) -> Iterator[list[Any]]:
    train, defaults = run.config["train"], asdict(replace(TrainConfig(), seed=run.setting("seed")))
    options = {name: value for name, value in train.items() if value != defaults[name]}
    options.pop("init_from", None)  # a folder that is not stored
    summary, history = run.summary or {}, run.config.get("history") or []
    changes = [entry["command"] for entry in history[1:] if entry.get("changes")]
    texts = [json.dumps(run.config.get(name) or {}) for name in ("versions", "hardware")]
    costs = [json.dumps(summary[name]) if name in summary else "" for name in COSTS]
    yield [
        json.dumps(options),
        *costs,
        shlex.join(run.config["command"]),
        json.dumps(changes) if changes else "",
        *texts,
    ]


def _curve_rows(run: ReportedRun) -> Iterator[list[str]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.rows:
        if row["split"] in ("train", "validation", "test"):
            groups.setdefault((row["split"], row.get("protocol", "")), []).append(row)
    for (split, protocol), rows in groups.items():
        numbers = [" ".join(f"{row['loss']:.6g}" for row in rows)]
        numbers += [" ".join(f"{row[name]!r}" for row in rows) for name in ("accuracy", "seconds")]
        yield [split, protocol, _range_text([row["step"] for row in rows]), *numbers]


def _probe_rows(run: ReportedRun) -> Iterator[list[str]]:
    """Yield the learned k of each layer, and the median over layers of the variance of their outputs."""
    for layer, values in run.learned_k().items():
        yield ["k", layer, " ".join(map(repr, values))]
    variances = [
        row["output_variance"] for row in run.rows_of("probes") if isinstance(row.get("output_variance"), dict)
    ]
    if variances:
        yield ["output_variance", MEDIAN, repr(median(variances[-1].values()))]


def _range_text(steps: Sequence[int]) -> str:
    """Return "50:8000:50" for steps at one distance, else the steps."""
    spacing = steps[1] - steps[0] if len(steps) > 1 else 0
    if spacing and list(steps) == list(range(steps[0], steps[-1] + 1, spacing)):
        return f"{steps[0]}:{steps[-1]}:{spacing}"
    return " ".join(map(str, steps))


def _steps(text: str) -> list[int]:
    if ":" not in text:
        return [int(step) for step in text.split()]
    first, last, spacing = map(int, text.split(":"))
    return list(range(first, last + 1, spacing))
