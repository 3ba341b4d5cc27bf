"""Which pictures a folder holds, of which classes, for training or for testing."""

import os

import numpy as np
import pytest
from PIL import Image

from spherenet.data import load_dataset
from spherenet.data.folder import list_folder
from spherenet.errors import DataError


def touch(root, *paths):
    """Make empty files: listing does not look into them."""
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()


def listed(root, val_fraction=0.2, seed=0):
    return list_folder(root, val_fraction=val_fraction, seed=seed)


def test_given_splits(tmp_path):
    touch(tmp_path, "train/b/2.png", "train/b/10.png", "train/a/x.JPG", "val/b/1.png", "train/.hidden/z.png")
    assert listed(tmp_path) == (
        ("a", "b"),
        [("train/a/x.JPG", 0), ("train/b/10.png", 1), ("train/b/2.png", 1)],
        [("val/b/1.png", 1)],
    )


def test_test_stands_for_val_unless_both_are_there(tmp_path):
    touch(tmp_path, "train/a/1.png", "train/b/1.png", "test/a/3.png")
    assert listed(tmp_path).test == [("test/a/3.png", 0)]
    touch(tmp_path, "val/b/4.png")
    assert listed(tmp_path).test == [("val/b/4.png", 1)]


def test_an_automatic_split_is_seeded_and_stratified(tmp_path):
    touch(tmp_path, *(f"a/{index}.png" for index in range(50)), *(f"b/{index}.png" for index in range(10)))
    touch(tmp_path, "c/1.png", "c/2.png")
    first = listed(tmp_path)
    assert first == listed(tmp_path)
    assert [sum(label == wanted for _, label in first.test) for wanted in range(3)] == [10, 2, 1]
    assert [sum(label == wanted for _, label in first.train) for wanted in range(3)] == [40, 8, 1]
    assert not {path for path, _ in first.train} & {path for path, _ in first.test}
    assert first.train == sorted(first.train)
    assert first != listed(tmp_path, seed=1)


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_every_class_is_on_both_sides(tmp_path, fraction):
    touch(tmp_path, *(f"{name}/{index}.png" for name in "ab" for index in range(5)))
    found = listed(tmp_path, fraction)
    assert {label for _, label in found.train} == {label for _, label in found.test} == {0, 1}


def test_a_class_may_be_called_train(tmp_path):
    touch(tmp_path, *(f"{name}/{index}.png" for name in ("bus", "train", "val") for index in range(2)))
    assert listed(tmp_path).classes == ("bus", "train", "val")


def test_suffixes_links_and_nested_folders(tmp_path):
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
    os.symlink(tmp_path / "nowhere", tmp_path / "a" / "dangling.png")  # found broken when it is read
    os.symlink(tmp_path, tmp_path / "a" / "circle")
    os.symlink(tmp_path / "b", tmp_path / "linked-class")
    found = listed(tmp_path)
    assert found.classes == ("a", "b", "linked-class")
    assert sorted(path for path, label in found.train + found.test if label == 0) == sorted(
        f"a/{name}" for name in [*names, "link.png", "dangling.png"]
    )


def test_a_relative_root(tmp_path, monkeypatch):
    touch(tmp_path, *(f"a/{index}.png" for index in range(2)), *(f"b/{index}.png" for index in range(2)))
    monkeypatch.chdir(tmp_path)
    for root in (".", "../" + tmp_path.name):
        assert listed(type(tmp_path)(root)) == listed(tmp_path)


