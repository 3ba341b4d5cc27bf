"""The table of the fault tests: rows of one session replace those of the same name, and all others stay."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from faults import table

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_table_of_the_page_is_read_and_written_without_change():
    text = PAGE.read_text(encoding="utf-8").partition(table.BEGIN)[2].partition(table.END)[0]
    rows = table._rows(text)
    assert len(rows) > 150
    assert table.in_markdown(rows, table._sessions(text)) == text.strip()


def report(when, outcome="passed", what="a saved model with a fuzzed file", times=7):
    return SimpleNamespace(
        when=when, outcome=outcome, nodeid="x.py::test_x", user_properties=[("point", 11), ("tried", {what: times})],
        longrepr=("x.py", 1, "Skipped: no disk"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "shown"),
    [
        ("passed", "| 7 | held |"),
        ("failed", "| 7 | **failed in 1 tests** |"),
        ("skipped", "| 0 | not tried: no disk |"),
    ],
)
def test_rows_of_one_file_replace_their_earlier_ones(tmp_path, outcome, shown):
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    table.write(copy, table.rows_of([report("call", outcome), report("teardown", outcome)]))
    before, after = (path.read_text(encoding="utf-8").splitlines() for path in (PAGE, copy))
    changed = [line for line in after if line not in before]
    (row,) = [line for line in changed if "a saved model with a fuzzed file" in line]
    assert shown in row
    assert len([line for line in after if line.startswith("| ")]) == len([x for x in before if x.startswith("| ")])
    (session,) = [line for line in after if line.startswith(f"- {row.split(' | ')[-1].strip(' |')} ")]
    assert ("failed" in session) == (outcome == "failed")
