"""Tests in two tiers: `make test` leaves out what slow.txt lists, `make test-all` and the workflow run everything."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
LINES = [line for line in (TESTS / "slow.txt").read_text().splitlines() if line]
STEPS = dict(line.partition(" /")[::2] for line in LINES if not line.startswith("#"))
LISTED = list(STEPS)
KEPT = [match[1] for line in LINES if (match := re.fullmatch(r"# \w.* (\w+/\S+\.py\S*)", line))]


@pytest.mark.parametrize("line", [*LISTED, *KEPT])
def test_listed_test_exists(line):
    file, _, name = line.partition("::")
    text = (ROOT / file if file.startswith("paper/") else TESTS / file).read_text()
    assert not name or re.search(rf"^def {name.partition('[')[0]}\(", text, re.MULTILINE)


def test_list_has_no_line_twice():
    assert len(STEPS) == len([line for line in LINES if not line.startswith("#")])


def test_every_nth_case_of_a_thinned_test_is_left(request):
    class Item:
        def __init__(self, nodeid):
            self.nodeid, self.markers = f"tests/{nodeid}", []
            self.add_marker = self.markers.append

    thinned = {line: int(step) for line, step in STEPS.items() if step}
    assert min(thinned.values()) >= 2
    name, step = next((line, step) for line, step in thinned.items() if "::" in line)
    items = [Item(f"{name}[{case}]") for case in range(2 * step + 1)]
    request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py")).pytest_collection_modifyitems(items)
    assert [case for case, item in enumerate(items) if not item.markers] == [0, step, 2 * step]


def test_one_test_of_each_kind_is_not_slow(request):
    """Of a file that is kept, at least one test must be left."""
    assert len(KEPT) == 8
    for line in KEPT:
        file, _, name = line.partition("::")
        tests = re.findall(r"^def (test_\w+)\(", (TESTS / file).read_text(), re.MULTILINE)
        fast = [test for test in tests if not any(STEPS.get(line) == "" for line in (file, f"{file}::{test}"))]
        assert name in fast if name else fast


def test_listed_tests_are_marked(request):
    """Only those: this file is none of them."""
    assert request.node.get_closest_marker("slow") is None
    marked = {item.nodeid for item in request.session.items if item.get_closest_marker("slow")}
    assert all(any(line in nodeid for line in LISTED) for nodeid in marked)


def test_commands_run_their_tier():
    makefile = (ROOT / "Makefile").read_text()
    fast, full = (re.search(rf"^{name}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[1] for name in ("test", "test-all"))
    assert "pytest SELECT='-m \"not slow\"'" in fast
    assert fast.replace(" SELECT='-m \"not slow\"'", "") == full
    assert "exec make test\n" in (ROOT / ".ci" / "run").read_text()
    assert "run: make test-all LOCKED=1\n" in (ROOT / ".github" / "workflows" / "tests.yml").read_text()
