"""The command line trains the normalized vision transformer and its plain counterpart, and uses the result."""

import json

import pytest
import torch
from PIL import Image

import spherenet as sn
from command_line import TINY, spherenet
from spherenet.models.transformer import EmbeddingMatrix

OPTIONS = ["--model", "sphere-vit-tiny", *TINY[4:], "--widths", 8, "--train-images", 200, "--learning-rate", 0.01]


@pytest.mark.parametrize("operator", ["cosine", "none"])
def test_train_evaluate_predict_and_export(operator, tmp_path, capsys):
    run = tmp_path / "run"
    assert spherenet("train", *OPTIONS, "--operator", operator, "--output", run) == 0
    matrices = [module for module in sn.load_run(run).model.modules() if isinstance(module, EmbeddingMatrix)]
    assert len(matrices) == 2 + 4 * 6
    errors = [(matrix.weight.norm(dim=matrix.axis) - 1).abs().max().item() for matrix in matrices]
    assert (max(errors) < 1e-6) == (operator == "cosine")
    assert spherenet("evaluate", run) == 0
    Image.new("L", (28, 28), 90).save(tmp_path / "0.png")
    capsys.readouterr()
    assert spherenet("predict", tmp_path / "0.png", "--run", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)
    assert spherenet("export", run, tmp_path / "x.pt2") == 0
    scores = torch.export.load(tmp_path / "x.pt2").module()(torch.randn(2, 1, 28, 28))
    assert scores.shape == (2, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--operator", "sigmoid"], "--operator must be cosine or none for a transformer, got sigmoid"),
        (["--image-size", 30], "--image-size must be multiples of 4, the size of a patch, got 30×30"),
        (["--magnitude", "ball"], "--magnitude must be none for a transformer"),
    ],
    ids=str,
)
def test_options_that_it_does_not_have_are_refused(options, message, tmp_path, capsys):
    assert spherenet("train", *OPTIONS, *options, "--output", tmp_path / "run") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
