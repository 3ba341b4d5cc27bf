"""`spherenet data`: list, read, download and check data sets."""

import functools
import hashlib
import http.server
import io
import json
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from spherenet.cli.data import data_parser, run_data
from spherenet.cli.output import progress_bar
from spherenet.data import DATASETS
from spherenet.data.cifar import CIFAR10, cifar_info
from spherenet.errors import DataError


def run(*arguments):
    run_data(data_parser().parse_args([str(argument) for argument in arguments]))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Hide the data sets of the user."""
    monkeypatch.setenv("SPHERENET_DATA", str(tmp_path / "cache"))


@pytest.fixture
def images(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(6):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / "images" / name / f"{index}.png")
    return tmp_path / "images"


def test_help_does_not_import_torch():
    code = "import sys; from spherenet.cli.data import data_parser; data_parser().print_help()"
    code += "; assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "examples:\n  spherenet data" in shown.stdout


def test_list_shows_sizes_and_locations(capsys):
    run()
    shown = capsys.readouterr()
    for text in (
        "mnist5k   found at",
        "cifar10   not available; download with spherenet data cifar10 --download",
        "50,000",
        "224 × 224 × 3",
    ):
        assert text in shown.out
    assert shown.err == ""


def test_list_as_json(capsys, images):
    run("--json", "--data-dir", images)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["mnist5k", "cifar10", "cifar100", "folder"]
    assert rows["mnist5k"]["found"].endswith("mnist5k.png")
    assert rows["cifar100"]["found"] is None
    assert rows["folder"]["found"] == str(images)
    assert (rows["cifar100"]["classes"], rows["cifar100"]["train"]) == (100, 50_000)


def test_json_has_counts_per_class(capsys):
    run("mnist5k", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["classes"][3] == {"class": "3", "train": 400, "test": 100}
    assert (result["train"], result["test"], result["broken"]) == (4000, 1000, [])


@pytest.mark.parametrize("workers", [0, 2])
def test_folder_is_decoded_and_counted(capsys, images, workers):
    run("folder", "--data-dir", images, "--test-fraction", 0.5, "--workers", workers)
    shown = capsys.readouterr()
    assert "folder: 2 classes" in shown.out
    assert "│ ant   │     3 │    3 │" in shown.out
    assert f"read from {images}" in shown.out
    assert shown.err == ""


def test_class_names_are_not_markup(capsys, images):
    (images / "bee").rename(images / "[red]bee")
    run("folder", "--data-dir", images)
    assert "[red]bee" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_unreadable_images_are_all_listed(capsys, images, as_json):
    broken = [images / "ant" / f"{index}.png" for index in range(6)]
    for path in broken:
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"^6 of 12 images cannot be read; they are listed on stdout\.$"):
        run("folder", "--data-dir", images, *(["--json"] if as_json else []))
    shown = capsys.readouterr().out
    if as_json:
        assert len(json.loads(shown)["broken"]) == 6
    for path in broken:
        assert str(path) in shown


def test_missing_dataset_names_folder_and_download_command(tmp_path):
    with pytest.raises(
        DataError, match=r"cifar10 was not found in '.*cache' .*: download it with 'spherenet data cifar10 --d"
    ):
        run("cifar10")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["cifar"],
            "data must be mnist5k, cifar10, cifar100 or an existing folder, got 'cifar'. Did you mean 'cifar10'?",
        ),
        (["mnist5k", "--download"], "NAME must be cifar10 or cifar100 with --download, got mnist5k"),
        (["--download"], "NAME must be cifar10 or cifar100 with --download, got none"),
        (["folder", "--data-dir", "x", "--test-fraction", "2"], "test_fraction must be between 0 and 1, got 2.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


def test_negative_number_of_workers_is_rejected(capsys):
    with pytest.raises(SystemExit):
        run("folder", "--data-dir", "x", "--workers", "-1")
    assert "--workers must be at least 0, got -1" in capsys.readouterr().err


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve a CIFAR-10 archive with two images per file from a local server."""
    form = replace(CIFAR10, train=dict.fromkeys(CIFAR10.train, 2), test={"test_batch": 2})
    folder = tmp_path / "served"
    folder.mkdir()
    with tarfile.open(folder / form.archive, "w:gz") as archive:
        for index, name in enumerate([*form.train, *form.test]):
            member = tarfile.TarInfo(f"{form.binary_folder}/{name}.bin")
            records = np.full((2, 3073), index, dtype=np.uint8).tobytes()
            member.size = len(records)
            archive.addfile(member, io.BytesIO(records))
    content = (folder / form.archive).read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    form = replace(
        form,
        url=f"http://127.0.0.1:{server.server_port}/{form.archive}",
        archive_bytes=len(content),
        archive_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(DATASETS, "cifar10", cifar_info(form, augmentation="flip"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield form
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_is_verified_and_reused(capsys, tmp_path, served):
    run("cifar10", "--data-dir", tmp_path / "here", "--download", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["found"] == str(tmp_path / "here" / served.archive)
    assert (result["train"], result["test"]) == (10, 2)
    assert [path.name for path in (tmp_path / "here").iterdir()] == [served.archive]
    run("cifar10", "--data-dir", tmp_path / "here")
    assert "airplane" in capsys.readouterr().out


def test_failed_download_leaves_no_file(tmp_path, served, monkeypatch):
    wrong = cifar_info(replace(served, archive_sha256="0" * 64), augmentation="flip")
    monkeypatch.setitem(DATASETS, "cifar10", wrong)
    with pytest.raises(DataError, match="wrong checksum"):
        run("cifar10", "--data-dir", tmp_path / "here", "--download")
    assert list((tmp_path / "here").iterdir()) == []


def test_progress_bar_is_written_to_stderr(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats stderr as a terminal
    with progress_bar("downloading", in_bytes=True) as progress:
        progress(10, 100)
        progress(100, 100)
    shown = capfd.readouterr()
    assert "downloading" in shown.err
    assert shown.out == ""
