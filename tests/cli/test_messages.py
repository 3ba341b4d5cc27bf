"""Messages that once named the wrong thing: each is one sentence in the words of the command line."""

import errno
import os

import numpy as np
import pytest
import torch
from PIL import Image

from command_line import TINY, one_sentence, spherenet
from spherenet._util.atomic import atomic_file
from spherenet.cli.main import _describe_error
from spherenet.data.embeddings import Embeddings, write_embeddings


def said(capsys, *arguments, code=2):
    assert spherenet(*arguments) == code
    message = capsys.readouterr().err
    assert one_sentence(message), message
    return message.strip()


def test_class_weights_of_a_loss_without_them_are_refused(capsys, tmp_path):
    options = ["--loss", "sphereface2", "--class-weights", "balanced"]
    message = said(capsys, "train", *TINY, *options, "--output", tmp_path / "run")
    assert "--class-weights must be left out with --loss sphereface2, got balanced." in message


def test_small_images_name_the_option(capsys, tmp_path):
    message = said(capsys, "train", "--image-size", 4, "--model", "cnn-9", "--output", tmp_path / "run")
    assert "--image-size must be at least 8×8 for 3 poolings, got 4×4." in message


def test_pickles_are_named(capsys, tmp_path):
    for name, is_zip in (("new.pt", True), ("old.pt", False), ("renamed.safetensors", True)):
        torch.save({"weight": torch.ones(2)}, tmp_path / name, _use_new_zipfile_serialization=is_zip)
        message = said(capsys, "train", *TINY, "--init-from", tmp_path / name, "--output", tmp_path / "run")
        assert f"{name} must be a safetensors file, got a pickle of torch.save" in message


def test_report_leaves_out_folders_that_are_no_runs(run, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    (tmp_path / "PLAN.md").write_text("plan")
    assert spherenet("report", run, tmp_path / "notes", tmp_path / "PLAN.md") == 0
    message = capsys.readouterr().err
    assert "notes is not a run: it has no config.json." in message
    assert "PLAN.md is not a run" in message
    assert "is not a run" in said(capsys, "report", tmp_path / "notes")
    assert spherenet("report", run, tmp_path / "missing") == 1  # a mistyped name
    assert "missing is not a folder." in capsys.readouterr().err
    (run / "config.json").write_text("{")
    assert "config.json" in said(capsys, "report", run)


def test_broken_images_are_listed_once(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for index in range(2):
            Image.new("L", (4, 4)).save(tmp_path / name / f"{index}.png")
    (tmp_path / "a" / "broken.jpg").write_bytes(b"xx")
    assert spherenet("data", tmp_path) == 2
    output = capsys.readouterr()
    assert output.out.count("broken.jpg") == 1
    assert output.err == "spherenet data: 1 of 5 images cannot be read; they are listed on stdout.\n"


def test_errors_of_files_name_file_and_reason(capsys, run, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    page = tmp_path / "page.html"
    assert spherenet("report", run, "-o", page) == 2
    assert capsys.readouterr().err == f"spherenet report: {page}: No space left on device.\n"


def test_error_of_a_library_without_a_number_keeps_its_reason(tmp_path):
    with pytest.raises(OSError, match="300 requested and 16 written") as caught, atomic_file(tmp_path / "x.npy"):
        raise OSError("300 requested and 16 written")
    assert "None" not in str(caught.value)
    assert _describe_error(caught.value)[0] == f"{tmp_path / 'x.npy'}: 300 requested and 16 written."


def test_embeddings_that_do_not_fit_on_the_disk(tmp_path):
    resource = pytest.importorskip("resource")
    values = np.arange(3000, dtype=np.float32).reshape(3, 1000)
    embeddings = Embeddings(values, ["a", "b", "c"], ["", "", ""])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_embeddings(embeddings, tmp_path / "x.npy")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_embeddings(embeddings, tmp_path / "x.npy")
    assert np.array_equal(np.load(tmp_path / "x.npy"), values)


def test_first_failure_does_not_mention_a_checkpoint(capsys, tmp_path):
    run = tmp_path / "run"
    options = [*TINY, "--learning-rate", "1e30", "--optimizer", "sgd", "--set", "orthogonality=0"]
    assert spherenet("train", *options, "--checkpoint-every", 100, "--eval-every", 100, "--output", run) == 1
    assert "there is no checkpoint yet" in capsys.readouterr().err
