"""Signals stop a run at once before training, and after the step during training; ignored signals stay ignored."""

import os
import signal
import time

import pytest

from spherenet.training import StopRequested, StopSignals

NUMBERS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]


def wait_for_signal(number):
    os.kill(os.getpid(), number)
    time.sleep(60)
    pytest.fail("the signal did not interrupt the function.")


def wait_and_catch_errors(number):
    try:
        wait_for_signal(number)
    except Exception as error:
        raise AssertionError from error


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_signal_before_training_stops_at_once(number):
    """For example a download or a rendezvous, which need not be finished first."""
    with StopSignals() as stop, pytest.raises(StopRequested) as request:
        wait_for_signal(number)
    assert request.value.number == stop.received == number


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_signal_during_training_is_deferred(number):
    with StopSignals() as stop, stop.deferred():
        stop.check()
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        assert stop.received == number
        with pytest.raises(StopRequested):
            stop.check()


def test_error_handlers_do_not_catch_stop_request():
    with StopSignals(), pytest.raises(StopRequested):
        wait_and_catch_errors(signal.SIGTERM)


def test_ignored_signal_stays_ignored():
    """nohup ignores SIGHUP for its command."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.01)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signal_interrupts_download(tmp_path):
    """The partial file stays, and the next call continues it."""
    import socket
    import threading

    from spherenet.data.archives import download

    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    interrupted = threading.Event()

    def send_half():
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 600000\r\n\r\n" + b"x" * 300_000)
            os.kill(os.getpid(), signal.SIGTERM)
            interrupted.wait(240)

    thread = threading.Thread(target=send_half, daemon=True)
    thread.start()
    target = tmp_path / "file"
    with server, StopSignals(), pytest.raises(StopRequested):
        download(f"http://127.0.0.1:{port}/file", target, size=600_000, sha256="0" * 64)
    assert thread.is_alive()  # the server still waits: the download did not wait for its end
    interrupted.set()
    assert not target.exists()
    thread.join()
