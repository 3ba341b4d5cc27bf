"""Fixtures of the tests of both packages."""

import os
import shutil

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def browser():
    """A headless chromium, which must be there in CI."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None and not os.environ.get("CI"):
        pytest.skip("chromium is not installed: make browser")
    playwright = pytest.importorskip("playwright.sync_api")
    switches = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
                "--disable-component-update", "--disable-sync"]  # fmt: skip
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=switches)
        yield launched
        launched.close()
