"""The first and the last lines of a training run: what is trained where, and what came out."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spherenet._util.text import as_number, plain
from spherenet.cli.progress import duration

__all__ = ["aligned", "header_rows", "result_text"]


def header_rows(description: Mapping[str, Any], parameters: int, folder: str | Path) -> list[tuple[str, str]]:
    """Return labels and texts about a run that starts.

    Args:
        description: Content of config.json.
        parameters: Number of trained parameters.
        folder: Folder of the run.
    """
    options, model, hardware = description["train"], description["model"], description["hardware"]
    size = "×".join(map(str, (model.get("in_channels", 3), *model["input_size"])))
    images = ", ".join(f"{count:,} {split}" for split, count in description["images"].items())
    is_own = options["data"] == "folder" and options["data_dir"]
    layers = "plain convolutions" if options["operator"] is None else f"{options['operator']} operator"
    processes = f", {description['processes']} processes" if description["processes"] > 1 else ""
    threads = f"{hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'}"
    device = f"{hardware['device']} ({hardware['processor']}, {threads}){processes}"
    rows = [
        ("data", f"{options['data_dir'] if is_own else options['data']}, {len(description['classes'])} classes"),
        ("images", f"{images}, {size}"),
        ("network", f"{options['model']}, {layers}, loss {options['loss']}, {parameters:,} parameters"),
        ("device", f"{device}, {options['precision']}"),
        ("kernels", str(description["implementation"])),
        ("output", str(folder)),
    ]
    return [(label, plain(text)) for label, text in rows]


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a line per row, with texts below each other; an empty label continues the row above."""
    width = max(len(label) for label, _ in rows)
    return [f"  {label:<{width}}  {text}" for label, text in rows]


def result_text(summary: Mapping[str, Any], folder: str | Path, state: str) -> str:
    """Return the final numbers of a run and commands to continue with.

    Args:
        summary: Content of summary.json.
        folder: Folder of the run.
        state: First word, e.g. "done".
    """
    names = ("seconds", "accuracy", "balanced_accuracy", "best_accuracy", "tta_accuracy")
    seconds, *accuracies = (as_number(summary.get(name)) for name in names)
    shown = ["unknown" if value is None else f"{value:.2%}" for value in accuracies]
    views = "" if shown[3] == "unknown" else f", {shown[3]} with test-time augmentation"
    balanced = "" if shown[1] in (shown[0], "unknown") else f", balanced accuracy {shown[1]}"
    early = ", stopped early without a better accuracy" if summary.get("stopped_early") is True else ""
    split = "validation" if summary.get("selected_on") == "validation" else "test"
    run = shlex.quote(str(folder))
    rows = [
        ("test accuracy", f"{shown[0]}{views}{balanced}"),
        ("best", f"{split} accuracy {shown[2]} at step {summary.get('best_step')}"),
        ("time", duration(seconds or 0)),
        ("next", f"spherenet evaluate {run}"),
        ("", f"spherenet predict IMAGE --run {run}"),
        ("", f"spherenet export {run} MODEL"),
    ]
    first = f"{state}{early}: {summary.get('iterations')} iterations, in {folder}"
    return "\n".join(plain(line) for line in (first, *aligned(rows)))
