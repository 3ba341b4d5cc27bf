"""A plugin of pytest that records what tests tried, in the table of results of docs/reliability.md.

Tests are recorded if their module has a POINT, the number of a guarantee.
"""

from collections import Counter
from pathlib import Path

import pytest

from faults import table
from faults.scale import SOAK

REPORT = Path(__file__).parents[2] / "docs" / "reliability.md"
_reports, _deselected = {}, []


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
        point = getattr(item.module, "POINT", None)
        if point is not None and ("point", point) not in item.user_properties:
            item.user_properties.append(("point", point))


def pytest_runtest_logreport(report):
    if "point" in dict(report.user_properties):
        _reports[report.nodeid, report.when] = report


def pytest_deselected(items):
    _deselected.extend(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """In `make soak`, write the results of each complete file to the table of the page.

    The files can be run one by one, and an interrupted soak loses only the results of the current file.
    """
    result = yield
    if not hasattr(item.module, "POINT"):
        return result
    config, file = item.config, item.nodeid.partition("::")[0]
    incomplete = _deselected or any("::" in argument for argument in config.args)
    alone = not hasattr(config, "workerinput")  # not a worker of pytest-xdist, which runs only some tests of a file
    if SOAK and alone and not incomplete and (nextitem is None or nextitem.path != item.path):
        own = [report for (test, _), report in _reports.items() if test.partition("::")[0] == file]
        table.write(REPORT, table.rows_of(own))
    return result
