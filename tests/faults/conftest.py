"""Fixtures of the fault tests, and the table of results in docs/reliability.md."""

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from faults import table
from faults.children import OPTIONS, Children
from faults.scale import SOAK

HERE = Path(__file__).parent
REPORT = HERE.parents[1] / "docs" / "reliability.md"
_reports, _deselected = [], []


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


@pytest.fixture
def tried(request):
    """Return a function that counts a trial for the table: tried("kill -9 at a random moment")."""
    counts = Counter()

    def count(what, times=1):
        counts[what] += times

    yield count
    request.node.user_properties.append(("tried", dict(counts)))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == HERE:
            item.user_properties.append(("point", item.module.POINT))


def pytest_runtest_logreport(report):
    if Path(report.fspath).parent.name == HERE.name:
        _reports.append(report)


def pytest_deselected(items):
    _deselected.extend(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """In `make soak`, write the results of each complete file to the table of the page.

    The files can be run one by one, and an interrupted soak loses only the results of the current file.
    """
    result = yield
    config, file = item.config, item.path.name
    incomplete = _deselected or any("::" in argument for argument in config.args)
    alone = not hasattr(config, "workerinput")  # not a worker of pytest-xdist, which runs only some tests of a file
    if SOAK and alone and not incomplete and (nextitem is None or nextitem.path != item.path):
        table.write(REPORT, table.rows_of([report for report in _reports if Path(report.fspath).name == file]))
    return result
