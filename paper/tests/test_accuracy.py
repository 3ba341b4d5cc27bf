"""The comparison at full width: its commands, its table, and its verdict on made-up numbers."""

import json
import subprocess

import pytest
from made_answers import accuracies

from spherenet.cli import main as spherenet
from spherenet_paper import accuracy
from spherenet_paper.accuracy import ARMS, QUESTION, SEEDS, Accuracy
from spherenet_paper.comparisons import read_rows, write_rows
from spherenet_paper.records import RESULTS
from spherenet_paper.report.questions import speed_table


@pytest.mark.parametrize(("lead", "decision"), [(0.01, "confirmed"), (-0.01, "refuted"), (0.0, "not decided")])
def test_verdict_follows_the_differences(lead, decision):
    [comparison] = accuracy.judge(accuracies(lead))
    assert comparison.name == "cosine"
    assert comparison.decision == decision
    assert comparison.mean == pytest.approx(100 * lead)
    assert accuracy.judge(accuracies(lead)[1:]) == []


@pytest.mark.parametrize("arm", ARMS)
def test_commands_are_accepted_by_the_command_line(arm, tmp_path, capsys):
    training = next(iter(accuracy.trainings([arm])))
    with pytest.raises(SystemExit, match=r"^0$"):
        spherenet([*training.train_command(tmp_path / "run", None)[3:], "--print-config"])
    assert "tta: mirror-shift" in capsys.readouterr().out


def test_new_runs_are_added_to_a_table(tmp_path, monkeypatch, capsys):
    def finish(command, **_):
        run = tmp_path / "runs" / command[command.index("--output") + 1].rpartition("/")[2]
        run.mkdir()
        numbers = {"seed": int(command[command.index("--seed") + 1]), "accuracy": 0.5}
        (run / "summary.json").write_text(json.dumps(accuracies(0.0)[0]._asdict() | numbers))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", finish)
    table = tmp_path / "speed.csv"
    write_rows([row for row in accuracies(0.0) if row.arm == "cnn" or row.seed < 2], Accuracy, table)
    assert QUESTION.main(["judge", str(table)]) == 0
    assert capsys.readouterr().out.startswith("No verdict: ")
    assert QUESTION.main(["run", str(tmp_path / "runs"), "--arms", "cosine"]) == 0
    (tmp_path / "runs" / "cosine-seed0" / "summary.json").unlink()
    assert QUESTION.main(["table", str(tmp_path / "runs"), "-o", str(table)]) == 0
    rows = read_rows(table, Accuracy)
    assert [row[:2] for row in rows] == [(arm, seed) for arm in ARMS for seed in SEEDS]
    assert [row.accuracy == 0.5 for row in rows] == [False] * 6 + [True] * 4
    assert QUESTION.main(["judge", str(table)]) == 0
    assert "cosine − cnn: " in capsys.readouterr().out


def test_tutorial_shows_the_table_of_the_runs():
    table = speed_table(read_rows(RESULTS / "speed.csv", Accuracy))
    assert table in (RESULTS.parents[1] / "docs" / "tutorials" / "speed.md").read_text()
