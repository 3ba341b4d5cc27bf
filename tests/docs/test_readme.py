"""README.md: the table of results agrees with docs/results.md, and the page stays short."""

import importlib.util

import pytest

from docs.pages import DOCS, ROOT
from spherenet.experiments import find_experiment


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
    assert {verdict for verdict, _ in rows.values()} == {"confirmed", "refuted", "not decided", "out of reach"}


def test_claims_of_long_runs_precede_those_of_appendices(script):
    rows = [f"| {start}Table 1) | +1.00 [+0.50, +1.50] points, n = 3 | headline |" for start in script.LONG_CLAIMS]
    rows[1] = (
        f"| {script.LONG_CLAIMS[1]}Table 1) | out of reach, -1 points, n = 2; requires more, reached 1 % | headline |"
    )
    small = "| SphereNets end above the CNN (Table 1) | -9.00 points, n = 3 | table1 |"
    page = "\n".join(["## Claims confirmed (9)", "", *rows, "## Appendix", "### Claims refuted (1)", "", small])
    setting, rows = script.table(page).split("\n\n")
    assert setting == script.LONG
    table = rows.splitlines()[2:]
    assert len(table) == len(script.LONG_CLAIMS)
    assert table[0] == "| SphereNets converge faster than the CNN | confirmed | +1.00 [+0.50, +1.50] points, n = 3 |"
    assert table[1] == "| SphereNets end above the CNN | out of reach | -1 points, n = 2 |"


def test_long_claims_are_claims_of_the_experiments(script):
    ids = ("headline", "fig-protocol", "table3", "fig-spherenorm", "fig-ultradeep")
    statements = []
    for experiment in map(find_experiment, ids):
        for claim in experiment.claims_about(experiment.cells("long")):
            statistics = f", {claim.protocol} BatchNorm statistics" if claim.protocol else ""
            statements.append(f"{claim.text}{statistics} ({claim.source})")
    assert [start for start in script.LONG_CLAIMS if not any(text.startswith(start) for text in statements)] == []


def test_missing_claim_is_an_error(script):
    with pytest.raises(KeyError, match="has no claim that starts with"):
        script.table("## Claims confirmed (1)\n\n| claim | difference | experiment |\n|---|---|---|\n| x | +1 | y |\n")


def test_length():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
