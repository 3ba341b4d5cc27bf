"""Fixtures for the two implementations of a loss: tensor operations, and blocks of classes for large heads."""

import pytest

from spherenet.kernels import dispatch
from spherenet.kernels.classes import blockwise as blocks


@pytest.fixture(params=["plain", "blockwise"])
def path(request, monkeypatch):
    """Run a test with both implementations on small tensors; return the name of the implementation."""
    if request.param == "blockwise":
        use_blocks(monkeypatch)
    return request.param


@pytest.fixture
def blockwise(monkeypatch):
    """Run a test with blocks of classes only."""
    use_blocks(monkeypatch)


def use_blocks(monkeypatch):
    monkeypatch.setattr(dispatch, "LARGE_MAP", 0)
    # Several blocks, the last of which is not full.
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 16)
