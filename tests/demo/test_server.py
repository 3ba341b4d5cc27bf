"""`spherenet demo` without a browser: its values, foreign requests, bad uploads, the port, and Ctrl-C."""

import base64
import http.client
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import torch
from PIL import Image

import spherenet as sn
from command_line import command, one_sentence, spherenet
from spherenet.data import Preprocessing
from spherenet.data.cifar import CIFAR10
from spherenet.data.corruptions import corrupt
from spherenet.data.images import MAX_PIXELS, read_pixels
from spherenet.data.preprocessing import normalize
from spherenet.demo import Analyzer, DemoServer
from spherenet.demo.samples import sample_images
from spherenet.demo.server import LARGEST_UPLOAD, own_hosts
from spherenet.errors import ModelError
from spherenet.training.saved_runs import Predictor

CLASSES = ("a", "b", "c")


def predictor(name="cnn-3", operator="cosine", widths=(4, 4, 4), channels=1):
    torch.manual_seed(0)
    model = sn.create_model(name, 3, operator, widths=widths, in_channels=channels, input_size=16)
    return Predictor(model.eval(), CLASSES, Preprocessing.standard((16, 16), channels, resize=(20, 20)))


@contextmanager
def serving(started):
    with started:
        thread = threading.Thread(target=started.serve_forever, args=(0.01,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server():
    with serving(DemoServer(Analyzer(predictor()), "small")) as started:
        yield started


@pytest.fixture(scope="module")
def png():
    stream = io.BytesIO()
    Image.linear_gradient("L").resize((40, 30)).save(stream, "PNG")
    return stream.getvalue()


def request(server, method="POST", path="/analyze", body=b"", **headers):
    """Send a request with the headers of the page, or with others; None removes a header."""
    host = f"127.0.0.1:{server.server_port}"
    own = {"Host": host, "Origin": f"http://{host}", "Content-Type": "application/octet-stream"}
    sent = {**own, "Content-Length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    with closing(http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=240)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in sent.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders()
        connection.send(body)
        response = connection.getresponse()
        return response.status, response.read(), response.headers


def test_values_are_those_of_the_network(server, png, tmp_path):
    status, content, _ = request(server, body=png)
    assert status == 200
    result = json.loads(content)
    (tmp_path / "image.png").write_bytes(png)
    used = server.analyzer.predictor
    image = sn.data.read_image(tmp_path / "image.png", used.preprocessing).unsqueeze(0)
    with torch.no_grad():
        probabilities = used.model(image).softmax(1)[0]
        cosines = used.model.head(used.model.features(image)).cosine[0]
    shown = {entry["class"]: entry for entry in result["classes"]}
    for index, name in enumerate(CLASSES):
        assert shown[name]["probability"] == pytest.approx(probabilities[index].item(), abs=1e-5)
        assert torch.tensor(shown[name]["angle"]).deg2rad().cos() == pytest.approx(cosines[index].item(), abs=1e-5)
    display = Image.open(io.BytesIO(base64.b64decode(result["image"].partition(",")[2])))
    assert display.size == (384, 384)


def test_light_changes_what_the_network_and_the_page_see(server, png, tmp_path):
    plain, spot, both = (
        json.loads(request(server, path=f"/analyze?{query}", body=png)[1])
        for query in ("", "light=spot:0.8", "light=spot:0.8&light=contrast:0.5")
    )
    assert len({plain["image"], spot["image"], both["image"]}) == 3
    (tmp_path / "image.png").write_bytes(png)
    used = server.analyzer.predictor
    pixels = torch.from_numpy(read_pixels(tmp_path / "image.png", used.preprocessing)).permute(2, 0, 1)[None]
    pixels = corrupt(corrupt(pixels, "spot:0.8"), "contrast:0.5").permute(0, 2, 3, 1)
    with torch.no_grad():
        probabilities = used.model(normalize(pixels, used.preprocessing)).softmax(1)[0]
    shown = {entry["class"]: entry["probability"] for entry in both["classes"]}
    assert [shown[name] for name in CLASSES] == pytest.approx(probabilities.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("light", "message"),
    [
        ("fog:1", "corruption must be one of"),
        ("spot:2", "strength of spot must be a number from 0 to 1, got '2'."),
        ("cast:0.5", "light must be given once for each of spot, ramp, contrast, got cast."),
        ("spot:0.5&light=spot:0.6", "light must be given once for each of spot, ramp, contrast, got spot, spot."),
        ("noise:10", "light must be given once"),
    ],
)
def test_wrong_light_is_rejected(server, png, light, message):
    status, content, _ = request(server, path=f"/analyze?light={light}", body=png)
    assert status == 400
    assert json.loads(content)["error"].startswith(message)


def test_model_is_described_with_samples_of_known_classes(server):
    described = json.loads(request(server, "GET", "/model")[1])
    assert (described["classes"], described["count"], described["samples"]) == (list(CLASSES), 3, [])
    assert described["lights"] == ["spot", "ramp", "contrast"]
    for classes, mode in ((CIFAR10.classes, "RGB"), (tuple("0123456789"), "L")):
        samples = sample_images(classes)
        assert [sample["class"] for sample in samples] == list(classes)
        image = Image.open(io.BytesIO(base64.b64decode(samples[3]["image"].partition(",")[2])))
        assert (image.mode, image.size) == (mode, (32, 32) if mode == "RGB" else (28, 28))


def test_compared_model_must_have_the_same_classes(png):
    first, second = predictor(), predictor(operator=None)
    with serving(DemoServer(Analyzer(first), "a", compared=Analyzer(second), compared_title="b")) as started:
        result = json.loads(request(started, body=png)[1])
    assert result["compared"]["title"] == "b"
    expected = Analyzer(second)
    assert len(result["compared"]["classes"]) == len(expected.predictor.classes)
    assert result["compared"]["classes"] != result["classes"]
    other = Predictor(second.model, ("x", "y", "z"), second.preprocessing)
    with pytest.raises(ValueError, match=r"^compared must have the same classes \(a, b, c, …\), got x, y, z, …\.$"):
        DemoServer(Analyzer(first), "a", compared=Analyzer(other))


@pytest.mark.parametrize(
    ("name", "operator", "widths"), [("cnn-3", "cosine", (4, 4, 4)), ("resnet-32", None, (4, 4, 4))]
)
def test_patches_are_the_largest_responses_of_a_layer(name, operator, widths, tmp_path):
    path = tmp_path / "noise.png"
    Image.effect_noise((20, 20), 80).save(path)
    used = predictor(name, operator, widths)
    analyzer = Analyzer(used)
    assert len(analyzer.layers) <= 12
    first = analyzer.layers[0]
    assert (first.height, first.width) == (3, 3)
    patches = analyzer.analyze(path, first.name)["patches"]
    module = used.model.features.get_submodule(first.name)
    image = sn.data.read_image(path, used.preprocessing).unsqueeze(0)
    with torch.no_grad():
        assert patches[0]["response"] == pytest.approx(module(image).max().item(), abs=1e-5)
    responses = [patch["response"] for patch in patches]
    assert responses == sorted(responses, reverse=True)
    assert len(responses) == 5
    for patch in patches:
        rows = slice(patch["top"], patch["top"] + patch["height"])
        columns = slice(patch["left"], patch["left"] + patch["width"])
        assert 0 <= rows.start < rows.stop <= 16
        changed_outside, changed_inside = image + 0.5, image.clone()
        changed_outside[..., rows, columns] = image[..., rows, columns]
        changed_inside[..., rows, columns] *= -1
        for changed, is_kept in ((changed_outside, True), (changed_inside, False)):
            with torch.no_grad():
                difference = (module(changed)[0, patch["filter"]] - patch["response"]).abs().min()
            assert (difference < 1e-6) == is_kept
    assert [name for name, module in used.model.named_modules() if module._forward_hooks] == []


def test_limit_of_image_files_is_an_option(tmp_path, png):
    (tmp_path / "image.png").write_bytes(png)  # 40 × 30 pixels
    for max_pixels in (1199, 1200):
        with serving(DemoServer(Analyzer(predictor(), max_pixels=max_pixels), "small")) as started:
            status, content, _ = request(started, body=png)
        assert (status == 200) == (max_pixels == 1200)
        assert max_pixels == 1200 or "at most 1199 pixels, got 40 × 30" in json.loads(content)["error"]


def test_command_line_sets_the_limit_of_image_files(monkeypatch):
    seen = []
    monkeypatch.setattr(DemoServer, "serve_forever", lambda server, poll_interval: seen.append(server.analyzer))
    assert spherenet("demo", "--no-browser", "--max-megapixels", "200") == 0
    assert spherenet("demo", "--no-browser") == 0
    assert [analyzer.max_pixels for analyzer in seen] == [200_000_000, MAX_PIXELS]


def test_black_image_and_many_layers(tmp_path):
    Image.new("L", (16, 16)).save(tmp_path / "black.png")
    analyzer = Analyzer(predictor("cnn-18"))
    result = analyzer.analyze(tmp_path / "black.png", analyzer.default_layer)
    assert all(0 <= entry["angle"] <= 180 for entry in result["classes"])
    json.dumps(result, allow_nan=False)


def test_other_models_are_rejected():
    with pytest.raises(ModelError, match="model must be a Classifier of create_model, got Linear"):
        Analyzer(Predictor(torch.nn.Linear(1, 1), CLASSES, Preprocessing.standard((16, 16), 1)))


def test_page_has_no_external_resource_and_a_policy(server):
    status, page, headers = request(server, "GET", "/", Origin=None)
    assert status == 200
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in page
    policy = headers["Content-Security-Policy"]
    nonce = policy.partition("script-src 'nonce-")[2].partition("'")[0]
    assert len(nonce) >= 20
    assert page.count(f'nonce="{nonce}"'.encode()) == 2
    assert policy.startswith("default-src 'none'; connect-src 'self'")
    assert nonce not in request(server, "GET", "/", Origin=None)[2]["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}, 403),
        ({"Host": "127.0.0.1:1"}, 403),
        ({"Host": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": None}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": "-1"}, 411),
        ({"Content_Length": "٣"}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": str(LARGEST_UPLOAD + 1)}, 413),
        ({"Content_Length": "9" * 5000}, 413),
    ],
)
def test_foreign_and_oversized_requests_are_rejected(server, headers, status):
    port = str(server.server_port)
    filled = {name: text.replace("{port}", port).encode() if text else text for name, text in headers.items()}
    received, content, sent = request(server, **filled)
    assert received == status
    assert set(json.loads(content)) == {"error"}
    assert sent["Connection"] == "close"
    assert "Access-Control-Allow-Origin" not in sent


def test_foreign_page_cannot_read_the_model(server):
    assert request(server, "GET", "/model", Origin=None)[0] == 200
    assert request(server, "GET", "/model", Host="evil.example", Origin=None)[0] == 403
    assert request(server, "GET", "/model", Origin="http://evil.example")[0] == 403


@pytest.mark.parametrize("path", ["/../../etc/passwd", "/page.html", "//x", "/analyze"])
def test_other_paths_do_not_exist(server, path):
    assert request(server, "GET", path)[0] == 404
    assert request(server, "POST", "/" if path == "/analyze" else path)[0] == 404
    assert request(server, "OPTIONS", path)[0] == 501


@pytest.mark.parametrize("body", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_bad_images_are_one_sentence_without_a_path(server, body, png):
    status, content, _ = request(server, body=body)
    assert status == 400
    message = json.loads(content)["error"]
    assert one_sentence(message)
    assert message.startswith("the file cannot be read: ")
    assert "/" not in message
    assert request(server, body=png)[0] == 200


def start_upload(server, length, body=b"", path="/analyze"):
    """Return a connection that announces an upload and sends only a part of it."""
    host = f"127.0.0.1:{server.server_port}"
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=240)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {length}\r\n"
    connection.sendall(f"{head}Content-Type: application/octet-stream\r\n\r\n".encode() + body)
    return connection


def sent_before_the_end(connection):
    """Send a byte now and then until the server closes the connection, for at most 50 s; return how many."""
    for sent in range(1_000):
        try:
            connection.sendall(b"x")
        except OSError:
            return sent
        time.sleep(0.05)
    return 1_000


def received(connection):
    """Return everything that a server sends until it closes a connection."""
    with connection, connection.makefile("rb") as file:
        return file.read()


@pytest.mark.parametrize("start", [b"", b"POST /analyze HTTP/1.1\r\n", b"POST /analyze HTTP/1.1\r\nHost: x", None])
def test_request_that_does_not_arrive_in_time_is_ended(server, monkeypatch, start):
    """However steadily it arrives: a byte now and then does not extend the deadline."""
    monkeypatch.setattr("spherenet.demo.server.DEADLINE", 0.4)
    if start is None:
        connection = start_upload(server, 1_000_000, b"x")
    else:
        connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=240)
        connection.sendall(start)
    with connection:
        assert sent_before_the_end(connection) < 1_000
    assert server._held == 0


def test_late_upload_is_told_why(server, monkeypatch):
    monkeypatch.setattr("spherenet.demo.server.DEADLINE", 0.2)
    reply = received(start_upload(server, 1_000_000, b"x"))
    assert b" 408 " in reply.splitlines()[0]
    assert b"the file must arrive within 0.2 s." in reply


def test_incomplete_upload_is_refused(server, png):
    connection = start_upload(server, len(png), png[:-1])
    connection.shutdown(socket.SHUT_WR)
    reply = received(connection)
    assert b" 400 " in reply.splitlines()[0]
    assert b"as announced" in reply


def test_sum_of_uploads_is_limited(server, png):
    waiting = [start_upload(server, LARGEST_UPLOAD, b"x") for _ in range(4)]
    replies = iter(lambda: request(server, body=png)[0], 503)
    for _ in replies:  # until all four are counted
        pass
    assert server._held == 4 * LARGEST_UPLOAD
    for connection in waiting:
        connection.close()
    while server._held:
        time.sleep(0.01)
    assert request(server, body=png)[0] == 200


def test_number_of_connections_is_limited(png):
    with serving(DemoServer(Analyzer(predictor()), "small")) as started:
        started._connections = threading.BoundedSemaphore(2)
        idle = [socket.create_connection(("127.0.0.1", started.server_port), timeout=240) for _ in range(2)]
        third = socket.create_connection(("127.0.0.1", started.server_port), timeout=240)
        assert received(third) == b""
        for connection in idle:
            connection.close()
        status = None
        while status != 200:
            with suppress(OSError, http.client.HTTPException):
                status = request(started, body=png)[0]


def test_unknown_layer_is_named(server, png):
    status, content, _ = request(server, path="/analyze?layer=%3Cb%3E", body=png)
    assert (status, json.loads(content)["error"].endswith("got '<b>'.")) == (400, True)


def test_server_listens_on_the_loopback_address_only(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    assert urlsplit(server.address).hostname == "127.0.0.1"


def test_server_is_reachable_before_it_serves():
    """The address is printed before; the system queues connections until then."""
    with DemoServer(Analyzer(predictor()), "queue") as started, ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(started.server_address, timeout=60))


def test_port_in_use_and_bad_options(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert spherenet("demo", "--port", port, "--no-browser") == 2
    assert f"port {port} cannot be used: " in capsys.readouterr().err
    assert spherenet("demo", "--port", "70000") == 2
    assert spherenet("demo", "missing-folder") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_interrupt_ends_the_command(tmp_path):
    process = subprocess.Popen(
        command("demo", "--no-browser"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        address = process.stdout.readline().split()[0]
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=240)
        connection.request("GET", "/model")
        assert json.loads(connection.getresponse().read())["count"] == 10
        connection.close()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=240)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert errors == "spherenet demo: ended.\n"


def test_outputs_that_are_not_finite_are_one_sentence(png):
    used = predictor()
    analyzer = Analyzer(used)
    with torch.no_grad():
        used.model.head.weight.fill_(float("nan"))
    with serving(DemoServer(analyzer, "broken")) as started:
        status, content, _ = request(started, body=png)
    assert status == 400
    assert json.loads(content)["error"].startswith("the outputs of the network must be finite")


def test_bug_is_reported_to_the_page(png, monkeypatch):
    analyzer = Analyzer(predictor())
    monkeypatch.setattr(analyzer, "analyze", lambda path, layer, lights: 1 / 0)
    with serving(DemoServer(analyzer, "broken")) as started:
        status, content, _ = request(started, body=png)
    assert status == 500
    assert json.loads(content) == {"error": "internal error (ZeroDivisionError: division by zero)."}


def test_page_shows_the_part_that_the_network_sees(tmp_path):
    """A wide image is cropped, not squashed, if the network was trained so."""
    wide = Image.new("RGB", (96, 32), "red")
    wide.paste("lime", (32, 0, 64, 32))
    wide.save(tmp_path / "wide.png")
    small = predictor(channels=3)
    preprocessing = Preprocessing.standard((16, 16), 3, resize=(20, 20), keep_aspect=True)
    analyzer = Analyzer(Predictor(small.model, CLASSES, preprocessing))
    shown = analyzer._display(tmp_path / "wide.png", ())
    pixels = Image.open(io.BytesIO(base64.b64decode(shown.partition(",")[2]))).convert("RGB")
    assert pixels.getcolors() == [(pixels.width * pixels.height, (0, 255, 0))]


def test_default_port_may_be_left_out_of_the_address():
    assert own_hosts(8000) == {"127.0.0.1:8000", "localhost:8000"}
    assert own_hosts(80) == {"127.0.0.1:80", "localhost:80", "127.0.0.1", "localhost"}
