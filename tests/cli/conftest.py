"""A short run that many tests of the command line read or change."""

import shutil

import pytest

from command_line import TINY, spherenet


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    run = tmp_path_factory.mktemp("trained") / "run"
    assert spherenet("train", *TINY, "--train-images", 200, "--output", run) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")
