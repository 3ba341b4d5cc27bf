"""LICENSES.md lists every required package with its bound and version; bounds exclude known vulnerabilities."""

import importlib.util
import re

import pytest

from docs.pages import ROOT

FIXED = {"filelock": "3.20.3", "jinja2": "3.1.6", "pillow": "13.0", "onnx": "1.21", "ray": "2.56"}
"""The newest versions that published advisories name as fixed."""


def parse_version(text):
    return tuple(map(int, text.split(".")))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("licenses", ROOT / "tools" / "licenses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_lists_every_required_package(script):
    rows = [line.split("|")[1:4] for line in (ROOT / "LICENSES.md").read_text(encoding="utf-8").splitlines()]
    listed = {tuple(cell.strip() for cell in row) for row in rows if len(row) == 3}
    pinned = script.pinned()
    assert {(name, bound, pinned[name.lower()]) for name, bound in script.required().items()} <= listed
    assert script.page().startswith((ROOT / "LICENSES.md").read_text(encoding="utf-8").partition("| torch")[0])


def test_base_install_has_nine_packages(script):
    assert list(script.requirements()[""]) == [
        "torch", "numpy", "safetensors", "lazy-loader", "rich", "jsonargparse", "pyyaml", "filelock", "pillow"
    ]  # fmt: skip


def test_lower_bounds_exclude_known_vulnerabilities(script):
    bounds = script.required()
    assert {name for name, first in FIXED.items() if parse_version(bounds[name]) < parse_version(first)} == set()


def test_build_excludes_vulnerable_setuptools(script):
    text = (script.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bound = re.search(r'^requires = \[\s+"setuptools>=([0-9.]+)",', text, re.MULTILINE)[1]
    assert parse_version(bound) >= (78, 1, 1)


def test_lock_has_the_pinned_versions_with_hashes(script):
    lines = (script.ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()[1:]
    matches = [re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(matches)
    locked = {match[1]: match[2].partition("+")[0] for match in matches}
    pinned = script.pinned()
    assert {name: version for name, version in locked.items() if name in pinned} == pinned
    assert set(locked) - set(pinned) == {"setuptools"}  # required by torch, but not pinned for development


def test_shipped_digits_are_listed_with_their_license(script):
    row = next(line for line in script.HEAD.splitlines() if "mnist5k.png" in line)
    assert "CC BY-SA 3.0" in row
    license_text = (script.ROOT / "src" / "spherenet" / "data" / "mnist5k.license.txt").read_text(encoding="utf-8")
    assert "CC BY-SA 3.0" in license_text
    assert "license.txt" in (script.ROOT / "pyproject.toml").read_text(encoding="utf-8")
