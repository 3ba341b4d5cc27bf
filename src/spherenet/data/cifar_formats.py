"""What CIFAR-10 and CIFAR-100 are: names, counts and places of everything in the official archives.

The facts are those of https://www.cs.toronto.edu/~kriz/cifar.html; the SHA-256 are the ones that TensorFlow Datasets
pins for the same archives (the page itself gives MD5 only).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CIFAR10", "CIFAR100", "CifarFormat"]


@dataclass(frozen=True)
class CifarFormat:
    """The official form of one of the two sets: names, counts and places of everything in it.

    `train` and `test` give the number of pictures of each file (named `x.bin` in the binary layout, `x` in the
    pickled one). A binary record is `label_bytes` labels, of which the last is the class, then the planes of red,
    green and blue.
    """

    name: str
    classes: tuple[str, ...]
    binary_folder: str
    python_folder: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    label_bytes: int
    label_key: str
    archive: str
    python_archive: str
    archive_bytes: int
    archive_sha256: str
    url: str


CIFAR10 = CifarFormat(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    binary_folder="cifar-10-batches-bin",
    python_folder="cifar-10-batches-py",
    train={f"data_batch_{part}": 10_000 for part in range(1, 6)},
    test={"test_batch": 10_000},
    label_bytes=1,
    label_key="labels",
    archive="cifar-10-binary.tar.gz",
    python_archive="cifar-10-python.tar.gz",
    archive_bytes=170_052_171,
    archive_sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)

CLASSES_OF_100 = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip

CIFAR100 = CifarFormat(
    name="cifar100",
    classes=CLASSES_OF_100,
    binary_folder="cifar-100-binary",
    python_folder="cifar-100-python",
    train={"train": 50_000},
    test={"test": 10_000},
    label_bytes=2,  # one of 20 superclasses, then the class
    label_key="fine_labels",
    archive="cifar-100-binary.tar.gz",
    python_archive="cifar-100-python.tar.gz",
    archive_bytes=168_513_733,
    archive_sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)
