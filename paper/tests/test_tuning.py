"""Tuning of the recipe: its commands, its choice of finalists, and its table."""

import json
import subprocess

import pytest

from spherenet.cli import main as spherenet
from spherenet_paper import tuning
from spherenet_paper.comparisons import read_rows
from spherenet_paper.report.questions import tuning_table
from spherenet_paper.tuning import CANDIDATES, QUESTION, Candidate


def test_both_networks_have_the_same_budget_and_start_with_the_recipe():
    by_network = {network: [name for name in CANDIDATES if tuning.network_of(name) == network]
                  for network in tuning.NETWORKS}  # fmt: skip
    assert [len(names) for names in by_network.values()] == [8, 8]
    assert [names[0] for names in by_network.values()] == list(tuning.NETWORKS)
    assert len(set(CANDIDATES.values())) == 16


@pytest.mark.parametrize("candidate", CANDIDATES)
def test_commands_are_accepted_by_the_command_line(candidate, tmp_path, capsys):
    [training] = tuning.trainings([candidate], [2])
    with pytest.raises(SystemExit, match=r"^0$"):
        spherenet([*training.train_command(tmp_path / "run", None)[3:], "--print-config"])
    printed = capsys.readouterr().out
    assert "validation_fraction: 0.1" in printed
    assert "seed: 2" in printed


def test_finalists_are_the_most_accurate_of_the_first_seed():
    rows = [Candidate("cnn", 0, 0.8), Candidate("cnn-he", 0, 0.7), Candidate("cnn-rate-0.12", 0, 0.75)]
    rows += [Candidate("cnn-he", 1, 0.99), Candidate("sphere", 0, 0.9)]
    assert tuning.best(rows, "cnn") == ["cnn", "cnn-rate-0.12"]
    assert tuning.best(rows, "sphere") == ["sphere"]


def test_all_candidates_are_run_once_and_the_best_again(tmp_path, monkeypatch, capsys):
    trained = []

    def finish(command, **_):
        """Stand in for the command line: write what a training writes."""
        name = command[command.index("--output") + 1].rpartition("/")[2]
        trained.append(name)
        run = tmp_path / "runs" / name
        run.mkdir()
        accuracy = 0.9 if name.startswith(("cnn-he", "cnn-rate", "sphere-log")) else 0.8
        rows = [{"split": "train", "accuracy": 1}, {"split": "validation", "accuracy": accuracy}]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (run / "summary.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", finish)
    folder, table = str(tmp_path / "runs"), tmp_path / "tuning.csv"
    assert QUESTION.main(["run", folder, "--arms", *list(CANDIDATES)[:8]]) == 0
    assert trained == [f"{name}-seed0" for name in list(CANDIDATES)[:8]]
    assert QUESTION.main(["table", folder, "-o", str(table)]) == 0
    assert QUESTION.main(["judge", str(table)]) == 0
    assert "No choice yet" in capsys.readouterr().out
    assert QUESTION.main(["run", folder]) == 0
    again = ("cnn", "cnn-rate-0.12", "cnn-rate-0.48", "sphere", "sphere-log")
    expected = {f"{name}-seed{seed}" for name in again for seed in (1, 2)}
    assert set(trained[16:]) == expected
    assert QUESTION.main(["table", folder, "-o", str(table)]) == 0
    rows = read_rows(table, Candidate)
    assert len(rows) == 16 + len(expected)
    assert [name for name, _ in tuning.ranking(rows)][:2] == ["cnn-rate-0.12", "cnn-rate-0.48"]
    assert QUESTION.main(["judge", str(table)]) == 0
    assert "No choice yet" not in capsys.readouterr().out
    assert "| CNN | `--operator none --learning-rate 0.12` | 3 | 90.00 ± 0.00 |" in tuning_table(rows)
