"""Imports of the package against pyproject.toml: everything is declared, and extras are imported only after a check."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "spherenet"
DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "lazy_loader": "lazy-loader",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Names of distributions that differ from the names of their modules."""

CHECKED_PACKAGES = {"estimators"}
"""Packages whose __init__ requires their extra before it imports their modules."""


@pytest.fixture(scope="module")
def requirements():
    """{extra: set of distributions}, with "" for the base install."""
    spec = importlib.util.spec_from_file_location("licenses", ROOT / "tools" / "licenses.py")
    licenses = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(licenses)
    return {extra: set(packages) for extra, packages in licenses.requirements().items()}


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def modules_of(node):
    """Return the absolute modules that a statement or call imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return [node.module]
    is_call = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
    if is_call and node.args and isinstance(node.args[0], ast.Constant):
        return [node.args[0].value]
    return []


def imports_of(node, checks=frozenset()):
    """Yield (line, module, extras checked before in the same function) for the third-party imports of a tree."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            calls = [call for call in ast.walk(child) if isinstance(call, ast.Call)]
            required = {
                (call.lineno, *(argument.value for argument in call.args if isinstance(argument, ast.Constant)))
                for call in calls
                if ast.unparse(call.func).split(".")[-1] == "require_extra"
            }
            yield from imports_of(child, frozenset(required))
            continue
        for module in modules_of(child):
            root = "tensorboard" if module == "torch.utils.tensorboard" else module.partition(".")[0]
            if root not in sys.stdlib_module_names and root not in ("__future__", "spherenet"):
                yield child.lineno, root, {check[1:] for check in checks if check[0] <= child.lineno}
        yield from imports_of(child, checks)


def undeclared(source, requirements, package=""):
    """Yield a message per import that is neither a base dependency nor checked with `require_extra`."""
    for line, module, checks in imports_of(ast.parse(source)):
        distribution = DISTRIBUTIONS.get(module, module)
        if distribution in requirements[""] or (module == "triton" and package == "kernels"):
            continue  # triton is installed with torch, and the dispatcher looks for it before it imports its kernels
        extras = {extra for extra, packages in requirements.items() if extra and distribution in packages}
        if not extras:
            yield f"line {line}: {module} is not declared in pyproject.toml"
        elif package not in CHECKED_PACKAGES and not any((extra, module) in checks for extra in extras):
            yield f"line {line}: {module} is imported without require_extra({min(extras)!r}, {module!r}) before it"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_are_declared_and_checked(path, requirements):
    package = path.relative_to(SOURCE).parts[0]
    assert list(undeclared(path.read_text("utf-8"), requirements, package)) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import pandas", "pandas is not declared"),
        ("def f():\n    import pandas", "pandas is not declared"),
        ("import plotly", "imported without require_extra('report', 'plotly')"),
        ("def f():\n    from plotly.offline import x", "imported without require_extra"),
        ("def f():\n    import plotly\n    require_extra('report', 'plotly')", "imported without require_extra"),
        ("def f():\n    require_extra('plot', 'plotly')\n    import plotly", "imported without require_extra"),
        ("def f():\n    importlib.import_module('onnx')", "imported without require_extra"),
        ("def f():\n    from torch.utils.tensorboard import SummaryWriter", "tensorboard is imported without"),
        ("try:\n    import ray\nexcept ImportError:\n    ray = None", "ray is imported without"),
    ],
)
def test_undeclared_import_is_found(source, message, requirements):
    findings = list(undeclared(source, requirements))
    assert len(findings) == 1
    assert message in findings[0]


@pytest.mark.parametrize(
    "source",
    [
        "import torch, yaml, PIL.Image, os",
        "if TYPE_CHECKING:\n    import matplotlib",
        "def f():\n    require_extra('report', 'plotly')\n    from plotly.offline import x",
    ],
)
def test_declared_import_is_accepted(source, requirements):
    assert list(undeclared(source, requirements)) == []


