"""From the command to the first token: the real `ft serve` in its own process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import tiny_models

FIRST_TOKEN_S = 4.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("start") / "tiny.gguf", "llama")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(model_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, float]]:
    port = free_port()
    started = time.monotonic()
    command = [sys.executable, "-m", "freetoken", "serve", "-m", str(model_path), "--port", str(port), "-c", "512"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield process, port, started
    process.kill()
    process.communicate()


def first_bytes(port: int) -> bytes:
    """The first event of a streamed completion; an OSError while nobody listens, HTTPError 503 while loading."""
    body = {"prompt": "ab", "n_predict": 4, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.readline()


def wait_for_first_token(process: subprocess.Popen[str], port: int) -> tuple[bytes, bool]:
    """The first line of the first answer, and whether the server said before that it was loading."""
    deadline = time.monotonic() + 30
    saw_loading = False
    while True:
        try:
            return first_bytes(port), saw_loading
        except urllib.error.HTTPError as error:
            assert error.code == 503
            assert json.load(error)["error"]["message"] == "Loading model"
            saw_loading = True
        except OSError:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_first_token_and_clean_end(server: tuple[subprocess.Popen[str], int, float]) -> None:
    process, port, started = server
    line, saw_loading = wait_for_first_token(process, port)
    elapsed = time.monotonic() - started
    assert line.startswith(b"data: {")
    assert saw_loading
    assert elapsed < FIRST_TOKEN_S, f"{elapsed:.2f} s from the command to the first token"
    process.send_signal(signal.SIGINT)
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    assert "Traceback" not in log


def test_a_long_queue_does_not_hold_up_the_end(server: tuple[subprocess.Popen[str], int, float]) -> None:
    process, port, _ = server
    wait_for_first_token(process, port)
    body = json.dumps({"prompt": ["a"] * 10000, "n_predict": 5}).encode()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        process.communicate(timeout=10)
    assert process.returncode == 0
    assert time.monotonic() - started < 4  # 2 on a machine that does nothing else
