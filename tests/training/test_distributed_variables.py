"""Variables of torchrun with wrong values: one sentence, before anything waits for other processes."""

import pytest

from spherenet.errors import RunError
from spherenet.training.distributed import Processes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WORLD_SIZE", "two"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "9" * 30),
        ("RANK", "x"),
        ("RANK", "-1"),
        ("RANK", "2"),
        ("LOCAL_RANK", ""),
    ],
)
def test_wrong_number_is_rejected(monkeypatch, name, value):
    for variable, default in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", name: value}.items():
        monkeypatch.setenv(variable, default)
    with pytest.raises(ValueError, match=f"the variable {name} must be an integer"), Processes.joined("cpu", 1):
        pass


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", "99999"), ("MASTER_PORT", "x"), ("MASTER_ADDR", None)])
def test_wrong_address_is_rejected(monkeypatch, name, value):
    variables = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for variable, default in {**variables, name: value}.items():
        monkeypatch.delenv(variable, raising=False) if default is None else monkeypatch.setenv(variable, default)
    with pytest.raises(RunError, match="all 2 processes must join within 5 s, but did not"), Processes.joined("cpu", 5):
        pass
