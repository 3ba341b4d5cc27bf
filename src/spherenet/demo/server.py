"""Web server of the demo on the loopback address, for one user on this machine.

Other websites in the same browser can send requests to this address, so the headers Host (against DNS rebinding) and
Origin (against forged requests) must be those of the page. Uploads are decoded by the reader of `spherenet predict`.
Their size, their sum at one time, the time of a request and the number of connections are limited.
"""

from __future__ import annotations

import io
import json
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from spherenet._util.text import first_line
from spherenet.data.corruptions import Corruption, parse_corruption
from spherenet.demo.analysis import Analyzer
from spherenet.demo.samples import sample_images
from spherenet.errors import DataError, InvalidArgument

__all__ = ["LARGEST_UPLOAD", "DemoServer", "own_hosts"]

LARGEST_UPLOAD = 20 * 2**20
"""Largest image file in bytes."""

LARGEST_SUM = 4 * LARGEST_UPLOAD
"""Largest sum of the image files that are received or analyzed at one time, in bytes."""

DEADLINE = 60.0
"""Seconds within which a request must arrive completely."""

LISTED_CLASSES = 100
"""Number of classes that the page lists."""

CONNECTIONS = 64
"""Number of connections at one time. A browser opens six."""

PAGE = Path(__file__).with_name("page.html")
BLOCK = 1 << 16  # bytes of an upload that are in memory
UPLOAD_TYPE = "application/octet-stream"  # not a type of HTML forms, so other websites need a permission to send it


