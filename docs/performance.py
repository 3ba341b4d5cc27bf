"""Write the measured tables of docs/performance.md and README.md from docs/performance.json.

    spherenet bench --suite --output docs/performance.json
    python docs/performance.py

`tests/docs/test_performance.py` compares both pages with the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BEGIN, END = "<!-- written by docs/performance.py: begin -->", "<!-- written by docs/performance.py: end -->"
OPERATORS = ("cosine", "linear", "sigmoid", "learnable")
TWIN = "cnn, winograd"


def _ratio(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})"


def _cell(row: dict[str, Any], target: float) -> str:
    return f"{_ratio(row['time_ratio'])} / {target:.2f}"


def _where(results: dict[str, Any]) -> str:
    return (
        f"{results['processor']}, {results['threads']} threads, torch {results['torch']}, Python {results['python']}, "
        f"sphere layers: {results['implementation']}"
    )


def page(results: dict[str, Any]) -> str:
    """Return the tables of docs/performance.md."""
    lines = [
        f"{_where(results)}. n = {results['rounds']} rounds, more for short steps. Each cell: median ratio "
        "(quartiles) / target.",
        "",
        "| workload (cnn-9) | CNN, ms | " + " | ".join(OPERATORS) + " | peak memory |",
        "|---" * (len(OPERATORS) + 3) + "|",
    ]
    same_engine = [
        'Against the CNN twin whose convolutions use the same engine (`engine="winograd"`):',
        "",
        "| workload (cnn-9) | that CNN against torch's | " + " | ".join(OPERATORS) + " |",
        "|---" * (len(OPERATORS) + 2) + "|",
    ]
    extra = []
    for entry in results["workloads"]:
        if "skipped" in entry:
            lines.append(f"| {entry['workload']} | {entry['skipped']} |" + " |" * (len(OPERATORS) + 1))
            continue
        rows = {row["name"]: row for row in entry["rows"]}
        if not rows.keys() >= set(OPERATORS):  # another network with some operators
            for name in entry["targets"]:
                cell = _cell(rows[name], entry["targets"][name])
                extra.append(f"| {entry['workload']}: {name}, against its CNN twin | {cell} |")
            continue
        cells = [_cell(rows[name], entry["targets"][name]) for name in OPERATORS]
        memory = max(rows[name]["memory_ratio"] for name in OPERATORS)
        milliseconds = rows["cnn"]["milliseconds"]["median"]
        lines.append(f"| {entry['workload']} | {milliseconds:.1f} | " + " | ".join(cells) + f" | {memory:.3f} |")
        if TWIN in rows:
            cells = [_ratio(rows[TWIN]["time_ratio"]), *(_ratio(rows[name]["engine_ratio"]) for name in OPERATORS)]
            same_engine.append(f"| {entry['workload']} | " + " | ".join(cells) + " |")
        for name, row in rows.items():
            if name not in (*OPERATORS, "cnn", TWIN):
                cell = _cell(row, entry["targets"][name])
                extra.append(f"| {entry['workload']}: {name}, against the CNN with it | {cell} |")
    for row in results["recurrent"]:
        extra.append(
            f"| {row['name']}, training, sequence 100, batch 64, hidden 128, against torch's layer | "
            f"{_cell(row, 2.5)} |"
        )
    first = results["first_step"]
    longest = max(first[name]["median"] - first["none"]["median"] for name in OPERATORS)
    extra.append(f"| first step of a new process, seconds longer than the CNN's | {longest:.2f} / 0.30 |")
    return "\n".join([*lines, "", *same_engine, "", "| further | measured / target |", "|---|---|", *extra])


def summary(results: dict[str, Any]) -> str:
    """Return the sentence of README.md."""
    workloads = results["workloads"]
    chosen = [*workloads[:3], next(one for one in workloads if one["workload"].startswith("inference"))]
    ratios = []
    for workload in chosen:
        rows = {row["name"]: row["time_ratio"]["median"] for row in workload["rows"]}
        ratios.append(f"{rows['cosine']:.2f}")
    torch = results["torch"].partition("+")[0]
    return (
        "- **Faster than `nn.Conv2d` on CPUs.** A training step of cnn-9 takes "
        f"{ratios[0]} of the CNN's time at full width,\n"
        f"  {ratios[1]} at half width, and {ratios[2]} on 16×16 images at a quarter; "
        f"inference {ratios[3]} (cosine, float32,\n"
        f"  {results['processor']}, {results['threads']} threads, torch {torch}, medians):\n"
        "  [Performance](docs/performance.md#networks-compared-with-their-cnn-twin)."
    )


def put(path: Path, text: str) -> str:
    """Return a page with the text between the two markers."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path.name} must contain the two markers of the measured table.")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the expected text of both pages."""
    results = json.loads((HERE / "performance.json").read_text(encoding="utf-8"))
    performance, readme = HERE / "performance.md", HERE.parent / "README.md"
    return {performance: put(performance, page(results)), readme: put(readme, summary(results))}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
