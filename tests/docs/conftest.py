"""The documentation site: that of `make test`, else built in a temporary folder with the command of `make docs`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE_URL = os.environ.get("SITE_URL", "https://example.org/spherenet/")


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    if "SPHERENET_SITE" in os.environ:
        return ROOT / os.environ["SPHERENET_SITE"]
    pytest.importorskip("zensical")
    copy = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", copy / "docs")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "src").symlink_to(ROOT / "src")
    (copy / "paper").symlink_to(ROOT / "paper")
    result = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--clean"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": "docs/extensions", "SITE_URL": SITE_URL},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return copy / "site"
