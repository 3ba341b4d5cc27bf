"""The table of results in docs/reliability.md, from the reports of the tests. Other rows stay as they are."""

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


def rows_of(reports):
    """Return {(point, what was tried): times, result and date} of the tests of a file."""
    outcomes, rows, failures, skipped = {}, Counter(), Counter(), {}
    for report in reports:
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid] = report
    for report in (report for report in reports if report.when == "teardown"):
        properties, outcome = dict(report.user_properties), outcomes[report.nodeid]
        name = report.nodeid.rpartition("::")[2].partition("[")[0].removeprefix("test_").replace("_", " ")
        for what, times in (properties.get("tried") or {name: 1}).items():
            key = properties["point"], what
            rows[key] += times if outcome.outcome != "skipped" else 0
            failures[key] += outcome.outcome == "failed"
            if outcome.outcome == "skipped":
                skipped[key] = str(outcome.longrepr[2]).removeprefix("Skipped: ")
    today = str(datetime.now(timezone.utc).date())
    return {key: (times, _result(failures[key], skipped.get(key)), today) for key, times in rows.items()}


def write(path, rows):
    """Write rows between the two markers of a page: they replace rows of the same name, and other rows stay."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    assert begin, f"{path} has no start marker of the table"
    assert end, f"{path} has no end marker of the table"
    sessions = _sessions(old)
    for date in {date for *_, date in rows.values()}:
        commits, versions = (sessions.get(date) or "").partition(", torch")[::2]
        commit, own = _where().partition(", torch")[::2]
        earlier = [name for name in commits.split("; ") if name and name != commit] if versions == own else []
        sessions[date] = f"{'; '.join([*earlier, commit])}, torch{own}"
    text = in_markdown(_rows(old) | rows, sessions)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def in_markdown(rows, sessions):
    """Return a line per date and the table, with one row per fault."""
    lines = []
    for date, where in sorted(sessions.items()):
        results = [result for _, result, when in rows.values() if when == date]
        failed = sum(result.startswith("**failed") for result in results)
        outcome = f"**{failed} rows failed**" if failed else "all held"
        lines += [f"- {date} ({where}): {len(results)} rows, {outcome}."] if results else []
    lines += ["", "| point | tried | times | result | date |", "|---|---|---|---|---|"]
    for point, name in POINTS.items():
        own = {what: row for (at, what), row in sorted(rows.items()) if at == point}
        lines += [
            f"| {point} {name} | {what} | {times:,} | {result} | {date} |"
            for what, (times, result, date) in own.items()
        ]
        if point in TOTALS:
            total = sum(times for what, (times, _, _) in own.items() if what.startswith(TOTALS[point]))
            lines.append(f"| {point} {name} | all of these | {total:,} | | |")
        if not own:
            lines.append(f"| {point} {name} | | 0 | **not run** | |")
    return "\n".join(lines)


def _rows(text):
    """Return the rows of a table that `in_markdown` wrote, without totals."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and cells[4]:
            point, what, times, result, date = cells
            if point[0].isdigit():
                rows[int(point.split()[0]), what] = (int(times.replace(",", "")), result, date)
    return rows


def _sessions(text):
    """Return {date: commit and versions} of a table that `in_markdown` wrote."""
    lines = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    return {line[:10]: line.partition(" (")[2].rpartition("): ")[0] for line in lines}


def _result(failures, skipped):
    if failures:
        return f"**failed in {failures} tests**"
    return f"not tried: {skipped}" if skipped else "held"


def _where():
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    return f"commit {_commit()}, {versions}"


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
