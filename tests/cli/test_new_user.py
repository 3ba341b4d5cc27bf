"""A session of a new user: a folder of photographs of odd kinds from training to an exported file.

`photos` is the folder and `trained` the run. Further steps, e.g. an export, are tests that use these fixtures.
"""

import csv
import io
import json
import os
import shlex
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from command_line import one_sentence, spherenet

OPTIONS = ["--image-size", 16, "--widths", 4, 4, 4, "--batch-size", 8, "--learning-rate", 0.01,
           "--set", "orthogonality=0", "--eval-every", 10, "--workers", 0, "--threads", 1,
           "--validation-fraction", 0.2]  # fmt: skip
UNREADABLE = ("truncated.jpg", "phone.heic")
FOREIGN = ("notes.txt", "README")


def photograph(brightness, seed):
    """Return a photograph of a bright or dark scene, wider than high and different from its mirror image."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 90, (24, 36, 3)) + brightness
    pixels[:8, :12] = brightness + 80
    return Image.fromarray(pixels.astype(np.uint8))


def write_odd_kinds(folder, brightness):
    """Write one photograph of each kind, and files that are not readable photographs."""
    image = photograph(brightness, 1)
    image.convert("L").save(folder / "gray.png")
    Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(folder / "sixteen-bit.png")
    image.convert("RGBA").save(folder / "transparent.png")
    image.convert("P", palette=Image.Palette.ADAPTIVE).save(folder / "palette.gif")
    image.convert("CMYK").save(folder / "print.jpg", quality=95)
    image.save(folder / "new.avif")
    image.save(folder / "No Extension", format="JPEG", quality=95)
    image.save(folder / "upright.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90° clockwise when it is shown
    image.transpose(Image.Transpose.ROTATE_90).save(folder / "rotated.webp", lossless=True, exif=exif)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Change to an empty folder, in which the session takes place, and return it."""
    folder = tmp_path_factory.mktemp("session")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def photos(place):
    """Write photographs of two classes, two of which cannot be read, and return the folder as a user types it."""
    for name, brightness in (("day light", 160), ("night", 0)):
        folder = place / "my photos" / name
        folder.mkdir(parents=True)
        for index in range(12):
            photograph(brightness, 10 + index).save(folder / f"{index}.jpg", quality=95)
        write_odd_kinds(folder, brightness)
    (folder / "truncated.jpg").write_bytes((folder / "0.jpg").read_bytes()[:700])
    (folder / "phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(50))
    (folder / "notes.txt").write_text("bad weather")
    (folder / "README").write_text("photographs of the night")
    (folder / ".DS_Store").touch()
    return "my photos"


@pytest.fixture(scope="module")
def trained(photos, place):
    """Train, resume for more iterations and return the run."""
    arguments = ["--data", photos, *OPTIONS, "--on-broken", "skip", "--output", "first run"]
    assert spherenet("train", *arguments, "--iterations", 20) == 0
    assert spherenet("train", "--resume", "first run", "--iterations", 40, "--allow-changes") == 0
    return place / "first run"


def test_data_names_what_is_not_readable(photos, capsys):
    assert spherenet("data", photos, "--json") == 2
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert len(result["broken"]) == 2
    assert all(any(name in message for message in result["broken"]) for name in UNREADABLE)
    assert all(name in result["messages"][0] for name in FOREIGN)
    assert ".DS_Store" not in str(result)
    assert "No Extension" in result["messages"][1]
    assert result["train"] + result["test"] == 44
    assert printed.err.startswith("spherenet data: 2 of 44 images cannot be read; they are listed on stdout.")


def test_training_stops_at_photographs_that_cannot_be_read(photos, place, capsys):
    assert spherenet("train", "--data", photos, *OPTIONS, "--output", "stopped") == 2
    message = capsys.readouterr().err
    assert "1 of 44 images cannot be read: 'night/phone.heic': it is an HEIC image" in message
    assert "--on-broken skip" in message
    assert one_sentence(message)
    assert not (place / "stopped").exists()


def test_run_records_its_data_and_commands(trained, place):
    config = json.loads((trained / "config.json").read_text())
    assert config["train"]["data"] == "folder"
    assert config["train"]["data_dir"] == str(place / "my photos")
    assert config["data"]["broken"] == [f"night/{name}" for name in sorted(UNREADABLE)]
    assert sum(config["images"].values()) == 42
    first, second = config["history"]
    assert shlex.split(first["command"])[:4] == ["spherenet", "train", "--data", "my photos"]
    assert first["step"] == 0
    assert second["command"] == "spherenet train --resume 'first run' --iterations 40 --allow-changes"
    assert (second["step"], second["changes"]) == (20, {"iterations": [20, 40]})
    assert config["command"] == shlex.split(first["command"])
    summary = json.loads((trained / "summary.json").read_text())
    assert (summary["iterations"], summary["selected_on"]) == (40, "validation")


def test_files_follow_the_umask(trained):
    umask = os.umask(0o022)
    os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in trained.rglob("*") if path.is_file()}
    assert {"model.safetensors", "manifest.json", "config.json", "metrics.jsonl"} <= set(modes)
    assert set(modes.values()) == {0o666 & ~umask}


