"""Every route, streaming and not, against llama-server's shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests
from fake_engine import FakeEngine
from serving import IM_END, Served, says, serving, write_vocab

from freetoken.request import EngineState
from freetoken.tokenizer import Tokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_vocab(tmp_path_factory.mktemp("vocab") / "tiny.gguf"))


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Served]:
    with serving(FakeEngine(says("Hello\nworld"), eos=IM_END), tokenizer) as served:
        yield served


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(server: Served, path: str) -> None:
    response = server.get(path)
    assert response.json() == {"status": "ok"}
    assert response.headers["Content-Type"] == "application/json; charset=utf-8"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/v1/models"), ("POST", "/completion"), ("GET", "/no/such/route")],
)
def test_while_loading_everything_is_503(tokenizer: Tokenizer, method: str, path: str) -> None:
    engine = FakeEngine(says("x"), state=EngineState.LOADING)
    with serving(engine, tokenizer) as served:
        response = served.get(path) if method == "GET" else served.post(path, {"prompt": "x"})
        assert response.status_code == 503
        assert response.json() == {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        engine.state = EngineState.READY
        assert served.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/models", "/v1/models"])
def test_models(server: Served, path: str) -> None:
    data = server.get(path).json()
    assert data["object"] == "list"
    assert data["models"][0]["name"] == data["data"][0]["id"] == "tiny"
    meta = data["data"][0]["meta"]
    assert meta["n_vocab"] == 258 and meta["n_ctx"] == 256 and meta["n_ctx_train"] == 512 and meta["vocab_type"] == 2


def test_props(server: Served) -> None:
    data = server.get("/props").json()
    assert data["total_slots"] == 2
    assert data["default_generation_settings"]["n_ctx"] == 256
    assert data["default_generation_settings"]["params"]["top_k"] == 40
    assert data["model_path"] == "models/tiny.gguf"
    assert "<|im_start|>" in data["chat_template"]
    assert data["eos_token"] == "<|im_end|>"
    assert server.post("/props", {}).status_code == 501


def test_slots(server: Served) -> None:
    slots = server.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert not any(slot["is_processing"] for slot in slots)
    assert server.get("/slots?fail_on_no_slot=1").status_code == 200


def test_tokenize_and_back(server: Served) -> None:
    tokens = server.ok("/tokenize", {"content": "hé<|im_end|>"})["tokens"]
    assert tokens == [*"hé".encode(), IM_END]
    assert server.ok("/detokenize", {"tokens": tokens}) == {"content": "hé<|im_end|>"}
    pieces = server.ok("/tokenize", {"content": "hé", "with_pieces": True})["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert server.ok("/tokenize", {"content": "<|im_end|>", "parse_special": False})["tokens"] == [*b"<|im_end|>"]
    assert server.ok("/tokenize", {}) == {"tokens": []}
    assert server.ok("/tokenize", {"content": ["a", 98]})["tokens"] == [97, 98]


def test_apply_template(server: Served) -> None:
    prompt = server.ok("/apply-template", CHAT)["prompt"]
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_input_tokens(server: Served) -> None:
    expected = {"input_tokens": 21, "object": "response.input_tokens"}
    assert server.ok("/v1/chat/completions/input_tokens", CHAT) == expected
    assert server.ok("/v1/chat/completions", CHAT)["usage"]["prompt_tokens"] == 21


def test_completion(server: Served) -> None:
    data = server.ok("/completion", {"prompt": "hi", "return_tokens": True, "temperature": 0.5})
    assert data["content"] == "Hello\nworld"
    assert data["tokens"] == [*b"Hello\nworld", IM_END]
    assert data["stop"] is True and data["stop_type"] == "eos" and data["stopping_word"] == ""
    assert data["prompt"] == "hi" and data["has_new_line"] is True and data["truncated"] is False
    assert data["tokens_predicted"] == data["timings"]["predicted_n"] == 12
    assert data["tokens_evaluated"] == 2 and data["tokens_cached"] == 13
    assert data["generation_settings"]["temperature"] == 0.5
    assert set(data["timings"]) == TIMINGS


def test_completion_stream(server: Served) -> None:
    chunks = server.stream("/completion", {"prompt": "hi"})
    assert "".join(chunk["content"] for chunk in chunks) == "Hello\nworld"
    *parts, last = chunks
    assert [token for part in parts for token in part["tokens"]] == [*b"Hello\nworld", IM_END]
    assert all(not part["stop"] and "timings" not in part for part in parts)
    assert last["stop"] is True and last["tokens"] == [] and set(last["timings"]) == TIMINGS


def test_oai_completion(server: Served) -> None:
    data = server.ok("/v1/completions", {"prompt": "hi", "max_tokens": 5})
    choice = {"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert data["choices"] == [choice]
    assert data["usage"] == {
        "completion_tokens": 5,
        "prompt_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert data["object"] == "text_completion" and data["id"].startswith("chatcmpl-")
    chunks = server.stream("/v1/completions", {"prompt": "hi"})
    assert chunks.pop() == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello\nworld"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
def test_chat(server: Served, path: str) -> None:
    data = server.ok(path, CHAT)
    message = {"role": "assistant", "content": "Hello\nworld"}
    assert data["choices"] == [{"finish_reason": "stop", "index": 0, "message": message}]
    assert data["object"] == "chat.completion" and set(data["timings"]) == TIMINGS


def test_chat_stream(server: Served) -> None:
    chunks = server.stream("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    assert chunks.pop() == "[DONE]"
    usage = chunks.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 12 and "timings" in usage
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert chunks[-1]["choices"] == [{"finish_reason": "stop", "index": 0, "delta": {}}]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1]) == "Hello\nworld"
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_without_include_usage_there_is_no_usage_chunk(server: Served) -> None:
    chunks = server.stream("/v1/chat/completions", CHAT)
    assert all(chunk == "[DONE]" or "usage" not in chunk for chunk in chunks)
    assert set(chunks[-2]["timings"]) == TIMINGS


def test_a_last_assistant_message_is_continued(server: Served) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Sure"}]
    prompt = server.ok("/apply-template", {"messages": messages})["prompt"]
    assert prompt.endswith("<|im_start|>assistant\nSure")
    body = CHAT | {"continue_final_message": True, "add_generation_prompt": False}
    assert server.ok("/apply-template", body)["prompt"].endswith("<|im_start|>assistant\nhi")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        ([97, "bc", 100], [[97, 98, 99, 100]]),
        (["a", "b"], [[97], [98]]),
        ([[97], "b", {"prompt_string": "c"}], [[97], [98], [99]]),
        ({"prompt_string": "c"}, [[99]]),
    ],
)
def test_shapes_of_prompt(server: Served, prompt: Any, expected: list[list[int]]) -> None:
    server.engine.started.clear()
    data = server.ok("/completion", {"prompt": prompt, "n_predict": 1})
    assert sorted(list(request.prompt) for request in server.engine.started) == expected
    results = data if len(expected) > 1 else [data]
    assert [result["index"] for result in results] == list(range(len(expected)))


def test_an_empty_prompt_gives_an_empty_answer(server: Served) -> None:
    data = server.ok("/completion", {"prompt": ""})
    assert data["content"] == "" and data["stop_type"] == "none" and data["tokens_predicted"] == 0


def test_several_choices(server: Served) -> None:
    server.engine.started.clear()
    data = server.ok("/v1/chat/completions", CHAT | {"n": 2, "seed": 7})
    assert [choice["index"] for choice in data["choices"]] == [0, 1]
    assert sorted(str(request.params.seed) for request in server.engine.started) == ["7", "8"]
    assert server.post("/v1/chat/completions", CHAT | {"n": 3}).status_code == 400
    chunks = server.stream("/v1/chat/completions", CHAT | {"n": 2})
    ends = [c["choices"][0]["index"] for c in chunks if c != "[DONE]" and c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1]


@pytest.mark.parametrize("field", ["n_predict", "max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_b10_every_name_of_the_limit(server: Served, path: str, field: str) -> None:
    data = server.ok(path, CHAT | {"prompt": "hi", field: 3})
    assert data["timings"]["predicted_n"] == 3


def test_n_predict_zero_evaluates_the_prompt_only(server: Served) -> None:
    data = server.ok("/completion", {"prompt": "hi", "n_predict": 0})
    assert data["content"] == "" and data["stop_type"] == "limit"


B63 = {
    "min_p": 0.25,
    "seed": 42,
    "repeat_penalty": 1.5,
    "top_k": 7,
    "typical_p": 0.5,
    "mirostat": 2,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "ignore_eos": False,
}


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_b63_sampling_fields_reach_the_engine_on_every_route(server: Served, path: str) -> None:
    server.engine.started.clear()
    body = B63 | CHAT | {"prompt": "hi", "samplers": ["top_k", "temp"], "logit_bias": [[97, 1.5], ["bc", False]]}
    server.ok(path, body)
    params = server.engine.started[-1].params
    assert {name: getattr(params, name) for name in B63} == B63
    assert params.samplers == ("top_k", "temperature")
    assert params.logit_bias == {97: 1.5, 98: float("-inf"), 99: float("-inf")}


def test_logit_bias_as_an_object(server: Served) -> None:
    server.ok("/v1/chat/completions", CHAT | {"logit_bias": {"97": -1, "b": 2, "99999": 1}})
    assert server.engine.started[-1].params.logit_bias == {97: -1.0, 98: 2.0}


@pytest.mark.parametrize("seed", [-1, None, 2**32 - 1])
def test_a_random_seed(server: Served, seed: int | None) -> None:
    data = server.ok("/completion", {"prompt": "hi", "seed": seed})
    assert server.engine.started[-1].params.seed is None
    assert data["generation_settings"]["seed"] == 2**32 - 1


def test_command_line_defaults_hold_until_a_request_says_otherwise(tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(says("x")), tokenizer, default_sampling={"top_k": 3, "n_predict": 2}) as served:
        served.ok("/completion", {"prompt": "hi", "top_k": None, "n_predict": -1})
        assert served.engine.started[-1].params.top_k == 3
        assert served.engine.started[-1].params.n_predict == 2
        served.ok("/completion", {"prompt": "hi", "top_k": 9})
        assert served.engine.started[-1].params.top_k == 9


def test_probabilities(server: Served) -> None:
    data = server.ok("/completion", {"prompt": "hi", "n_probs": 2, "n_predict": 2})
    first = data["completion_probabilities"][0]
    assert (first["id"], first["token"], first["bytes"], first["logprob"]) == (72, "H", [72], -0.5)
    assert [top["id"] for top in first["top_logprobs"]] == [72, 73]
    after = server.ok("/completion", {"prompt": "hi", "n_probs": 2, "n_predict": 2, "post_sampling_probs": True})
    assert set(after["completion_probabilities"][0]) == {"id", "token", "bytes", "prob", "top_probs"}
    chunks = server.stream("/completion", {"prompt": "hi", "n_probs": 1, "n_predict": 2})
    assert [chunk["completion_probabilities"][0]["id"] for chunk in chunks[:-1]] == [72, 101]
    assert "completion_probabilities" not in chunks[-1]


def test_logprobs_of_openai_routes(server: Served) -> None:
    data = server.ok("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 2})
    assert [entry["token"] for entry in data["choices"][0]["logprobs"]["content"]] == ["H", "e"]
    assert server.engine.started[-1].params.n_probs == 2
    server.ok("/v1/chat/completions", CHAT | {"logprobs": True})
    assert server.engine.started[-1].params.n_probs == 20
    data = server.ok("/v1/completions", {"prompt": "hi", "logprobs": 1, "max_tokens": 1})
    assert data["choices"][0]["logprobs"]["content"][0]["id"] == 72
    chunks = server.stream("/v1/chat/completions", CHAT | {"logprobs": True})
    seen = [
        c["choices"][0].get("logprobs") for c in chunks if c != "[DONE]" and c["choices"][0]["delta"].get("content")
    ]
    assert len(seen) == 11 and all(entry["content"] for entry in seen)


def test_response_fields(server: Served) -> None:
    body = {"prompt": "hi", "response_fields": ["content", "generation_settings/n_predict", "no/such"]}
    assert server.ok("/completion", body) == {"content": "Hello\nworld", "generation_settings/n_predict": -1}


def test_timings_per_token_and_progress(server: Served) -> None:
    body = {"prompt": "x" * 70, "timings_per_token": True, "return_progress": True, "n_predict": 2}
    chunks = server.stream("/completion", body)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[0] == {"total": 70, "cache": 1, "processed": 1, "time_ms": 0}
    assert progress[-1]["processed"] == 70
    parts = [chunk for chunk in chunks if chunk["tokens"]]
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2]
    assert parts[0]["timings"]["cache_n"] == 1 and parts[0]["timings"]["prompt_n"] == 69
    chat = server.stream("/v1/chat/completions", CHAT | {"return_progress": True})
    assert "prompt_progress" in chat[0] and chat[0]["choices"][0]["delta"]["role"] == "assistant"


def test_verbose(server: Served) -> None:
    data = server.ok("/v1/chat/completions", CHAT | {"verbose": True})
    assert data["__verbose"]["prompt"].endswith("<|im_start|>assistant\n")


def test_cache_prompt_and_slot(server: Served) -> None:
    server.ok("/completion", {"prompt": "hi", "cache_prompt": False, "id_slot": 1})
    request = server.engine.started[-1]
    assert request.cache_prompt is False and request.id_slot == 1


def test_template_variables(server: Served) -> None:
    body = CHAT | {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert server.post("/apply-template", body).status_code == 200


def test_a_body_sent_in_chunks(server: Served) -> None:
    response = requests.post(server.url + "/completion", data=iter([b'{"prompt"', b': "hi"}']), timeout=20)
    assert response.json()["content"] == "Hello\nworld"


def test_the_openai_client(server: Served) -> None:
    with openai.OpenAI(api_key="none", base_url=server.url + "/v1") as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        chat = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}], max_tokens=5)
        assert chat.choices[0].message.content == "Hello" and chat.choices[0].finish_reason == "length"
        stream = client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}], stream=True, stop=["wor"]
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello\n"
        assert chunks[-1].choices[0].finish_reason == "stop"
        text = client.completions.create(model="any", prompt="hi", max_tokens=5)
        assert text.choices[0].text == "Hello"
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="any", prompt="x" * 300)
        assert caught.value.type == "exceed_context_size_error"


def test_cors(server: Served) -> None:
    headers = {"Origin": "https://example.org"}
    response = server.get("/health", headers=headers)
    assert response.headers["Access-Control-Allow-Origin"] == "https://example.org"
    preflight = requests.options(server.url + "/completions", headers=headers, timeout=20)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE, OPTIONS"
    assert preflight.headers["Access-Control-Allow-Headers"] == "*"
    assert preflight.headers["Access-Control-Allow-Credentials"] == "true"
