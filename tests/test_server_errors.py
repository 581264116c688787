"""What is refused and how: llama-server's error shape, never a traceback, never a dead server (cases B18, B38)."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from fake_engine import FakeEngine
from serving import IM_END, Served, says, serving, write_vocab

from freetoken.errors import EngineError, RequestError
from freetoken.tokenizer import Tokenizer

USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(FakeEngine(says("ok"), eos=IM_END), tokenizer, max_body_bytes=1_000_000) as served:
        yield served
        assert served.ok("/completion", {"prompt": "hi"})["content"] == "ok", "the server must live on"


def check_error(response: requests.Response, status: int, kind: str, *words: str) -> dict[str, Any]:
    """The inner error object of a refusal."""
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"].startswith("application/json")
    error = response.json()["error"]
    assert (error["code"], error["type"]) == (status, kind)
    assert "Traceback" not in response.text
    for word in words:
        assert word in error["message"], error["message"]
    return dict(error)


BODIES = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"{} x", "not JSON"),
    (b"nul", "not JSON"),
    (b'{"prompt": NaN}', "NaN"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"n_predict": ' + b"9" * 5000 + b"}", "not JSON"),
    (b"[" * 200_000, "nested"),
    (b'"text"', "object"),
    (b"[1, 2]", "object"),
    (b"null", "object"),
    ('{"prompt": "你好"}'.encode("gbk"), "UTF-8"),
    (b'{"prompt": "\xff\xfe"}', "UTF-8"),
    (b'{"prompt": "a\x00"}', "not JSON"),
]


@pytest.mark.parametrize(("body", "word"), BODIES, ids=[str(body[:24]) for body, _ in BODIES])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_are_no_json_object(server: Served, path: str, body: bytes, word: str) -> None:
    check_error(server.post(path, body), 400, "invalid_request_error", word)


@pytest.mark.parametrize("body", [b'\xef\xbb\xbf{"prompt": "hi"}', b'{\r\n"prompt":\r\n"h\\r\\ni"\r\n}\r\n'])
def test_b18_bom_and_crlf_are_fine(server: Served, body: bytes) -> None:
    assert server.post("/completion", body).status_code == 200


FIELDS = [
    ({}, '"prompt" is required'),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": []}, "empty"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [[1, [2]]]}, "prompt"),
    ({"prompt": [1.5]}, "integer"),
    ({"prompt": [-1]}, "-1"),
    ({"prompt": [258]}, "258"),
    ({"prompt": [10**30]}, "vocabulary"),
    ({"prompt": [1, True]}, "prompt"),
    ({"prompt": "x", "temperature": "hot"}, "'temperature'"),
    ({"prompt": "x", "temperature": [1]}, "'temperature'"),
    ({"prompt": "x", "temperature": 1e300}, "'temperature'"),
    ({"prompt": "x", "top_k": "40"}, "'top_k'"),
    ({"prompt": "x", "n_predict": -2}, "'n_predict'"),
    ({"prompt": "x", "n_predict": 10**20}, "'n_predict'"),
    ({"prompt": "x", "max_tokens": 2**31}, "'max_tokens'"),
    ({"prompt": "x", "n_predict": 10**4000}, "'n_predict'"),
    ({"prompt": "x", "seed": -(10**400)}, "'seed'"),
    ({"prompt": [10**4000]}, "vocabulary"),
    ({"prompt": "x", "seed": "s"}, "'seed'"),
    ({"prompt": "x", "stream": 1}, "'stream'"),
    ({"prompt": "x", "stream": "yes"}, "'stream'"),
    ({"prompt": "x", "stop": 5}, "'stop'"),
    ({"prompt": "x", "stop": [5]}, "'stop'"),
    ({"prompt": "x", "samplers": 5}, "'samplers'"),
    ({"prompt": "x", "samplers": [5]}, "'samplers'"),
    ({"prompt": "x", "logit_bias": "x"}, "'logit_bias'"),
    ({"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
    ({"prompt": "x", "repeat_last_n": -1}, "'repeat_last_n'"),
    ({"prompt": "x", "dry_sequence_breakers": []}, "'dry_sequence_breakers'"),
    ({"prompt": "x", "n": 99}, "'n'"),
    ({"prompt": "x", "n": 0}, "'n'"),
    ({"prompt": "x", "id_slot": 2**40}, "'id_slot'"),
    ({"prompt": "x", "response_fields": [1]}, "'response_fields'"),
    ({"prompt": "x", "cache_prompt": "no"}, "'cache_prompt'"),
    ({"prompt": "x", "t_max_predict_ms": "x"}, "'t_max_predict_ms'"),
]


@pytest.mark.parametrize(("body", "word"), FIELDS, ids=[str(body)[:50] for body, _ in FIELDS])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_wrong_fields_are_named(server: Served, path: str, body: dict[str, Any], word: str) -> None:
    check_error(server.post(path, body), 400, "invalid_request_error", word)
    if "stream" not in body:
        check_error(server.post(path, body | {"stream": True}), 400, "invalid_request_error", word)


CHATS = [
    ({}, "'messages' is required"),
    ({"messages": 3}, "array"),
    ({"messages": "hi"}, "array"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "text"),
    ({"messages": [{"role": "assistant"}]}, "content"),
    ({"messages": [{"role": "assistant", "content": "a"}] * 2}, "the last two messages"),
    ({"messages": USER, "continue_final_message": True}, "add_generation_prompt"),
    ({"messages": USER, "top_logprobs": 2}, "logprobs"),
    ({"messages": USER, "logprobs": 2}, "'logprobs'"),
    ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "'top_logprobs'"),
    ({"messages": USER, "temperature": "hot"}, "'temperature'"),
    ({"messages": USER, "chat_template_kwargs": 5}, "'chat_template_kwargs'"),
    ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs'"),
    ({"messages": USER, "chat_template_kwargs": {"enable_thinking": "yes"}}, "enable_thinking"),
    ({"messages": USER, "reasoning_effort": 5}, "'reasoning_effort'"),
    ({"messages": USER, "max_completion_tokens": "all"}, "'max_completion_tokens'"),
]


@pytest.mark.parametrize(("body", "word"), CHATS, ids=[str(body)[:60] for body, _ in CHATS])
def test_wrong_chats_are_explained(server: Served, body: dict[str, Any], word: str) -> None:
    check_error(server.post("/v1/chat/completions", body), 400, "invalid_request_error", word)


MISSING = [
    {"grammar": 'root ::= "a"'},
    {"json_schema": {}},
    {"response_format": {"type": "json_object"}},
    {"lora": [{"id": 0, "scale": 1}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"n_indent": 2},
    {"adaptive_target": 0.5},
    {"samplers": ["infill"]},
    {"reasoning_format": "deepseek"},
    {"reasoning_budget_tokens": 0},
]


@pytest.mark.parametrize("body", MISSING, ids=[next(iter(body)) for body in MISSING])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_what_we_do_not_have_is_said(server: Served, path: str, body: dict[str, Any]) -> None:
    response = server.post(path, {"prompt": "x", "messages": USER} | body)
    check_error(response, 501, "not_supported_error", next(iter(body)))


NOTHING = {
    "grammar": "",
    "json_schema": None,
    "response_format": {"type": "text"},
    "lora": [],
    "tools": [],
    "tool_choice": "auto",
    "n_indent": 0,
    "adaptive_target": -1,
    "logit_bias": [],
    "stop": None,
    "stream_options": None,
    "temperature": None,
    "an_unknown_field": {"x": 1},
}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_values_that_ask_for_nothing_pass(server: Served, path: str) -> None:
    assert server.post(path, {"prompt": "x", "messages": USER} | NOTHING).status_code == 200


@pytest.mark.parametrize("path", ["/infill", "/v1/embeddings", "/v1/responses", "/v1/messages", "/slots/0?action=save"])
def test_routes_that_we_do_not_have_are_said(server: Served, path: str) -> None:
    check_error(server.post(path, {}), 501, "not_supported_error", path.partition("?")[0])
    assert server.get("/lora-adapters").json() == []


def test_images_are_refused(server: Served) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})
    check_error(response, 400, "invalid_request_error", "image input is not supported")
    response = server.post("/completion", {"prompt": {"prompt_string": "x", "multimodal_data": ["AAAA"]}})
    check_error(response, 501, "not_supported_error", "multimodal_data")


@pytest.mark.parametrize("body", [{"echo": True}, {"best_of": 2}, {"suffix": "x"}])
def test_fields_of_openai_that_llama_server_refuses(server: Served, body: dict[str, Any]) -> None:
    check_error(server.post("/v1/completions", {"prompt": "x"} | body), 501, "not_supported_error", *body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_b38_a_prompt_longer_than_the_context(server: Served, path: str, stream: bool) -> None:
    body = {"prompt": "x" * 300, "messages": [{"role": "user", "content": "x" * 300}], "stream": stream}
    error = check_error(server.post(path, body), 400, "exceed_context_size_error", "context_length_exceeded")
    assert error["n_prompt_tokens"] >= 300 and error["n_ctx"] == 256


def test_one_prompt_too_long_cancels_the_others(server: Served) -> None:
    server.engine.started.clear()
    check_error(server.post("/completion", {"prompt": ["a", "x" * 300]}), 400, "exceed_context_size_error")
    assert all(request.cancelled.is_set() for request in server.engine.started)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/nope"), ("POST", "/nope"), ("GET", "/completion"), ("POST", "/health"), ("DELETE", "/props")],
)
def test_unknown_routes_and_methods(server: Served, method: str, path: str) -> None:
    response = requests.request(method, server.url + path, timeout=20)
    check_error(response, 404, "not_found_error", "File Not Found")


@pytest.mark.parametrize("tokens", [5, "x", [1.5], [-1], [258], ["a"], [True], [10**30]])
def test_detokenize_checks_ids(server: Served, tokens: Any) -> None:
    check_error(server.post("/detokenize", {"tokens": tokens}), 400, "invalid_request_error")


@pytest.mark.parametrize("content", [5, {}, [None], [-1], [[1]], True])
def test_tokenize_checks_content(server: Served, content: Any) -> None:
    check_error(server.post("/tokenize", {"content": content}), 400, "invalid_request_error")


def test_a_body_larger_than_the_limit(server: Served) -> None:
    check_error(server.post("/completion", b" " * 1_000_001), 413, "invalid_request_error", "larger")


@pytest.mark.parametrize(
    ("error", "status", "kind", "word"),
    [
        (EngineError("out of memory"), 500, "server_error", "out of memory"),
        (RequestError("no such sampler"), 400, "invalid_request_error", "no such sampler"),
        (ValueError("secret detail"), 500, "server_error", "ValueError"),
    ],
)
def test_failures_of_the_engine(
    tokenizer: Tokenizer, error: Exception, status: int, kind: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    with serving(FakeEngine(lambda _: [97, error]), tokenizer) as served:
        check_error(served.post("/completion", {"prompt": "x"}), status, kind, word)
        chunks = served.stream("/completion", {"prompt": "x"})
        assert chunks[0]["content"] == "a"
        assert chunks[-1]["error"]["type"] == kind and word in chunks[-1]["error"]["message"]
        assert "secret" not in str(chunks[-1])


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: minus\r\n\r\n",
        b'POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 1_6\r\n\r\n{"prompt": "hi"}',
        b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n{}",
        b"GET /health HTTP/1.1\r\n folded: x\r\n\r\n",
        b"POST /completion HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 70_000,
    ],
)
def test_broken_http(server: Served, raw: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        received = b""
        while piece := client.recv(65536):
            received += piece
    assert re.match(rb"(HTTP/1\.1 (4\d\d|505) |$)", received), received
    assert not [record for record in caplog.records if record.exc_info]
    assert server.get("/health").status_code == 200
