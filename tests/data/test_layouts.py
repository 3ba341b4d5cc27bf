"""Layouts of folders of images: given splits, stray files, links, folders named like splits, small classes."""

import numpy as np
import pytest
from PIL import Image

from spherenet.data import images, load_dataset
from spherenet.data.listing import list_folder
from spherenet.errors import DataError
from spherenet.training import TrainConfig
from spherenet.training.build import build_data, split_folds, subsample
from spherenet.training.embedding import find_images


def write(root, *paths):
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(root / path)
    return root


def listed(root, **options):
    return list_folder(root, **{"test_fraction": 0.5, "seed": 0, **options})


@pytest.fixture
def three_splits(tmp_path):
    splits = {"train": 3, "val": 2, "test": 1}
    paths = [f"{split}/{name}/{i}.png" for split, count in splits.items() for name in "ab" for i in range(count)]
    return write(tmp_path, *paths)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_val_beside_test_is_for_validation(three_splits, name):
    (three_splits / "val").rename(three_splits / name)
    listing = listed(three_splits)
    assert [len(listing.train), len(listing.validation), len(listing.test)] == [6, 4, 2]
    assert all(path.startswith(name) for path, _ in listing.validation)
    assert all(path.startswith("test") for path, _ in listing.test)
    dataset = load_dataset("folder", three_splits, image_size=4)
    assert [len(split) for split in (dataset.train, dataset.validation, dataset.test)] == [6, 4, 2]
    with pytest.raises(ValueError, match=r"validation_fraction must be 0 for a folder with val/ and test/, got 0\.1"):
        build_data(TrainConfig(data="folder", data_dir=str(three_splits), image_size=4, validation_fraction=0.1))


@pytest.mark.parametrize("name", ["val", "valid", "test"])
def test_one_split_beside_train_is_for_testing(tmp_path, name):
    listing = listed(write(tmp_path, "train/a/0.png", "train/b/0.png", f"{name}/a/1.png"))
    assert listing.validation is None
    assert listing.test == [(f"{name}/a/1.png", 0)]


def test_stray_image_in_train_does_not_change_the_layout(three_splits):
    write(three_splits, "train/preview.png")
    listing = listed(three_splits)
    assert listing.classes == ("a", "b")
    assert listing.outside == ["train/preview.png"]
    assert any("beside the folders" in message for message in load_dataset("folder", three_splits).messages)


def test_train_can_be_a_class(tmp_path):
    listing = listed(write(tmp_path, *(f"{name}/{i}.png" for name in ("bus", "train") for i in range(3))))
    assert listing.classes == ("bus", "train")


@pytest.mark.parametrize("names", [("Training", "Testing"), ("Train", "Valid", "Test")], ids=str)
def test_classes_named_like_splits_are_refused(tmp_path, names):
    write(tmp_path, *(f"{name}/cat/{i}.png" for name in names for i in range(3)))
    with pytest.raises(DataError, match="must be classes, or train/ and val/ or test/ with a folder per class"):
        listed(tmp_path)


def test_labels_of_embeddings_are_classes(three_splits, tmp_path):
    files, labels = find_images([str(three_splits)])
    assert len(files) == 12
    assert set(labels) == {"a", "b"}
    files, labels = find_images([str(three_splits / "train")])
    assert len(files) == 6
    assert set(labels) == {"a", "b"}


def test_links_to_class_folders_are_followed_and_others_named(tmp_path):
    root = write(tmp_path / "images", *(f"{name}/{i}.png" for name in "ab" for i in range(3)))
    write(tmp_path / "elsewhere", "0.png", "1.png")
    (root / "c").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (root / "a" / "inner").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    listing = listed(root)
    assert listing.classes == ("a", "b", "c")
    assert listing.unused == ["a/inner"]
    files, labels = find_images([str(root)])
    assert len(files) == 8
    assert set(labels) == {"a", "b", "c"}


def test_every_class_keeps_an_image(tmp_path):
    root = write(tmp_path, *(f"a/{i}.png" for i in range(60)), "b/0.png", "b/1.png", "c/0.png", "c/1.png")
    dataset = load_dataset("folder", root, image_size=4)
    for count in (3, 5, 8, len(dataset.train)):
        few = subsample(dataset, count)
        assert len(few.train) == len({str(few.train.path(i)) for i in range(count)}) == count
        assert min(few.train.labels.bincount(minlength=3)) >= 1


def test_more_folds_than_images_are_refused(tmp_path):
    dataset = load_dataset("folder", write(tmp_path, *(f"{n}/{i}.png" for n in "ab" for i in range(3))), image_size=4)
    with pytest.raises(ValueError, match=f"folds must be at most {len(dataset.train)}, the number of training images"):
        split_folds(dataset, 20, 18)


def test_class_without_readable_images_names_the_broken_ones(tmp_path):
    write(tmp_path, "a/0.png", "a/1.png", "b/0.png")
    (tmp_path / "b" / "1.png").write_text("no image")
    with pytest.raises(DataError, match=r"1 of 4 images cannot be read: .*1\.png.*; without them the class 'b'"):
        load_dataset("folder", tmp_path, image_size=4, on_broken="skip")


def test_hashes_of_classes_do_not_depend_on_other_classes(tmp_path):
    root = write(tmp_path, *(f"{name}/{i}.png" for name in "abc" for i in range(8)))
    split = load_dataset("folder", root, image_size=4).train
    members = [(split.labels == label).nonzero().flatten() for label in range(3)]
    assert split.class_hashes(4)[:3] == [split.subset(indices).listing_hash()[:8] for indices in members]
    assert split.held_out(0.5).sum() > 0


def test_integers_of_32_bits_have_no_standard_range(tmp_path):
    Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)).save(tmp_path / "wide.tif")
    with pytest.raises(DataError, match="32-bit integers are not supported"):
        images.decode(tmp_path / "wide.tif", (8, 8), 1)
    Image.fromarray(np.full((8, 8), 65535, dtype=np.uint16)).save(tmp_path / "short.tif")
    assert images.decode(tmp_path / "short.tif", (8, 8), 1).min() == 255
