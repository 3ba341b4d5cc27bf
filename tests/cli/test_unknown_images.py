"""`spherenet evaluate --ood`: areas of the scores for unknown images."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

import spherenet as sn
from command_line import one_sentence, spherenet
from spherenet.training.build import build_data


@pytest.fixture
def noise(tmp_path):
    """A folder of 12 images of other sizes and colors than the digits of the run."""
    folder = tmp_path / "noise"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(12):
        pixels = generator.integers(0, 256, (40, 30 + index, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return folder


def test_json_has_the_areas_of_the_formulas(run, noise, capsys):
    assert spherenet("evaluate", run, "--json") == 0
    before = json.loads(capsys.readouterr().out)
    assert "ood" not in before
    assert spherenet("evaluate", run, "--ood", noise, "--json", "--batch-size", 300) == 0
    result = json.loads(capsys.readouterr().out)
    ood = result.pop("ood")
    assert result["accuracy"] == before["accuracy"]
    assert (ood["folder"], ood["count"], ood["neighbors"]) == (str(noise), 12, 50)

    saved = sn.load_run(run)
    dataset = build_data(saved.config)
    read = [sn.data.read_image(str(path), saved.preprocessing) for path in sorted(noise.iterdir(), key=str)]
    with torch.no_grad():
        known = torch.cat([batch.images for batch in all_batches(dataset.test)])
        images = torch.cat([known, torch.stack(read)])
        features = saved.model.features(images)
        output = saved.model.head(features)
        train = saved.model.features(torch.cat([batch.images for batch in all_batches(dataset.train)]))
        logits = saved.model.criterion.logits(output)
    is_known = torch.arange(len(images)) < 1000
    cosines = F.normalize(features) @ F.normalize(train).T
    assert len(train) == 200
    expected = {
        "knn_cosine": cosines.sort(1, descending=True).values[:, 49],
        "max_cosine": output.cosine.max(1).values,
        "energy": logits.logsumexp(1),
        "max_softmax": logits.softmax(1).max(1).values,
    }
    for name, score in expected.items():
        assert ood["auroc"][name] == pytest.approx(sn.roc_auc(score, is_known), abs=2e-3), name
    assert set(ood["auroc"]) == set(expected)


def all_batches(split):
    order = [(0, torch.arange(len(split)))]
    return split.batches(order, device=torch.device("cpu"), augmentation=None, workers=0)


def test_text_names_the_scores_and_broken_images(run, noise, capsys):
    (noise / "broken.png").write_text("not an image")
    assert spherenet("evaluate", run, "--ood", noise) == 0
    said = capsys.readouterr()
    line = next(line for line in said.out.splitlines() if line.startswith("AUROC"))
    assert line.startswith("AUROC of 1000 known against 12 images of ")
    assert all(name in line for name in ("max cosine", "knn cosine", "energy", "max softmax", "(k = 50)"))
    assert "1 of 13 images of --ood cannot be read and are left out" in said.err
    assert one_sentence(said.err), said.err


WRONG = {
    "missing": (["--ood", "{tmp}/nowhere"], "--ood must be a folder of images, got "),
    "file": (["--ood", "{tmp}/text.png"], "--ood must be a folder of images, got "),
    "empty": (["--ood", "{tmp}/empty"], "has no images"),
    "broken": (["--ood", "{tmp}/broken"], "none of 1 images can be read"),
    "train": (["--ood", "{tmp}/broken", "--split", "train"], "--split must be test or validation with --ood"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folder_is_one_sentence(case, run, tmp_path, capsys):
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "text.png").write_text("not an image")
    arguments, message = WRONG[case]
    assert spherenet("evaluate", run, *(argument.format(tmp=tmp_path) for argument in arguments)) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert one_sentence(said.err), said.err
    assert said.out == ""
