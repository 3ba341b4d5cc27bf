"""Fixtures of the fault tests."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from faults.children import OPTIONS, Children
from faults.scale import SOAK


@pytest.fixture(scope="session")
def children(tmp_path_factory):
    """Return the starter of child processes, which is fast enough for hundreds of them."""
    started = Children(tmp_path_factory.mktemp("children"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Return the folder of all runs: on disk in `make soak`, else in memory, which halves the time."""
    if SOAK or not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("runs")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def folder(place):
    """Return a new folder for the runs of a test."""
    return Path(tempfile.mkdtemp(dir=place))


@pytest.fixture(scope="session")
def uninterrupted(children, place):
    """Return a function for the folder of an uninterrupted run: uninterrupted("--accumulate", "2")."""
    paths = {}

    def run(*options):
        if options not in paths:
            paths[options] = Path(tempfile.mkdtemp(dir=place)) / "run"
            done = children.run("train", *OPTIONS, *options, "--output", paths[options])
            assert done.code == 0, done.output
        return paths[options]

    return run


@pytest.fixture(scope="session")
def interrupted(children, place):
    """Return a function that copies a run killed at a step: interrupted(10, folder / "run")."""
    originals = {}

    def copy(step, path):
        if step not in originals:
            originals[step] = Path(tempfile.mkdtemp(dir=place)) / "run"
            killed = children.run("train", *OPTIONS, "--output", originals[step], die_at_step={"step": step})
            assert killed.code == -9, killed.output
        shutil.copytree(originals[step], path)
        return path

    return copy
