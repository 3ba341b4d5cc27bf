"""Random numbers from (seed, epoch, index, purpose): equal to an integer implementation, and uniform."""

import pytest
import torch

from spherenet.data.augmentation import Purpose, draw, shuffled

MASK = (1 << 64) - 1


def mix(word):
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def reference_draw(seed, epoch, index, purpose, below):
    key = 0
    for number in (seed, epoch, int(purpose)):
        key = mix((key + 0x9E3779B97F4A7C15 + number) & MASK)
    word = mix((key + index * 0x9E3779B97F4A7C15) & MASK)
    return ((word >> 32) * below) >> 32


def test_reference_is_splitmix64():
    # The first outputs of the reference implementation (Vigna, splitmix64.c) for the seed 1234567.
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, -5, 1 << 70])
@pytest.mark.parametrize("epoch", [0, 3, 100_000])
def test_draw_equals_reference(seed, epoch):
    indices = torch.tensor([0, 1, 2, 49_999, 1 << 40])
    for purpose in Purpose:
        for below in (1, 2, 9, 33, 1 << 31):
            expected = [reference_draw(seed, epoch, int(index), purpose, below) for index in indices]
            assert draw(seed, epoch, indices, purpose, below).tolist() == expected


def test_draws_are_uniform_and_independent():
    indices = torch.arange(90_000)
    counts = draw(0, 0, indices, Purpose.PADDED_CROP_TOP, 9).bincount(minlength=9)
    assert (counts - 10_000).abs().max() < 500  # five standard deviations
    one = draw(0, 0, indices, Purpose.HORIZONTAL_FLIP, 2)
    others = [
        draw(0, 1, indices, Purpose.HORIZONTAL_FLIP, 2),
        draw(1, 0, indices, Purpose.HORIZONTAL_FLIP, 2),
        draw(0, 0, indices, Purpose.VERTICAL_FLIP, 2),
        one.roll(1),
    ]
    for other in others:
        assert abs((one == other).double().mean() - 0.5) < 0.01


def test_draws_do_not_change_global_generator():
    before = torch.get_rng_state()
    draw(0, 0, torch.arange(10), Purpose.SHUFFLE, 2)
    shuffled(0, 10)
    assert torch.equal(before, torch.get_rng_state())


def test_shuffled_is_a_fixed_permutation():
    assert shuffled(0, 8).tolist() == shuffled(0, 8).tolist()
    assert sorted(shuffled(3, 1000).tolist()) == list(range(1000))
    assert shuffled(3, 1000).tolist() != shuffled(4, 1000).tolist()
    words = [reference_draw(5, 0, index, Purpose.SHUFFLE, 1 << 31) for index in range(50)]
    assert shuffled(5, 50).tolist() == sorted(range(50), key=words.__getitem__)
