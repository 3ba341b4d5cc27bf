"""Tools for committed runs: comparison of repetitions, collection of finished runs, the included model."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grid_folders import finish_job, make_grid

from command_line import TINY, spherenet
from made_runs import make_run
from spherenet.data import load_dataset
from spherenet.errors import RunError
from spherenet.export import load_metadata, load_model
from spherenet.report import read_run
from spherenet_paper.experiments import find_experiment
from spherenet_paper.experiments.jobs import create_jobs
from spherenet_paper.records import read_records, write_records
from spherenet_paper.report.grids import stored_grid

TOOLS = Path(__file__).parents[2] / "tools"


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run and its repetition."""
    folders = [tmp_path_factory.mktemp("runs") / name for name in ("run", "rerun")]
    for folder in folders:
        assert spherenet("train", *TINY, "--output", folder) == 0
    return folders


def test_repetition_has_the_same_metrics(runs, capsys):
    tool = load_tool("compare_runs")
    assert tool.main([str(run) for run in runs]) == 0
    assert "the same settings and the same" in capsys.readouterr().out


def test_differences_between_runs_are_found(runs, tmp_path, capsys):
    tool = load_tool("compare_runs")
    other = tmp_path / "other"
    assert spherenet("train", *TINY, "--seed", "5", "--output", other) == 0
    seed, row, *_ = tool.differences(str(runs[0]), str(other))
    assert seed == "seed is 0 and 5."
    assert row.startswith("metrics.jsonl differs in row 1:")
    lines = (other / "metrics.jsonl").read_text().splitlines()
    (other / "metrics.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    (other / "summary.json").unlink()
    found = tool.differences(str(runs[0]), str(other))
    assert f"metrics.jsonl has {len(lines)} and {len(lines) - 1} rows." in found
    assert "one of the runs is not finished." in found
    capsys.readouterr()
    assert tool.main([str(runs[0]), str(other)]) == 1
    assert tool.main([str(runs[0]), str(tmp_path)]) == 2


def test_last_digit_counts(tmp_path):
    tool = load_tool("compare_runs")
    for name, accuracy in (("a", 0.1), ("b", 0.1 + 1e-18), ("c", 0.10000000000000002)):
        make_run(tmp_path / name, [accuracy])
    assert tool.differences(str(tmp_path / "a"), str(tmp_path / "b")) == []  # the same number in float64
    assert len(tool.differences(str(tmp_path / "a"), str(tmp_path / "c"))) == 1


@pytest.fixture
def tables(tmp_path):
    """An empty folder of tables."""
    folder = tmp_path / "tables"
    folder.mkdir()
    write_records([], folder)
    return folder


def test_complete_cells_are_collected(tmp_path, tables):
    tool, source = load_tool("collect_runs"), tmp_path / "long"
    cells = find_experiment("headline").cells("long")
    first, second, third = create_jobs(cells[:3], source / "headline", [0])
    for job in (first, second):
        finish_job(job)
    (second.folder / "summary.json").unlink()
    assert tool.collect(source, tables) == {"headline": 0}
    assert read_records(tables) == []
    for job in create_jobs(cells[:1], source / "headline", [2, 3]):
        finish_job(job)
    assert tool.collect(source, tables)["headline"] == 0  # three runs, but not the planned ones
    for job in create_jobs(cells[:1], source / "headline", [1]):
        finish_job(job, 0.25)
    for _ in range(2):  # runs that are there are replaced
        assert tool.collect(source, tables)["headline"] == 3
    grid = stored_grid("long", "headline", tables)
    assert grid.cell(cells[0].name).values() == [50.0, 25.0, 50.0]
    assert cells[0].name not in grid.missing()
    assert grid.missing()[cells[1].name] == [0, 1, 2]
    config = first.folder / "config.json"
    config.write_text(config.read_text().replace('"spherenet"', '"/home/me/spherenet"'))
    with pytest.raises(RunError, match="names a folder of this machine"):
        tool.collect(source, tables)
    config.write_text(config.read_text().replace("/home/me/", ""))
    for seed in (1, 2):
        finish_job(create_jobs(cells[2:3], source / "headline", [seed])[0])
    finish_job(third)
    other = json.loads((third.folder / "config.json").read_text())
    other["train"]["learning_rate"] = 0.5
    (third.folder / "config.json").write_text(json.dumps(other))
    with pytest.raises(RunError, match="was run with --learning-rate"):
        tool.collect(source, tables)


def test_tables_of_another_version_are_one_sentence(tmp_path, tables):
    with pytest.raises(RunError, match=r"runs\.csv must be a table of records\.py"):
        read_records(tmp_path)  # such as the folders of earlier versions
    (tables / "runs.csv").write_text("preset,experiment,cell,seed,options\nlong,headline,a,0,{}\n")
    with pytest.raises(RunError, match=r"got an invalid row \(KeyError"):
        read_records(tables)
    (tables / "curves.csv").write_text("run,step\n1,2\n")
    with pytest.raises(RunError, match=r"curves\.csv must be a table"):
        read_records(tables)


def test_missing_folder_of_runs_is_refused(tmp_path):
    missing = tmp_path / "long"
    ended = subprocess.run([sys.executable, TOOLS / "collect_runs.py", missing], capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"{missing} is not a folder; pass the folder of a preset" in ended.stderr


def test_differences_between_cells_are_paired_by_seed(tmp_path, capsys):
    cells = {
        "cnn": ("none", "a", None, {0: [0.5, 0.4, 0.6, 0.7], 1: [0.4, 0.3, 0.5, 0.6]}),
        "cosine": ("cosine", "a", None, {0: [0.6, 0.6, 0.6, 0.72], 1: [0.5, 0.5, 0.6, 0.64], 2: [0, 0, 0, 0]}),
        "empty": ("linear", "a", None, {}),
    }
    made = make_grid(tmp_path / "grid", cells)
    tool = load_tool("compare_cells")
    output = tool.compare(made.read(), ["cnn", "cosine"], protocol=None, last=1250, reach=60.0)
    # Differences of 2 and 4 points: 3 ± 12.71 · 1.
    assert "| test accuracy, end | +3.00 [-9.71, +15.71] |" in output
    assert "| mean drop between evaluations, first half: smaller by | +10.00 [+10.00, +10.00] |" in output
    first, second, _, title, *variances = output.splitlines()[-6:]
    assert first.startswith("cnn: seed 0: ")
    assert second.endswith("seed 2: –")
    assert title == "Median variance of the outputs of a layer at the end:"
    assert variances == ["cnn: seed 0: –, seed 1: –", "cosine: seed 0: –, seed 1: –, seed 2: –"]
    with pytest.raises(RunError, match=r"\(cnn, cosine\), got 'empty'\."):
        tool.compare(made.read(), ["cnn", "empty"], protocol=None, last=1250, reach=60.0)
    assert tool.main(["long", "headline", "none_softmax", "cosine_softmax"]) == 0
    assert "| test accuracy, first half | +" in capsys.readouterr().out
    assert tool.main(["long", "headline", "none_softmax", "nowhere"]) == 2
    assert tool.main(["long", "headlines", "none_softmax", "cosine_softmax"]) == 2
    assert "Did you mean 'headline'" in capsys.readouterr().err


def test_median_variance_is_that_of_the_last_probes(tmp_path):
    folder = make_run(tmp_path / "run", [0.5])
    rows = [{"a": 9.0}, {"a": 0.1, "b": 0.3, "c": 4.0, "d": None}]
    with (folder / "metrics.jsonl").open("a") as stream:
        for step, variances in enumerate(rows):
            stream.write(json.dumps({"step": step, "split": "probes", "output_variance": variances}) + "\n")
    assert load_tool("compare_cells").median_variance(read_run(folder)) == 0.3


def test_best_sphere_net_of_a_grid(tmp_path):
    cells = {
        "cnn": ("none", "a", None, {0: [0.99]}),
        "lucky": ("cosine", "a", None, {0: [0.95], 1: [0.5]}),
        "steady": ("linear", "a", None, {1: [0.9], 2: [0.9]}),
    }
    made = make_grid(tmp_path / "grid", cells, baseline="none")
    assert load_tool("ship_model").best_run(made.read()) == str(made / "steady" / "seed-1")
    with pytest.raises(RunError, match="no finished run of a SphereNet"):
        load_tool("ship_model").best_run(make_grid(tmp_path / "empty", {"a": ("a", "b", None, {})}).read())


def test_card_of_the_included_model_states_its_measured_accuracy(runs, tmp_path):
    target = tmp_path / "mnist5k-cnn-3"
    statement = load_tool("ship_model").ship(str(runs[0]), target)
    card = (target / "README.md").read_text()
    model, test = load_model(target), load_dataset("mnist5k").test
    [batch] = test.batches([(0, torch.arange(1000))], device=torch.device("cpu"), augmentation=None)
    with torch.no_grad():
        accuracy = (model(batch.images).argmax(1) == batch.labels).float().mean().item()
    assert f"accuracy {accuracy:.2%} on 1,000 images" in statement
    assert f"{accuracy:.2%} on the test images of mnist5k (n = 1,000; 95% interval" in card
    assert len(load_metadata(target)["classes"]) == 10
    assert (
        "the stored weights, which are rounded to half precision. The weights are those of the last checkpoint" in card
    )
    assert "spherenet train" in card
    unfinished = tmp_path / "unfinished"
    shutil.copytree(runs[0], unfinished)
    (unfinished / "summary.json").unlink()
    with pytest.raises(RunError, match="must be a finished run, got one at step 6"):
        load_tool("ship_model").ship(str(unfinished), target)