@pytest.mark.parametrize("package", sorted(CHECKED_PACKAGES))
def test_checked_packages_require_their_extra_first(package, requirements):
    body = ast.parse((SOURCE / package / "__init__.py").read_text("utf-8")).body
    calls = [ast.unparse(node) for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    imported = {
        module for path in (SOURCE / package).glob("*.py") for _, module, _ in imports_of(ast.parse(path.read_text()))
    }
    extra_modules = {module for module in imported if DISTRIBUTIONS.get(module, module) not in requirements[""]}
    assert extra_modules
    assert {f"require_extra('sklearn', '{module}')" for module in extra_modules} == set(calls)
    lines = [ast.unparse(node) for node in body]
    first_own = next(index for index, line in enumerate(lines) if line.startswith(f"from spherenet.{package}"))
    assert all(lines.index(call) < first_own for call in calls)


BLOCK_EXTRAS = """
import sys
from importlib.machinery import PathFinder
BLOCKED = {blocked!r}
class WithoutExtras(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in BLOCKED else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
"""

BASE_RUN = """
from PIL import Image
from spherenet.cli import main
small = ["--model", "cnn-3", "--iterations", "2", "--batch-size", "8", "--train-images", "40"]
assert main(["train", *small, "--device", "cpu", "--output", folder + "/run"]) == 0
assert main(["evaluate", folder + "/run"]) == 0
Image.new("L", (28, 28)).save(folder + "/digit.png")
assert main(["predict", folder + "/digit.png", "--run", folder + "/run"]) == 0
assert not BLOCKED & set(sys.modules)
"""

MISSING = """
import json
import torch
import spherenet as sn
from spherenet.cli.output import TensorBoard
from spherenet.errors import MissingExtraError
from spherenet.experiments.runner import RayLauncher
from spherenet.export import export_onnx
from spherenet.report.claims import confidence_interval
from spherenet.report.page import write_page
from spherenet.report.confusion import draw_confusion
from spherenet.theory.drawing import new_figure, require_output
messages = []
for use in (
    lambda: write_page([], folder + "/page.html", "title"),
    lambda: confidence_interval([1.0, 2.0]),
    lambda: draw_confusion([[1]], ["a"], folder + "/confusion.png"),
    lambda: require_output(folder + "/figure.png"),
    lambda: new_figure(1, 1, width=1.0, height=1.0),
    lambda: export_onnx(sn.create_model("cnn-3", 10), folder + "/model.onnx", example=torch.zeros(1, 3, 32, 32)),
    lambda: TensorBoard(folder),
    lambda: RayLauncher("local"),
    lambda: __import__("spherenet.estimators"),
    lambda: sn.from_pretrained("user/name"),
):
    try:
        use()
    except MissingExtraError as error:
        messages.append(str(error))
print(json.dumps(messages))
"""


def run_without_extras(code, requirements, folder):
    """Run code in a process in which no package of an extra can be imported, and return its output."""
    modules = {distribution: module for module, distribution in DISTRIBUTIONS.items()}
    extras = set().union(*(packages for extra, packages in requirements.items() if extra)) - requirements[""]
    blocked = {modules.get(distribution, distribution) for distribution in extras} | {"mlxtend", "pandas"}
    script = BLOCK_EXTRAS.replace("{blocked!r}", repr(blocked)) + f"folder = {str(folder)!r}\n" + code
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_base_install_trains_evaluates_and_predicts(requirements, tmp_path):
    run_without_extras(BASE_RUN, requirements, tmp_path)


def test_missing_extra_gives_one_message_with_the_install_command(requirements, tmp_path):
    messages = json.loads(run_without_extras(MISSING, requirements, tmp_path).splitlines()[-1])
    assert messages == [
        f"{package} is not installed: pip install 'spherenet-torch[{extra}]'."
        for package, extra in (
            ("jinja2", "report"),
            ("scipy", "report"),
            ("matplotlib", "plot"),
            ("matplotlib", "plot"),
            ("matplotlib", "plot"),
            ("onnx", "onnx"),
            ("tensorboard", "tensorboard"),
            ("ray", "cluster"),
            ("sklearn", "sklearn"),
            ("huggingface_hub", "hub"),
        )
    ]
