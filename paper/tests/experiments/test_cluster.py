"""Grids on a Ray cluster, here a local one."""

import pytest

from command_line import in_other_processes, one_sentence
from spherenet.runs import RunDirectory

pytest.importorskip("ray")


def test_grid_runs_on_a_local_cluster(tmp_path):
    smoke = ["reproduce", "weight-decay", "--preset", "smoke", "--only", "cosine"]
    done = in_other_processes(*smoke, "--jobs", 2, "--output", tmp_path, "--ray", "local", timeout=300)
    assert done.returncode == 0, done.stderr
    runs = sorted((tmp_path / "smoke" / "weight-decay").glob("*/seed-0"))
    assert [run.parent.name for run in runs] == ["cosine_decay", "cosine_free"]
    assert all(RunDirectory.open(run).finished for run in runs)


def test_unreachable_cluster_exits_with_one_sentence(tmp_path):
    done = in_other_processes("reproduce", "weight-decay", "--preset", "smoke", "--output", tmp_path, "--ray", "auto")
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("spherenet")]
    assert len(lines) == 1
    assert "--ray must be the address of a running cluster, got 'auto'" in lines[0]
    assert one_sentence(lines[0])
