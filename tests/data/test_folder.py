"""The listing of a folder: its images, classes and splits."""

import os

import numpy as np
import pytest
from PIL import Image

from spherenet.data import load_dataset
from spherenet.data.listing import list_folder
from spherenet.errors import DataError


def touch(root, *paths):
    """Create empty files, which suffice for a listing."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def listing_of(root, test_fraction=0.2, seed=0, **options):
    return list_folder(root, test_fraction=test_fraction, seed=seed, **options)


def test_given_splits_are_used(tmp_path):
    touch(tmp_path, "train/b/2.png", "train/b/10.png", "train/a/x.JPG", "val/b/1.png", "train/.hidden/z.png")
    assert listing_of(tmp_path) == (
        ("a", "b"),
        [("train/a/x.JPG", 0), ("train/b/10.png", 1), ("train/b/2.png", 1)],
        None,
        [("val/b/1.png", 1)],
        [],
        [],
    )


def test_split_is_reproducible_and_seeded(tmp_path):
    touch(tmp_path, *(f"{name}/{index}.png" for name in "ab" for index in range(50)))
    first = listing_of(tmp_path)
    assert first == listing_of(tmp_path)
    assert not {path for path, _ in first.train} & {path for path, _ in first.test}
    assert first.train == sorted(first.train)
    assert first != listing_of(tmp_path, seed=1)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_every_class_is_in_both_splits(tmp_path, fraction):
    touch(tmp_path, *(f"{name}/{index}.png" for name in "ab" for index in range(5)))
    listing = listing_of(tmp_path, fraction)
    assert {label for _, label in listing.train} == {label for _, label in listing.test} == {0, 1}


def test_class_may_be_named_train(tmp_path):
    touch(tmp_path, *(f"{name}/{index}.png" for name in ("bus", "train", "val") for index in range(2)))
    assert listing_of(tmp_path).classes == ("bus", "train", "val")


def test_suffixes_links_and_nested_folders_are_listed(tmp_path):
    names = ["1.jpg", "2.jpeg", "3.PNG", "4.bmp", "5.GiF", "6.webp", "7.tif", "8.TIFF", "deep/er/9.png"]
    touch(
        tmp_path,
        *(f"a/{name}" for name in names),
        "a/notes.txt",
        "a/.10.png",
        "a/Thumbs.db",
        "a/jpg",
        "b/1.png",
        "b/2.png",
    )
    os.symlink(tmp_path / "b" / "1.png", tmp_path / "a" / "link.png")
    os.symlink(tmp_path / "nowhere", tmp_path / "a" / "dangling.png")
    os.symlink(tmp_path, tmp_path / "a" / "circle")
    os.symlink(tmp_path / "b", tmp_path / "linked-class")
    listing = listing_of(tmp_path)
    assert listing.classes == ("a", "b", "linked-class")
    assert sorted(path for path, label in listing.train + listing.test if label == 0) == sorted(
        f"a/{name}" for name in [*names, "link.png", "dangling.png"]
    )


def test_relative_root_gives_the_same_listing(tmp_path, monkeypatch):
    touch(tmp_path, *(f"a/{index}.png" for index in range(2)), *(f"b/{index}.png" for index in range(2)))
    monkeypatch.chdir(tmp_path)
    for root in (".", "../" + tmp_path.name):
        assert listing_of(type(tmp_path)(root)) == listing_of(tmp_path)


WRONG = {
    "nowhere": ([], "nowhere", "there is no folder '.*nowhere'"),
    "a file": (["x"], "x", "there is no folder"),
    "empty": (["notes.txt"], "", "must have folders of at least two classes, got none"),
    "one class": (["a/1.png", "a/2.png"], "", "at least two classes, got only 'a'"),
    "one class to train": (["train/a/1.png", "val/a/1.png"], "", "train' must have folders .* got only 'a'"),
    "one image": (["a/1.png", "a/2.png", "b/1.png"], "", "the class 'b' of .* must have at least two images, got one"),
    "no images": (["a/1.png", "a/2.png", "b/x.txt"], "", "the class 'b' of .* must have images .* got none"),
    "no val": (
        ["train/a/1.png", "train/b/1.png"],
        "",
        "must have val/ or test/ beside train/, found neither; use '.*train' as the folder",
    ),
    "unknown classes": (
        ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png", "val/d/1.png"],
        "",
        "the classes 'c', 'd' of '.*val' must also be in '.*train'",
    ),
    "empty val": (["train/a/1.png", "train/b/1.png", "val/a/x.txt"], "", "val' has no images"),
    "unprintable": (
        ["a\x1b[2J/1.png", "b/1.png"],
        "",
        r"names of class folders in .* must be printable, got 'a\\x1b.2J'",
    ),
    "too deep": (["a/" + "x/" * 20 + "1.png", "b/1.png"], "", "must be at most 16 levels below their class"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_folder_is_refused(tmp_path, case):
    paths, root, message = WRONG[case]
    touch(tmp_path, *paths)
    with pytest.raises(DataError, match=message) as caught:
        listing_of(tmp_path / root)
    assert len(str(caught.value).splitlines()) == 1


def test_invalid_utf8_name_is_refused(tmp_path):
    os.makedirs(os.path.join(os.fsencode(tmp_path), b"\xff\xfe"))
    touch(tmp_path, "a/1.png")
    with pytest.raises(DataError, match="must be printable"):
        listing_of(tmp_path)


def test_message_names_at_most_five_classes(tmp_path):
    touch(tmp_path, *(f"{index:03}/1.png" for index in range(100)))
    with pytest.raises(DataError, match="the classes '000', '001', '002', '003', '004' and 95 more of"):
        listing_of(tmp_path)


def test_unreadable_folder_is_reported(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    scandir = os.scandir

    def denied_scandir(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied_scandir)
    with pytest.raises(DataError, match="b' cannot be read: Permission denied"):
        listing_of(tmp_path)


def test_load_dataset_uses_imagenet_sizes(tmp_path, image_folder, collect):
    dataset = load_dataset("folder", image_folder)
    assert dataset.classes == ("ant", "bee", "cat")
    assert dataset.preprocessing.size == (224, 224)
    assert dataset.preprocessing.resize == (256, 256)
    assert (len(dataset.train), len(dataset.test)) == (15, 3)
    assert collect(dataset.test, [0, 2])[0].images.shape == (2, 3, 224, 224)
    small = load_dataset("folder", image_folder, image_size=28, channels=1, test_fraction=0.5, seed=3)
    assert small.preprocessing.resize == (32, 32)
    assert (len(small.train), len(small.test)) == (9, 9)
    assert collect(small.train, [0])[0].images.shape == (1, 1, 28, 28)


def test_load_dataset_requires_a_folder(monkeypatch):
    monkeypatch.setenv("SPHERENET_DATA", "/somewhere")
    with pytest.raises(DataError, match="requires a folder of images: set data_dir"):
        load_dataset("folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar11"}, "data must be one of 'mnist5k', .*, got 'cifar11'. Did you mean 'cifar10'"),
        ({"name": "folder", "test_fraction": 0}, "test_fraction must be between 0 and 1, got 0"),
        ({"name": "folder", "test_fraction": "0.1"}, "test_fraction must be between 0 and 1, got '0.1'"),
        ({"name": "folder", "test_fraction": float("nan")}, "test_fraction must be between 0 and 1, got nan"),
        ({"name": "mnist5k", "image_size": 0}, "image_size must be an integer from 1 to 4096, got 0"),
        ({"name": "mnist5k", "image_size": "32"}, "image_size must be an integer"),
        ({"name": "mnist5k", "channels": 2}, "channels must be 1"),
    ],
)
def test_wrong_argument_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(**options)


def test_listing_does_not_read_images(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / name / "1.png")
        (tmp_path / name / "2.png").write_bytes(b"broken")
    assert len(load_dataset("folder", tmp_path, test_fraction=0.5).train) == 2
