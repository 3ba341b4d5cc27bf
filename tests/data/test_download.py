"""Downloads from a local server that works, or fails in various ways."""

import hashlib
import http.server
import multiprocessing
import os
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from spherenet.data import DATASETS, load_dataset
from spherenet.data.archives import download
from spherenet.data.cifar import cifar_info
from spherenet.errors import DataError

module = sys.modules["spherenet.data.archives"]
CONTENT = bytes(range(256)) * 4000  # about 1 MB: several chunks
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        server.requests.append(self.headers.get("Range"))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", server.moved_to)
            self.end_headers()
            return
        if self.path != "/file":
            self.send_error(404)
            return
        start = 0
        if server.ranges and self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            if start >= len(server.content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start + server.shifted}-{len(server.content) - 1}/*")
        else:
            self.send_response(200)
        body = server.content[start:]
        if server.announced:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.broken_after])


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        """Ignore clients that close the connection."""


@pytest.fixture
def server():
    server = Server(("127.0.0.1", 0), Handler)
    server.content, server.ranges, server.announced, server.broken_after = CONTENT, True, True, None
    server.shifted, server.requests, server.moved_to = 0, [], "/file"
    server.url = f"http://127.0.0.1:{server.server_port}/file"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "file.tar.gz"


def fetch(server, target, url=None, **options):
    download(url or server.url, target, size=len(CONTENT), sha256=DIGEST, timeout=5, **options)


def write_part(target, content=CONTENT[:500_000]):
    target.parent.mkdir()
    target.with_name("file.tar.gz.part").write_bytes(content)


def is_complete(target):
    """Whether the target is complete and the only file in its folder."""
    return target.read_bytes() == CONTENT and os.listdir(target.parent) == [target.name]


def test_complete_download(server, target):
    calls = []
    fetch(server, target, progress=lambda done, total: calls.append((done, total)))
    assert is_complete(target)
    assert server.requests == [None]
    assert calls[0] == (0, len(CONTENT))
    assert calls[-1] == (len(CONTENT), len(CONTENT))
    assert calls == sorted(calls)


def test_partial_download_is_resumed(server, target):
    write_part(target)
    calls = []
    fetch(server, target, progress=lambda done, total: calls.append(done))
    assert is_complete(target)
    assert server.requests == ["bytes=500000-"]
    assert calls[0] == 500_000


def test_server_without_ranges_sends_the_file_again(server, target):
    server.ranges = False
    write_part(target)
    fetch(server, target)
    assert is_complete(target)


def test_wrong_range_is_requested_again_from_the_start(server, target):
    server.shifted = 1
    write_part(target)
    fetch(server, target)
    assert is_complete(target)
    assert server.requests == ["bytes=500000-", None]


def test_complete_part_is_verified_without_network(target):
    write_part(target, CONTENT)
    fetch(None, target, url="http://127.0.0.1:9/file")
    assert is_complete(target)


def test_corrupt_part_is_deleted_and_downloaded_again(server, target):
    write_part(target, b"x" * 500_000)
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []
    fetch(server, target)
    assert is_complete(target)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious")], ids=["a pipe", "a link"])
def test_part_that_is_not_a_regular_file_is_refused(server, target, make):
    """In a folder that others can write to, a link would append to, or truncate, a file of this user."""
    target.parent.mkdir()
    precious = target.with_name("precious")
    precious.write_text("precious")
    make(target.with_name("file.tar.gz.part"))
    with pytest.raises(DataError, match="must be a regular file, got"):
        fetch(server, target)
    assert precious.read_text() == "precious"


def test_part_that_is_too_long_is_deleted(server, target):
    write_part(target, CONTENT + b"x")
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def test_wrong_checksum_is_refused(server, target):
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=r"wrong checksum \(SHA-256 .* instead of .*\) and was deleted") as caught:
        fetch(server, target)
    assert server.url in str(caught.value)
    assert os.listdir(target.parent) == []


def test_broken_connection_is_resumed(server, target):
    server.broken_after = 300_000
    fetch(server, target)
    assert is_complete(target)
    assert server.requests == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_connection_without_data_fails_and_keeps_the_part(server, target):
    server.broken_after = 0
    write_part(target)
    with pytest.raises(DataError, match=r"stopped after 500000 of 1024000 bytes: try again to continue from"):
        fetch(server, target)
    assert target.with_name("file.tar.gz.part").stat().st_size == 500_000
    server.broken_after = None
    fetch(server, target)
    assert is_complete(target)


def test_endless_file_is_stopped(server, target):
    server.content, server.announced = CONTENT * 20, False
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def test_wrong_content_length_is_refused_and_keeps_the_part(server, target):
    server.content = b"<html>please log in"
    server.ranges = False
    write_part(target)
    with pytest.raises(DataError, match="must have 1024000 bytes, got 19: it is another file"):
        fetch(server, target)
    assert target.with_name("file.tar.gz.part").stat().st_size == 500_000


def test_file_that_became_shorter_is_refused(server, target):
    server.content = CONTENT[:1000]
    write_part(target)
    with pytest.raises(DataError, match="must have 1024000 bytes, got 1000"):
        fetch(server, target)


def test_missing_file_is_reported(server, target):
    with pytest.raises(DataError, match="the server returned 404 Not Found; or save a copy") as caught:
        fetch(server, target, url=server.url + "s")
    assert len(str(caught.value).splitlines()) == 1
    assert os.listdir(target.parent) == []


def test_unreachable_server_is_reported(target):
    with socket.socket() as closed:  # bound but not listening: refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/file"
        with pytest.raises(
            DataError, match=r"cannot reach .* \(Connection refused\): check the network, or save a copy"
        ):
            fetch(None, target, url=url)
    with pytest.raises(DataError, match="cannot reach"):
        fetch(None, target, url="https://nowhere.invalid/file")
    assert os.listdir(target.parent) == []


def test_silent_server_times_out(target):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file"
        with pytest.raises(DataError, match="cannot reach"):
            download(url, target, size=10, sha256=DIGEST, timeout=0.2)


def test_redirects_only_to_the_web(server, target, tmp_path):
    moved = server.url.replace("/file", "/moved")
    fetch(server, target, url=moved)
    assert is_complete(target)
    (tmp_path / "secret").write_bytes(CONTENT)
    for place in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/file"):
        server.moved_to = place
        with pytest.raises(DataError):
            fetch(server, target.with_name("other"), url=moved)
    assert os.listdir(target.parent) == [target.name]


def test_local_file_is_not_downloaded(target, tmp_path):
    (tmp_path / "secret").write_bytes(CONTENT)
    with pytest.raises(DataError, match="must start with https or http"):
        fetch(None, target, url=f"file://{tmp_path}/secret")


def test_unwritable_folder_is_reported(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot write .*: (Not a directory|File exists)"):
        fetch(server, tmp_path / "file" / "inside" / "x.tar.gz")


def test_full_disk_is_reported(server, target, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            raise OSError(28, "No space left on device")

    open_exclusively = module._open_exclusively

    @contextmanager
    def full(part):
        with open_exclusively(part) as file:
            yield Full(file)

    monkeypatch.setattr(module, "_open_exclusively", full)
    with pytest.raises(DataError, match=r"cannot write '.*file.tar.gz.part': No space left on device"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def download_in_process(url, target):
    download(url, target, size=len(CONTENT), sha256=DIGEST, timeout=5)


def test_processes_download_once(server, target):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=download_in_process, args=(server.url, target)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert is_complete(target)
    assert server.requests == [None]


def test_load_dataset_downloads_once(server, tmp_path, cifar10, monkeypatch):
    server.content = cifar10.archive
    form = replace(cifar10.form, url=server.url)
    monkeypatch.setitem(DATASETS, "cifar10", cifar_info(form, augmentation="flip"))
    calls = []
    dataset = load_dataset("cifar10", tmp_path / "client", progress=lambda done, total: calls.append(done))
    assert len(dataset.train) == 300
    assert calls[-1] == len(server.content)
    load_dataset("cifar10", tmp_path / "client")
    assert server.requests == [None]