WRONG = {
    "nowhere": ([], "nowhere", "there is no folder '.*nowhere'"),
    "a file": (["x"], "x", "there is no folder"),
    "empty": (["notes.txt"], "", "must have a folder for each of two classes or more, found none"),
    "one class": (["a/1.png", "a/2.png"], "", "two classes or more, found only 'a'"),
    "one class to train": (["train/a/1.png", "val/a/1.png"], "", "train' must have a folder .* found only 'a'"),
    "one picture": (["a/1.png", "a/2.png", "b/1.png"], "", "the class 'b' of .* must have two pictures or more"),
    "no pictures": (["a/1.png", "a/2.png", "b/x.txt"], "", "the class 'b' of .* must have pictures .* found none"),
    "no val": (
        ["train/a/1.png", "train/b/1.png"],
        "",
        "has train/ but neither val/ nor test/; given '.*train' instead",
    ),
    "unknown classes": (
        ["train/a/1.png", "train/b/1.png", "val/a/1.png", "val/c/1.png", "val/d/1.png"],
        "",
        "the classes 'c', 'd' of '.*val' must also be in '.*train'",
    ),
    "empty val": (["train/a/1.png", "train/b/1.png", "val/a/x.txt"], "", "val' has no pictures"),
    "unprintable": (["a\x1b[2J/1.png", "b/1.png"], "", r"a\\x1b.2J' of .* has a name that cannot be printed"),
    "too deep": (["a/" + "x/" * 20 + "1.png", "b/1.png"], "", "lies more than 16 folders below its class"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path, case):
    paths, root, message = WRONG[case]
    touch(tmp_path, *paths)
    with pytest.raises(DataError, match=message) as caught:
        listed(tmp_path / root)
    assert len(str(caught.value).splitlines()) == 1


def test_a_name_that_is_no_text(tmp_path):
    os.makedirs(os.path.join(os.fsencode(tmp_path), b"\xff\xfe"))
    touch(tmp_path, "a/1.png")
    with pytest.raises(DataError, match="a name that cannot be printed"):
        listed(tmp_path)


def test_many_classes_are_not_all_named(tmp_path):
    touch(tmp_path, *(f"{index:03}/1.png" for index in range(100)))
    with pytest.raises(DataError, match="the classes '000', '001', '002', '003', '004' and 95 more of"):
        listed(tmp_path)


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    touch(tmp_path, "a/1.png", "a/2.png", "b/1.png", "b/2.png")
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(DataError, match="b' cannot be read: Permission denied"):
        listed(tmp_path)


def test_load_dataset_prepares_as_for_imagenet(tmp_path, picture_folder, collect):
    dataset = load_dataset("folder", picture_folder)
    assert dataset.classes == ("ant", "bee", "cat")
    assert dataset.preprocessing.size == (224, 224)
    assert dataset.preprocessing.resize == (256, 256)
    assert (len(dataset.train), len(dataset.test)) == (15, 3)
    assert collect(dataset.test, [0, 2])[0].images.shape == (2, 3, 224, 224)
    small = load_dataset("folder", picture_folder, image_size=28, channels=1, val_fraction=0.5, seed=3)
    assert small.preprocessing.resize == (32, 32)
    assert (len(small.train), len(small.test)) == (9, 9)
    assert collect(small.train, [0])[0].images.shape == (1, 1, 28, 28)


def test_load_dataset_needs_a_folder(monkeypatch):
    monkeypatch.setenv("SPHERENET_DATA", "/somewhere")
    with pytest.raises(DataError, match="needs a folder of pictures: give data_dir"):
        load_dataset("folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "cifar11"}, "data must be one of 'mnist5k', .*, got 'cifar11'. Did you mean 'cifar10'"),
        ({"name": "folder", "val_fraction": 0}, "val_fraction must be between 0 and 1, got 0"),
        ({"name": "folder", "val_fraction": "0.1"}, "val_fraction must be between 0 and 1, got '0.1'"),
        ({"name": "folder", "val_fraction": float("nan")}, "val_fraction must be between 0 and 1, got nan"),
        ({"name": "mnist5k", "image_size": 0}, "image_size must be a whole number from 1 to 4096, got 0"),
        ({"name": "mnist5k", "image_size": "32"}, "image_size must be a whole number"),
        ({"name": "mnist5k", "channels": 2}, "channels must be 1"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        load_dataset(**options)


def test_unreadable_pictures_do_not_stop_the_listing(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / name / "1.png")
        (tmp_path / name / "2.png").write_bytes(b"broken")
    assert len(load_dataset("folder", tmp_path, val_fraction=0.5).train) == 2
