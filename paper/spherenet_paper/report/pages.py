"""What `make results` writes: cells.csv and verdicts.csv from the tables of runs, then pages by templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment, StrictUndefined

from spherenet.cli.plugin import markdown
from spherenet_paper.light import CONTROLS, LIGHT
from spherenet_paper.report.claims import CONFIRMED, NOT_DECIDED, OUT_OF_REACH, REFUTED
from spherenet_paper.report.closeness import closeness, distance
from spherenet_paper.report.csv_tables import grids_as_csv
from spherenet_paper.report.figure import draw_curves, figure_cells, main_grid
from spherenet_paper.report.grids import PRESETS, Grid, presets_of, stored_grids
from spherenet_paper.report.markdown_tables import (
    accuracy_table,
    footer,
    logs_table,
    missing_table,
    protocol_table,
    time_table,
)
from spherenet_paper.report.questions import (
    Light,
    Questions,
    area_table,
    comparison_table,
    light_table,
    segmentation_table,
    speed_table,
    tuning_table,
)
from spherenet_paper.report.tables import row_name
from spherenet_paper.report.verdicts import VerdictRow, read_verdicts, verdict_rows, write_verdicts

__all__ = ["grids_page", "measured_light", "readme_parts", "results_page", "with_parts", "write_pages"]

HERO = "light"
"""The figure at the top of README.md: "headline", or "light" when the runs under uneven light are complete."""

PARTS = ("hero", "facts", "holds", "fails")
"""Names of the parts of README.md that are written."""

GROUPS = {
    "Claims confirmed": (CONFIRMED,),
    "Claims refuted": (REFUTED,),
    "Claims not decided or out of reach": (NOT_DECIDED, OUT_OF_REACH),
}


def grids_page(grids: Sequence[Grid], verdicts: Sequence[VerdictRow]) -> str:
    """Return the page of all grids: the main grid with its figure, all claims, all grids, small ones at the end."""
    main = main_grid(grids)
    grids = sorted(grids, key=lambda grid: grid is not main)
    first = [grid for grid in grids if grid.preset == presets_of(grids)[0]]
    runs = sum(len(cell.runs) for grid in grids for cell in grid.cells)
    experiments = len({grid.id for grid in grids if grid.has_runs})
    return _render(
        "grids.md.j2",
        runs=f"{runs:,}",
        experiments=experiments,
        presets=[(preset, [grid for grid in grids if grid.preset == preset]) for preset in presets_of(grids)],
        about=PRESETS,
        planned=sum(sum(grid.seeds.values()) for grid in first),
        missing=sum(len(seeds) for grid in first for seeds in grid.missing().values()),
        groups=GROUPS,
        verdicts=verdicts,
        **_main_curves(main),
    )


def results_page(grids: Sequence[Grid], verdicts: Sequence[VerdictRow], questions: Questions) -> str:
    """Return the page of results: four questions, each with its verdict, figure and table, then the paper's numbers."""
    main = main_grid(grids)
    preset = presets_of(grids)[0]
    strengths = "; ".join(f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in LIGHT.items())
    return _render(
        "results.md.j2",
        light=questions.light,
        light_claims=questions.light_claims,
        light_names=("clean", *LIGHT),
        control_names=tuple(CONTROLS),
        strengths=strengths,
        speed=questions.speed,
        speed_claims=questions.speed_claims,
        tuning=questions.tuning,
        segmentation=questions.segmentation,
        segmentation_claims=questions.segmentation_claims,
        areas=questions.areas,
        unknown_claims=questions.unknown_claims,
        small=next((grid for grid in grids if (grid.preset, grid.id) == (preset, "fig-spherenorm")), None),
        published=[grid for grid in grids if any(cell.runs and cell.paper is not None for cell in grid.cells)],
        first_preset=preset,
        groups=GROUPS,
        verdicts=verdicts,
        **_main_curves(main),
    )


def _main_curves(main: Grid | None) -> dict[str, Any]:
    """Return the main grid with what the caption of its figure names."""
    cells = [] if main is None else figure_cells(main)
    names = [] if main is None else [markdown(row_name(main, cell.row)) for cell in cells]
    return {"main": main, "curves": names, "column": markdown(cells[0].column) if cells else ""}


