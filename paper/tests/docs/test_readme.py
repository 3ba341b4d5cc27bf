"""README.md: the tables of results agree with docs/results.md."""

import importlib.util

import pytest

from docs.pages import DOCS, ROOT
from spherenet_paper.experiments import EXPERIMENTS


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
    assert {verdict for verdict, _, _ in rows.values()} == {"confirmed", "refuted", "not decided", "out of reach"}


PAGE = """\
# Results

## headline: Operators

| | softmax |
|---|---|
| CNN | 85.00 ± 0.10 (3) |

## Claims confirmed (2)

| claim | difference | experiment |
|---|---|---|
| SphereNets converge faster than the CNN (Figure) | +1.00 [+0.50, +1.50] points, n = 3 | headline |
| SphereNets end above the CNN (Table 1, softmax) | out of reach, -1 points, n = 2; requires more | headline |

## fig-protocol: Learning or evaluation

| | cnn-9 |
|---|---|
| none | 1 |

## Appendix: small grids, preset cpu

### Claims refuted (3)

| claim | difference | experiment |
|---|---|---|
| SphereNets end above the CNN (Table 1, softmax) | -9.00 points, n = 3 | table1 |
| SphereNets converge faster than the plain network (cnn-9) (Figure: convergence) | -1 points, n = 4 | fig |
| Margin losses (A-Softmax, GA-Softmax) beat softmax (Table 1, columns) | -2 points, n = 3 | table1 |
"""


def test_claims_of_large_grids_replace_those_of_small_ones(script):
    assert script.tables(PAGE).splitlines() == [
        script.FIGURE,
        "",
        *script.LARGE.splitlines(),
        "",
        "| | softmax |",
        "|---|---|",
        "| CNN | 85.00 ± 0.10 (3) |",
        "",
        *script.SMALL.splitlines(),
        "",
        "| claim | our verdict | difference [95 % interval] | grid |",
        "|---|---|---|---|",
        "| SphereNets converge faster than the CNN | confirmed | +1.00 [+0.50, +1.50] points, n = 3 | large |",
        "| SphereNets end above the CNN | out of reach | -1 points, n = 2 | large |",
        "| Margin losses (A-Softmax, GA-Softmax) beat softmax | refuted | -2 points, n = 3 | small |",
    ]


def test_page_without_large_grids_has_small_ones_only(script):
    small = PAGE.replace("## headline", "## other").partition("## Appendix")[0]
    assert script.accuracies(small) == []
    assert {grid for _, _, grid in script.verdicts(small).values()} == {"small"}
    assert script.LARGE not in script.tables(small)


def test_claims_are_claims_of_the_experiments(script):
    statements = []
    for experiment in EXPERIMENTS.values():
        for preset in ("cpu", "long"):
            for claim in experiment.claims_about(experiment.cells(preset)):
                statistics = f", {claim.protocol} BatchNorm statistics" if claim.protocol else ""
                statements.append(f"{claim.text}{statistics} ({claim.source})")
    starts = [start for row in script.CLAIMS for start in row]
    assert [start for start in starts if not any(text.startswith(start) for text in statements)] == []
