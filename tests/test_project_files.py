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


def test_actions_are_pinned_by_major_version(workflow):
    used = [step["uses"] for job in workflow["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", name)] == []


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
