"""The study of unknown images: its images, its commands, its table, and its verdict on made-up numbers."""

import json
import subprocess

import numpy as np
import pytest
from made_answers import areas

from spherenet_paper import unknown
from spherenet_paper.comparisons import read_rows
from spherenet_paper.unknown import ARMS, KINDS, SCORES, SEEDS, Area


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_the_same_each_time(kind):
    images = KINDS[kind]()
    assert images.shape == (2000, 32, 32, 3)
    assert images.dtype == np.uint8
    assert np.array_equal(images, KINDS[kind]())
    assert len({image.tobytes() for image in images}) > 1990


@pytest.mark.parametrize(("lead", "decision"), [(0.1, "confirmed"), (-0.1, "refuted"), (0.0, "not decided")])
def test_verdict_follows_the_differences(lead, decision):
    comparisons = unknown.judge(areas(lead))
    assert [one.name for one in comparisons] == [
        f"{arm} − cnn on {kind}" for kind in ("digits", "noise") for arm in ("cosine", "patch")
    ]
    assert {one.decision for one in comparisons} == {decision}
    assert comparisons[0].mean == pytest.approx(100 * lead)


def test_missing_evaluation_yields_no_verdict():
    assert unknown.judge(areas(0.1)[1:])  # the first is a score that no claim rests on
    assert unknown.judge([area for area in areas(0.1) if area[:3] != ("patch", 2, "noise")]) == []


def test_runs_become_a_table_and_a_verdict(tmp_path, monkeypatch, capsys):
    def finish(command, **_):
        numbers = {"ood": {"auroc": dict.fromkeys(SCORES, 0.75)}}
        return subprocess.CompletedProcess(command, 0, json.dumps(numbers).encode())

    monkeypatch.setattr(subprocess, "run", finish)
    monkeypatch.setattr(unknown, "COUNT", 3)
    assert unknown.QUESTION.main(["run", str(tmp_path), "--data-dir", "data"]) == 0
    assert len(list((tmp_path / "unknown-digits").glob("*.png"))) == 3
    table = tmp_path / "unknown.csv"
    assert unknown.QUESTION.main(["table", str(tmp_path), "-o", str(table)]) == 0
    assert len(read_rows(table, Area)) == len(ARMS) * len(SEEDS) * len(KINDS) * len(SCORES)
    assert unknown.QUESTION.main(["judge", str(table)]) == 0
    assert capsys.readouterr().out.count("not decided") == 4
    table.write_text(table.read_text().replace("cosine", "other"))
    assert unknown.QUESTION.main(["judge", str(table)]) == 0
    assert "No verdict" in capsys.readouterr().out


def test_failed_evaluation_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(unknown, "COUNT", 1)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    assert unknown.QUESTION.main(["run", str(tmp_path)]) == 1
    assert list(unknown.collect(tmp_path)) == []
