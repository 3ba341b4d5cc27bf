"""The four questions on the page of results: complete tables, missing ones, and what is left out of them."""

from made_answers import accuracies, areas, made_rows, segmentation_scores

from spherenet_paper.light import Row
from spherenet_paper.records import RESULTS
from spherenet_paper.report.grids import stored_grids
from spherenet_paper.report.pages import results_page
from spherenet_paper.report.questions import Light, Questions, area_table, comparison_table, light_table
from spherenet_paper.report.verdicts import read_verdicts


def test_means_are_over_strengths_per_seed():
    measured = Light.of(made_rows())
    assert measured.arms[0] == "patch"
    assert [round(value, 6) for value in measured.accuracies["patch", "spot"]] == [68, 68.1, 68.2, 68.3, 68.4]
    assert measured.strengths["gamma"] == [1.5, 2.2, 3]
    assert [round(value, 6) for value in measured.uneven("cnn")] == [48] * 5


def test_seed_without_an_evaluation_is_left_out():
    rows = [row for row in made_rows() if (row.arm, row.seed, row.corruption) != ("cnn", 3, "ramp")]
    assert Light.of(rows).seeds == {**Light.of(made_rows()).seeds, "cnn": [0, 1, 2, 4]}
    assert Light.of([]).arms == []


def test_tables_name_arms_and_verdicts():
    lines = light_table(made_rows(), ("clean", "spot"), mean=True).splitlines()
    assert lines[0] == "| | n | as it is | spot | **mean of the five** |"
    assert lines[2] == "| SphereNet, centered | 5 | 70.2 ± 0.2 | 68.2 ± 0.2 | **68.2 ± 0.2** |"
    [_, _, first, *others] = comparison_table(Questions(light=made_rows()).light_claims, "minus").splitlines()
    assert first.startswith("| CNN | +20.20 [+20.00, +20.40] points, n = 5 | < 0.001 | confirmed |")
    assert len(others) == 3
    assert "| SphereNet, centered | noise | 90.0 ± 0.1 | 80.0 ± 0.0 |" in area_table(areas(0.1))


def test_page_states_verdicts_or_that_runs_are_missing():
    grids, verdicts = stored_grids(), read_verdicts(RESULTS / "verdicts.csv")
    page = results_page(grids, verdicts, Questions(made_rows(), areas(0.1)))
    assert "the centered SphereNet beats 4 of 4 CNNs" in page
    assert "**Confirmed: the largest cosine of a SphereNet" in page
    refuted = results_page(grids, verdicts, Questions(made_rows(patch=0.55), areas(-0.1)))
    assert "**Of 4 comparisons 1 confirm that" in refuted
    assert "**Of 4 comparisons 0 confirm and 4 refute" in refuted
    some = [area for area in areas(0.1) if area.arm != "patch"]
    for lead, verdict in ((0.01, "Confirmed"), (-0.01, "Refuted"), (0.0, "Not decided")):
        assert f"**{verdict}: with the speed recipe" in results_page(grids, verdicts, Questions(speed=accuracies(lead)))
    page = results_page(grids, verdicts, Questions(segmentation=segmentation_scores(-0.1)))
    assert "0 confirm and 5 refute" in page
    assert "| SphereNorm, centered by patch | 40.0 ± 0.2 | 0.001 | 40.0 ± 0.2 | 0.001 |" in page
    missing = results_page(grids, verdicts, Questions([Row("cnn", 0, "clean", "", 0.5)], some))
    assert missing.count("so there is no verdict") == 2
    assert "**No verdict yet: the runs of the speed recipe are not complete.**" in missing
