"""The study of uneven light: its commands, its table, and its verdict on made-up numbers."""

import json
import subprocess

import pytest
from scipy.stats import ttest_1samp

from spherenet.cli import main as spherenet
from spherenet.data import parse_corruption
from spherenet_paper import light
from spherenet_paper.comparisons import read_rows
from spherenet_paper.light import ARMS, BASELINES, CLAIM_SEEDS, CONTROLS, LIGHT, Row
from spherenet_paper.report.claims import holm, mean_test


def rows(lead, arms=("patch", *BASELINES), noise=0.001):
    """Made-up rows in which `patch` has a lead over all others."""
    return [
        Row(arm, seed, kind, f"{strength:g}", 0.5 + lead * (arm == "patch") + noise * (seed - 2) * (arm == "patch"))
        for arm in arms
        for seed in CLAIM_SEEDS
        for kind, values in LIGHT.items()
        for strength in values
    ]


@pytest.mark.parametrize(("lead", "decision"), [(0.1, "confirmed"), (-0.1, "refuted"), (-0.001, "not decided")])
def test_verdict_follows_the_differences(lead, decision):
    comparisons = light.judge(rows(lead))
    assert [one.name for one in comparisons] == list(BASELINES)
    assert {one.decision for one in comparisons} == {decision}
    assert comparisons[0].mean == pytest.approx(100 * lead)
    assert all(one.interval[0] < one.mean < one.interval[1] for one in comparisons)


def test_missing_run_or_evaluation_yields_no_verdict():
    complete = rows(0.1)
    assert light.judge(complete)
    assert light.judge([row for row in complete if (row.arm, row.seed) != ("cnn-light", 1)]) == []
    assert light.judge(complete[:-1]) == []
    assert light.judge(rows(0.1, arms=("patch", "cnn"))) == []


def test_interval_and_probability_are_those_of_the_t_test():
    values = [1.2, 0.4, 0.9, 2.0]
    mean, interval, p = mean_test(values)
    expected = ttest_1samp(values, 0)
    assert p == pytest.approx(expected.pvalue)
    assert (mean, *interval) == pytest.approx((1.125, *expected.confidence_interval(0.95)))
    assert mean_test([0.0, 0.0])[2] == 1
    assert mean_test([2.0, 2.0])[2] == 0


def test_holm_corrects_the_smallest_most():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("arm", ARMS)
def test_commands_are_accepted_by_the_command_line(arm, tmp_path, capsys):
    training = next(one for one in light.trainings([arm]) if one.seed == 1)
    command = training.train_command(tmp_path / "run", None)
    with pytest.raises(SystemExit, match=r"^0$"):
        spherenet([*command[3:], "--print-config"])
    printed = capsys.readouterr().out
    assert "widths:" in printed
    assert "seed: 1" in printed
    for kind, values in (LIGHT | CONTROLS).items():
        for strength in values:
            parse_corruption(f"{kind}:{strength:g}")


def test_folder_of_runs_becomes_a_table(tmp_path, monkeypatch, capsys):
    accuracy = 0.25

    def finish(command, **_):
        """Stand in for the command line: write what a training or an evaluation writes."""
        if "train" in command:
            run = tmp_path / "runs" / command[command.index("--output") + 1].rpartition("/")[2]
            run.mkdir()
            (run / "summary.json").write_text("{}")
            return subprocess.CompletedProcess(command, 0)
        texts = command[command.index("--corrupt") + 1 :]
        kinds = [text.split(":") for text in texts]
        numbers = [{"corruption": kind, "strength": float(value), "accuracy": accuracy} for kind, value in kinds]
        text = json.dumps({"accuracy": 0.5, "corruptions": numbers})
        return subprocess.CompletedProcess(command, 0, text.encode())

    monkeypatch.setattr(subprocess, "run", finish)
    assert light.QUESTION.main(["run", str(tmp_path / "runs"), "--arms", "patch", *BASELINES]) == 0
    table = tmp_path / "light.csv"
    assert light.QUESTION.main(["table", str(tmp_path / "runs"), "-o", str(table)]) == 0
    read = read_rows(table, Row)
    settings = sum(map(len, (LIGHT | CONTROLS).values()))
    assert len(read) == 5 * len(CLAIM_SEEDS) * (1 + settings)
    assert light.light_accuracy(read, "patch") == {seed: pytest.approx(25) for seed in CLAIM_SEEDS}
    assert light.QUESTION.main(["judge", str(table)]) == 0
    assert capsys.readouterr().out.count("not decided") == 4
    table.write_text("arm,seed\n")
    with pytest.raises(ValueError, match=r"^columns of .* must be arm, seed, corruption, strength, accuracy, got"):
        read_rows(table, Row)


def test_failed_run_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert light.QUESTION.main(["run", str(tmp_path), "--arms", "cnn"]) == 1
    assert light.light_accuracy(light.collect(tmp_path), "cnn") == {}
