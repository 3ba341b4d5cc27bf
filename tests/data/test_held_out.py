"""Test and validation images are chosen by name, and broken, foreign and extension-less files are counted and named."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from spherenet.data import Preprocessing, TensorSplit, broken_images, images, load_dataset, locate
from spherenet.data.listing import held_out, list_folder
from spherenet.errors import DataError
from spherenet.training import TrainConfig
from spherenet.training.build import build_data, split_validation


def write(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def test_images(root):
    return {path for path, _ in list_folder(root, test_fraction=0.3, seed=0).test}


test_images.__test__ = False


def test_other_files_do_not_move_an_image_between_splits(tmp_path):
    """Adding, removing and renaming files changes the split of those files only."""
    random.seed(0)
    write(tmp_path, *(f"{name}/{index}.png" for name in "ab" for index in range(60)))
    for _ in range(20):
        before, files = test_images(tmp_path), sorted(tmp_path.glob("*/*"))
        changed = random.sample(files, 3)
        changed[0].unlink()
        changed[1].rename(changed[1].with_name(f"renamed-{random.random()}.png"))
        write(tmp_path, f"a/0-added-{random.random()}.png", f"b/added-{random.random()}.png")
        kept = {str(path.relative_to(tmp_path)) for path in files if path.exists()}
        assert before & kept == test_images(tmp_path) & kept


def test_added_files_never_move_a_training_image_to_the_test_split(tmp_path):
    """Not even in small classes, in which the image with the smallest number is held out."""
    write(tmp_path, "a/0.png", "a/1.png", "b/0.png", "b/1.png")
    for index in range(2, 30):
        files, before = {f"{name}/{number}.png" for name in "ab" for number in range(index)}, test_images(tmp_path)
        write(tmp_path, f"a/{index}.png", f"b/{index}.png")
        assert test_images(tmp_path) & files <= before


def test_fraction_of_held_out_images_is_about_the_requested_one():
    names = [f"class/{index}.jpg".encode() for index in range(20_000)]
    for fraction in (0.1, 0.5):
        chosen = held_out(names, fraction, "test 0")
        # Four standard deviations of a binomial distribution.
        assert abs(sum(chosen) / len(chosen) - fraction) < 4 * (fraction * (1 - fraction) / len(chosen)) ** 0.5
    both = [a and b for a, b in zip(held_out(names, 0.5, "a"), held_out(names, 0.5, "b"), strict=True)]
    assert abs(sum(both) / len(both) - 0.25) < 0.02  # independent choices


@pytest.mark.parametrize(("count", "fraction", "expected"), [(1, 0.9, 0), (2, 1e-9, 1), (2, 0.999999, 1), (5, 0.0, 1)])
def test_both_sides_have_an_image_if_there_are_two(count, fraction, expected):
    assert sum(held_out([bytes([index]) for index in range(count)], fraction, "key")) == expected


@pytest.mark.parametrize("data", ["mnist5k", "folder"])
def test_validation_images_are_held_out_of_the_training_images(data, image_folder):
    options = {"data": data, "data_dir": str(image_folder) if data == "folder" else None, "image_size": 12}
    whole = build_data(TrainConfig(**options))
    dataset = build_data(TrainConfig(**options, validation_fraction=0.25, seed=3))
    assert dataset.test.listing_hash() == whole.test.listing_hash()
    assert len(dataset.train) + len(dataset.validation) == len(whole.train)
    classes = set(range(len(dataset.classes)))
    assert set(dataset.validation.labels.tolist()) == set(dataset.train.labels.tolist()) == classes
    if data == "folder":
        names = [{split.path(index) for index in range(len(split))} for split in (dataset.train, dataset.validation)]
        assert not names[0] & names[1]
    else:
        assert len(dataset.validation) == 1000
        assert not set(dataset.train._positions.tolist()) & set(dataset.validation._positions.tolist())
    again = build_data(TrainConfig(**options, validation_fraction=0.25))
    assert again.validation.listing_hash() == dataset.validation.listing_hash()
    fewer = build_data(TrainConfig(**options, validation_fraction=0.25, train_images=len(classes)))
    assert len(fewer.train) == len(classes)
    assert fewer.validation.listing_hash() == dataset.validation.listing_hash()


def test_validation_image_does_not_depend_on_other_files(image_folder):
    def validation():
        split = build_data(TrainConfig(data="folder", data_dir=str(image_folder), validation_fraction=0.4)).validation
        return {str(split.path(index).relative_to(image_folder)) for index in range(len(split))}

    for name in ("ant", "bee", "cat"):
        for index in range(20):
            (image_folder / name / f"more-{index}.png").touch()
    before = validation()
    (image_folder / "ant" / "more-0.png").unlink()
    (image_folder / "ant" / "added.png").touch()
    assert before - {"ant/more-0.png"} == validation() - {"ant/added.png"}


def test_single_images_cannot_be_validated():
    preprocessing = Preprocessing.standard((4, 4), 1)
    split = TensorSplit(torch.zeros(2, 4, 4, 1, dtype=torch.uint8), torch.arange(2), preprocessing)
    dataset = load_dataset("mnist5k")
    with pytest.raises(ValueError, match="validation_fraction must be 0 if every class has a single training image"):
        split_validation(type(dataset)("two", ("a", "b"), preprocessing, split, split), 0.5)


@pytest.fixture
def odd_folder(image_folder):
    """A folder with files that are not images, broken or without an extension, and images that Pillow cannot read."""
    (image_folder / "ant" / "0.jpg").rename(image_folder / "ant" / "no-extension")
    (image_folder / "ant" / "README").write_text("BMP images of ants")
    (image_folder / "bee" / "notes.txt").touch()
    (image_folder / "forgotten.jpg").touch()
    (image_folder / "bee" / "broken.png").write_bytes((image_folder / "bee" / "1.PNG").read_bytes()[:200])
    (image_folder / "cat" / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    Image.fromarray(np.zeros((9, 8, 3), np.uint8)).save(image_folder / "cat" / "new.avif")
    return image_folder


def test_unsupported_images_stop_at_once_by_default(odd_folder):
    expected = "^1 of 21 images cannot be read: 'cat/phone.heic': it is an HEIC image, which Pillow does not read "
    with pytest.raises(
        DataError, match=expected + r"\(convert it .*\); convert or remove them, or add --on-broken skip\.$"
    ):
        load_dataset("folder", odd_folder, image_size=12)


def test_broken_images_are_skipped_counted_and_named(odd_folder):
    calls = []
    dataset = load_dataset(
        "folder", odd_folder, image_size=12, on_broken="skip", progress=lambda *done: calls.append(done)
    )
    assert set(dataset.broken) == {"bee/broken.png", "cat/phone.heic"}
    assert calls[-1] == (21, 21)
    splits = (dataset.train, dataset.test)
    paths = {str(split.path(index).relative_to(odd_folder)) for split in splits for index in range(len(split))}
    assert len(paths) == 19
    assert {"ant/no-extension", "cat/new.avif"} <= paths
    assert not {"bee/broken.png", "cat/phone.heic", "ant/README"} & paths
    assert all(broken_images(split) == {} for split in splits)
    unused, outside, used, broken = dataset.messages
    assert unused.endswith("that are not images: 2 ('ant/README', 'bee/notes.txt').")
    assert outside.endswith("that are beside the folders of the classes and not used: 1 ('forgotten.jpg').")
    assert used.endswith("without an extension, which are used: 1 ('ant/no-extension').")
    assert broken.startswith("2 of 21 images cannot be read: ")
    assert broken.endswith("; they are left out.")
    known = load_dataset("folder", odd_folder, image_size=12, on_broken="skip", broken=dataset.broken, progress=1 / 1)
    assert known.train.listing_hash() == dataset.train.listing_hash()  # nothing was decoded: progress is not callable


def test_format_is_named_by_its_content(odd_folder, monkeypatch):
    heic, avif = odd_folder / "cat" / "phone.heic", odd_folder / "cat" / "new.avif"
    assert images.decode(avif, (6, 6), 3).shape == (6, 6, 3)
    heic.rename(heic.with_name("renamed.jpg"))
    with pytest.raises(
        DataError, match="cannot be read: it is an HEIC image, which Pillow does not read \\(convert it"
    ):
        images.decode(heic.with_name("renamed.jpg"), (6, 6), 3)
    monkeypatch.setattr(images, "FORMATS", images.FORMATS[:6])  # a Pillow that was built without libavif
    with pytest.raises(DataError, match="it is an AVIF image, which this build of Pillow does not read"):
        images.decode(avif, (6, 6), 3)
    assert images.unsupported("x.AVIF") is not None


@pytest.mark.parametrize("suffix", ["jpg", "PNG", "bmp", "gif", "webp", "tiff"])
def test_signature_agrees_with_pillow(image_folder, suffix):
    path = next((image_folder / "ant").glob(f"*.{suffix}"))
    with Image.open(path) as image:
        assert images.signature(path) == image.format


def test_data_may_be_a_folder(image_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data_dir in (None, image_folder, "images"):
        assert locate("images", data_dir) == ("folder", str(image_folder))
    assert locate("folder", "images") == ("folder", str(image_folder))
    assert locate("cifar10") == ("cifar10", None)
    (tmp_path / "cifar10").mkdir()
    assert locate("cifar10") == ("cifar10", None)  # a name before a folder
    assert locate("./cifar10") == ("folder", str(tmp_path / "cifar10"))
    for data, data_dir, message in (
        ("mnist5k", "images", "data_dir must be left out with mnist5k, which is part of the package, got 'images'"),
        ("images", ".", "data_dir must be left out if data is the folder 'images', got '.'"),
        ("./image", None, "data must be mnist5k, cifar10, cifar100 or an existing folder, got './image'"),
        ("cifar11", None, r"got 'cifar11'\. Did you mean 'cifar10'\?$"),
    ):
        with pytest.raises(ValueError, match=message):
            locate(data, data_dir)
