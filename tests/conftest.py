"""What every test shares: a fixed seed, and one torch thread a worker when several workers run."""

import os

import pytest
import torch


def pytest_configure(config):
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
