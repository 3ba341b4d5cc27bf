"""Both ways a loss can be computed: whole-tensor operations, and the blockwise kernels of huge heads."""

import pytest

from spherenet.kernels import blocks, dispatch


@pytest.fixture(params=["plain", "blockwise"])
def path(request, monkeypatch):
    """Run a test on both paths, on small tensors; yields the path's name."""
    if request.param == "blockwise":
        use_blocks(monkeypatch)
    return request.param


@pytest.fixture
def blockwise(monkeypatch):
    """Run a test on the blockwise path alone."""
    use_blocks(monkeypatch)


def use_blocks(monkeypatch):
    monkeypatch.setattr(dispatch, "LARGE_MAP", 0)
    # Small enough for several blocks, and a last one that is not full.
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", 16)
