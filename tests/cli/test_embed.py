"""`embed` and `verify`: files of embeddings, metrics of pairs, and bad input in one sentence."""

import csv
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import spherenet as sn
from command_line import one_sentence, spherenet
from spherenet.data import Preprocessing, read_image
from spherenet.data.embeddings import Embeddings, read_embeddings, read_pairs, write_embeddings
from spherenet.errors import DataError

CLASSES = ("ant", "=bee", "cat")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A saved network, a folder of three classes with four images each, and a file of pairs."""
    root = tmp_path_factory.mktemp("world")
    generator = np.random.default_rng(0)
    for color, name in enumerate(CLASSES):
        (root / "images" / name / "deeper").mkdir(parents=True)
        for index in range(4):
            pixels = generator.integers(0, 120, (20, 30, 3), dtype=np.uint8)
            pixels[..., color] += 100
            folder = root / "images" / name / ("deeper" if index == 3 else "")
            Image.fromarray(pixels).save(folder / f"{index}.png")
    torch.manual_seed(0)
    model = sn.create_model("cnn-3", num_classes=2, widths=(4, 4, 4), input_size=16)
    preprocessing = Preprocessing.standard((16, 16), 3, (18, 18), keep_aspect=True)
    sn.save_model(model, root / "model", metadata={"classes": ["a", "b"], "preprocessing": preprocessing.as_dict()})
    files = sorted(str(path.relative_to(root / "images")) for path in (root / "images").rglob("*.png"))
    pairs = [(a, b, int(a.split("/")[0] == b.split("/")[0])) for i, a in enumerate(files) for b in files[:i]]
    with open(root / "pairs.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("first", "second", "same"), *pairs])
    return SimpleNamespace(root=root, model=model.eval(), preprocessing=preprocessing, files=files, pairs=pairs)


def expected_embeddings(world):
    images = [read_image(world.root / "images" / name, world.preprocessing) for name in world.files]
    with torch.no_grad():
        return world.model.features(torch.stack(images))


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_embeddings_are_the_features_of_the_network(world, tmp_path, suffix, capsys):
    output = tmp_path / f"out.{suffix}"
    images = world.root / "images"
    assert spherenet("embed", world.root / "model", images, "-o", output, "--batch-size", 5, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["images"], printed["dimensions"], printed["classes"]) == (12, 256, 3)
    saved = read_embeddings(output)
    expected = expected_embeddings(world)
    torch.testing.assert_close(torch.from_numpy(saved.values), expected, rtol=1e-5, atol=1e-6)
    assert saved.files == [str(images / name) for name in world.files]
    assert set(saved.labels) == {"ant", "'=bee", "cat"}  # spreadsheets would evaluate =bee
    if suffix == "npy":
        assert np.array_equal(np.load(output, allow_pickle=False), saved.values)


def test_normalized_embeddings_of_single_images(world, tmp_path, capsys):
    images = [world.root / "images" / name for name in world.files[:2]]
    workers = ["--workers", 1, "--batch-size", 1]
    assert spherenet("embed", world.root / "model", *images, "-o", tmp_path / "x.csv", "--normalize", *workers) == 0
    assert "2 embeddings of 256 numbers, 0 classes" in capsys.readouterr().out
    saved = read_embeddings(tmp_path / "x.csv")
    assert np.linalg.norm(saved.values, axis=1) == pytest.approx([1, 1], abs=1e-6)
    assert saved.labels == ["", ""]


def test_retrieval_metrics_are_printed(world, tmp_path, capsys):
    arguments = ["embed", world.root / "model", world.root / "images", "-o", tmp_path / "x.npy", "--retrieval"]
    assert spherenet(*arguments, "--json") == 0
    printed = json.loads(capsys.readouterr().out)["retrieval"]
    labels = [name.split("/")[0] for name in world.files]
    features = expected_embeddings(world)
    assert printed["recall@1"] == pytest.approx(sn.recall_at_k(features, labels))
    assert printed["recall@10"] == pytest.approx(sn.recall_at_k(features, labels, 10))
    assert printed["mAP@R"] == pytest.approx(sn.mean_average_precision_at_r(features, labels))
    assert spherenet(*arguments) == 0
    assert "recall@1 " in capsys.readouterr().out


def test_verification_of_images_and_of_embeddings_agrees_with_the_library(world, tmp_path, capsys):
    arguments = ["--root", world.root / "images", "--folds", 3, "--fpr", 0.5, 0.01, "--json"]
    results = []
    assert spherenet("embed", world.root / "model", world.root / "images", "-o", tmp_path / "x.npy") == 0
    capsys.readouterr()
    for source in (world.root / "model", tmp_path / "x.npy"):
        roc = ["--roc", tmp_path / "roc.csv"]
        assert spherenet("verify", source, world.root / "pairs.csv", *arguments, *roc) == 0
        results.append(json.loads(capsys.readouterr().out))
    rows = {name: row for row, name in enumerate(world.files)}
    features = expected_embeddings(world)
    first, second = (features[[rows[pair[side]] for pair in world.pairs]] for side in (0, 1))
    scores, same = sn.pair_similarities(first, second), torch.tensor([pair[2] for pair in world.pairs])
    accuracy = sn.verification_accuracy(scores, same, 3)
    for result in results:
        assert (result["same"], result["different"]) == (18, 48)
        assert result["accuracy"] == pytest.approx(accuracy.mean)
        assert result["thresholds"] == pytest.approx(accuracy.thresholds, abs=1e-5)
        assert result["eer"] == pytest.approx(sn.equal_error_rate(scores, same))
        assert result["tpr_at_fpr"]["0.5"] == pytest.approx(sn.true_positive_rate_at(scores, same, 0.5))
    points = np.loadtxt(tmp_path / "roc.csv", delimiter=",", skiprows=1)
    assert points[0].tolist() == [0, 0, float("inf")]
    assert points[-1, :2].tolist() == [1, 1]
    assert spherenet("verify", tmp_path / "x.npy", world.root / "pairs.csv", *arguments[:-1]) == 0
    assert "18 same and 48 different pairs" in capsys.readouterr().out
    for option in (["--checkpoint", "best"], ["--device", "cpu"]):
        assert spherenet("verify", tmp_path / "x.npy", world.root / "pairs.csv", *option) == 2
        assert f"{option[0]} must be left out for a file of embeddings" in capsys.readouterr().err


BAD_PAIRS = {
    "missing images": ("ant/0.png,nowhere.png,1\nant/0.png,cat/0.png,0\n" * 2, "names 1 images that do not exist"),
    "two columns": ("ant/0.png,ant/1.png\n", "line 1 of "),
    "four columns": ("ant/0.png,ant/1.png,1\na,b,c,0\n", "line 2 of "),
    "another label": ("ant/0.png,ant/1.png,yes\n", "must end in 1 (same) or 0, got 'yes'"),
    "one kind": ("ant/0.png,ant/1.png,1\nant/0.png,ant/2.png,1\n", "must have same and different pairs, got 2 pairs"),
    "no pairs": ("first,second,same\n", "must have same and different pairs, got no pairs"),
    "empty": ("", "got no pairs"),
    "fewer pairs than folds": ("ant/0.png,ant/1.png,1\nant/0.png,cat/0.png,0\n" * 2, "--folds must be at most 2"),
    "one pair of each kind": (
        "ant/0.png,ant/1.png,1\nant/0.png,cat/0.png,0\n",
        "at least 2 same and 2 different pairs, got 1 and 1.",
    ),
    "faces": ("10\t300\nant\t1\n", "must be NAME, number, number or NAME, number, NAME, number"),
    "faces without numbers": ("10\t300\nant\t1\tx\n", "must be NAME, number, number or NAME, number, NAME, number"),
    "unbalanced quotes": ('ant/0.png,"ant/1.png,1\n', "is not valid CSV"),
    "nul bytes": ("ant/0.png,x\0.png,1\nant/0.png,cat/0.png,0\n" * 2, "names 1 images that do not exist"),
}
if sys.version_info < (3, 11):  # csv cannot read the character
    BAD_PAIRS["nul bytes"] = (BAD_PAIRS["nul bytes"][0], "is not valid CSV: line contains NUL")


@pytest.mark.parametrize("case", BAD_PAIRS)
@pytest.mark.parametrize("source", ["model", "x.npy"])
def test_bad_pairs_are_refused_in_one_sentence(world, tmp_path, case, source, capsys):
    text, message = BAD_PAIRS[case]
    (tmp_path / "pairs.csv").write_text(text)
    folds = [] if case == "fewer pairs than folds" else ["--folds", 2]
    if source == "x.npy":
        write_embeddings(
            Embeddings(np.eye(2, dtype=np.float32), ["ant/0.png", "cat/0.png"], ["", ""]), tmp_path / source
        )
        model, root = tmp_path / source, []
        message = message.replace("1 images that do not exist", "1 images that are not in")
    else:
        model, root = world.root / "model", ["--root", world.root / "images"]
    assert spherenet("verify", model, tmp_path / "pairs.csv", *root, *folds) == 2
    said = capsys.readouterr().err
    assert message in said
    assert one_sentence(said)


def test_bad_input_of_embed_is_refused_in_one_sentence(world, tmp_path, capsys):
    def fails(message, *arguments):
        assert spherenet(*arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert one_sentence(said)

    model, images = world.root / "model", world.root / "images"
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"no image")
    fails("--output must be a file ending in .npy or .csv, got none", "embed", model, images)
    fails("--output must end in .npy or .csv, got 'x.txt'", "embed", model, images, "-o", "x.txt")
    fails("there is no image or folder 'nowhere'", "embed", model, "nowhere", "-o", tmp_path / "x.npy")
    fails("has no images", "embed", model, tmp_path / "empty", "-o", tmp_path / "x.npy")
    fails("broken.png", "embed", model, tmp_path / "broken.png", "-o", tmp_path / "x.npy")
    fails("--retrieval requires folders of classes", "embed", model, images / "ant" / "0.png", "-o", tmp_path / "x.npy",
          "--retrieval")  # fmt: skip
    fails("is not", "embed", tmp_path / "empty", images, "-o", tmp_path / "x.npy")
    fails("--output must be a file in an existing folder", "embed", model, images, "-o", tmp_path / "no" / "x.npy")
    roc = ["--root", images, "--folds", 2, "--roc", tmp_path / "no" / "x.csv"]
    fails("--roc must be a file in an existing folder", "verify", model, world.root / "pairs.csv", *roc)
    assert not (tmp_path / "x.npy").exists()


def test_hostile_files_of_embeddings_are_refused(tmp_path):
    import pickle

    good = Embeddings(np.ones((2, 3), np.float32), ["a", "b"], ["", ""])

    def fails(message, name, content):
        write_embeddings(good, tmp_path / "x.npy")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message) as caught:
            read_embeddings(tmp_path / ("x.npy" if name.startswith("x.") else name))
        assert len(str(caught.value)) < 400

    fails("is not a valid .npy file", "x.npy", pickle.dumps([1, 2]))
    fails("is not a valid .npy file", "x.npy", b"")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 1000000), }" % (1 << 30)
    large = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + header.ljust(117) + b"\n"
    fails("must have at most 16,777,216 rows, 65,536 columns", "x.npy", large)
    fails("must have the header file,label and one row for each of 2", "x.files.csv", b"file,label\na,\n")
    fails("must have 2 columns, got 3", "x.files.csv", b"file,label\na,,\nb,\n")
    fails("must have the header file,label,x0", "y.csv", b"a,b\n")
    fails("must have numbers after file and label", "y.csv", b"file,label,x0\na,,one\n")
    fails("must hold finite numbers", "y.csv", b"file,label,x0\na,,nan\n")
    np.save(tmp_path / "z.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    fails("must hold one floating point matrix", "x.npy", (tmp_path / "z.npy").read_bytes())
    np.save(tmp_path / "z.npy", np.ones(3))
    fails("must hold one floating point matrix", "x.npy", (tmp_path / "z.npy").read_bytes())
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_embeddings(tmp_path / "nowhere.npy")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f4", "<f8"])
def test_matrices_of_other_programs_are_read(tmp_path, monkeypatch, order, dtype):
    """Rows or columns first, any precision and byte order, in blocks of a few lines."""
    monkeypatch.setattr("spherenet.data.arrays.BLOCK", 100)
    values = np.random.default_rng(0).standard_normal((37, 11)).astype(dtype)
    write_embeddings(
        Embeddings(np.ones((37, 1), np.float32), [f"{n}.jpg" for n in range(37)], [""] * 37), tmp_path / "x.npy"
    )
    np.save(tmp_path / "x.npy", np.asarray(values, order=order))
    read = read_embeddings(tmp_path / "x.npy").values
    assert read.dtype == np.float32
    assert np.array_equal(read, values.astype(np.float32))


def test_numbers_beyond_float32_are_refused(tmp_path):
    write_embeddings(Embeddings(np.ones((2, 1), np.float32), ["a", "b"], [""] * 2), tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.array([[1e300], [1.0]]))
    with pytest.raises(DataError, match="must hold finite numbers"):
        read_embeddings(tmp_path / "x.npy")


def test_names_survive_the_files(tmp_path):
    names = ["a,b.jpg", 'quote".jpg', "=formula.jpg", "new\nline.jpg", "return\rhere.jpg", "caf\udce9.jpg"]
    for file in ("x.npy", "x.csv"):
        write_embeddings(Embeddings(np.random.rand(6, 4).astype(np.float32), names, [""] * 6), tmp_path / file)
        assert [name.removeprefix("./") for name in read_embeddings(tmp_path / file).files] == names


def test_pairs_of_labeled_faces_in_the_wild_are_read(tmp_path):
    (tmp_path / "pairs.txt").write_text("10\t300\nAnna_Ahl\t1\t4\nAnna_Ahl\t1\tBerta_Bo\t12\n")
    assert read_pairs(tmp_path / "pairs.txt") == [
        ("Anna_Ahl/Anna_Ahl_0001.jpg", "Anna_Ahl/Anna_Ahl_0004.jpg", True),
        ("Anna_Ahl/Anna_Ahl_0001.jpg", "Berta_Bo/Berta_Bo_0012.jpg", False),
    ]


def test_pairs_with_one_number_in_the_first_line_are_read(tmp_path):
    (tmp_path / "pairsDevTest.txt").write_text("1\nAnna\t1\t4\nAnna\t1\tBerta\t12\n")
    assert [pair.same for pair in read_pairs(tmp_path / "pairsDevTest.txt")] == [True, False]


def test_images_that_are_given_twice_are_embedded_once(world, tmp_path, capsys):
    images = world.root / "images"
    arguments = ["-o", tmp_path / "x.npy", "--retrieval", "--json"]
    printed = []
    for sources in ([images], [images, f"{images}/../images", images / "ant" / "0.png"]):
        assert spherenet("embed", world.root / "model", *sources, *arguments) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0] == printed[1]


def test_model_that_does_not_exist_is_refused(world, capsys):
    assert spherenet("verify", "runs/none", world.root / "pairs.csv") == 2
    said = capsys.readouterr().err
    assert "MODEL must be the folder of a run or a model, or a file ending in .npy or .csv, got 'runs/none'" in said
    assert one_sentence(said)


def test_pairs_may_be_separated_by_tabs(tmp_path):
    (tmp_path / "pairs.tsv").write_text("a, b.jpg\tc.jpg\t1\n\na, b.jpg\td.jpg\t0\n")
    assert read_pairs(tmp_path / "pairs.tsv") == [("a, b.jpg", "c.jpg", True), ("a, b.jpg", "d.jpg", False)]
