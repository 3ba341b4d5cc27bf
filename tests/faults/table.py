"""The table of results in docs/reliability.md, from the reports of the tests. Results of earlier sessions are kept."""

import platform
import subprocess
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import torch

BEGIN, END = "<!-- written by make soak: begin -->", "<!-- written by make soak: end -->"

POINTS = {
    1: "kill -9",
    2: "corrupt checkpoints",
    3: "disk full",
    4: "hostile pickles",
    5: "hostile archives",
    6: "losses that are not finite",
    7: "signals and lost processes",
    8: "two runs in one folder",
    9: "resuming with changes",
    10: "leaks",
    11: "fuzzing",
    12: "numerics under stress",
    13: "nothing hangs",
    14: "processes and data that differ",
    15: "the command line under hostile input",
    16: "lost power",
    18: "weights divided among processes",
}

TOTALS = {1: "kill -9", 11: "a"}
"""Points with a row for the total of all rows that start with this text."""


def results_of(reports):
    """Return {file: date, system, number of tests and rows of the table} as JSON values."""
    by_file = {}
    for report in reports:
        by_file.setdefault(Path(report.fspath).name, []).append(report)
    session = {"when": f"{datetime.now(timezone.utc).date()}, commit {_commit()}", "where": _where()}
    return {
        file: {**session, "tests": len({report.nodeid for report in own}), "rows": _rows(own)}
        for file, own in by_file.items()
    }


def write(path, results):
    """Write the table between the two markers of a page."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{path} has no start marker of the table"
    assert end, f"{path} has no end marker of the table"
    path.write_text(f"{before}{BEGIN}\n{in_markdown(results)}\n{END}{after}", encoding="utf-8")


def in_markdown(results):
    """Return the sessions and the table, with one row per fault."""
    sessions, rows = {}, {}
    for result in results.values():
        points = sessions.setdefault((result["when"], result["where"]), {"tests": 0, "failed": 0, "points": set()})
        points["tests"] += result["tests"]
        for row in result["rows"]:
            points["points"].add(row["point"])
            points["failed"] += row["failed"]
            same = rows.setdefault((row["point"], row["what"]), {**row, "times": 0, "failed": 0})
            same["times"] += row["times"]
            same["failed"] += row["failed"]
    lines = []
    for (when, where), session in sorted(sessions.items()):
        numbers = ", ".join(map(str, sorted(session["points"])))
        outcome = "all held" if not session["failed"] else f"**{session['failed']} failures**"
        lines.append(f"- {when}, {where}: points {numbers}, {session['tests']} tests, {outcome}.")
    lines += ["", "| point | tried | times | result |", "|---|---|---|---|"]
    for point, name in POINTS.items():
        own = {what: row for (at, what), row in sorted(rows.items()) if at == point}
        lines += [f"| {point} {name} | {what} | {row['times']:,} | {_result(row)} |" for what, row in own.items()]
        if point in TOTALS:
            times = sum(row["times"] for what, row in own.items() if what.startswith(TOTALS[point]))
            lines.append(f"| {point} {name} | all of these | {times:,} | |")
        if not own:
            lines.append(f"| {point} {name} | | 0 | **not run** |")
    return "\n".join(lines)


def _rows(reports):
    """Return the rows of the table for the tests of a file."""
    outcomes = {}
    for report in reports:
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid] = report
    rows = {}
    for report in reports:
        if report.when != "teardown":
            continue
        properties = dict(report.user_properties)
        outcome = outcomes[report.nodeid]
        name = report.nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        for what, times in (properties.get("tried") or Counter({name: 1})).items():
            row = {"point": properties["point"], "what": what, "times": 0, "failed": 0, "skipped": ""}
            row = rows.setdefault(what, row)
            row["times"] += times
            row["failed"] += outcome.outcome == "failed"
            if outcome.outcome == "skipped":
                row["times"] -= times
                row["skipped"] = str(outcome.longrepr[2]).removeprefix("Skipped: ")
    return list(rows.values())


def _result(row):
    if row["failed"]:
        return f"**failed in {row['failed']} tests**"
    return f"not tried: {row['skipped']}" if row["skipped"] else "held"


def _where():
    return f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


def _commit():
    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=True
        ).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--", "../../src", "../../tests/faults"))
        return git("rev-parse", "--short", "HEAD") + (" with changes not yet committed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
