"""Write the tables of results in README.md from docs/results.md, which `spherenet report` writes.

python docs/readme.py
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
README, RESULTS = HERE.parent / "README.md", HERE / "results.md"
BEGIN, END = "<!-- written by docs/readme.py: begin -->", "<!-- written by docs/readme.py: end -->"

CLAIMS = (
    ("SphereNets converge faster than the CNN (", "SphereNets converge faster than the plain network (cnn-9)"),
    ("SphereNets end above the CNN (", "SphereNets end above the plain network (cnn-9)"),
    ("The accuracy of SphereNets fluctuates less than the CNN's (",),
    ("SphereNets with cosine W-Softmax end above the CNN with softmax (",),
    ("With a margin a SphereNet ends above the same network with softmax (",),
    ("SphereNets have a higher test accuracy during training, lagging",),
    ("SphereNets have a higher test accuracy during training, precise",),
    ("The orthogonality term improves accuracy",),
    ("SphereConv operators beat the plain convolution (Table 1, rows)",),
    ("SphereNets work without ReLU better than a plain network (",),
    ("SphereNets beat the plain network, cnn-3",),
    ("SphereNets end above the plain network (resnet-32)",),
    ("At small batches SphereNorm converges faster than BatchNorm (",),
    ("At small batches centered SphereNorm beats BatchNorm (",),
    ("A SphereNet of 45 plain layers trains more easily than a CNN (",),
    ("Margin losses (A-Softmax, GA-Softmax) beat softmax",),
    ("SphereNets with GA-Softmax beat the plain residual network",),
)
"""The main claims by the start of their text. The first of a row that the page has is shown."""

FIGURE = "![Test accuracy of a CNN and two SphereNets over iterations](docs/images/headline.svg)"
LARGE = """\
Grid "large": CIFAR-10, cnn-9 at half the paper's widths, 8,000 iterations, an eighth of the paper's (claims on
SphereNorm, BatchNorm statistics, no ReLU, 45 layers: 3,000 to 6,000, some at a quarter of the widths). Test accuracy in
%, mean ± standard deviation (seeds):"""
SMALL = """\
Claims of the paper and ours. Grid "small": 16 × 16 CIFAR-10 images, a quarter of the paper's widths, 300 to 2,000
iterations; accuracies are far below the paper's. Differences are in points of test accuracy, n seeds each."""

VERDICTS = {"Claims confirmed": "confirmed", "Claims refuted": "refuted", "Claims not decided": "not decided"}


def verdicts(page):
    """Return {claim: (verdict, difference, grid)} of the tables of claims; those of appendices have the grid "small".

    A claim at the start of the page precedes the same claim in an appendix.
    """
    found, verdict, grid = {}, None, "large" if "\n## headline" in page else "small"
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            grid = "small" if heading.startswith("Appendix") else grid
            verdict = next((name for title, name in VERDICTS.items() if heading.startswith(title)), None)
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if verdict is not None and line.startswith("| ") and len(cells) >= 3 and cells[0] != "claim":
            _, marker, difference = cells[1].rpartition("out of reach, ")
            found.setdefault(cells[0], ("out of reach" if marker else verdict, difference, grid))
    return found


def accuracies(page):
    """Return the table of accuracies of the main grid, or nothing if the page has none."""
    _, _, section = page.partition("\n## headline")
    return re.findall(r"^\|.*\|$", section.partition("\n## ")[0], re.MULTILINE)


def tables(page):
    """Return the accuracies of the main grid and the rows of the selected claims that the page has."""
    known = verdicts(page)
    lines = [FIGURE, "", LARGE, "", *accuracies(page), ""] if accuracies(page) else []
    lines += [SMALL, "", "| claim | our verdict | difference [95 % interval] | grid |", "|---|---|---|---|"]
    for starts in CLAIMS:
        name = next((claim for start in starts for claim in known if claim.startswith(start)), None)
        if name is None:
            continue
        verdict, difference, grid = known[name]
        difference = difference.partition("; requires ")[0]
        text = re.sub(r" \((?:Table|Figure|Section)[^()]*\)$", "", name)
        lines.append(f"| {text} | {verdict} | {difference} | {grid} |")
    return "\n".join(lines)


def expected():
    """Return README.md with the current tables."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("README.md must contain the two markers of the tables of results.")
    return f"{before}{BEGIN}\n{tables(RESULTS.read_text(encoding='utf-8'))}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(expected(), encoding="utf-8")
