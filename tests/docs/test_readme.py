"""Every number of README.md is written by a script, or compared with its source here (list in CONTRIBUTING.md)."""

import re

import pytest

import spherenet as sn
from docs.pages import DOCS, ROOT

README = (ROOT / "README.md").read_text("utf-8")
WRITTEN = r"<!-- (make results: \w+|written by \S+: begin) -->.*?<!-- (end|written by \S+: end) -->"
NUMBER = re.compile(r"\d[\d.,]*\d|\d")
FIXED = ["NIPS 2017", "16×16", "TensorFlow 1", "4 functions g", "nn.Conv2d", "CC BY-SA 3.0"]
"""Names and descriptions that contain numbers which are not measured."""


def by_hand():
    """Return the README without the parts that scripts write, code blocks, addresses and `FIXED`."""
    text = re.sub(r"^```.*?^```", "", re.sub(WRITTEN, "", README, flags=re.DOTALL), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for name in FIXED:
        text = text.replace(name, "")
    return text


def table_row(page, first):
    """Return the cells of the row of a page whose first cell contains this text."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return next(row for row in rows if first in row[0])


def versions():
    """Return the versions of Python and torch that RELEASING.md says the tests were run with."""
    text = (ROOT / "RELEASING.md").read_text("utf-8")
    return {found.rsplit(".", 1)[0] if found.count(".") > 1 else found
            for found in re.findall(r"(?:Python|torch) (\d+\.\d+(?:\.\d+)?)", text)}  # fmt: skip


def test_every_number_has_a_source():
    losses = str(len(sn.list_losses()) - 1)  # without softmax
    performance = DOCS.joinpath("performance.md").read_text("utf-8").partition("## Alternatives")[2]
    rounds = re.search(r"alternatives\.py[^`]*--rounds (\d+)", performance)[1]
    cosine, unfold = (table_row(performance, name)[2].split()[0] for name in ("spherenet, cosine", "unfold"))
    minimum = [re.search(pattern, (ROOT / "pyproject.toml").read_text("utf-8"))[1]
               for pattern in (r'requires-python = ">=([\d.]+)"', r'"torch>=([\d.]+)"')]  # fmt: skip
    sources = {losses, rounds, cosine, f"{float(unfold):.1f}", *minimum, *versions()}
    accuracy = {"94"}  # report/questions.py computes it from paper/results/speed.csv
    assert set(NUMBER.findall(by_hand())) - accuracy <= sources
    assert table_row(README, "**spherenet**")[2].startswith(f"{losses}, ")
    assert table_row(README, "**spherenet**")[3] == cosine
    assert table_row(README, "`unfold`")[3] == f"{float(unfold):.1f}"


@pytest.mark.parametrize(
    ("alternative", "measured"),
    [
        ("**spherenet**", ["spherenet, cosine", "cosine with tanh magnitude"]),
        ("`unfold`", ["by unfold", "by two convolutions"]),
        ("`weight_norm`", ["weight_norm"]),
        ("sharpened cosine", ["sharpened cosine, plain", "spherenet, sharpened"]),
        ("DCNets", ["decoupled tanh"]),
    ],
)
def test_times_of_alternatives_are_those_measured(alternative, measured):
    """The table of docs/choosing.md repeats ratios of docs/performance.md."""
    choosing = DOCS.joinpath("choosing.md").read_text("utf-8").partition("## Alternatives")[2]
    performance = DOCS.joinpath("performance.md").read_text("utf-8").partition("## Alternatives")[2]
    ratios = [float(table_row(performance, name)[2].split()[0]) for name in measured]
    stated = re.findall(r"\d+\.\d+", table_row(choosing, alternative)[-1])
    assert stated == [f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}" for ratio in ratios]