def test_evaluation_works_from_any_folder(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    results = {}
    for options in ([], ["--checkpoint", "best"], ["--split", "validation"], ["--split", "train"]):
        assert spherenet("evaluate", trained, *options, "--json") == 0
        printed = capsys.readouterr()
        results[tuple(options)] = json.loads(printed.out)
        assert printed.err == ""
    last = results[()]
    assert (last["checkpoint"], last["step"], last["selected_on"], last["split"]) == ("last", 40, None, "test")
    assert results["--checkpoint", "best"]["selected_on"] == "validation"
    counts = [results[options]["count"] for options in ((), ("--split", "validation"), ("--split", "train"))]
    assert sum(counts) == 42
    assert results["--split", "train"]["accuracy"] > 0.9  # bright and dark photographs


def test_predictions_of_a_folder_name_the_failures(trained, photos, capsys):
    """Exit code 1: the others are predicted."""
    assert spherenet("predict", photos, "--run", trained, "--top", 1, "--batch-size", 5, "--device", "cpu", "--json")
    printed = capsys.readouterr()
    rows = {row["image"]: row["classes"][0] for row in json.loads(printed.out)}
    assert len(rows) == 42
    assert sum(name.split("/")[1] == row["class"] for name, row in rows.items()) > 38
    failures = printed.err.strip().splitlines()
    assert [line.startswith("warning: files in 'my photos' that are not images: 2 ") for line in failures].count(True)
    assert sum("cannot be read" in line for line in failures) == 2
    assert all(any(name in line for line in failures) for name in UNREADABLE)
    upright, rotated = (rows[f"my photos/night/{name}"] for name in ("upright.png", "rotated.webp"))
    assert upright["class"] == rotated["class"]
    assert upright["score"] == pytest.approx(rotated["score"], abs=1e-4)  # versions of Pillow decode WebP differently


def test_predictions_are_written_as_csv(trained, photos, place, capsys):
    assert spherenet("predict", f"{photos}/night", "--run", trained, "--csv", "classes.csv") == 1
    printed = capsys.readouterr()
    assert printed.out == "21 images: classes.csv\n"
    lines = (place / "classes.csv").read_text().splitlines()
    assert lines[0] == "image,class_1,score_1,class_2,score_2"
    assert len(lines) == 22
    assert lines[1].startswith("my photos/night/0.jpg,night,")


def test_paths_are_read_from_stdin(trained, photos, monkeypatch, capsys):
    paths = [f"{photos}/night/No Extension", f"{photos}/night/missing.jpg", f"{photos}/day light/gray.png"]
    stdin = io.TextIOWrapper(io.BytesIO("\n".join([*paths, ""]).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert spherenet("predict", "-", "--run", trained) == 1
    printed = capsys.readouterr()
    assert [line.split("  ")[0].strip() for line in printed.out.splitlines()] == [paths[0], paths[2]]
    assert "missing.jpg' cannot be read: No such file or directory." in printed.err
    assert one_sentence(printed.err)


def test_nothing_readable_is_wrong_input(trained, photos, place, capsys):
    (place / "empty").mkdir()
    assert spherenet("predict", f"{photos}/night/truncated.jpg", "empty", "--run", trained, "--csv", "none.csv") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "truncated.jpg' cannot be read" in printed.err
    assert "the folder 'empty' has no images." in printed.err
    assert not (place / "none.csv").exists()


def test_changed_photographs_are_named(trained, photos, place, capsys):
    """An added photograph does not move the others between the splits, but the run did not see it."""
    run = shutil.copytree(trained, place / "copy")
    added = place / photos / "night" / "added.jpg"
    photograph(0, 99).save(added)
    try:
        assert spherenet("evaluate", run) == 2
        message = capsys.readouterr().err
        assert "of class 'night' instead of" in message
        assert "--allow-changes" in message
        assert one_sentence(message)
        assert spherenet("evaluate", run, "--allow-changes", "--json") == 0
        printed = capsys.readouterr()
        assert "of class 'night' instead of" in printed.err
        assert json.loads(printed.out)["count"] > 0
        assert spherenet("train", "--resume", run, "--iterations", 50, "--allow-changes") == 0
        assert "of class 'night' instead of" in capsys.readouterr().err
    finally:
        added.unlink()


def test_embeddings_of_a_folder_are_verified(trained, photos, place, capsys):
    """Two photographs cannot be read: exit code 1, and the others are embedded."""
    assert spherenet("embed", trained, photos, "-o", "photos.npy", "--retrieval", "--json") == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["images"], result["classes"]) == (42, 2)
    assert result["retrieval"]["recall@1"] > 0.9
    assert all(any(name in line for line in printed.err.splitlines()) for name in UNREADABLE)
    files = [row["file"] for row in csv.DictReader(io.StringIO((place / "photos.files.csv").read_text()))]
    assert len(files) == len(np.load(place / "photos.npy", allow_pickle=False)) == 42
    names = {name: sorted(file for file in files if f"/{name}/" in file) for name in ("day light", "night")}
    same = [
        (first, second, 1) for group in names.values() for first, second in zip(group[:10], group[10:20], strict=True)
    ]
    different = [(first, second, 0) for first, second in zip(*names.values(), strict=False)]
    with open(place / "pairs.csv", "w", newline="") as file:
        csv.writer(file).writerows([*same, *different])
    results = []
    for source in ("photos.npy", trained):
        assert spherenet("verify", source, "pairs.csv", "--folds", 5, "--json") == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["auc"] == pytest.approx(results[1]["auc"], abs=1e-3)
    assert results[0]["accuracy"] > 0.8


def test_exported_file_agrees_with_predict(trained, photos, capsys):
    import onnxruntime

    from spherenet.data import read_pixels
    from spherenet.training.saved_runs import load_predictor

    assert spherenet("export", trained, "photos.onnx", "--with-preprocessing") == 0
    path = f"{photos}/night/rotated.webp"
    capsys.readouterr()
    assert spherenet("predict", path, "--run", trained, "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    session = onnxruntime.InferenceSession("photos.onnx", providers=["CPUExecutionProvider"])
    pixels = read_pixels(path, load_predictor(trained, "last").preprocessing)[None]
    [scores] = session.run(["scores"], {"images": pixels})
    probabilities = np.exp(scores[0] - scores[0].max())
    probabilities /= probabilities.sum()
    expected = {entry["class"]: entry["score"] for entry in row["classes"]}
    assert dict(zip(("day light", "night"), probabilities.tolist(), strict=True)) == pytest.approx(expected, abs=1e-5)


def test_a_run_is_used_in_python_without_an_export(trained, photos, capsys):
    """In three lines: load the run, predict its classes, print them."""
    import torch

    import spherenet as sn

    run = sn.load_run(trained)
    predictions = sn.predict(run, [f"{photos}/night/gray.png", f"{photos}/day light/0.jpg"], top=1)
    assert [(image, classes[0][0]) for image, classes in predictions] == [
        (f"{photos}/night/gray.png", "night"),
        (f"{photos}/day light/0.jpg", "day light"),
    ]
    assert run.model(torch.zeros(1, 3, 16, 16)).shape == (1, len(run.classes))
    assert spherenet("predict", f"{photos}/night", "--run", trained, "--device", "cpu", "--json") == 1
    printed = [
        (row["image"], [(entry["class"], entry["score"]) for entry in row["classes"]])
        for row in json.loads(capsys.readouterr().out)
    ]
    failures = []
    assert [tuple(row) for row in sn.predict(trained, f"{photos}/night", failures=failures)] == printed
    assert len(failures) == 2
    assert all(any(name in message for message in failures) for name in UNREADABLE)


def test_a_run_is_not_a_saved_model(trained):
    import spherenet as sn
    from spherenet.errors import ModelError

    with pytest.raises(ModelError, match="it is a run: use load_run, or spherenet export"):
        sn.load_model(trained)
    with pytest.raises(ValueError, match=r"checkpoint must be .*last.*best.*, got 'bset'"):
        sn.load_run(trained, "bset")


def test_a_trained_network_is_quantized_and_adapted(trained, photos):
    """torchao rounds its weights, and a LoRA adapter of peft is merged without a change."""
    import torch

    import spherenet as sn

    peft = pytest.importorskip("peft")
    torchao = pytest.importorskip("torchao.quantization")
    files = [f"{photos}/night/gray.png", f"{photos}/day light/0.jpg"]
    before = [dict(classes) for _, classes in sn.predict(trained, files)]

    run = sn.load_run(trained)
    linear = [name for name, module in run.model.named_modules() if type(module) is sn.SphereLinear]
    assert linear
    torchao.quantize_(run.model, torchao.Int8WeightOnlyConfig())
    assert type(run.model.get_submodule(linear[0]).weight) is not torch.nn.Parameter
    for (_, classes), expected in zip(sn.predict(run, files), before, strict=True):
        assert dict(classes) == pytest.approx(expected, abs=0.02)

    model = sn.load_run(trained).model
    with pytest.raises(TypeError, match="target_modules of peft must be plain layers, got a SphereLinear"):
        peft.get_peft_model(sn.load_run(trained).model, peft.LoraConfig(r=2, target_modules=linear))
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[f"{name}.weight" for name in linear])
    adapted = peft.get_peft_model(model, config).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_()
        scores = adapted(images)
        assert torch.equal(adapted.merge_and_unload()(images), scores)


def test_a_converted_transformer_is_trained_on_the_photographs(photos, place):
    """The checkpoint of a Trainer keeps the sphere layers, and transformers alone does not load it as a plain model."""
    import torch

    import spherenet as sn
    from spherenet.data import Preprocessing, read_image

    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    preprocessing = Preprocessing.standard((16, 16), 3)
    dataset = [
        {"pixel_values": read_image(f"{photos}/{name}/{index}.jpg", preprocessing), "labels": label}
        for label, name in enumerate(("day light", "night"))
        for index in range(8)
    ]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    vit = sn.to_sphere(transformers.ViTForImageClassification(config))
    arguments = transformers.TrainingArguments(
        "vit", max_steps=2, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True, logging_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(sn.param_groups(vit, weight_decay=0.01), lr=0.01)
    transformers.Trainer(vit, arguments, train_dataset=dataset, optimizers=(optimizer, None)).train()
    with pytest.raises(ValueError, match=r"load it by spherenet.load_pretrained"):
        type(vit).from_pretrained("vit/checkpoint-2")
    loaded = sn.load_pretrained(type(vit), "vit/checkpoint-2")
    images = torch.stack([row["pixel_values"] for row in dataset])
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, vit.eval()(images).logits)
