"""Routes that generate: /completion(s), /v1/completions, /(v1/)chat/completions, and what renders a chat only."""

from __future__ import annotations

import dataclasses
from typing import Any

from flask import Flask, Response, request

from freetoken.request import Request
from freetoken.server.answers import Answer, ChatAnswer, CompletionAnswer, NativeAnswer
from freetoken.server.chat import completion_body, render_prompt
from freetoken.server.fields import has, read_bool
from freetoken.server.generation import Choice
from freetoken.server.job import Job
from freetoken.server.json import json_response, parse_body
from freetoken.server.prompts import tokenize_prompts
from freetoken.server.refuse import invalid, not_supported
from freetoken.server.schema import TaskParams, read_params
from freetoken.server.sse import FLUSH_HEADERS, stream_response
from freetoken.server.state import ServerState

__all__ = ["CLIENT_SOCKET", "register"]

CLIENT_SOCKET = "freetoken.socket"
"""WSGI environment key of the connection's socket; `listen` sets it."""

Json = dict[str, Any]


def register(app: Flask, state: ServerState) -> None:
    """Add the routes to the application."""

    def completion() -> Response:
        return _run(state, parse_body(request), _native(state))

    def oai_completion() -> Response:
        body = parse_body(request)
        _check_oai_completion(body)
        return _run(state, body, CompletionAnswer(_native(state)))

    def chat_completion() -> Response:
        body = completion_body(parse_body(request), state.model.template, state.options.chat_template_kwargs)
        return _run(state, body, ChatAnswer(_native(state)))

    def apply_template() -> Response:
        kwargs = state.options.chat_template_kwargs
        return json_response({"prompt": render_prompt(parse_body(request), state.model.template, kwargs)})

    def input_tokens() -> Response:
        kwargs = state.options.chat_template_kwargs
        prompt = render_prompt(parse_body(request), state.model.template, kwargs)
        (tokens,) = tokenize_prompts(state.model.tokenizer, prompt)
        return json_response({"input_tokens": len(tokens), "object": "response.input_tokens"})

    for view, paths in (
        (completion, ("/completion", "/completions")),
        (oai_completion, ("/v1/completions",)),
        (chat_completion, ("/chat/completions", "/v1/chat/completions")),
        (apply_template, ("/apply-template",)),
        (input_tokens, ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens")),
    ):
        for path in paths:
            app.add_url_rule(path, path, view, methods=["POST"])


def _native(state: ServerState) -> NativeAnswer:
    tokenizer = state.model.tokenizer
    return NativeAnswer(state.model.name, lambda tokens: tokenizer.decode(tokens, special=True))


def _check_oai_completion(body: Json) -> None:
    """Fields of OpenAI's completions that llama-server refuses too."""
    if read_bool(body, "echo", False):
        raise not_supported("Field 'echo' is not supported by this server yet")
    for name in ("best_of", "suffix"):
        if has(body, name):
            raise not_supported(f"Field '{name}' is not supported by this server")


def _run(state: ServerState, body: Json, answer: Answer) -> Response:
    """Run a completion body and answer it, streaming or whole."""
    if "prompt" not in body:
        raise invalid('"prompt" is required')
    tokenizer = state.model.tokenizer
    params = read_params(body, state.defaults, tokenizer)
    prompts = tokenize_prompts(tokenizer, body["prompt"])
    choices = _choices(prompts, params, state)
    job = Job(state, choices, request.environ.get(CLIENT_SOCKET))
    if params.stream:
        request.environ[FLUSH_HEADERS] = True
        return stream_response(job, answer, params.sse_ping_interval)
    try:
        return json_response(answer.whole(job.results()))
    finally:
        job.close()


def _choices(prompts: list[list[int]], params: TaskParams, state: ServerState) -> list[Choice]:
    """`n_cmpl` choices of each prompt; a given seed counts up from choice to choice."""
    choices: list[Choice] = []
    for prompt in prompts:
        for i in range(params.n_cmpl):
            seed = params.sampling.seed
            sampling = params.sampling
            if i and seed is not None:
                sampling = dataclasses.replace(sampling, seed=(seed + i) % 2**32)
            own = dataclasses.replace(params, sampling=sampling)
            engine_request = Request(
                prompt=tuple(prompt),
                params=sampling,
                cache_prompt=params.cache_prompt,
                id_slot=params.id_slot if i == 0 else -1,
                return_progress=params.stream,
            )
            choices.append(Choice(len(choices), engine_request, own, state.model.tokenizer))
    return choices
