"""The registry: one entry makes a data set available by name everywhere."""

from pathlib import Path

import pytest
import torch

from spherenet.cli import main
from spherenet.data import (
    DATASETS,
    Dataset,
    DatasetInfo,
    TensorSplit,
    default_augmentation,
    find_dataset,
    list_datasets,
    load_dataset,
)


def load_stripes(options):
    labels = torch.arange(8) % 2
    images = (labels[:, None, None, None] * 200).expand(8, 12, 12, 1).to(torch.uint8)
    train, test = (TensorSplit(images, labels, options.preprocessing) for _ in range(2))
    return Dataset("stripes", ("dark", "bright"), options.preprocessing, train, test)


@pytest.fixture
def stripes(monkeypatch):
    info = DatasetInfo(
        "generated images", 2, 8, 8, (12, 12), 1, "flip", find=lambda data_dir: Path("stripes"), load=load_stripes
    )
    monkeypatch.setitem(DATASETS, "stripes", info)


@pytest.mark.usefixtures("stripes")
def test_new_entry_is_listed_found_and_loaded(collect):
    assert list_datasets()[-1] == "stripes"
    assert find_dataset("stripes") == Path("stripes")
    assert default_augmentation("stripes") == "flip"
    dataset = load_dataset("stripes", image_size=6, channels=3)
    assert collect(dataset.train, [0, 1])[0].images.shape == (2, 3, 6, 6)


@pytest.mark.usefixtures("stripes")
def test_new_entry_is_available_on_the_command_line(capsys, tmp_path):
    assert main(["data", "stripes"]) == 0
    assert "bright" in capsys.readouterr().out
    options = ["--model", "cnn-3", "--iterations", "1", "--batch-size", "4", "--device", "cpu"]
    assert main(["train", "--data", "stripes", *options, "--output", str(tmp_path / "run")]) == 0


def test_entries_describe_themselves():
    for name, info in DATASETS.items():
        assert info.summary
        assert info.channels in (1, 3), name
        assert (info.train is None) == (info.test is None) == (info.classes is None)


@pytest.mark.parametrize("function", [default_augmentation, find_dataset, load_dataset])
def test_unknown_name_is_refused_with_a_suggestion(function):
    with pytest.raises(ValueError, match=r"data must be one of 'mnist5k', .* got 'mnist'. Did you mean 'mnist5k'\?"):
        function("mnist")


def test_size_in_memory_is_bounded():
    with pytest.raises(ValueError, match="image_size must keep cifar10 below 16 GB in memory, got 4096, which takes"):
        load_dataset("cifar10", image_size=4096)
