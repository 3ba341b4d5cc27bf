"""Write the table of results in README.md from docs/results.md, which `spherenet report` writes.

python docs/readme.py
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
README, RESULTS = HERE.parent / "README.md", HERE / "results.md"
BEGIN, END = "<!-- written by docs/readme.py: begin -->", "<!-- written by docs/readme.py: end -->"

CLAIMS = (
    "SphereNets converge faster than the plain network (cnn-9)",
    "SphereNets end above the plain network (cnn-9)",
    "The orthogonality term improves accuracy",
    "SphereConv operators beat the plain convolution (Table 1, rows)",
    "SphereNets beat the plain network, cnn-3",
    "At small batches SphereNorm converges faster than BatchNorm",
    "Margin losses (A-Softmax, GA-Softmax) beat softmax",
    "SphereNets with GA-Softmax beat the plain residual network",
)
"""The paper's main claims, by the start of their text; confirmed, refuted and open ones."""

LONG_CLAIMS = (
    "SphereNets converge faster than the CNN (",
    "SphereNets end above the CNN (",
    "The accuracy of SphereNets fluctuates less than the CNN's (",
    "SphereNets with cosine W-Softmax end above the CNN with softmax (",
    "With a margin a SphereNet ends above the same network with softmax (",
    "SphereNets have a higher test accuracy during training, lagging",
    "SphereNets have a higher test accuracy during training, precise",
    "SphereNets work without ReLU better than a plain network (",
    "At small batches SphereNorm converges faster than BatchNorm (",
    "At small batches centered SphereNorm beats BatchNorm (",
    "A SphereNet of 45 plain layers trains more easily than a CNN (",
)
"""The claims of the long runs that replace those above when the page has long runs."""

SMALL = """\
Small networks on two CPU cores (16 × 16 CIFAR-10 images, a quarter of the paper's widths, 300 to 2,000 iterations), so
accuracies are far below the paper's; differences are in points of test accuracy, n seeds each."""
LONG = """\
CIFAR-10 on two CPU cores, at most an eighth of the paper's 64,000 iterations at half or a quarter of its widths, in
bfloat16; differences are in points of test accuracy, n seeds each."""

VERDICTS = {"Claims confirmed": "confirmed", "Claims refuted": "refuted", "Claims not decided": "not decided"}


def verdicts(page):
    """Return {claim: (verdict, difference)} of the tables of claims; those at the start precede those of appendices."""
    found, verdict = {}, None
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            verdict = next((name for title, name in VERDICTS.items() if heading.startswith(title)), None)
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if verdict is not None and line.startswith("| ") and len(cells) >= 3 and cells[0] != "claim":
            _, marker, difference = cells[1].rpartition("out of reach, ")
            found.setdefault(cells[0], ("out of reach" if marker else verdict, difference))
    return found


def table(page):
    """Return the setting of the runs and the rows of the selected claims.

    Raises KeyError for a claim that the page does not have.
    """
    known = verdicts(page)
    is_long = any(claim.startswith(LONG_CLAIMS[0]) for claim in known)
    lines = [LONG if is_long else SMALL, ""]
    lines += ["| claim of the paper | our verdict | difference [95 % interval] |", "|---|---|---|"]
    for start in LONG_CLAIMS if is_long else CLAIMS:
        name = next((claim for claim in known if claim.startswith(start)), None)
        if name is None:
            raise KeyError(f"docs/results.md has no claim that starts with {start!r}.")
        verdict, difference = known[name]
        difference = difference.partition("; requires ")[0]
        text = re.sub(r" \((?:Table|Figure|Section)[^()]*\)$", "", name)
        lines.append(f"| {text} | {verdict} | {difference} |")
    return "\n".join(lines)


def expected():
    """Return README.md with the current table."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError("README.md must contain the two markers of the table of results.")
    return f"{before}{BEGIN}\n{table(RESULTS.read_text(encoding='utf-8'))}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(expected(), encoding="utf-8")
