"""The page of licenses names every package that is required, with its bound and version; bounds exclude known holes."""

import importlib.util

import pytest

from docs.pages import DOCS

FIXED = {"filelock": "3.20.1", "jinja2": "3.1.6", "pillow": "12.2", "onnx": "1.21", "ray": "2.52"}
"""The newest versions that published advisories known to us name as fixed."""


def numbers(version):
    return tuple(map(int, version.split(".")))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("licenses", DOCS / "licenses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_of_the_packages_that_are_required(script):
    rows = [line.split("|")[1:4] for line in (DOCS / "licenses.md").read_text(encoding="utf-8").splitlines()]
    told = {tuple(cell.strip() for cell in row) for row in rows if len(row) == 3}
    pinned = script.pinned()
    assert {(name, bound, pinned[name.lower()]) for name, bound in script.required().items()} <= told
    assert script.page().startswith((DOCS / "licenses.md").read_text(encoding="utf-8").partition("| torch")[0])


def test_lower_bounds_exclude_known_vulnerabilities(script):
    bounds = script.required()
    assert {name for name, first in FIXED.items() if numbers(bounds[name]) < numbers(first)} == set()