def own_hosts(port: int) -> set[str]:
    """Return the values of the header Host with which the page is requested; browsers leave out the default port."""
    names = {"127.0.0.1", "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


class DemoServer(ThreadingHTTPServer):
    """Server of the page for one model, or for two that are compared.

    Args:
        analyzer: Model and its layers.
        title: Name of the model on the page.
        port: Port; 0 for a free one.
        compared: A second model with the same classes, whose probabilities are shown beside.
        compared_title: Its name on the page.

    Raises:
        ValueError: If the models have different classes.
        OSError: If the port is in use or not allowed.
    """

    daemon_threads = True
    allow_reuse_address = False  # a second server on the same port must fail
    request_queue_size = CONNECTIONS  # the address is announced before `serve_forever` accepts the first one

    def __init__(
        self,
        analyzer: Analyzer,
        title: str,
        port: int = 0,
        *,
        compared: Analyzer | None = None,
        compared_title: str = "",
    ) -> None:
        if compared is not None and compared.predictor.classes != analyzer.predictor.classes:
            mine, other = (", ".join(map(str, one.predictor.classes[:3])) for one in (analyzer, compared))
            raise InvalidArgument("compared", f"must have the same classes ({mine}, …), got {other}, ….")
        super().__init__(("127.0.0.1", port), _Handler)
        self.analyzer, self.title = analyzer, title
        self.compared, self.compared_title = compared, compared_title
        self.lock = threading.Lock()  # one image at a time: the layers of a model share hooks
        self.hosts = own_hosts(self.server_port)
        self._held, self._counting = 0, threading.Lock()
        self._connections = threading.BoundedSemaphore(CONNECTIONS)

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://127.0.0.1:{self.server_port}/"

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count the bytes of an upload. Raises _RequestError if there are too many at one time."""
        with self._counting:
            if self._held + size > LARGEST_SUM:
                text = f"the files that are analyzed at one time must have at most {LARGEST_SUM // 2**20} MiB."
                raise _RequestError(HTTPStatus.SERVICE_UNAVAILABLE, text)
            self._held += size
        try:
            yield
        finally:
            with self._counting:
                self._held -= size

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or close it if there are too many."""
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection in this thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that the browser closed."""

    @property
    def lights(self) -> list[str]:
        """Names of the changes of light that apply to the images of all models."""
        models = [self.analyzer] if self.compared is None else [self.analyzer, self.compared]
        return [name for name in self.analyzer.lights if all(name in model.lights for model in models)]

    def analyze(self, path: Path, layer: str, lights: list[Corruption]) -> dict[str, Any]:
        """Return what the page shows of an image file: see `Analyzer.analyze`."""
        with self.lock:
            result = self.analyzer.analyze(path, layer, lights)
            if self.compared is not None:
                classes = self.compared.classify(path, lights)
                result["compared"] = {"title": self.compared_title, "classes": classes}
        return result

    def description(self) -> dict[str, Any]:
        """Return what the page shows of the model."""
        layers = [{"name": layer.name, "description": layer.description} for layer in self.analyzer.layers]
        return {
            "title": self.title,
            "classes": self.analyzer.predictor.classes[:LISTED_CLASSES],
            "count": len(self.analyzer.predictor.classes),
            "layers": layers,
            "layer": self.analyzer.default_layer,
            "lights": self.lights,
            "samples": sample_images(self.analyzer.predictor.classes),
        }


class _RequestError(Exception):
    """A request that is rejected with an HTTP status."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Incoming(io.RawIOBase):
    """What a connection receives until a deadline, however many small parts it arrives in."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.set_deadline()

    def set_deadline(self) -> None:
        """Start the time of a request."""
        self._deadline = time.monotonic() + DEADLINE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Receive at least one byte. Raises TimeoutError at the deadline."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "spherenet", ""

    def setup(self) -> None:
        """Read from the connection with a deadline."""
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self._incoming)

    def handle_one_request(self) -> None:
        """Handle a request, for which the time starts now. Without one, the connection is closed at the deadline."""
        self._incoming.set_deadline()
        super().handle_one_request()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print no line per request."""

    def do_GET(self) -> None:
        """Send the page or the description of the model."""
        self._handle(self._get)

    def do_POST(self) -> None:
        """Analyze an uploaded image."""
        self._handle(self._post)

    def _handle(self, respond: Any) -> None:
        try:
            self._require_own_page()
            respond()
        except _RequestError as error:
            self.close_connection = True  # the body of the request was not read
            self._send_json({"error": str(error)}, error.status)
        except OSError:  # the browser closed the connection
            raise
        except Exception as error:
            self.close_connection = True
            text = f"internal error ({type(error).__name__}: {first_line(error)})."
            self._send_json({"error": text}, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            nonce = secrets.token_urlsafe(16)
            page = PAGE.read_text(encoding="utf-8").replace("{nonce}", nonce)
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.encode(), nonce)
        elif path == "/model":
            self._send_json(self._demo.description())
        else:
            raise _RequestError(HTTPStatus.NOT_FOUND, "the path must be / or /model.")

    def _post(self) -> None:
        address = urlsplit(self.path)
        if address.path != "/analyze":
            raise _RequestError(HTTPStatus.NOT_FOUND, "the path must be /analyze.")
        if self.headers.get("Content-Type") != UPLOAD_TYPE:
            raise _RequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the content type must be {UPLOAD_TYPE}.")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            raise _RequestError(HTTPStatus.LENGTH_REQUIRED, "the request must have a content length.")
        if len(length) > 12 or int(length) > LARGEST_UPLOAD:
            text = f"the file must have at most {LARGEST_UPLOAD // 2**20} MiB."
            raise _RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        query = parse_qs(address.query)
        layer = query.get("layer", [self._demo.analyzer.default_layer])[0]
        lights = self._lights(query.get("light", []))
        with self._demo.holding(int(length)), tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "image")
            self._receive(path, int(length))
            try:
                result = self._demo.analyze(path, layer, lights)
            except DataError as error:
                message = str(error).replace(f"the image {str(path)!r}", "the file")
                raise _RequestError(HTTPStatus.BAD_REQUEST, message) from None
            except ValueError as error:
                raise _RequestError(HTTPStatus.BAD_REQUEST, str(error)) from None
        self._send_json(result)

    def _lights(self, texts: list[str]) -> list[Corruption]:
        """Return the changes of light of a request, each at most once."""
        allowed = self._demo.lights
        try:
            lights = [parse_corruption(text) for text in texts]
        except ValueError as error:
            raise _RequestError(HTTPStatus.BAD_REQUEST, str(error)) from None
        names = [light.name for light in lights]
        if not set(names) <= set(allowed) or len(set(names)) < len(names):
            text = f"light must be given once for each of {', '.join(allowed)}, got {', '.join(names)}."
            raise _RequestError(HTTPStatus.BAD_REQUEST, text)
        return lights

    def _receive(self, path: Path, length: int) -> None:
        """Write the body of a request to a file."""
        with path.open("wb") as file:
            while file.tell() < length:
                try:
                    block = self.rfile.read1(min(BLOCK, length - file.tell()))
                except TimeoutError:
                    text = f"the file must arrive within {DEADLINE:g} s."
                    raise _RequestError(HTTPStatus.REQUEST_TIMEOUT, text) from None
                if not block:
                    raise _RequestError(HTTPStatus.BAD_REQUEST, f"the file must have {length} bytes as announced.")
                file.write(block)

    @property
    def _demo(self) -> DemoServer:
        return cast(DemoServer, self.server)

    def _require_own_page(self) -> None:
        """Reject requests of other websites and of names that other websites made point to this machine."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or hosts[0] not in self._demo.hosts:
            raise _RequestError(HTTPStatus.FORBIDDEN, "the header Host must be the address of this page.")
        origins = self.headers.get_all("Origin", [])
        if origins != [f"http://{hosts[0]}"] and (origins or self.command == "POST"):
            raise _RequestError(HTTPStatus.FORBIDDEN, "the header Origin must be the address of this page.")

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, "application/json", json.dumps(value, allow_nan=False).encode())

    def _send(self, status: HTTPStatus, content_type: str, content: bytes, nonce: str | None = None) -> None:
        inline = "" if nonce is None else f"; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'"
        headers = {
            "Content-Type": content_type,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
            f"form-action 'none'; frame-ancestors 'none'{inline}",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if self.close_connection:
            headers["Connection"] = "close"
        self.connection.settimeout(DEADLINE)  # of sending everything
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
