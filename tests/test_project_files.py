"""Workflows, templates and the citation: valid by their published schemas, and consistent with the repository."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import spherenet

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "feature.yml")],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


def validate(schema, files):
    """Check files with a schema that is included in check-jsonschema: no network is used."""
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, "--default-filetype", "yaml"]
    return subprocess.run([*command, *files], capture_output=True, text=True, timeout=240)


def commands(workflow):
    """Return the shell commands of a workflow."""
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request):
    return yaml.safe_load(request.param.read_text("utf-8"))


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_are_valid(schema):
    assert SCHEMAS[schema]
    done = validate(schema, SCHEMAS[schema])
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrong_workflow_is_rejected(tmp_path):
    path = tmp_path / "wrong.yml"
    path.write_text("on: push\njobs:\n  a:\n    runs-on: ubuntu-24.04\n    steps:\n      - runs: make\n")
    assert validate("vendor.github-workflows", [path]).returncode == 1


def uses_lines(text):
    """Return the lines of a workflow that use an action."""
    return [line.strip().removeprefix("- ") for line in text.splitlines() if re.match(r"\s*(- )?uses:", line)]


def is_pinned(line):
    """Return whether a line uses an action by commit and names its version: tags can be moved, commits cannot."""
    return bool(re.fullmatch(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(path):
    lines = uses_lines(path.read_text("utf-8"))
    jobs = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
    assert [line.partition(" #")[0].removeprefix("uses: ") for line in lines] == [
        step["uses"] for job in jobs for step in job["steps"] if "uses" in step
    ]
    assert lines
    assert [line for line in lines if not is_pinned(line)] == []


@pytest.mark.parametrize("name", ["a/b@v4", "a/b@release/v1", f"a/b@{'0' * 40}", f"a/b@{'0' * 39} # v4.2.2"])
def test_action_that_can_change_is_found(name):
    (line,) = uses_lines(f"steps:\n      - uses: {name}\n")
    assert not is_pinned(line)


def test_an_action_has_one_version():
    lines = {line for path in WORKFLOWS for line in uses_lines(path.read_text("utf-8"))}
    assert len({line.partition("@")[0] for line in lines}) == len(lines)


def test_dependabot_updates_actions():
    updates = yaml.safe_load((GITHUB / "dependabot.yml").read_text("utf-8"))["updates"]
    assert {"package-ecosystem": "github-actions", "directory": "/"}.items() <= updates[0].items()


LOCKED = re.compile(r"pip install --require-hashes --requirement (build|release|requirements)\.lock")


def test_release_installs_from_lock_files():
    """What builds, checks and publishes a release has hashes; only the wheels under test are installed without."""
    release = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text("utf-8"))
    lines = [line.strip() for command in commands(release) for line in command.splitlines()]
    installs = [line for line in lines if "install" in line.split()]
    assert [line for line in installs if not LOCKED.fullmatch(line) and line != "pip install dist/*.whl"] == []
    assert sum(bool(LOCKED.fullmatch(line)) for line in installs) == 3
    assert [line for line in lines if "-m build" in line and "--no-isolation" not in line.split()] == []
    for name, job in release["jobs"].items():
        steps = [step.get("run", "") for step in job["steps"]]
        tools = [index for index, step in enumerate(steps) if re.search(r"-m build|cibuildwheel|twine", step)]
        installed = [index for index, step in enumerate(steps) if LOCKED.search(step)]
        assert not tools or min(installed, default=99) < min(tools), name


def test_build_of_wheels_installs_from_lock_file():
    settings = re.search(r"\[tool\.cibuildwheel\]\n(.*?)\n\[", (ROOT / "pyproject.toml").read_text("utf-8"), re.DOTALL)[
        1
    ]
    assert 'args = ["--no-isolation"]' in settings
    assert 'before-build = "pip install --require-hashes --requirement {project}/build.lock"' in settings
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert [line for line in makefile.splitlines() if "-m build" in line and "--no-isolation" not in line] == []


@pytest.mark.parametrize(
    ("workflow", "command"),
    [("docs", "make docs LOCKED=1"), ("docs", "make audit"), ("tests", "make test-all LOCKED=1")],
)
def test_pinned_jobs_install_from_lock_file(workflow, command):
    steps = commands(yaml.safe_load((GITHUB / "workflows" / f"{workflow}.yml").read_text("utf-8")))
    assert command in [step.strip() for step in steps]
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True
    )
    installs = [line for line in done.stdout.splitlines() if "pip install" in line]
    assert installs
    assert all("--require-hashes" in line or "--no-deps" in line for line in installs), installs


def locked(name):
    """Return {package: version} of a lock file, in which each package must have a hash."""
    text = (ROOT / f"{name}.lock").read_text("utf-8").replace("\\\n", "")
    rows = [line for line in text.splitlines() if not line.startswith("#")]
    assert [row for row in rows if not re.fullmatch(r"[a-z0-9-]+==[^ ]+ .*?( +--hash=sha256:[0-9a-f]{64})+", row)] == []
    return dict(row.split(" ")[0].split("==") for row in rows)


@pytest.mark.parametrize("name", ["build", "release"])
def test_lock_files_have_hashes_and_the_tools(name):
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8").partition("[dependency-groups]")[2].partition("\n[")[0]
    group = re.search(rf"^{name} = \[(.*?)\]$", pyproject, re.MULTILINE | re.DOTALL)[1]
    required = set(re.findall(r'"([a-z-]+)[>=]=', group))
    assert required
    assert required <= set(locked(name))


def test_development_is_locked_at_the_pinned_versions():
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()[1:]
    pinned = {re.sub("[_.]", "-", name.lower()): version for name, version in (line.split("==") for line in lines)}
    versions = {name: version.partition("+")[0] for name, version in locked("requirements").items()}
    assert {name: versions.get(name) for name in pinned} == pinned
    assert set(versions) - set(pinned) == {"setuptools"}  # torch requires it


def test_jobs_have_few_permissions_and_a_time_limit(workflow):
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert "timeout-minutes" in job, name
        assert set(job.get("permissions", {})) <= {"pages", "id-token"}, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_jobs_and_matrix_keys_exist(workflow):
    for name, job in workflow["jobs"].items():
        needed = job.get("needs", [])
        assert set([needed] if isinstance(needed, str) else needed) <= set(workflow["jobs"]), name
        matrix = job.get("strategy", {}).get("matrix", {})
        assert set(re.findall(r"matrix\.([\w-]+)", str(job))) <= set(matrix), name


def test_commands_name_targets_and_files_that_exist(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(commands(workflow))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert [
        name for name in re.findall(r"\b(?:tests|docs|src|tools)/[\w./-]+", text) if not (ROOT / name).exists()
    ] == []


def test_untrusted_text_is_not_in_commands(workflow):
    """Expressions in a command are replaced before the shell reads it, so a title or branch could run code."""
    assert [command for command in commands(workflow) if "${{" in command] == []


def test_matrix_covers_systems_pythons_and_versions_of_torch():
    (job,) = [job for job in yaml.safe_load(WORKFLOWS[-1].read_text("utf-8"))["jobs"].values() if "strategy" in job]
    matrix = job["strategy"]["matrix"]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert {*matrix["torch"], *(row["torch"] for row in matrix["include"])} == {"oldest", "latest", "nightly"}
    oldest = re.search(r'"torch>=([\d.]+)"', text)[1]
    assert f"torch=={oldest}.*" in WORKFLOWS[-1].read_text("utf-8")
    assert f"VERSION ?= {oldest}.0\n" in (ROOT / "Makefile").read_text("utf-8")


def test_folders_of_portable_tests_exist():
    names = (ROOT / "tests" / "portable.txt").read_text("utf-8").split()
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == spherenet.__version__
    paper = citation["preferred-citation"]
    assert (paper["title"], paper["year"], len(paper["authors"])) == ("Deep Hyperspherical Learning", 2017, 7)
