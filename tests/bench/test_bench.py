"""Benchmark functions: alternating rounds, paired ratios, peak memory and the authors' formula."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import spherenet as sn
from command_line import spherenet
from spherenet.bench.networks import (
    Spread,
    compare,
    contestants,
    paired_ratios,
    peak_bytes,
    take_turns,
    with_authors_formula,
)
from spherenet.bench.suite import WORKLOADS, _first_step, run_suite
from spherenet.layers import SphereConv2d


def test_take_turns_rotates_the_order():
    order = []
    runs = {name: (lambda name=name: order.append(name)) for name in "abc"}
    rounds = list(take_turns(runs, rounds=3, warmup=1))
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert all(list(seconds) == ["a", "b", "c"] for seconds in rounds)


def test_paired_ratios_compare_the_same_round():
    rounds = [{"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 20.0}, {"a": 5.0, "b": 10.0}]
    assert paired_ratios(rounds, "b", "a") == Spread(2.0, 2.0, 2.0, 3)


def test_peak_bytes_counts_live_tensors_only():
    def run():
        first = torch.empty(1000, dtype=torch.float32)
        del first
        second, third = torch.empty(1000), torch.empty(500)
        return second, third

    assert peak_bytes(run) == 6000


@pytest.mark.parametrize("operator", ["cosine", "linear", "sigmoid", "learnable"])
def test_authors_formula_gives_the_same_output(operator):
    model = sn.create_model("cnn-3", operator=operator, widths=(4, 6, 8)).eval()
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(with_authors_formula(model)(images), model(images), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_compare_measures_every_network(mode):
    networks = contestants(["cosine"], sphere_norm=True, authors=True, engine=True)
    rows = compare("cnn-3", networks, mode=mode, batch_size=2, rounds=2, warmup=1, widths=(4, 6, 8))
    names = ["cnn", "cnn, winograd", "cosine", "cosine, no BatchNorm", "cosine, authors' formula"]
    assert [row.name for row in rows] == names
    assert rows[1].engine_ratio.median == 1
    alone = compare("cnn-3", networks[:1], mode=mode, batch_size=2, rounds=2, warmup=1, widths=(4, 6, 8))
    assert alone[0].engine_ratio is None
    assert rows[0].time_ratio.median == 1
    assert rows[0].memory_ratio == 1
    assert all(row.milliseconds.median > 0 and row.peak_megabytes > 0 for row in rows)


def test_command_measures_in_half_precision(capsys, monkeypatch):
    seen, forward = set(), SphereConv2d.forward

    def watch(layer, x):
        seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)
        return forward(layer, x)

    monkeypatch.setattr(SphereConv2d, "forward", watch)
    small = ["--network", "cnn-3", "--widths", "4", "6", "8", "--batch-size", "2", "--operators", "cosine"]
    assert spherenet("bench", *small, "--rounds", "2", "--warmup", "1", "--precision", "bfloat16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["precision"] == "bfloat16"
    assert seen == {torch.bfloat16}
    assert spherenet("bench", "--precision", "half") == 2
    assert "--precision must be float32 or bfloat16 or float16, got 'half'" in capsys.readouterr().err


def test_command_prints_no_messages_of_the_profiler():
    small = ["--network", "cnn-3", "--widths", "4", "6", "8", "--batch-size", "2", "--operators", "cosine"]
    command = [sys.executable, "-m", "spherenet", "bench", *small, "--rounds", "2", "--mode", "inference", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["rounds"] == 2
    assert ended.stderr.strip() == ""


def test_suite_contains_the_documented_workloads(monkeypatch):
    # Two processes for two networks instead of five for each, because every process imports torch.
    steps = {name: _first_step(name, processes=2) for name in ("none", "learnable")}
    monkeypatch.setattr("spherenet.bench.suite._first_step", lambda name: steps.get(name, {}))
    small = [
        replace(workload, widths=(4, 4, 4), batch_size=2, size=8, repeats=1, precision="float32")
        for workload in (WORKLOADS[0], WORKLOADS[4])
    ]
    results = run_suite(2, lambda rounds, total, name: rounds, small)
    assert [entry["workload"] for entry in results["workloads"]] == [workload.name for workload in small]
    for entry in results["workloads"]:
        assert [row["name"] for row in entry["rows"]] == ["cnn", "cnn, winograd", *_in_order(entry["targets"])]
    assert [row["name"] for row in results["recurrent"]] == ["SphereLSTM", "SphereGRU"]
    assert list(results["first_step"]) == ["none", "cosine", "linear", "sigmoid", "learnable"]
    assert all(step["median"] > 0 for step in steps.values())
    assert results["implementation"].startswith("native")
    json.dumps(results, allow_nan=False)


def _in_order(targets):
    """Return names in the order of the networks: each operator, then the same without BatchNorm."""
    return sorted(targets, key=lambda name: ["cosine", "linear", "sigmoid", "learnable"].index(name.split(",")[0]))


def test_suite_skips_bfloat16_without_cpu_support(monkeypatch):
    monkeypatch.setattr("spherenet.bench.suite.has_bfloat16", lambda: False)
    monkeypatch.setattr("spherenet.bench.suite._recurrent", lambda *_: [])
    monkeypatch.setattr("spherenet.bench.suite._first_step", lambda _: {})
    (entry,) = run_suite(2, lambda rounds, total, name: rounds, [WORKLOADS[3]])["workloads"]
    assert "does not support bfloat16" in entry["skipped"]
    assert "rows" not in entry
