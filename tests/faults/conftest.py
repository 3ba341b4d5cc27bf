"""What the fault tests share: children that may die, and the table of what was tried."""

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
KEPT = "spherenet/soak"
"""Where pytest's cache keeps the results of a soak, by file."""

_reports, _deselected = [], []


@pytest.fixture(scope="session")
def children(tmp_path_factory):
    """Command lines in processes of their own, cheap enough for hundreds of them."""
    made = Children(tmp_path_factory.mktemp("children"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Where runs are written: in memory, for a kill cannot tell and fsync takes half of the time; in a soak on disk."""
    if SOAK or not os.access("/dev/shm", os.W_OK):
        yield tmp_path_factory.mktemp("runs")
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def folder(place):
    """A folder of a test's own for its runs."""
    return Path(tempfile.mkdtemp(dir=place))


@pytest.fixture(scope="session")
def whole(children, place):
    """Finished runs that nothing happened to, by their further options: whole("--accumulate", "2")."""
    made = {}

    def run(*options):
        if options not in made:
            made[options] = Path(tempfile.mkdtemp(dir=place)) / "run"
            done = children.run("train", *OPTIONS, *options, "--output", made[options])
            assert done.code == 0, done.said
        return made[options]

    return run


@pytest.fixture(scope="session")
def interrupted(children, place):
    """Copies of a run that was killed when it had made so many steps: interrupted(10, folder / "run")."""
    made = {}

    def copy(step, path):
        if step not in made:
            made[step] = Path(tempfile.mkdtemp(dir=place)) / "run"
            killed = children.run("train", *OPTIONS, "--output", made[step], die_at_step={"step": step})
            assert killed.code == -9, killed.said
        shutil.copytree(made[step], path)
        return path

    return copy


@pytest.fixture
def tried(request):
    """Count what a test tries, for the table: tried("kill -9 at a random moment") each time."""
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
    """In a soak, keep the results of each file that ran to its end, and write the table of all that are kept.

    So the files may run one by one, and a soak that is cut off loses only the file it was at.
    """
    result = yield
    config, file = item.config, item.path.name
    in_parts = _deselected or any("::" in argument for argument in config.args)
    alone = not hasattr(config, "workerinput")  # not one of the workers of pytest-xdist, who see parts of a file
    if SOAK and alone and not in_parts and (nextitem is None or nextitem.path != item.path):
        found = table.results_of([report for report in _reports if Path(report.fspath).name == file])
        kept = {**config.cache.get(KEPT, {}), **found}
        kept = {name: result for name, result in kept.items() if (HERE / name).exists()}
        config.cache.set(KEPT, kept)
        table.write(REPORT, kept)
    return result
