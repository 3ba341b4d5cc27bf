"""What the fuzz tests of the study try is recorded in docs/reliability.md, as that of the fault tests."""

from faults.recording import (
    pytest_collection_modifyitems,
    pytest_deselected,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    tried,
)

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_deselected",
    "pytest_runtest_logreport",
    "pytest_runtest_protocol",
    "tried",
]
