"""One self-contained page about runs and experiments: tables, claims, interactive curves; it opens offline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from spherenet.report.sections import Section
from spherenet.runlog.atomic import replacing
from spherenet.text import plain

__all__ = ["write_page"]


def write_page(sections: Sequence[Section], path: str | Path, title: str) -> None:
    """Write a page of sections; whatever the folders of the runs say is shown as text, never run."""
    from jinja2 import Environment
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    template = Environment(autoescape=True).from_string(
        files("spherenet.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    )
    plots = [
        {"data": [_named(trace) for trace in plot.traces], "layout": plot.layout}
        for section in sections
        for plot in section.plots
    ]
    page = template.render(title=title, sections=sections, plots=_embedded(plots), plotly=get_plotlyjs())
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        temporary.write_text(page, encoding="utf-8")


def _named(trace: dict[str, Any]) -> dict[str, Any]:
    """A trace whose name is text: plotly would make links and markup of tags in it."""
    return {**trace, "name": escape(plain(trace["name"]), quote=False)}


def _embedded(value: Any) -> str:
    """JSON inside a script element: no character of it can end the element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
