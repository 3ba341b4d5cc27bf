"""Fourier phases and magnitudes: reconstructions are real, and phases carry more of an image."""

import pytest
import torch
from PIL import Image

from spherenet.errors import DataError
from spherenet_paper.theory.features import Digits
from spherenet_paper.theory.phase import correlation, draw, mixed_spectrum, read_image, reconstruct


def synthetic_image(name, side=48):
    """Return a synthetic image [C, side, side] in [0, 1]."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, side, dtype=torch.float64)] * 2, indexing="ij")
    if name == "disc":
        return ((x - 0.2) ** 2 + (y + 0.1) ** 2 < 0.3).double().unsqueeze(0)
    if name == "bars":
        return ((x * 5).floor() % 2 * (y > -0.3)).unsqueeze(0)
    if name == "blobs":
        centers = [(0.3, 0.4), (-0.5, 0.1), (0.1, -0.6)]
        return sum(torch.exp(-((x - a) ** 2 + (y - b) ** 2) * 30) for a, b in centers).unsqueeze(0)
    if name == "cross":
        arms = ((x.abs() < 0.2) | ((y - 0.2).abs() < 0.15)) & (x.abs() < 0.8) & (y.abs() < 0.7)
        return arms.double().unsqueeze(0)
    disc, cross = synthetic_image("disc", side), synthetic_image("cross", side)
    return torch.cat([disc, cross, (x + 1).unsqueeze(0) / 2 * disc])


IMAGES = ["disc", "cross", "blobs", "color"]


def correlations(name, seeds=12):
    """Return correlations [3, seeds] of the reconstructions: phases with white and 1/f magnitudes, and magnitudes."""
    return torch.tensor(
        [list(reconstruct(synthetic_image(name), seed).correlations().values()) for seed in range(seeds)]
    ).mT


@pytest.mark.parametrize("name", IMAGES)
def test_phases_carry_more_of_an_image_than_magnitudes(name):
    white, pink, magnitudes = correlations(name)
    assert white.min() > 0.1
    assert white.mean() > magnitudes.abs().mean()
    assert white.mean() > magnitudes.mean() + 0.1  # magnitudes may have either sign
    assert (pink > magnitudes.abs()).all()
    assert abs(magnitudes.mean()) < 0.15


def test_magnitudes_carry_more_of_a_periodic_pattern():
    white, _, magnitudes = correlations("bars")
    assert magnitudes.abs().mean() > white.mean()


def test_phases_carry_more_of_digits_than_magnitudes():
    images, _ = Digits(torch.float64).test(20)
    results = [reconstruct(image, seed).correlations() for seed, image in enumerate(images)]
    white, pink, magnitudes = (torch.tensor([list(each.values())[index] for each in results]) for index in range(3))
    assert white.mean() > magnitudes.abs().mean() + 0.1
    assert pink.mean() > magnitudes.abs().mean() + 0.3
    assert (pink > magnitudes).all()


@pytest.mark.parametrize("side", [16, 17])
def test_mixed_spectrum_has_the_symmetry_of_real_images(side):
    first, second = (torch.fft.fft2(torch.randn(3, side, side + 3, dtype=torch.float64)) for _ in range(2))
    mixed = mixed_spectrum(first, second)
    assert torch.fft.ifft2(mixed).imag.abs().max() < 1e-12
    mirrored = mixed.flip((1, 2)).roll((1, 1), (1, 2)).conj()
    torch.testing.assert_close(mixed, mirrored, rtol=1e-9, atol=1e-9)


def test_phases_magnitudes_and_means_are_kept():
    original = synthetic_image("color", 32)
    reconstruction = reconstruct(original, 3)
    spectrum = torch.fft.fft2(original)
    not_mean = torch.ones(32, 32, dtype=torch.bool)
    not_mean[0, 0] = False
    strong = (spectrum.abs() > 1e-6) & not_mean
    ours = torch.fft.fft2(reconstruction.phases_white)
    torch.testing.assert_close(torch.exp(1j * ours.angle())[strong], torch.exp(1j * spectrum.angle())[strong])
    torch.testing.assert_close(
        torch.fft.fft2(reconstruction.magnitudes).abs()[:, not_mean], spectrum.abs()[:, not_mean]
    )
    for image in (reconstruction.phases_white, reconstruction.phases_pink, reconstruction.magnitudes):
        assert not image.is_complex()
        torch.testing.assert_close(image.mean((1, 2)), original.mean((1, 2)))


def test_mixture_of_a_spectrum_with_itself_is_the_image():
    original = synthetic_image("bars")
    spectrum = torch.fft.fft2(original)
    torch.testing.assert_close(torch.fft.ifft2(mixed_spectrum(spectrum, spectrum)).real, original)


def test_seed_determines_the_reconstruction():
    original = synthetic_image("disc")
    first, again, other = (reconstruct(original, seed).magnitudes for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_correlation_ignores_brightness_and_contrast():
    image = synthetic_image("color")
    assert correlation(image, 3 * image + torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) == pytest.approx(1)
    assert correlation(image, -image) == pytest.approx(-1)


def test_constant_channel_is_kept():
    original = torch.cat([synthetic_image("disc"), torch.full((1, 48, 48), 0.3).double(), synthetic_image("bars")])
    reconstruction = reconstruct(original)
    torch.testing.assert_close(reconstruction.phases_pink[1], original[1])


@pytest.mark.parametrize(
    ("image", "message"),
    [(torch.full((3, 8, 8), 0.5), "single color"), (torch.rand(3, 1, 8), "2 × 2"), (torch.rand(8, 8), "must be")],
)
def test_image_without_phases_raises_value_error(image, message):
    with pytest.raises(ValueError, match=message):
        reconstruct(image.double())


def save(path, size, mode="RGB", **options):
    Image.effect_noise(size, 80).convert(mode).save(path, **options)
    return path


def test_images_keep_their_size_up_to_1024_pixels(tmp_path):
    assert read_image(save(tmp_path / "gray.png", (37, 21), "L")).shape == (1, 21, 37)
    assert read_image(save(tmp_path / "equal.png", (37, 21), "RGB")).shape == (1, 21, 37)
    assert read_image(save(tmp_path / "large.png", (2048, 1000), "L")).shape == (1, 500, 1024)
    Image.linear_gradient("L").convert("P").convert("RGB").point([*range(256), *[9] * 512]).save(tmp_path / "red.png")
    color = read_image(tmp_path / "red.png")
    assert color.shape == (3, 256, 256)
    assert color.min() >= 0
    assert color.max() == 1


def test_exif_orientation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert read_image(save(tmp_path / "rotated.jpg", (40, 20), exif=exif)).shape[1:] == (40, 20)


def test_invalid_file_raises_data_error(tmp_path):
    (tmp_path / "text.png").write_text("not an image")
    complete = save(tmp_path / "complete.png", (64, 64)).read_bytes()
    (tmp_path / "cut.png").write_bytes(complete[: len(complete) // 2])
    for name in ("text.png", "cut.png", "missing.png", "."):
        with pytest.raises(DataError, match="image"):
            read_image(tmp_path / name)


@pytest.mark.parametrize("name", ["disc", "color"])
def test_figure_shows_four_images(name):
    figure = draw(reconstruct(synthetic_image(name)))
    assert [len(axis.images) for axis in figure.axes] == [1, 1, 1, 1]
