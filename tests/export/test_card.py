"""Model cards: complete and partial cards, and invalid fields."""

import datetime

import pytest

import spherenet as sn
from spherenet.export import ModelCard, library_versions
from spherenet.export.card import wilson_interval

FULL = ModelCard(
    "CIFAR-10 SphereNet",
    description="A small network.",
    architecture="cnn-9 with the sigmoid operator.",
    trained_on="CIFAR-10, 50,000 images.",
    accuracy=0.9128,
    accuracy_n=10_000,
    accuracy_on="the CIFAR-10 test images",
    command="spherenet train --model cnn-9",
    versions={"spherenet": "1.0", "torch": "2.13", "Python": "3.11"},
    date=datetime.date(2020, 2, 29),
    license="MIT",
    intended_use="Research.",
    limits="Small images only.",
    classes=["cat", "dog"],
    input_shape=(1, 3, 32, 32),
)

EXPECTED = """\
# CIFAR-10 SphereNet

A small network.

## Model

cnn-9 with the sigmoid operator.

## Training data

CIFAR-10, 50,000 images.

## Accuracy

91.28% on the CIFAR-10 test images (n = 10,000; 95% interval 90.71% to 91.82%).

## Command

```bash
spherenet train --model cnn-9
```

## Versions

spherenet 1.0, torch 2.13, Python 3.11

## Date

2020-02-29

## Classes

2: cat, dog.

## Intended use

Research.

## Limits

Small images only.

## License

MIT

## Usage

```python
import torch
from spherenet.export import load_metadata, load_model

model = load_model("path/to/this/folder")
print(load_metadata("path/to/this/folder"))  # class names and preprocessing, if available
scores = model(torch.zeros(1, 3, 32, 32))  # a batch of images; softmax turns scores into probabilities
```
"""


def test_complete_card():
    assert FULL.to_markdown() == EXPECTED


def test_missing_fields_are_omitted():
    text = ModelCard("Only a name").to_markdown()
    assert text.startswith("# Only a name\n\n## Usage\n")
    assert text.count("##") == 1
    assert "None" not in text
    assert "## Accuracy\n\n50.00%.\n" in ModelCard("x", accuracy=0.5).to_markdown()


def test_code_cannot_end_its_block():
    text = ModelCard("a\n# b", command="echo '```'", usage="````").to_markdown()
    assert text.startswith("# a # b\n")
    assert "````bash\necho '```'\n````\n" in text
    assert "`````python\n````\n`````\n" in text


def test_library_versions():
    versions = library_versions()
    assert list(versions) == ["spherenet", "torch", "Python"]
    assert versions["spherenet"] == sn.__version__


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (5, 5), (9128, 10_000), (1, 3)])
def test_wilson_interval_satisfies_its_definition(hits, n):
    """Each end p satisfies |hits/n − p| = z·sqrt(p(1 − p)/n), which defines Wilson's interval."""
    fraction = hits / n
    for end in wilson_interval(fraction, n):
        assert abs(fraction - end) == pytest.approx(1.959964 * (end * (1 - end) / n) ** 0.5, abs=1e-9)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"accuracy": 91.28}, ValueError, "accuracy must be a fraction from 0 to 1, got 91.28"),
        ({"accuracy": "91 %"}, TypeError, "accuracy must be a number"),
        ({"accuracy": 0.9, "accuracy_n": 0}, ValueError, "accuracy_n must be at least 1, got 0"),
        ({"name": " "}, ValueError, "name must be a string that is not empty, got ' '"),
    ],
)
def test_invalid_fields_raise(fields, error, message):
    with pytest.raises(error, match=message):
        ModelCard(**({"name": "x"} | fields))


def test_date_does_not_read_the_clock(monkeypatch):
    import time

    monkeypatch.setattr(time, "time", lambda: pytest.fail("the clock was read"))
    assert "## Date\n\nMay\n" in ModelCard("x", date="May").to_markdown()
