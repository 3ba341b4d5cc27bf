"""The distribution: metadata, the content of sdist and wheel, and a wheel installed without a compiler.

By default the pure Python wheel is built, which takes seconds. `make test-wheel` tests the wheels of `make wheel`.
"""

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from setuptools import Distribution

import spherenet

ROOT = Path(__file__).parents[1]
FILES = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist and the pure wheel from a copy of the sources, and return the folder that contains them."""
    if os.environ.get("SPHERENET_WHEELS"):
        return ROOT / os.environ["SPHERENET_WHEELS"]
    folder = tmp_path_factory.mktemp("distribution")
    copy = folder / "sources"
    copy.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in ("src", "tests", "docs"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.dll", "*.egg-info")
        )
    environment = {**os.environ, "SPHERENET_PURE": "1"}
    for step in ("build_sdist", "build_wheel"):
        command = [sys.executable, "-c", BUILD, step, str(folder)]
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def wheels(built):
    found = sorted(built.glob("*.whl"))
    assert found
    return found


@pytest.fixture(scope="module")
def metadata(wheels):
    with zipfile.ZipFile(wheels[0]) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_metadata_is_complete(metadata):
    assert (metadata["Name"], metadata["Version"]) == ("spherenet-torch", spherenet.__version__)
    assert metadata["Author"] == "spherenet contributors"
    assert metadata["License-Expression"] == "MIT AND CC-BY-SA-3.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {url.split(",")[0] for url in metadata.get_all("Project-URL")} == {
        *("Homepage", "Repository", "Documentation", "Changelog", "Issues")
    }
    versions = {entry.rpartition(":: ")[2] for entry in metadata.get_all("Classifier") if ":: 3." in entry}
    assert versions == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    own = [entry for entry in metadata.get_all("Requires-Dist") if re.match(r"spherenet\b(?!-torch)", entry)]
    assert own == [], "extras must refer to spherenet-torch"


def test_links_of_the_description_are_absolute(metadata):
    description = metadata.get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", description, flags=re.DOTALL | re.MULTILINE))
    assert len(links) >= 5
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    files = [match[1] for link in links if (match := re.search(r"/(?:blob|raw)/main/([^#]+)", link))]
    assert files
    assert [name for name in files if not (ROOT / name).exists()] == []


def setup_script():
    """Return setup.py as a module."""
    spec = importlib.util.spec_from_file_location("setup_of_the_package", ROOT / "setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    return setup


def test_windows_library_is_built_with_clang_and_the_runtime_of_torch(tmp_path, monkeypatch):
    """Record the commands of a build for Windows; `make wheel-windows` runs them."""
    monkeypatch.setenv("SPHERENET_CROSS", "windows")
    setup = setup_script()
    calls = []

    def record(*arguments):
        calls.append(arguments)
        Path(arguments[-1]).write_bytes(b"")

    monkeypatch.setattr(setup, "run_zig", record)
    distribution = Distribution({"ext_modules": [setup.KERNELS]})
    command = setup.BuildKernels(distribution)
    command.build_lib, command.build_temp = str(tmp_path / "lib"), str(tmp_path / "temp")
    command.ensure_finalized()
    command.build_extension(setup.KERNELS)
    assert (tmp_path / "lib/spherenet/kernels/_native.dll").is_file()
    assert setup.PlatformWheel(distribution).get_tag() == ("py3", "none", "win_amd64")
    compiled = [call for call in calls if "-c" in call]
    assert len(compiled) == 7  # the library, and two files of kernels once per instruction set
    assert all("x86_64-windows-gnu" in call and "-fopenmp" in call and "-fPIC" not in call for call in compiled)
    assert calls[-1][-3].endswith("libiomp5md.lib")
    assert "__kmpc_fork_call" in (tmp_path / "temp/libiomp5md.def").read_text()


def test_code_of_the_description_is_unchanged(tmp_path, monkeypatch):
    setup = setup_script()
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text('[project.urls]\nRepository = "https://host/a"\n')
    Path("README.md").write_text("![x](p.svg) [y](d/e.md#f) [z](#g) [w](https://o)\n```python\na[0](b)\n```\n[v](q)\n")
    assert setup.long_description() == (
        "![x](https://host/a/raw/main/p.svg) [y](https://host/a/blob/main/d/e.md#f) [z](#g) [w](https://o)\n"
        "```python\na[0](b)\n```\n[v](https://host/a/blob/main/q)\n"
    )


def test_sdist_contains_sources_tests_and_documents(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"CHANGELOG.md", "docs/concepts.md", "tests/conftest.py", "src/spherenet/kernels/csrc/kernels.cpp"}
    assert expected <= names
    tests = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("*.py")}
    assert tests <= names
    assert [name for name in names if name.endswith((".pyc", ".so", ".dll"))] == []


def test_wheel_contains_all_package_data(wheels):
    tracked = {
        str(file.relative_to(ROOT / "src"))
        for file in (ROOT / "src" / "spherenet").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".so", ".dll")
    }
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
        assert tracked <= names
        libraries = [name for name in names if ".so" in name or name.endswith(".dll")]
        suffix = "dll" if "-win_" in wheel.name else "so"
        assert libraries == ([] if wheel.name.endswith("-any.whl") else [f"spherenet/kernels/_native.{suffix}"])


def test_installed_wheel_trains_predicts_and_measures_without_a_compiler(wheels, tmp_path):
    for wheel in wheels:
        folder = tmp_path / wheel.stem
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("[Ll]ib/**/site-packages")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        others = sorted({str(entry.locate_file("")) for entry in distributions()})
        (site / "others.pth").write_text("\n".join(others))
        python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "PYTHONPATH")}
        kernels = "pure" if wheel.name.endswith("-any.whl") else "native"
        done = subprocess.run(
            [python, ROOT / "tests" / "installed_package.py", kernels],
            cwd=tmp_path,
            env={**environment, "PATH": str(python.parent), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["version"] == spherenet.__version__


def test_pip_installs_the_wheel_by_name(built, tmp_path):
    options = ["--no-index", "--no-deps", "--find-links", built, "--target", tmp_path, "--quiet"]
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *options, "spherenet-torch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "spherenet" / "__init__.py").is_file()
    assert list((tmp_path / "bin").glob("spherenet*"))


def test_extras_of_the_pages_exist(metadata):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"(?:spherenet-torch|`)\[([a-z]+)\]", page.read_text("utf-8"))
    }
    assert {"report", "cluster", "hub", "all"} <= named
    assert named <= set(metadata.get_all("Provides-Extra"))


def test_release_is_refused_while_the_placeholder_stands(tmp_path):
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    steps = [
        step for job in workflow["jobs"].values() for step in job["steps"] if "placeholder" in step.get("name", "")
    ]
    assert [step["if"] for step in steps] == ["github.ref_type == 'tag'"]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for written, code in ((text, 1), (text.replace("OWNER", "somebody"), 0)):
        (tmp_path / "pyproject.toml").write_text(written, "utf-8")
        assert (
            subprocess.run(["bash", "-ec", steps[0]["run"]], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == code
        )


def test_placeholder_is_in_one_file_only():
    placed = re.compile(r"\bOWNER\b")
    suffixes = {".md", ".toml", ".yml", ".yaml", ".cff", ".py", ""}
    folders = (".github", ".ci", "docs", "src", "examples", "tools")
    files = [path for path in ROOT.iterdir() if path.is_file()]
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [path for path in files if not path.parent.name.endswith(".egg-info")]
    texts = {path: path.read_text("utf-8") for path in files if path.suffix in suffixes}
    found = {str(path.relative_to(ROOT)) for path, text in texts.items() if placed.search(text)}
    assert found == {"pyproject.toml"}
