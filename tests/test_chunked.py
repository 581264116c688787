"""Bodies in chunked coding: read as sent, whatever sizes they claim, and never mistaken for the next request."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from serving import IM_END, Served, says, serving, write_vocab

from freetoken.errors import RequestError
from freetoken.server.chunked import ChunkedBody
from freetoken.tokenizer import Tokenizer

HEAD = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    tokenizer = Tokenizer(write_vocab(tmp_path_factory.mktemp("chunked") / "tiny.gguf"))
    with serving(FakeEngine(says("ok"), eos=IM_END), tokenizer) as served:
        yield served


@pytest.mark.parametrize(
    ("coded", "plain"),
    [
        (b"0\r\n\r\n", b""),
        (b"3\r\nabc\r\n0\r\n\r\n", b"abc"),
        (b'1\r\na\r\n00002;x="y"\r\nbc\r\n0\r\nTrailer: 1\r\n\r\n', b"abc"),
        (b"A \r\n0123456789\r\n0;last\r\n\r\n", b"0123456789"),
    ],
)
def test_sound(coded: bytes, plain: bytes) -> None:
    source = io.BytesIO(coded + b"next")
    body = ChunkedBody(source)
    assert body.read() == plain
    assert body.is_complete and source.read() == b"next"


@pytest.mark.parametrize(
    "coded",
    [
        b"",
        b"zz\r\nab",
        b"-5\r\nabcde\r\n0\r\n\r\n",
        b"+3\r\nabc",
        b"0x3\r\nabc",
        b"1_0\r\nabc",
        b"3\nabc\r\n0\r\n\r\n",
        b"f" * 16 + b"\r\nabc",
        b"7fffffffffffff\r\nabc",
        b"3\r\nab",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\r\nabc\r\n",
        b"3;" + b"x" * 10_000 + b"\r\nabc\r\n0\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * 1000,
    ],
)
def test_broken(coded: bytes) -> None:
    with pytest.raises(RequestError, match="chunked coding"):
        ChunkedBody(io.BytesIO(coded)).read()


def answers(server: Served, raw: bytes) -> list[bytes]:
    """Status lines of everything that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(raw)
        received = b""
        while piece := client.recv(65536):
            received += piece
    return [part.split(b" ", 2)[1] for part in received.split(b"HTTP/1.1")[1:]]


@pytest.mark.parametrize("size", [b"zz", b"-5", b"ffffffffffffffffff", b"fffffff"])
def test_a_broken_body_is_refused(server: Served, size: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(HEAD % b"/completion" + size + b"\r\nabc")
        client.shutdown(socket.SHUT_WR)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert received.startswith(b"HTTP/1.1 400")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_the_next_request_stands_behind_a_body_that_was_read(server: Served) -> None:
    body = b'{"prompt": "a"}'
    raw = HEAD % b"/completion" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    assert answers(server, raw + HEALTH) == [b"200", b"200"]


def test_a_body_that_nobody_read_is_no_request(server: Served) -> None:
    hidden = HEALTH.replace(b"close", b"keep-alive")
    raw = HEAD % b"/nowhere" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(hidden), hidden)
    assert answers(server, raw) == [b"404"]
