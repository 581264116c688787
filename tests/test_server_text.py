"""Text that comes in pieces: whole characters, broken bytes, stop strings (cases B16, B17, B19, B20)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import IM_END, Served, says, serving, write_vocab

from freetoken.request import Request
from freetoken.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = ["/completion", "/v1/completions", "/v1/chat/completions"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"))


def whole_text(data: dict[str, Any]) -> str:
    """The text of an answer that did not stream."""
    if "choices" not in data:
        return str(data["content"])
    choice = data["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def streamed_text(chunks: Sequence[Any]) -> str:
    """The joined text of a stream."""
    text = ""
    for chunk in chunks:
        if chunk == "[DONE]":
            continue
        if "choices" not in chunk:
            text += chunk["content"]
        elif chunk["choices"]:
            choice = chunk["choices"][0]
            text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


def both(served: Served, path: str, **fields: Any) -> tuple[str, str]:
    """The text of a request, whole and streamed."""
    body = CHAT | {"prompt": "hi"} | fields
    return whole_text(served.ok(path, body)), streamed_text(served.stream(path, body))


BYTES = [
    ("emoji and Cyrillic", "a😀жb".encode(), "a😀жb"),
    ("a lone continuation byte", b"a\x80b", "a\ufffdb"),
    ("an overlong form", b"a\xc0\xafb", "a\ufffd\ufffdb"),
    ("a surrogate", b"a\xed\xa0\x80b", "a\ufffd\ufffd\ufffdb"),
    ("an unfinished character at the end", b"ab\xf0\x9f\x98", "ab\ufffd"),
]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("probs", [False, True])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("raw", "text"), [case[1:] for case in BYTES], ids=[case[0] for case in BYTES])
def test_b16_b17_whole_characters(
    tokenizer: Tokenizer, path: str, probs: bool, ends: bool, raw: bytes, text: str
) -> None:
    fields: dict[str, Any] = {"n_probs": 1} if probs else {}
    if probs and "chat" in path:
        fields = {"logprobs": True}
    with serving(FakeEngine(says(raw, ends=ends), eos=IM_END), tokenizer) as served:
        assert both(served, path, **fields) == (text, text)


def test_probabilities_cover_every_byte_of_a_character(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(says("😀")), tokenizer) as served:
        whole = served.ok("/completion", {"prompt": "hi", "n_probs": 1})["completion_probabilities"]
        assert [b for entry in whole for b in entry["bytes"]] == [*"😀".encode()]
        chunks = served.stream("/completion", {"prompt": "hi", "n_probs": 1})
        streamed = [p for chunk in chunks for p in chunk.get("completion_probabilities", [])]
        assert streamed == whole
        assert [chunk["content"] for chunk in chunks if chunk["content"]] == ["😀"]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("said", "stops", "shown"),
    [
        ("the alphabet: N O P Q R", ["O P Q"], "the alphabet: N "),
        ("aaab", ["aab"], "a"),
        ("User: hello\nUser:", ["User:\n", "User: x"], "User: hello\nUser:"),
        ("one two thr", ["three", "threshold"], "one two thr"),
        ("abcabcabd", ["abd"], "abcabc"),
        ("x😀y", ["😀"], "x"),
        ("abc", ["abc"], ""),
        ("abc", [""], "abc"),
        ("abc", "c", "ab"),
    ],
)
def test_b19_b20_stop_strings(tokenizer: Tokenizer, path: str, said: str, stops: list[str] | str, shown: str) -> None:
    with serving(FakeEngine(says(said), eos=IM_END), tokenizer) as served:
        assert both(served, path, stop=stops) == (shown, shown)


def test_a_stop_string_is_reported_and_ends_the_engine_within_a_token(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says("go on, ", ends=False), is_endless=True, token_s=0.002, n_ctx=10_000)
    with serving(engine, tokenizer) as served:
        data = served.ok("/completion", {"prompt": "hi", "stop": ["on,"], "return_tokens": True, "n_probs": 1})
        assert data["content"] == "go " and data["stop_type"] == "word" and data["stopping_word"] == "on,"
        assert data["tokens_predicted"] == data["timings"]["predicted_n"] == 6
        assert data["tokens"] == [*b"go on,"]
        assert [entry["token"] for entry in data["completion_probabilities"]] == ["g", "o", " "]
        chunks = served.stream("/v1/chat/completions", CHAT | {"stop": "on,"})
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert len(engine.finished) == 2


@pytest.mark.parametrize(("ends", "stop_type"), [(True, "eos"), (False, "limit")])
def test_a_held_beginning_of_a_stop_string_is_shown_at_the_end(
    tokenizer: Tokenizer, ends: bool, stop_type: str
) -> None:
    with serving(FakeEngine(says("so far", ends=ends), eos=IM_END), tokenizer) as served:
        assert both(served, "/completion", stop=["farm"]) == ("so far", "so far")
        assert served.ok("/completion", {"prompt": "hi", "stop": ["farm"]})["stop_type"] == stop_type


def test_t_max_predict_ends_at_a_new_line(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(says("ab\n", ends=False), is_endless=True, token_s=0.005, n_ctx=10_000)
    with serving(engine, tokenizer) as served:
        data = served.ok("/completion", {"prompt": "hi", "t_max_predict_ms": 40})
        assert data["stop_type"] == "limit" and data["content"].endswith("\n") and len(data["content"]) > 3


def test_control_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    script: Callable[[Request], Sequence[int]] = lambda _: [97, 256, 98]  # noqa: E731
    with serving(FakeEngine(script), tokenizer) as served:
        assert both(served, "/completion") == ("ab", "ab")


def test_b53_a_model_without_a_template_or_an_end_still_chats(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("poor") / "poor.gguf"
    write_vocab(path, without=("chat_template", "eos_token_id", "pre", "token_type"))
    with serving(FakeEngine(says("fine", ends=False)), Tokenizer(path)) as served:
        assert both(served, "/v1/chat/completions") == ("fine", "fine")
        assert served.get("/props").json()["chat_template"]
