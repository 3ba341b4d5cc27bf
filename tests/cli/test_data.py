"""`spherenet data`: lists, reads, fetches and checks; one sentence where something is wrong."""

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

from spherenet.cli import data
from spherenet.cli.output import progress_bar
from spherenet.data import registry as catalogue
from spherenet.data.cifar import CIFAR10
from spherenet.errors import DataError


def run(*arguments):
    data.run(data.parser().parse_args([str(argument) for argument in arguments]))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """No data set of the user's own is found."""
    monkeypatch.setenv("SPHERENET_DATA", str(tmp_path / "cache"))


@pytest.fixture
def pictures(tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(6):
            Image.new("RGB", (8, 8), (index, 0, 0)).save(tmp_path / "pictures" / name / f"{index}.png")
    return tmp_path / "pictures"


def test_help_needs_no_torch():
    code = "import sys; from spherenet.cli.data import parser; parser().print_help(); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "examples:\n  spherenet data" in shown.stdout


def test_the_list(capsys):
    run()
    shown = capsys.readouterr()
    for part in (
        "mnist5k   found at",
        "cifar10   not here: spherenet data cifar10 --download",
        "50,000",
        "224 × 224 × 3",
    ):
        assert part in shown.out
    assert shown.err == ""


def test_the_list_as_json(capsys, pictures):
    run("--json", "--data-dir", pictures)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["mnist5k", "cifar10", "cifar100", "folder"]
    assert rows["mnist5k"]["found"].endswith("mnist_5k.csv.gz")
    assert rows["cifar100"]["found"] is None
    assert rows["folder"]["found"] == str(pictures)
    assert (rows["cifar100"]["classes"], rows["cifar100"]["train"]) == (100, 50_000)


def test_a_set_is_read_and_counted(capsys):
    run("mnist5k", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["classes"][3] == {"class": "3", "train": 400, "test": 100}
    assert (result["train"], result["test"], result["broken"]) == (4000, 1000, [])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_is_checked(capsys, pictures, workers):
    run("folder", "--data-dir", pictures, "--val-fraction", 0.5, "--workers", workers)
    shown = capsys.readouterr()
    assert "folder: 2 classes" in shown.out
    assert "│ ant   │     3 │    3 │" in shown.out
    assert f"read from {pictures}" in shown.out
    assert shown.err == ""


def test_class_names_are_shown_as_they_are(capsys, pictures):
    (pictures / "bee").rename(pictures / "[red]bee")
    run("folder", "--data-dir", pictures)
    assert "[red]bee" in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [False, True])
def test_broken_pictures_are_all_listed(capsys, pictures, as_json):
    broken = [pictures / "ant" / f"{index}.png" for index in range(6)]
    for path in broken:
        path.write_bytes(b"broken")
    with pytest.raises(DataError, match=r"^6 of 12 pictures cannot be read: .* and 1 more\.$") as caught:
        run("folder", "--data-dir", pictures, *(["--json"] if as_json else []))
    assert len(str(caught.value).splitlines()) == 1
    shown = capsys.readouterr().out
    if as_json:
        assert len(json.loads(shown)["broken"]) == 6
    for path in broken:
        assert str(path) in shown


def test_what_is_not_there(tmp_path):
    with pytest.raises(
        DataError, match=r"cifar10 is not in '.*cache', where .* looked for: 'spherenet data cifar10 --d"
    ):
        run("cifar10")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cifar"], "data must be one of 'mnist5k', 'cifar10', 'cifar100', 'folder', got 'cifar'. Did you mean"),
        (["mnist5k", "--download"], "--download fetches cifar10 or cifar100, got mnist5k"),
        (["--download"], "--download fetches cifar10 or cifar100, got no name"),
        (["folder", "--data-dir", "x", "--workers", "-1"], "--workers must be at least 0, got -1"),
        (["folder", "--data-dir", "x", "--val-fraction", "2"], "val_fraction must be between 0 and 1, got 2.0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        run(*arguments)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A CIFAR-10 of two pictures a file, as the one that --download fetches, from a server of our own."""
    form = replace(CIFAR10, train=dict.fromkeys(CIFAR10.train, 2), test={"test_batch": 2})
    folder = tmp_path / "served"
    folder.mkdir()
    with tarfile.open(folder / form.archive, "w:gz") as archive:
        for index, part in enumerate([*form.train, *form.test]):
            member = tarfile.TarInfo(f"{form.binary_folder}/{part}.bin")
            records = np.full((2, 3073), index, dtype=np.uint8).tobytes()
            member.size = len(records)
            archive.addfile(member, io.BytesIO(records))
    content = (folder / form.archive).read_bytes()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    form = replace(
        form,
        url=f"http://127.0.0.1:{server.server_port}/{form.archive}",
        archive_bytes=len(content),
        archive_sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(catalogue.CIFAR_FORMATS, "cifar10", form)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield form
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(capsys, tmp_path, served):
    run("cifar10", "--data-dir", tmp_path / "here", "--download", "--json")
    result = json.loads(capsys.readouterr().out)
    assert result["found"] == str(tmp_path / "here" / served.archive)
    assert (result["train"], result["test"]) == (10, 2)
    assert [path.name for path in (tmp_path / "here").iterdir()] == [served.archive]
    run("cifar10", "--data-dir", tmp_path / "here")  # now it is there
    assert "airplane" in capsys.readouterr().out


def test_a_download_that_fails(tmp_path, served, monkeypatch):
    monkeypatch.setitem(catalogue.CIFAR_FORMATS, "cifar10", replace(served, archive_sha256="0" * 64))
    with pytest.raises(DataError, match="wrong checksum"):
        run("cifar10", "--data-dir", tmp_path / "here", "--download")
    assert list((tmp_path / "here").iterdir()) == []


def test_the_bar_goes_to_stderr(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    with progress_bar("fetching", in_bytes=True) as progress:
        progress(10, 100)
        progress(100, 100)
    shown = capfd.readouterr()
    assert "fetching" in shown.err
    assert shown.out == ""
