"""The Fourier figure: what is rebuilt is real, and phases carry the image."""

import pytest
import torch
from PIL import Image

from spherenet.errors import DataError
from spherenet.theory.features import Digits
from spherenet.theory.phase import correlation, draw, mixed_spectrum, read_picture, rebuild


def picture(name, side=48):
    """Synthetic pictures [C, side, side] in [0, 1]."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, side, dtype=torch.float64)] * 2, indexing="ij")
    if name == "disc":
        return ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.3).double().unsqueeze(0)
    if name == "bars":
        return ((x * 5).floor() % 2 * (y > -0.3)).unsqueeze(0)
    if name == "blobs":
        centres = [(0.3, 0.4), (-0.5, 0.1), (0.1, -0.6)]
        return sum(torch.exp(-((x - a) ** 2 + (y - b) ** 2) * 30) for a, b in centres).unsqueeze(0)
    if name == "cross":
        arms = ((x.abs() < 0.2) | ((y - 0.2).abs() < 0.15)) & (x.abs() < 0.8) & (y.abs() < 0.7)
        return arms.double().unsqueeze(0)
    disc, cross = picture("disc", side), picture("cross", side)
    return torch.cat([disc, cross, (x + 1).unsqueeze(0) / 2 * disc])


PICTURES = ["disc", "cross", "blobs", "colour"]


def correlations(name, seeds=12):
    """Correlations [3, seeds] of what is rebuilt: phases with white and with 1/f magnitudes, magnitudes."""
    return torch.tensor([list(rebuild(picture(name), seed).correlations().values()) for seed in range(seeds)]).mT


@pytest.mark.parametrize("name", PICTURES)
def test_phases_carry_more_of_a_picture_than_magnitudes(name):
    white, pink, magnitudes = correlations(name)
    assert white.min() > 0.1
    assert white.mean() > magnitudes.abs().mean()
    assert white.mean() > magnitudes.mean() + 0.1  # which may have either sign
    assert (pink > magnitudes.abs()).all()
    assert abs(magnitudes.mean()) < 0.15


def test_a_pattern_that_repeats_is_the_exception():
    white, _, magnitudes = correlations("bars")
    assert magnitudes.abs().mean() > white.mean()


def test_phases_carry_more_of_real_digits():
    images, _ = Digits(torch.float64).test(20)
    found = [rebuild(image, seed).correlations() for seed, image in enumerate(images)]
    white, pink, magnitudes = (torch.tensor([list(each.values())[index] for each in found]) for index in range(3))
    assert white.mean() > magnitudes.abs().mean() + 0.1
    assert pink.mean() > magnitudes.abs().mean() + 0.3
    assert (pink > magnitudes).all()


@pytest.mark.parametrize("side", [16, 17])
def test_mixtures_have_the_symmetry_of_real_images(side):
    first, second = (torch.fft.fft2(torch.randn(3, side, side + 3, dtype=torch.float64)) for _ in range(2))
    mixed = mixed_spectrum(first, second)
    assert torch.fft.ifft2(mixed).imag.abs().max() < 1e-12
    mirrored = mixed.flip((1, 2)).roll((1, 1), (1, 2)).conj()
    torch.testing.assert_close(mixed, mirrored, rtol=1e-9, atol=1e-9)


def test_halves_are_kept_and_means_too():
    original = picture("colour", 32)
    rebuilt = rebuild(original, 3)
    spectrum = torch.fft.fft2(original)
    away = torch.ones(32, 32, dtype=torch.bool)
    away[0, 0] = False
    strong = (spectrum.abs() > 1e-6) & away
    ours = torch.fft.fft2(rebuilt.phases_white)
    torch.testing.assert_close(torch.exp(1j * ours.angle())[strong], torch.exp(1j * spectrum.angle())[strong])
    torch.testing.assert_close(torch.fft.fft2(rebuilt.magnitudes).abs()[:, away], spectrum.abs()[:, away])
    for image in (rebuilt.phases_white, rebuilt.phases_pink, rebuilt.magnitudes):
        assert not image.is_complex()
        torch.testing.assert_close(image.mean((1, 2)), original.mean((1, 2)))


def test_a_mixture_with_itself_is_the_picture():
    original = picture("bars")
    spectrum = torch.fft.fft2(original)
    torch.testing.assert_close(torch.fft.ifft2(mixed_spectrum(spectrum, spectrum)).real, original)


def test_the_seed_decides():
    original = picture("disc")
    first, again, other = (rebuild(original, seed).magnitudes for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_correlation_forgets_light_and_contrast():
    image = picture("colour")
    assert correlation(image, 3 * image + torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) == pytest.approx(1)
    assert correlation(image, -image) == pytest.approx(-1)


def test_a_channel_of_one_value_stays_so():
    original = torch.cat([picture("disc"), torch.full((1, 48, 48), 0.3).double(), picture("bars")])
    rebuilt = rebuild(original)
    torch.testing.assert_close(rebuilt.phases_pink[1], original[1])


@pytest.mark.parametrize(
    ("made", "message"),
    [(torch.full((3, 8, 8), 0.5), "single colour"), (torch.rand(3, 1, 8), "2 × 2"), (torch.rand(8, 8), "must be")],
)
def test_pictures_without_phases(made, message):
    with pytest.raises(ValueError, match=message):
        rebuild(made.double())


def save(path, size, mode="RGB", **options):
    Image.effect_noise(size, 80).convert(mode).save(path, **options)
    return path


def test_pictures_keep_their_size_up_to_a_bound(tmp_path):
    assert read_picture(save(tmp_path / "grey.png", (37, 21), "L")).shape == (1, 21, 37)
    assert read_picture(save(tmp_path / "equal.png", (37, 21), "RGB")).shape == (1, 21, 37)
    assert read_picture(save(tmp_path / "large.png", (2048, 1000), "L")).shape == (1, 500, 1024)
    Image.linear_gradient("L").convert("P").convert("RGB").point([*range(256), *[9] * 512]).save(tmp_path / "red.png")
    colour = read_picture(tmp_path / "red.png")
    assert colour.shape == (3, 256, 256)
    assert colour.min() >= 0
    assert colour.max() == 1


def test_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_picture(save(tmp_path / "turned.jpg", (40, 20), exif=exif)).shape[1:] == (40, 20)


def test_what_is_no_picture_is_refused(tmp_path):
    (tmp_path / "text.png").write_text("not a picture")
    whole = save(tmp_path / "whole.png", (64, 64)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    for name in ("text.png", "cut.png", "missing.png", "."):
        with pytest.raises(DataError, match="picture"):
            read_picture(tmp_path / name)


@pytest.mark.parametrize("name", ["disc", "colour"])
def test_drawing_shows_four(name):
    figure = draw(rebuild(picture(name)))
    assert [len(axis.images) for axis in figure.axes] == [1, 1, 1, 1]
