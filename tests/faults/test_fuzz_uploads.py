"""`spherenet demo` answers mutated uploads and requests in one sentence, and keeps answering."""

import http.client
import io
import json
import random
import socket
import threading

import pytest
import torch
from PIL import Image

import spherenet as sn
from command_line import one_sentence
from faults.mutation import mutated_bytes
from faults.scale import FUZZ_INPUTS
from spherenet.data import Preprocessing
from spherenet.demo import Analyzer, DemoServer
from spherenet.training.saved_runs import Predictor

POINT = 11
FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")


@pytest.fixture(scope="module")
def server():
    torch.manual_seed(0)
    model = sn.create_model("cnn-3", 3, widths=(4, 4, 4), in_channels=1, input_size=16).eval()
    predictor = Predictor(model, ("a", "b", "c"), Preprocessing.standard((16, 16), 1))
    with DemoServer(Analyzer(predictor), "small") as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.01,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


def image_file(form):
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((20, 30)).save(stream, form)
    return stream.getvalue()


def upload(server, body):
    """Return status and JSON of the answer to an image."""
    host = f"127.0.0.1:{server.server_port}"
    connection = http.client.HTTPConnection(host, timeout=240)
    headers = {"Origin": f"http://{host}", "Content-Type": "application/octet-stream"}
    connection.request("POST", "/analyze", body, headers)
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content


def test_mutated_uploads(server, tried):
    originals, chance, rejected = [image_file(form) for form in FORMATS], random.Random(0), 0
    for _ in range(FUZZ_INPUTS):
        status, content = upload(server, mutated_bytes(chance.choice(originals), chance))
        assert status in (200, 400), content
        if status == 400:
            assert one_sentence(content["error"]), content
            assert "/" not in content["error"].replace("/s", ""), content  # no path of this machine
        rejected += status == 400
        tried("a fuzzed upload to the demo")
    assert rejected > FUZZ_INPUTS // 10
    assert [upload(server, body)[0] for body in originals] == [200] * len(originals)


def test_mutated_requests(server, tried):
    """The answer to any bytes is an HTTP response or a closed connection; internal errors have the status 500."""
    host, body, chance = f"127.0.0.1:{server.server_port}", image_file("PNG"), random.Random(1)
    head = f"POST /analyze?light=spot:0.5 HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: "
    original = f"{head}{len(body)}\r\nContent-Type: application/octet-stream\r\n\r\n".encode()
    statuses = set()
    for _ in range(FUZZ_INPUTS):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=240) as connection:
            connection.sendall(mutated_bytes(original, chance) + body)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as answer:
                try:
                    first = answer.readline(100)
                except ConnectionError:  # closed with unread bytes of the request
                    first = b""
        statuses.add(first[9:12])
        assert b" 500 " not in first, first
        tried("a fuzzed request to the demo")
    assert {b"200", b"403"} <= statuses
    assert upload(server, body)[0] == 200
