"""README.md: its numbers agree with docs/results.md, and the page stays short."""

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


def test_numbers_agree_with_results(script):
    assert (ROOT / "README.md").read_text(encoding="utf-8") == script.expected(), "run python docs/readme.py"
    rows = script.verdicts((DOCS / "results.md").read_text(encoding="utf-8"))
    assert {verdict for verdict, _ in rows.values()} == {"confirmed", "refuted", "not decided", "out of reach"}


PAGE = """\
# Results

## Claims confirmed (1)

| claim | difference | experiment |
|---|---|---|
| SphereNets converge faster than the CNN (Figure) | +1.00 [-0.50, +1.50] points, n = 3 | headline |
| SphereNets end above the CNN (Table 1, softmax) | out of reach, -1 points, n = 2; requires more | headline |

## fig-protocol: Learning or evaluation

| | cnn-9 |
|---|---|
| none | 1 |

## Appendix: small grids, preset cpu

### Claims refuted (2)

| claim | difference | experiment |
|---|---|---|
| SphereNets end above the CNN (Table 1, softmax) | -9.00 points, n = 3 | table1 |
| Margin losses (A-Softmax, GA-Softmax) beat softmax (Table 1, columns) | -2 points, n = 3 | table1 |
"""


def test_claims_of_large_grids_replace_those_of_small_ones(script):
    assert script.verdicts(PAGE) == {
        "SphereNets converge faster than the CNN (Figure)": ("confirmed", "+1.00 [-0.50, +1.50] points, n = 3"),
        "SphereNets end above the CNN (Table 1, softmax)": ("out of reach", "-1 points, n = 2"),
        "Margin losses (A-Softmax, GA-Softmax) beat softmax (Table 1, columns)": ("refuted", "-2 points, n = 3"),
    }
    assert script.short("+1.00 [-0.50, +1.50] points smaller, n = 3") == "+1.00 [−0.50, +1.50] points, n = 3"


def test_claim_that_does_not_hold_is_refused(script):
    claims = script.verdicts((DOCS / "results.md").read_text(encoding="utf-8"))
    assert len(script.holds(claims).splitlines()) == 6
    (broken,) = [text for text in claims if text.startswith("SphereNets converge faster than the CNN (")]
    with pytest.raises(SystemExit, match="not decided"):
        script.holds({**claims, broken: ("not decided", "+1")})


def test_page_without_markers_is_rejected(script):
    with pytest.raises(ValueError, match="markers of 'hero'"):
        script.put("# spherenet\n", "hero", "text")


def test_claims_are_claims_of_the_experiments(script):
    statements = []
    for experiment in EXPERIMENTS.values():
        for preset in ("cpu", "long"):
            for claim in experiment.claims_about(experiment.cells(preset)):
                statements.append(f"{claim.text} ({claim.source})")
    assert [start for start in script.HOLDS if not any(text.startswith(start) for text in statements)] == []
