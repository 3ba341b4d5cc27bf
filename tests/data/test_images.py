"""Image files of every supported and unsupported type: decoded correctly, or refused by name."""

import io
import os
import random
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from faults.mutation import call_reader, mutated_bytes
from spherenet.data import Preprocessing, read_image
from spherenet.data.images import FORMATS, MAX_PIXELS, decode, pixel_limit
from spherenet.errors import DataError

# An image with four different corners, which shows any rotation or flip: red, green / blue, gray.
CORNERS = np.zeros((40, 60, 3), dtype=np.uint8)
CORNERS[:20, :30], CORNERS[:20, 30:], CORNERS[20:, :30], CORNERS[20:, 30:] = (
    (200, 30, 30), (30, 200, 30), (30, 30, 200), (120, 120, 120),
)  # fmt: skip


@pytest.fixture
def save(tmp_path):
    def write(image, name="image.png", **options):
        (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(tmp_path / name, **options)
        return tmp_path / name

    return write


def corners(path, channels=3):
    """Return the colors in the middle of the four quarters."""
    pixels = decode(path, (40, 60), channels).astype(int)
    return [pixels[y, x].tolist() for y in (10, 30) for x in (15, 45)]


EXPECTED = [[200, 30, 30], [30, 200, 30], [30, 30, 200], [120, 120, 120]]


def close(actual, expected, tolerance):
    return np.abs(np.array(actual) - np.array(expected)).max() <= tolerance


@pytest.mark.parametrize(
    ("suffix", "tolerance"), [("jpg", 8), ("JPEG", 8), ("png", 0), ("bmp", 0), ("gif", 4), ("webp", 12), ("tif", 0)]
)
def test_every_format_is_decoded(save, suffix, tolerance):
    assert close(corners(save(CORNERS, f"image.{suffix}")), EXPECTED, tolerance)


def test_content_determines_the_format(save, tmp_path):
    path = save(CORNERS, "image.png").rename(tmp_path / "image.jpg")
    assert corners(path) == EXPECTED


GRAY = [[81, 81, 81], [130, 130, 130], [49, 49, 49], [120, 120, 120]]


def test_gray_and_color_are_converted(save):
    color, gray = save(CORNERS, "c.png"), save(Image.fromarray(CORNERS).convert("L"), "g.png")
    assert corners(color, 1) == [[level[0]] for level in GRAY]
    assert corners(gray, 1) == [[level[0]] for level in GRAY]
    assert corners(gray) == GRAY


def test_one_bit_per_pixel(save):
    pixels = CORNERS[..., 0] > 100
    assert corners(save(Image.fromarray(pixels), "bits.png")) == [[255] * 3, [0] * 3, [0] * 3, [255] * 3]


def test_palette_is_converted(save):
    path = save(Image.fromarray(CORNERS).convert("P", palette=Image.Palette.ADAPTIVE), "palette.png")
    assert close(corners(path), EXPECTED, 8)


@pytest.mark.parametrize(("suffix", "order"), [("png", "<u2"), ("tif", "<u2"), ("tif", ">u2")])
def test_sixteen_bits_are_scaled(save, suffix, order):
    deep = (np.array(Image.fromarray(CORNERS).convert("L")).astype(np.uint16) * 257).astype(order)
    assert corners(save(Image.fromarray(deep), f"deep.{suffix}")) == GRAY


def test_cmyk_is_converted(save):
    assert close(corners(save(Image.fromarray(CORNERS).convert("CMYK"), "print.jpg", quality=95)), EXPECTED, 12)


def test_transparency_is_composited_on_white(save):
    alpha = np.full((40, 60, 1), 255, dtype=np.uint8)
    alpha[:20, :30], alpha[:20, 30:] = 0, 128
    path = save(np.concatenate([CORNERS, alpha], axis=2), "alpha.png")
    assert close(corners(path), [[255, 255, 255], [142, 227, 142], *EXPECTED[2:]], 1)
    gray = np.stack([np.full((40, 60), 50, np.uint8), alpha[..., 0]], axis=2)
    assert close(corners(save(gray, "gray.png"), 1), [[255], [152], [50], [50]], 1)


def test_transparent_palette_color_becomes_white(save):
    image = Image.new("P", (60, 40), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(0, (0, 0, 30, 20))
    for transparency in (0, bytes([0, 255])):
        path = save(image, "palette.png", transparency=transparency)
        assert corners(path) == [[255, 255, 255], [200, 100, 50], [200, 100, 50], [200, 100, 50]]


def test_transparent_color_without_palette_becomes_white(save):
    assert corners(save(CORNERS, "color.png", transparency=(200, 30, 30))) == [[255, 255, 255], *EXPECTED[1:]]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_exif_orientation_is_applied(save, orientation, suffix):
    undo = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(undo[orientation](Image.fromarray(CORNERS)), f"rotated.{suffix}", exif=exif.tobytes())
    assert close(corners(path), EXPECTED, 12)


@pytest.mark.parametrize(
    "exif", [b"Exif\x00\x00garbage", b"Exif\x00\x00MM\x00*\xff\xff\xff\xff", b"Exif\x00\x00II*\x00"]
)
def test_corrupt_metadata_is_ignored(save, exif):
    assert close(corners(save(CORNERS, "odd.jpg", exif=exif)), EXPECTED, 8)


def test_animation_gives_its_first_frame(save):
    first, second = Image.fromarray(CORNERS), Image.new("RGB", (60, 40), "black")
    for name in ("moving.gif", "moving.webp", "moving.png", "moving.tif"):
        assert close(corners(save(first, name, save_all=True, append_images=[second])), EXPECTED, 12)


def test_large_jpeg_decoded_at_reduced_size_is_close(save):
    large = Image.fromarray(CORNERS).resize((2400, 1600), Image.Resampling.NEAREST)
    assert close(corners(save(large, "large.jpg", quality=95)), EXPECTED, 4)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_decoding_leaves_no_warnings_and_no_open_files(save):
    path = save(CORNERS, "image.tif")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        decode(path, (8, 8), 3)
    assert len(os.listdir("/proc/self/fd")) == before


def png_of(width, height):
    """Return a PNG whose header states a size but which holds no pixels."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def encoded(image_format, **options):
    stream = io.BytesIO()
    Image.fromarray(CORNERS).save(stream, image_format, **options)
    return stream.getvalue()


BROKEN = {
    "empty": (b"", "it is not a JPEG, PNG, BMP, GIF, WebP, TIFF or AVIF image"),
    "text": (b"this is not a image", "it is not a JPEG"),
    "zeros": (bytes(1000), "it is not a JPEG"),
    "truncated jpeg": (encoded("JPEG")[:-300], "cannot be read: "),
    "truncated png": (encoded("PNG")[:-30], "cannot be read: "),
    "truncated webp": (encoded("WEBP")[:-30], "cannot be read: "),
    "corrupt png": (encoded("PNG").replace(b"IDAT", b"IDAT\0\0\0\0"), "cannot be read: "),
    "header only": (png_of(100, 100), "cannot be read: "),
    "bomb": (png_of(10_000, 10_000), f"must have at most {MAX_PIXELS} pixels, got 10000 × 10000"),
    "long bomb": (png_of(80_000_000, 1), "must have sides of at most 65536 pixels, got 80000000 × 1"),
    "high bomb": (png_of(1, 80_000_000), "must have sides of at most 65536 pixels, got 1 × 80000000"),
    "strip": (png_of(1, 10_001), "must have a long side of at most 10000 times the short one, got 1 × 10001"),
    "big bomb": (png_of(60_000, 60_000), f"must have at most {MAX_PIXELS} pixels, got 60000 × 60000"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "it is not a JPEG"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is not a JPEG"),
    "icon": (encoded("ICO"), "it is not a JPEG"),
    "pdf": (encoded("PDF"), "it is not a JPEG"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_image_is_refused_by_name(tmp_path, case):
    data, message = BROKEN[case]
    path = tmp_path / "broken\nname.png"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        decode(path, (32, 32), 3)
    assert message in str(caught.value)
    assert r"broken\nname.png" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_bomb_is_refused_without_pillow_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "bomb.png").write_bytes(png_of(60_000, 60_000))
    with pytest.raises(DataError, match=str(MAX_PIXELS)):
        decode(tmp_path / "bomb.png", (32, 32), 3)


def test_limit_can_be_raised(tmp_path, monkeypatch):
    path = tmp_path / "large.png"
    Image.new("L", (300, 200), 7).save(path)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10_000)  # Pillow refuses more than twice as many
    with pytest.raises(DataError, match=r"at most 59999 pixels, got 300 × 200 \(--max-megapixels sets the limit\)\.$"):
        decode(path, (8, 8), 1, max_pixels=59_999)
    assert decode(path, (8, 8), 1, max_pixels=60_000).max() == 7
    preprocessing = Preprocessing.standard((8, 8), 1)
    with pytest.raises(DataError, match="at most 5 pixels"):
        read_image(path, preprocessing, max_pixels=5)
    assert Image.MAX_IMAGE_PIXELS == 10_000
    assert (pixel_limit(None), pixel_limit(120.5)) == (MAX_PIXELS, 120_500_000)


@pytest.mark.parametrize("image_format", ["WEBP", "PNG"])
def test_sparse_file_is_refused(tmp_path, image_format):
    """Pillow would read all of it into memory."""
    path = tmp_path / "image"
    path.write_bytes(encoded(image_format))
    os.truncate(path, 1 << 32)
    with pytest.raises(DataError, match="must have at most 715827880 bytes, got 4294967296"):
        decode(path, (32, 32), 3)


@pytest.mark.parametrize("size", [(65_536, 66), (10, 10_000), (1, 1_000)])
def test_longest_images_are_decoded(save, size):
    assert decode(save(Image.new("L", size, 77)), (8, 8), 1).tolist() == [[[77]] * 8] * 8


def test_floating_point_pixels_are_refused(save):
    with pytest.raises(DataError, match="floating point pixels are not supported"):
        decode(save(Image.new("F", (8, 8)), "float.tif"), (8, 8), 1)


def test_missing_files_folders_and_pipes_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.png' cannot be read: No such file or directory\."):
        decode(tmp_path / "nowhere.png", (8, 8), 3)
    with pytest.raises(DataError, match="is not a regular file"):
        decode(tmp_path, (8, 8), 3)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="is not a regular file"):
        decode(tmp_path / "pipe.png", (8, 8), 3)
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match="No such file"):
        decode(tmp_path / "dangling.png", (8, 8), 3)


def test_read_image_resizes_crops_and_normalizes(save):
    path = save(CORNERS)
    direct = read_image(path, Preprocessing.standard((40, 60), 3))
    assert direct.dtype == torch.float32
    assert torch.equal(direct, (torch.from_numpy(CORNERS).permute(2, 0, 1).float() - 127.5) / 128)
    cropped = read_image(path, Preprocessing.standard((20, 30), 3, resize=(40, 60)))
    assert torch.equal(cropped, direct[:, 10:30, 15:45])
    assert read_image(str(path), Preprocessing.standard((7, 9), 1)).shape == (1, 7, 9)


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "jpeg"])
@pytest.mark.skipif(os.name == "nt", reason="libtiff is a part of Pillow there")
def test_libtiff_prints_nothing_beside_the_error(compression, tmp_path, capfd):
    path = tmp_path / "corrupt.tif"
    Image.effect_noise((32, 32), 50).convert("RGB").save(path, compression=compression)
    content = bytearray(path.read_bytes())
    content[20:400] = b"\xff" * 380
    path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(DataError, match="cannot be read"):
            decode(path, size=(8, 8), channels=3)
    assert capfd.readouterr().err == ""
    with pytest.raises(OSError, match="-2"), Image.open(path) as image:
        image.load()
    assert capfd.readouterr().err != "", "messages of others are not silenced"


@pytest.mark.parametrize("image_format", FORMATS)
def test_mutated_image_is_decoded_or_refused(image_format, tmp_path):
    stream = io.BytesIO()
    Image.effect_noise((16, 12), 90).convert("RGB").save(stream, image_format)
    path, chance, refused = tmp_path / "image", random.Random(0), 0
    for _ in range(300):
        path.write_bytes(mutated_bytes(stream.getvalue(), chance))
        pixels, message = call_reader(lambda path: decode(path, (10, 11), 3), path, DataError)
        assert message or (pixels.shape, pixels.dtype) == ((10, 11, 3), np.uint8)
        refused += message is not None
    assert 0 < refused < 300


def test_mutated_png_is_decoded_correctly_or_refused(save):
    path, chance = save(CORNERS), random.Random(1)
    content = path.read_bytes()
    for _ in range(300):
        path.write_bytes(mutated_bytes(content, chance))
        pixels, _ = call_reader(lambda path: decode(path, CORNERS.shape[:2], 3), path, DataError)
        assert pixels is None or np.array_equal(pixels, CORNERS)
