"""Write LICENSES.md: the shipped files and required packages, with versions and licenses.

python tools/licenses.py            # reads the installed packages, which must be those of constraints.txt
"""

import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "LICENSES.md"

HEAD = """\
# Licenses

The code of spherenet has the MIT license (`LICENSE`). `tools/licenses.py` writes this page from the packages with which
the project is developed and tested.

## Shipped files

| files | origin | license |
|---|---|---|
| code, documentation, figures | this project; figures are drawn by the code in the repository | MIT |
| `docs/images/phase.png` | a portrait of Grace Hopper by the US Navy, from matplotlib's sample data | public domain |
| `docs/images/features.png` | features of MNIST digits, computed by `spherenet theory features` | MIT |
| `spherenet/data/mnist5k.png` | 5,000 digits of MNIST (LeCun, Cortes, Burges); `mnist5k.license.txt` | CC BY-SA 3.0 |
| model `cifar10-cnn-9-sigmoid` | trained for this project on CIFAR-10 (Krizhevsky, 2009) | MIT |

CIFAR-10 and CIFAR-100 are downloaded on request and not shipped. Their authors state no license and request a citation
of *Learning Multiple Layers of Features from Tiny Images* (2009).

## Versions

Lower bounds exclude versions with published vulnerabilities:

| package | advisories | fixed in |
|---|---|---|
| filelock | CVE-2025-68146, CVE-2026-22701: symbolic links in place of lock files | 3.20.3 |
| pillow | CVE-2026-112403 (JPEG), CVE-2026-112395 (TIFF), CVE-2026-96643 (Exif) and others | 13.0 |
| jinja2 | CVE-2025-27516: escape from the sandbox | 3.1.6 |
| onnx | CVE-2026-27489, CVE-2026-34445 to 34447: external data, links | 1.21 |
| ray | CVE-2025-62593, CVE-2026-27482 (dashboard), CVE-2026-41486, CVE-2026-57516 (Ray Data) | 2.56 |
| setuptools (to build) | CVE-2025-47273: path traversal | 78.1.1 |

Pillow 13 requires Python 3.11. For Python 3.10, whose support ended in October 2026, the last version is 12.3. It has
the vulnerabilities of that row: do not read images of strangers with it. Open advisories concern files that this
package does not read: those of torch (CVE-2026-4538 and others) programs and pickles, that of onnx (CVE-2026-44512)
models of earlier opsets. `torch.load` is not called, and `torch.export.load` only for a program that was just written.

The bounds were compared in November 2026 with stored copies of PyPI's advisory database, the CVE list and the release
notes of pillow, by searching for each package. No advisory was found for the bounds of the other packages in the table
below. YAML is read with `safe_load` only, and images are decoded only in the formats that the package names. Packages
that these require are pinned, but not bounded.

`constraints.txt` pins the version of every package for development. It has no hashes, because pip then rejects an
editable install. `requirements.lock` has the same versions with the SHA-256 of each file, for Linux x86-64, Python 3.11
and the CPU build of torch; `tools/lock.py` writes it:

```bash
pip install --require-hashes --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
```

## Required packages

The base install requires the first nine packages; the extra that requires each of the others is in the last column.

| package | lower bound | tested with | license | extra |
|---|---|---|---|---|
"""


def requirements():
    """Return {extra: {package: lower bound}} of pyproject.toml for users, with "" for the base install."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = {"": re.search(r"^dependencies = (\[.*?^\])", text, re.MULTILINE | re.DOTALL)[1]}
    extras = re.search(r"^\[project.optional-dependencies\](.*?)^all = ", text, re.MULTILINE | re.DOTALL)[1]
    lists.update(re.findall(r"^(\w+) = (\[.*?\])$", extras, re.MULTILINE | re.DOTALL))
    return {extra: dict(re.findall(r'"([A-Za-z0-9_-]+)>=([0-9.]+)[";]', packages)) for extra, packages in lists.items()}


def required():
    """Return {package: lower bound} of the base install and of all extras for users."""
    return {name: bound for packages in requirements().values() for name, bound in packages.items()}


def pinned():
    """Return {package: version} of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {name.lower().replace("_", "-"): version.split()[0] for name, version in pairs}


def license_of(name):
    """Return the license that the metadata of a package state."""
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
    """Return the page as Markdown."""
    versions = pinned()
    rows = []
    for name, bound in required().items():
        extras = ", ".join(f"`{extra}`" for extra, packages in requirements().items() if extra and name in packages)
        version, terms = versions.get(name.lower(), "–"), license_of(name).replace("|", "/")
        rows.append(f"| {name} | {bound} | {version} | {terms} | {extras} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