def readme_parts(verdicts: Sequence[VerdictRow], light: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the parts of README.md that are written, by the names of their markers.

    Args:
        verdicts: Rows of verdicts.csv.
        light: Number of seeds and mean accuracies under uneven light for the figure at the top, or None for the curves.

    Raises:
        ValueError: A claim that README.md calls confirmed is not, or the other way round.
    """
    module = _environment(verdicts).from_string(_template("readme.md.j2")).make_module({"light": light})
    return {name: str(getattr(module, name)()).strip("\n") for name in PARTS}


def with_parts(page: str, parts: Mapping[str, str]) -> str:
    """Return a page with these contents between the markers of their names.

    Raises:
        ValueError: The page has no markers of a part.
    """
    for name, content in parts.items():
        before, begin, rest = page.partition(f"<!-- make results: {name} -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not begin or not end:
            raise ValueError(f"the page must contain the markers of {name!r}.")
        page = f"{before}{begin}{content}{end}{after}"
    return page


def measured_light(questions: Questions) -> dict[str, Any] | None:
    """Return what the README states of the runs under uneven light, or None unless `HERO` names them.

    Raises:
        ValueError: The README would state what the runs do not confirm.
    """
    if HERO != "light":
        return None
    claims = {claim.name: claim for claim in questions.light_claims}
    for arm in ("cnn", "cnn-standardized"):
        if arm not in claims or claims[arm].decision != CONFIRMED:
            raise ValueError(f"the lead over {arm} must be confirmed in README.md.")
    measured = Light.of(questions.light)
    arms = {"patch": "patch", "cnn": "cnn", "standardized": "cnn-standardized", "trained": "cnn-light"}
    accuracies = {
        name: {"mean": measured.uneven(arm)} | {kind: measured.accuracies[arm, kind] for kind in ("clean", "shadow")}
        for name, arm in arms.items()
    }
    shown = {name: {key: f"{fmean(own):.1f}" for key, own in values.items()} for name, values in accuracies.items()}
    return {"seeds": claims["cnn"].n, "claim": str(claims["cnn-standardized"]), **shown}


def write_pages(folder: Path) -> None:
    """Write cells.csv and verdicts.csv beside the tables of runs, and the pages and the figure of the repository."""
    grids, root = stored_grids(folder), folder.parents[1]
    (folder / "cells.csv").write_text(grids_as_csv(grids), encoding="utf-8")
    main = main_grid(grids)
    write_verdicts(verdict_rows(sorted(grids, key=lambda grid: grid is not main)), folder / "verdicts.csv")
    verdicts, questions = read_verdicts(folder / "verdicts.csv"), Questions.read(folder)
    (root / "docs" / "grids.md").write_text(grids_page(grids, verdicts), encoding="utf-8")
    (root / "docs" / "results.md").write_text(results_page(grids, verdicts, questions), encoding="utf-8")
    readme = root / "README.md"
    parts = readme_parts(verdicts, measured_light(questions))
    readme.write_text(with_parts(readme.read_text(encoding="utf-8"), parts), encoding="utf-8")
    tutorial = root / "docs" / "tutorials" / "speed.md"
    text = tutorial.read_text(encoding="utf-8")
    tutorial.write_text(with_parts(text, {"speed": speed_table(questions.speed)}), encoding="utf-8")
    if main is not None:
        (root / "docs" / "images" / "headline.svg").write_text(draw_curves(main), encoding="utf-8")


def _render(name: str, *, verdicts: Sequence[VerdictRow], **values: Any) -> str:
    """Render a template. Its result has no two empty lines in a row."""
    text = _environment(verdicts).from_string(_template(name)).render(verdicts=verdicts, **values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def _template(name: str) -> str:
    return files("spherenet_paper.report").joinpath("templates", name).read_text(encoding="utf-8")


def _environment(verdicts: Sequence[VerdictRow]) -> Environment:
    """Return what templates use: tables of grids, and effects of claims by their ids."""

    def claim(id: str) -> VerdictRow:
        return next(row for row in verdicts if row.id == id and row.verdict)  # of the largest preset

    def effect(id: str, is_confirmed: bool | None = None) -> str:
        row = claim(id)
        if is_confirmed is not None and (row.verdict == CONFIRMED) != is_confirmed:
            raise ValueError(f"{id} must {'' if is_confirmed else 'not '}be confirmed in README.md, got {row.verdict}.")
        return f"{row.difference} [{row.lower}, {row.upper}] points, n = {row.seeds}".replace("-", "−")

    environment = Environment(  # noqa: S701 (Markdown, whose names pass the filter of that name)
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    filters = (markdown, closeness, distance, accuracy_table, footer, logs_table, missing_table, protocol_table,
               time_table, light_table, comparison_table, speed_table, tuning_table, segmentation_table, area_table,
               claim, effect)  # fmt: skip
    environment.filters.update({function.__name__: function for function in filters})
    environment.filters["confirmed"] = partial(effect, is_confirmed=True)
    environment.filters["unconfirmed"] = partial(effect, is_confirmed=False)
    return environment
