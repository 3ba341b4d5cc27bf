"""A missing package ends what needs it with the command that installs it."""

import sys

import pytest

from spherenet.errors import MissingExtraError
from spherenet_paper.experiments.runner import RayLauncher
from spherenet_paper.report.claims import confidence_interval
from spherenet_paper.theory.drawing import new_figure, require_output


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("ray", "cluster", lambda: RayLauncher("local")),
        ("scipy", "report", lambda: confidence_interval([1.0, 2.0])),
        ("matplotlib", "plot", lambda: require_output("figure.png")),
        ("matplotlib", "plot", lambda: new_figure(1, 1, width=1.0, height=1.0)),
    ],
)
def test_missing_package_is_one_message_with_the_install_command(package, extra, use, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"{package} is not installed: pip install 'spherenet-torch.{extra}.'"):
        use()
