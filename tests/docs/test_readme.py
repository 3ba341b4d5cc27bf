"""README.md: the table of results agrees with docs/results.md, and the page stays short."""

import importlib.util

import pytest

from docs.pages import DOCS, ROOT


@pytest.fixture
def script():
    specification = importlib.util.spec_from_file_location("readme", DOCS / "readme.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_table_agrees_with_results(script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == script.expected(), "run python docs/readme.py"
    rows = script.verdicts((DOCS / "results.md").read_text(encoding="utf-8"))
    assert {verdict for verdict, _ in rows.values()} == {"confirmed", "refuted", "not decided"}


def test_missing_claim_is_an_error(script):
    with pytest.raises(KeyError, match="has no claim that starts with"):
        script.table("## Claims confirmed (1)\n\n| claim | difference | experiment |\n|---|---|---|\n| x | +1 | y |\n")


def test_length():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
