"""Fixtures of the tests of both packages."""

import gc
import os
import shutil

import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def process_group():
    """A process group of this process alone, which is destroyed after the modules that refer to it.

    If DDP is the last to refer to a group, torch waits for the threads of gloo while it holds Python's lock.
    """
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()
    torch.distributed.destroy_process_group()


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


@pytest.fixture
def visit(browser):
    """Return a function that opens a page; at the end, assert that there was no error and no request to other hosts."""
    contexts, problems = [], []

    def open_page(address, width=1280, scheme="light", *, errors=("error", "warning")):
        own = address.rpartition("/")[0]
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=address.startswith("file:")
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: problems.append(message.text) if message.type in errors else None)
        page.on("pageerror", lambda error: problems.append(str(error)))

        def requested(request):
            if not request.url.startswith((own, "data:", "blob:", "about:")):
                problems.append(f"another host: {request.url}")

        def failed(request):
            if request.failure != "net::ERR_ABORTED":  # the page was left before its icon was loaded
                problems.append(f"{request.url}: {request.failure}")

        page.on("request", requested)
        page.on("requestfailed", failed)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
