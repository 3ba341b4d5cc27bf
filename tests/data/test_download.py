"""Downloads against a server of our own that behaves, and that does not."""

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

from spherenet.data import load_dataset
from spherenet.data import registry as catalogue
from spherenet.data.archives import download
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
        """Say nothing of clients that hang up: some of ours do."""


@pytest.fixture
def server():
    made = Server(("127.0.0.1", 0), Handler)
    made.content, made.ranges, made.announced, made.broken_after = CONTENT, True, True, None
    made.shifted, made.requests, made.moved_to = 0, [], "/file"
    made.url = f"http://127.0.0.1:{made.server_port}/file"
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "new" / "file.tar.gz"


def fetch(server, target, url=None, **options):
    download(url or server.url, target, size=len(CONTENT), sha256=DIGEST, timeout=5, **options)


def half(target, content=CONTENT[:500_000]):
    target.parent.mkdir()
    target.with_name("file.tar.gz.part").write_bytes(content)


def only(target):
    """Whether the target is whole and alone."""
    return target.read_bytes() == CONTENT and os.listdir(target.parent) == [target.name]


def test_whole(server, target):
    seen = []
    fetch(server, target, progress=lambda done, total: seen.append((done, total)))
    assert only(target)
    assert server.requests == [None]
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert seen == sorted(seen)


def test_half_a_download_is_resumed(server, target):
    half(target)
    seen = []
    fetch(server, target, progress=lambda done, total: seen.append(done))
    assert only(target)
    assert server.requests == ["bytes=500000-"]
    assert seen[0] == 500_000


def test_a_server_without_ranges_sends_it_all_again(server, target):
    server.ranges = False
    half(target)
    fetch(server, target)
    assert only(target)


def test_a_server_that_answers_another_range_is_asked_again(server, target):
    server.shifted = 1
    half(target)
    fetch(server, target)
    assert only(target)
    assert server.requests == ["bytes=500000-", None]


def test_a_whole_part_is_verified_without_the_network(target):
    half(target, CONTENT)
    fetch(None, target, url="http://127.0.0.1:9/file")
    assert only(target)


def test_a_half_that_was_damaged_is_removed_and_fetched_anew(server, target):
    half(target, b"x" * 500_000)
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []
    fetch(server, target)
    assert only(target)


def test_a_part_that_is_too_long_is_removed(server, target):
    half(target, CONTENT + b"x")
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def test_wrong_checksum(server, target):
    server.content = CONTENT[:-1] + b"x"
    with pytest.raises(DataError, match=r"wrong checksum \(SHA-256 .* instead of .*\) and was removed") as caught:
        fetch(server, target)
    assert server.url in str(caught.value)
    assert os.listdir(target.parent) == []


def test_a_breaking_connection_is_carried_on(server, target):
    server.broken_after = 300_000
    fetch(server, target)
    assert only(target)
    assert server.requests == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]


def test_a_connection_that_brings_nothing_is_given_up_and_the_part_kept(server, target):
    server.broken_after = 0
    half(target)
    with pytest.raises(DataError, match=r"broke off after 500000 of 1024000 bytes: the next try carries on from"):
        fetch(server, target)
    assert target.with_name("file.tar.gz.part").stat().st_size == 500_000
    server.broken_after = None
    fetch(server, target)
    assert only(target)


def test_an_endless_file_is_stopped(server, target):
    server.content, server.announced = CONTENT * 20, False
    with pytest.raises(DataError, match="wrong checksum"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def test_another_length_is_not_even_begun(server, target):
    server.content = b"<html>please log in"
    server.ranges = False
    half(target)
    with pytest.raises(DataError, match="sends 19 bytes instead of 1024000: it is not the file"):
        fetch(server, target)
    assert target.with_name("file.tar.gz.part").stat().st_size == 500_000


def test_a_file_that_got_shorter(server, target):
    server.content = CONTENT[:1000]
    half(target)
    with pytest.raises(DataError, match="sends 1000 bytes instead of"):
        fetch(server, target)


def test_not_found(server, target):
    with pytest.raises(DataError, match="the server answered 404 Not Found; a copy") as caught:
        fetch(server, target, url=server.url + "s")
    assert len(str(caught.value).splitlines()) == 1
    assert os.listdir(target.parent) == []


def test_nobody_there(target):
    with socket.socket() as taken:  # bound but not listening: refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/file"
        with pytest.raises(DataError, match=r"cannot be reached \(Connection refused\): check the network; a copy"):
            fetch(None, target, url=url)
    with pytest.raises(DataError, match="cannot be reached"):
        fetch(None, target, url="https://nowhere.invalid/file")
    assert os.listdir(target.parent) == []


def test_a_server_that_falls_silent(target):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/file"
        with pytest.raises(DataError, match="cannot be reached"):
            download(url, target, size=10, sha256=DIGEST, timeout=0.2)


def test_redirects(server, target, tmp_path):
    moved = server.url.replace("/file", "/moved")
    fetch(server, target, url=moved)
    assert only(target)
    (tmp_path / "secret").write_bytes(CONTENT)
    for place in (f"file://{tmp_path}/secret", "ftp://127.0.0.1/file"):
        server.moved_to = place
        with pytest.raises(DataError):
            fetch(server, target.with_name("other"), url=moved)
    assert os.listdir(target.parent) == [target.name]


def test_only_the_web_is_fetched(target, tmp_path):
    (tmp_path / "secret").write_bytes(CONTENT)
    with pytest.raises(DataError, match="must begin with https or http"):
        fetch(None, target, url=f"file://{tmp_path}/secret")


def test_a_folder_that_cannot_be_written(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot write .*: (Not a directory|File exists)"):
        fetch(server, tmp_path / "file" / "inside" / "x.tar.gz")


def test_a_full_disk(server, target, monkeypatch):
    class Full:
        def __init__(self, file):
            self.file = file

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, data):
            raise OSError(28, "No space left on device")

    alone = module._alone

    @contextmanager
    def full(part):
        with alone(part) as file:
            yield Full(file)

    monkeypatch.setattr(module, "_alone", full)
    with pytest.raises(DataError, match=r"cannot write '.*file.tar.gz.part': No space left on device"):
        fetch(server, target)
    assert os.listdir(target.parent) == []


def _fetch_in_process(url, target):
    download(url, target, size=len(CONTENT), sha256=DIGEST, timeout=5)


def test_processes_take_turns(server, target):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_fetch_in_process, args=(server.url, target)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert only(target)
    assert server.requests == [None]


def test_load_dataset_downloads(server, tmp_path, cifar10, monkeypatch):
    cifar10.write(tmp_path / "there", "bin.tar.gz")
    server.content = (tmp_path / "there" / cifar10.form.archive).read_bytes()
    sizes = {"archive_bytes": len(server.content), "archive_sha256": hashlib.sha256(server.content).hexdigest()}
    monkeypatch.setitem(catalogue.CIFAR_FORMATS, "cifar10", replace(cifar10.form, url=server.url, **sizes))
    seen = []
    dataset = load_dataset("cifar10", tmp_path / "here", progress=lambda done, total: seen.append(done))
    assert len(dataset.train) == 300
    assert seen[-1] == len(server.content)
    load_dataset("cifar10", tmp_path / "here")
    assert server.requests == [None]  # once
