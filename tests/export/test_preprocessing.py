"""The preprocessing next to exported files: its steps give the pixels of `predict`, and onnxruntime its scores."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image, ImageOps

import spherenet as sn
from command_line import one_sentence, spherenet
from spherenet.data import Preprocessing, read_image, read_pixels
from spherenet.data.images import TRANSPOSES
from spherenet.export import preprocessing_steps

SIZES = {"wide": (700, 130), "tall": (90, 333), "large": (900, 700), "turned": (400, 120), "small": (9, 30)}
"""(width, height): large enough for JPEG's reduced sizes, and with a long side that a crop cuts off."""


def photograph(width, height, seed):
    """Return an image with edges and gradients, so that another filter, crop or rotation changes it."""
    y, x = np.mgrid[:height, :width]
    phases = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = [np.sin(x / (5 + 9 * i) + phase) * np.cos(y / (13 - 3 * i)) for i, phase in enumerate(phases)]
    return Image.fromarray((127 + 120 * np.stack(waves, axis=2)).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of two classes of JPEG files of odd sizes; one is turned by its EXIF orientation."""
    folder = tmp_path_factory.mktemp("photographs")
    for seed, name in enumerate(("ant", "bee")):
        (folder / name).mkdir()
        for title, (width, height) in SIZES.items():
            exif = Image.Exif()
            exif[0x0112] = 6 if title == "turned" else 1
            photograph(width, height, seed).save(folder / name / f"{title}.jpg", exif=exif.tobytes(), quality=90)
    return folder


@pytest.fixture(scope="module", params=["data", "image"])
def run(request, photographs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ["--image-size", 21, "--widths", 4, 4, 4, "--batch-size", 4, "--iterations", 2, "--eval-every", 2,
               "--workers", 0, "--checkpoint-every", 2, "--set", f"standardize={request.param}"]  # fmt: skip
    assert spherenet("train", "--data", "folder", "--data-dir", photographs, *options, "--output", folder) == 0
    return folder


def follow(steps, path):
    """Return the pixels that the calls of Pillow in the steps give, as a stranger would write them."""
    by_name = {step["step"]: step for step in steps}
    names = {"Image": Image, "ImageOps": ImageOps, "file": path}
    exec(by_name["decode"]["pillow"], names)
    orientation = names["image"].getexif().get(0x0112, 1)
    exec(by_name["convert"]["pillow"], names)
    resize = by_name["resize"]["pillow"]
    height, width = by_name["resize"]["size"]
    if orientation >= 5:
        assert f"({width}, {height})" in resize
        resize = resize.replace(f"({width}, {height})", f"({height}, {width})")
    exec(resize, names)
    if orientation > 1:
        names["image"] = names["image"].transpose(TRANSPOSES[orientation])
    exec(by_name["crop"]["pillow"], names)
    return np.asarray(names["image"])


@pytest.mark.parametrize("keep_aspect", [False, True])
@pytest.mark.parametrize(("size", "resize"), [((21, 21), (24, 24)), ((16, 25), None), ((15, 30), (40, 31))])
def test_steps_give_the_pixels_of_a_batch(photographs, keep_aspect, size, resize):
    preprocessing = Preprocessing.standard(size, 3, resize, keep_aspect)
    steps = json.loads(json.dumps(preprocessing_steps(preprocessing)))
    for path in sorted(photographs.glob("*/*.jpg")):
        assert np.array_equal(follow(steps, path), read_pixels(path, preprocessing)), path.name


def test_aspect_ratio_is_kept_and_the_center_is_used(tmp_path):
    # A circle in the center of a wide image; its surroundings are cut off.
    y, x = np.mgrid[:100, :300]
    circle = ((x - 149.5) ** 2 + (y - 49.5) ** 2 < 45**2).astype(np.uint8) * 255
    Image.fromarray(circle).save(tmp_path / "circle.png")

    def extent(keep_aspect):
        pixels = read_pixels(tmp_path / "circle.png", Preprocessing.standard((50, 50), 1, None, keep_aspect))[..., 0]
        inside = pixels > 127
        return int(inside.any(0).sum()), int(inside.any(1).sum()), np.abs(inside - inside[:, ::-1].astype(int)).sum()

    width, height, asymmetry = extent(keep_aspect=True)
    assert (width, asymmetry) == (height, 0)
    assert abs(width - 45) <= 1
    squashed, height, _ = extent(keep_aspect=False)
    assert abs(squashed - 15) <= 1
    assert abs(height - 45) <= 1


@pytest.mark.parametrize("shape", [(1, 9000), (9000, 1), (1, 1), (2, 7), (8191, 3), (333, 1000)])
def test_extreme_shapes_need_little_memory(tmp_path, shape):
    Image.new("RGB", shape, (10, 200, 30)).save(tmp_path / "x.png")
    pixels = read_pixels(tmp_path / "x.png", Preprocessing.standard((7, 13), 3, (64, 48), True))
    assert np.array_equal(pixels, np.broadcast_to(np.array([10, 200, 30]), (7, 13, 3)))


def scores_of(file, images):
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["scores"], {"images": images})[0])


@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_onnx_file_agrees_with_predict_on_jpegs(run, photographs, tmp_path, with_preprocessing, capsys):
    file = tmp_path / "model.onnx"
    assert spherenet("export", run, file, *["--with-preprocessing"] * with_preprocessing) == 0
    record = json.loads((tmp_path / "model.preprocessing.json").read_text())
    paths = sorted(photographs.glob("*/*.jpg"))
    capsys.readouterr()
    assert spherenet("predict", *paths, "--run", run, "--top", 2, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    pixels = np.stack([follow(record["steps"], path) for path in paths])
    standardize = next((step for step in record["steps"] if step["step"] == "standardize"), None)
    assert (standardize is None) == ("standardize" not in record["preprocessing"])
    inside = ["normalize", *(["standardize"] if standardize else []), "transpose"]
    assert [step["step"] for step in record["steps"] if step["in_model"]] == (inside if with_preprocessing else [])
    if not with_preprocessing:
        normalize = next(step for step in record["steps"] if step["step"] == "normalize")
        mean, std = (np.float32(normalize[name]) for name in ("mean", "std"))
        pixels = (pixels.astype(np.float32) - mean) / std
        if standardize:
            pixels = pixels - pixels.mean((1, 2, 3), keepdims=True)
            pixels = pixels / np.maximum(pixels.std((1, 2, 3), keepdims=True), np.float32(standardize["smallest"]))
        pixels = pixels.transpose(0, 3, 1, 2)
    assert record["input"]["dtype"] == str(pixels.dtype)
    assert record["input"]["shape"][1:] == list(pixels.shape[1:])
    properties = {entry.key: json.loads(entry.value) for entry in onnx.load(file).metadata_props}
    assert properties["input"] == record["input"]
    assert properties["preprocessing"] == record["preprocessing"]
    probabilities = scores_of(file, pixels).softmax(1)
    for row, values in zip(rows, probabilities.tolist(), strict=True):
        predicted = {entry["class"]: entry["score"] for entry in row["classes"]}
        assert predicted == pytest.approx(dict(zip(record["classes"], values, strict=True)), abs=1e-5)
    spread = probabilities[:, 0].max() - probabilities[:, 0].min()
    assert spread > 1e-3, "the images must have different scores"


def test_model_folder_predicts_the_same_as_the_run(run, photographs, tmp_path):
    assert spherenet("export", run, tmp_path / "model") == 0
    paths = sorted(photographs.glob("*/*.jpg"))
    expected, loaded = (sn.predict(source, paths, top=2) for source in (run, tmp_path / "model"))
    for own, other in zip(expected, loaded, strict=True):
        assert dict(own.classes) == dict(other.classes)


def test_program_takes_pixels_too(run, photographs, tmp_path):
    from spherenet.training.saved_runs import load_predictor

    file = tmp_path / "model.pt2"
    assert spherenet("export", run, file, "--with-preprocessing", "--checkpoint", "last") == 0
    predictor = load_predictor(run, "last")
    path = photographs / "ant" / "turned.jpg"
    pixels = torch.from_numpy(read_pixels(path, predictor.preprocessing).copy()).unsqueeze(0)
    loaded = torch.export.load(file).module()
    with torch.no_grad():
        expected = predictor.model(read_image(path, predictor.preprocessing).unsqueeze(0))
        torch.testing.assert_close(loaded(pixels), expected, rtol=1e-5, atol=1e-5)


def test_runs_crop_by_default(run):
    config = json.loads((run / "config.json").read_text())
    assert config["preprocessing"]["keep_aspect"] is True
    assert config["train"]["resize"] == "crop"


def test_mistakes_are_one_sentence(run, tmp_path, capsys):
    def fails(message, *arguments):
        assert spherenet(*arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert one_sentence(said)

    fails("--with-preprocessing must be left out for a folder", "export", run, tmp_path / "x", "--with-preprocessing")
    (tmp_path / "x.preprocessing.json").write_text("{}")
    fails("x.preprocessing.json exists: add --overwrite", "export", run, tmp_path / "x.pt2")
    assert not (tmp_path / "x.pt2").exists()
    fails("--resize must be squash or crop, got 'stretch'", "train", "--resize", "stretch")


def test_files_of_one_name_share_a_description_only_if_it_is_the_same(run, tmp_path, capsys):
    target = tmp_path / "digits.onnx"
    assert spherenet("export", run, target, "--with-preprocessing") == 0
    record = (tmp_path / "digits.preprocessing.json").read_bytes()
    assert spherenet("export", run, tmp_path / "digits.pt2", "--with-preprocessing") == 0
    (tmp_path / "digits.pt2").unlink()
    for options in ([], ["--overwrite"]):
        assert spherenet("export", run, tmp_path / "digits.pt2", *options) == 2
        assert "describes" in (said := capsys.readouterr().err)
        assert "digits.onnx, which has another input or model: choose another target." in said
        assert (tmp_path / "digits.preprocessing.json").read_bytes() == record
        assert not (tmp_path / "digits.pt2").exists()
    assert spherenet("export", run, target, "--overwrite") == 0
    assert (tmp_path / "digits.preprocessing.json").read_bytes() != record
