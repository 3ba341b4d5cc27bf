"""Tables of runs as CSV and Markdown, and the command of a run."""

import csv
import io

from command_line import one_sentence, spherenet
from made_runs import make_run
from spherenet.report import provenance, read_run


def test_csv_of_runs_has_one_line_per_run(tmp_path):
    runs = [make_run(tmp_path / "first", [0.4, 0.9, 0.8]), make_run(tmp_path / "=second", [0.5], operator=None)]
    assert spherenet("report", *runs, "--csv", tmp_path / "runs.csv") == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert [row["run"] for row in rows] == ["first", "'=second"]
    assert [row["operator"] for row in rows] == ["cosine", "none"]
    assert (rows[0]["accuracy"], rows[0]["best"], rows[0]["iterations"]) == ("80.0", "90.0", "30")


def test_markdown_of_runs_has_one_line_per_run(tmp_path):
    runs = [make_run(tmp_path / "a|b", [0.4, 0.9]), make_run(tmp_path / "second", [0.5], finished=False)]
    assert spherenet("report", *runs, "--markdown", tmp_path / "runs.md", "--title", "Two runs") == 0
    page = (tmp_path / "runs.md").read_text()
    assert page.startswith("# Two runs\n\n| run | network |")
    assert "| a\\|b | cnn-9 | cosine | softmax | 1,234 | 20 | 90.00% |" in page
    assert "10 so far" in page
    assert "claim" not in page


def test_command_in_reports_states_the_operator(tmp_path):
    run = read_run(make_run(tmp_path / "run", [0.5], operator=None))
    assert provenance(run) == "spherenet train --operator none --output run (torch 2.13.0, device cpu)"
    run.config["command"][-1] = "my run"
    changed = "spherenet train --resume 'my run' --iterations 9 --allow-changes"
    run.config["history"] = [{"command": "first"}, {"command": "same"}, {"command": changed, "changes": {"x": [1, 2]}}]
    assert provenance(run).startswith(f"spherenet train --operator none --output 'my run'; {changed} (torch")


def test_report_of_readable_folders_only(tmp_path, capsys):
    (tmp_path / "grid").mkdir()
    run = make_run(tmp_path / "run", [0.1, 0.9])
    files = {name: tmp_path / f"out.{name}" for name in ("html", "md", "csv")}
    code = spherenet("report", run, tmp_path / "grid", tmp_path / "nothing", "-o", files["html"], "--markdown",
                     files["md"], "--csv", files["csv"])  # fmt: skip
    output = capsys.readouterr()
    assert code == 1
    assert "nothing is not a folder" in output.err
    assert "grid is not a run" in output.err
    assert all(file.stat().st_size > 100 for file in files.values())
    assert "90.00%" in output.out


def test_report_without_readable_folders_writes_nothing(tmp_path, capsys):
    assert spherenet("report", tmp_path, "-o", tmp_path / "page.html") == 2
    assert one_sentence(capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []
