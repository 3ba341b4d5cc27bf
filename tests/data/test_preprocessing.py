"""The preprocessing that is saved with a network: its formula, and its checks of values from files."""

import json
import math
import random

import pytest
import torch

from faults.mutation import call_reader, mutated_value
from spherenet.data import Preprocessing
from spherenet.data.preprocessing import normalize
from spherenet.errors import DataError

COLOR = Preprocessing((6, 5), 3, (125.3, 123.0, 113.9), (63.0, 62.1, 66.7), (8, 8))


@pytest.mark.parametrize("preprocessing", [COLOR, Preprocessing.standard((6, 5), 1), Preprocessing.standard((6, 5), 3)])
def test_normalize_subtracts_mean_and_divides_by_std(preprocessing):
    channels = preprocessing.channels
    pixels = torch.randint(0, 256, (4, 6, 5, channels), dtype=torch.uint8)
    images = normalize(pixels, preprocessing)
    assert images.dtype == torch.float32
    assert images.shape == (4, channels, 6, 5)
    assert images.is_contiguous(memory_format=torch.channels_last)
    for channel in range(channels):
        exact = (pixels[..., channel].double() - preprocessing.mean[channel]) / preprocessing.std[channel]
        torch.testing.assert_close(images[:, channel].double(), exact, rtol=1e-6, atol=1e-6)


def test_standard_preprocessing_is_exact():
    images = normalize(torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1), Preprocessing.standard((16, 16), 1))
    assert images.flatten().tolist() == [(pixel - 127.5) / 128 for pixel in range(256)]


@pytest.mark.parametrize("channels", [1, 3])
def test_standardized_images_have_mean_0_and_deviation_1_in_every_batch(channels):
    preprocessing = Preprocessing.standard((6, 5), channels, standardize="image")
    pixels = torch.randint(0, 128, (4, 6, 5, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = normalize(pixels, preprocessing)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.mean((1, 2, 3)).abs().max() < 1e-6
    torch.testing.assert_close(images.std((1, 2, 3), correction=0), torch.ones(4))
    for index in range(4):
        assert torch.equal(normalize(pixels[index : index + 1], preprocessing)[0], images[index])
    torch.testing.assert_close(normalize(2 * pixels, preprocessing), images)
    torch.testing.assert_close(normalize(pixels + 100, preprocessing), images)


def test_standardization_leaves_empty_images_empty():
    preprocessing = Preprocessing.standard((6, 5), 3, standardize="image")
    assert normalize(torch.full((1, 6, 5, 3), 200, dtype=torch.uint8), preprocessing).abs().max() < 1e-6


@pytest.mark.parametrize("value", ["images", 1, None, ["image"]])
def test_wrong_standardization_is_refused(value):
    with pytest.raises(ValueError, match=r"^standardize must be 'data' or 'image', got "):
        Preprocessing.standard((6, 5), 3, standardize=value)
    with pytest.raises(DataError, match=r"^the saved preprocessing is wrong: standardize must be"):
        Preprocessing.from_dict({**GOOD, "standardize": value})


def test_defaults_are_left_out_of_saved_preprocessing():
    assert list(Preprocessing.standard((28, 28), 1).as_dict()) == ["size", "channels", "mean", "std", "resize"]


CROPPED = Preprocessing.standard((28, 28), 1, keep_aspect=True)
STANDARDIZED = Preprocessing.standard((28, 28), 1, standardize="image")


@pytest.mark.parametrize("preprocessing", [COLOR, Preprocessing.standard((28, 28), 1), CROPPED, STANDARDIZED])
def test_json_round_trip_is_identical(preprocessing):
    assert Preprocessing.from_dict(json.loads(json.dumps(preprocessing.as_dict()))) == preprocessing


GOOD = COLOR.as_dict()
nested = []
for _ in range(100_000):
    nested = [nested]
HOSTILE = {
    "no dict": [GOOD],
    "nothing": None,
    "missing": {key: value for key, value in GOOD.items() if key != "std"},
    "unknown": {**GOOD, "eval": "x"},
    "renamed": {**{key: value for key, value in GOOD.items() if key != "std"}, "STD": [1.0, 1.0, 1.0]},
    "size of text": {**GOOD, "size": "66"},
    "size of floats": {**GOOD, "size": [6.0, 5.0]},
    "size of bools": {**GOOD, "size": [True, True]},
    "size of three": {**GOOD, "size": [6, 5, 4]},
    "size zero": {**GOOD, "size": [0, 5]},
    "size negative": {**GOOD, "size": [-6, 5]},
    "size huge": {**GOOD, "size": [1 << 40, 1 << 40]},
    "resize huge": {**GOOD, "resize": [10_000, 10_000]},
    "resize smaller": {**GOOD, "resize": [5, 5]},
    "channels two": {**GOOD, "channels": 2, "mean": [1.0, 1.0], "std": [1.0, 1.0]},
    "channels text": {**GOOD, "channels": "3"},
    "channels float": {**GOOD, "channels": 3.0},
    "mean short": {**GOOD, "mean": [1.0]},
    "mean nan": {**GOOD, "mean": [1.0, math.nan, 1.0]},
    "mean infinite": {**GOOD, "mean": [1.0, math.inf, 1.0]},
    "mean of text": {**GOOD, "mean": ["1", "2", "3"]},
    "mean null": {**GOOD, "mean": None},
    "mean of many digits": {**GOOD, "mean": [10**5000, 1, 1]},
    "std zero": {**GOOD, "std": [0.0, 1.0, 1.0]},
    "std negative": {**GOOD, "std": [1.0, -1.0, 1.0]},
    "std nan": {**GOOD, "std": [math.nan] * 3},
    "nested": {**GOOD, "mean": nested},
    "keep_aspect of text": {**GOOD, "keep_aspect": "yes"},
    "keep_aspect of number": {**GOOD, "keep_aspect": 1},
    "long": {**GOOD, "mean": [1.0] * 1_000_000},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_value_gives_one_short_message(case):
    with pytest.raises(DataError) as caught:
        Preprocessing.from_dict(HOSTILE[case])
    assert "preprocessing" in str(caught.value)
    assert len(str(caught.value)) < 300
    assert len(str(caught.value).splitlines()) == 1


def test_wrong_argument_is_refused():
    with pytest.raises(ValueError, match=r"std must be greater than 0, got \(0.0,\)"):
        Preprocessing((4, 4), 1, (0.0,), (0.0,))
    with pytest.raises(ValueError, match=r"channels must be 1 \(gray\) or 3 \(RGB\), got 4"):
        Preprocessing.standard((4, 4), 4)


def test_mutated_preprocessing_is_read_unchanged_or_refused():
    chance, refused = random.Random(0), 0
    for _ in range(500):
        saved = mutated_value(GOOD, chance)
        read, message = call_reader(Preprocessing.from_dict, saved, DataError)
        assert message or read.as_dict() == saved
        refused += message is not None
    assert 0 < refused < 500
