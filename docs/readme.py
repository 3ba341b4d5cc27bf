"""Write the numbers of README.md: from docs/results.md, which `make results` writes, and from the table of light.

python docs/readme.py
"""

import re
import sys
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent
README, RESULTS = HERE.parent / "README.md", HERE / "results.md"

HERO = "headline"
"""The figure at the top: "headline", or "light" when the runs under uneven light are complete."""

VERDICTS = {"Claims confirmed": "confirmed", "Claims refuted": "refuted", "Claims not decided": "not decided"}
HOLDS = {
    "SphereNets converge faster than the CNN (": "SphereNets learn faster than the CNN",
    "At small batches centered SphereNorm beats BatchNorm (": "At batches of 2 to 32 centered ones beat BatchNorm",
    "At small batches centered SphereNorm beats GroupNorm (": "At batches of 2 to 32 centered ones beat GroupNorm",
    "The accuracy of SphereNets fluctuates less than the CNN's (": "Their accuracy fluctuates less than the CNN's",
}
"""Claims of the long runs by the start of their text, with the words of README.md."""


def verdicts(page):
    """Return {claim: (verdict, difference)} of the tables of claims; the first of two equal claims counts."""
    claims, verdict = {}, None
    for line in page.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
            verdict = next((name for title, name in VERDICTS.items() if heading.startswith(title)), None)
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if verdict is not None and line.startswith("| ") and len(cells) >= 3 and cells[0] != "claim":
            _, marker, difference = cells[1].rpartition("out of reach, ")
            claims.setdefault(cells[0], ("out of reach" if marker else verdict, difference.partition("; requires ")[0]))
    return claims


def find(claims, start):
    """Return verdict and difference of the claim whose text has this start."""
    return next(value for text, value in claims.items() if text.startswith(start))


def short(difference):
    """Return "+1.71 [+0.87, +2.55] points, n = 3" with minus signs, without words on the quantity."""
    return re.sub(r" points[^,]*", " points", difference).replace("-", "−")


def light():
    """Return the module that reads and draws the runs under uneven light."""
    sys.path.insert(0, str(HERE / "images"))
    import light

    return light


def hero(name):
    """Return the figure with its caption."""
    if name == "headline":
        return (
            "![Test accuracy of a CNN and two SphereNets over iterations](docs/images/headline.svg)\n\n"
            "*CIFAR-10, nine layers at half the paper's widths, 8,000 iterations: means and ranges of three seeds.*"
        )
    measured = light().read()
    return (
        "![Images under uneven light, and the test accuracies of two CNNs and a SphereNet](docs/images/light.svg)\n\n"
        f"*CIFAR-10 under uneven light that no network was trained with: means over three strengths and n = "
        f"{len(measured.seeds)} seeds, error bars ± one standard deviation.*"
    )


def facts(name, claims):
    """Return the sentences on light and small batches."""
    lines = []
    if name == "light":
        measured = light().read()
        own, plain, standardized = (
            f"{fmean(measured.uneven(arm)):.1f} %" for arm in ("patch", "cnn", "cnn-standardized")
        )
        lines.append(
            f"- **Robust to uneven light.** The centered SphereNet keeps {own}, the CNN {plain}, the CNN on\n"
            f"  standardized images {standardized} (means over five kinds of light, n = {len(measured.seeds)}):\n"
            "  [Findings](docs/findings.md#light)."
        )
    difference = short(find(claims, "At small batches centered SphereNorm beats BatchNorm (")[1])
    lines.append(
        "- **Trains without BatchNorm.** At batches of 2 to 32 centered SphereNets end above the CNN with\n"
        f"  BatchNorm: {difference} ([Findings](docs/findings.md#small-batches))."
    )
    return "\n".join(lines)


def holds(claims):
    """Return the table of claims that hold; one that is not confirmed any more stops the script."""
    lines = ["| what holds | difference [95 % interval] |", "|---|---|"]
    for start, words in HOLDS.items():
        verdict, difference = find(claims, start)
        if verdict != "confirmed":
            raise SystemExit(f"HOLDS names a claim that is {verdict}: {start}")
        lines.append(f"| {words} | {short(difference)} |")
    return "\n".join(lines)


def fails(claims):
    """Return the lines on what the runs do not reproduce."""
    without_relu = short(find(claims, "SphereNets work without ReLU better than a plain network (")[1])
    deep = short(find(claims, "A SphereNet of 45 plain layers trains more easily than a CNN (")[1])
    margin = short(find(claims, "Margin losses (A-Softmax, GA-Softmax) beat softmax")[1])
    return (
        f"- 18 layers without ReLU: the paper gains 5 points, we see {without_relu}.\n"
        f"- 45 plain layers: the paper gains 2 points, we see {deep}; all networks stay below 45 %.\n"
        f"- Margins of the paper's form: about +1 point in the paper, {margin} in our short runs."
    )


def put(text, name, content):
    """Return a page with this content between the markers of a name."""
    before, begin, rest = text.partition(f"<!-- docs/readme.py: {name} -->\n")
    _, end, after = rest.partition("\n<!-- end -->")
    if not begin or not end:
        raise ValueError(f"README.md must contain the markers of {name!r}.")
    return f"{before}{begin}{content}{end}{after}"


def expected(name=HERO):
    """Return README.md with current numbers."""
    claims = verdicts(RESULTS.read_text(encoding="utf-8"))
    text = README.read_text(encoding="utf-8")
    parts = {"hero": hero(name), "facts": facts(name, claims), "holds": holds(claims), "fails": fails(claims)}
    for part, content in parts.items():
        text = put(text, part, content)
    return text


if __name__ == "__main__":
    README.write_text(expected(), encoding="utf-8")
