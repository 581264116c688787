"""Routes that do not generate: health, models, props, slots, tokenize, detokenize; and those that we lack."""

from __future__ import annotations

import time
from typing import Any

from flask import Flask, Response, request

from freetoken.errors import NotReadyError
from freetoken.server.fields import has, read_bool
from freetoken.server.json import json_response, parse_body
from freetoken.server.model import BUILD_INFO
from freetoken.server.prompts import token_ids, tokenize_mixed
from freetoken.server.refuse import not_supported
from freetoken.server.schema import TaskParams, settings_json
from freetoken.server.state import ServerState

__all__ = ["register"]

Json = dict[str, Any]
_MISSING = {
    "GET": ("/metrics",),
    "POST": (
        "/infill",
        "/embedding",
        "/embeddings",
        "/v1/embeddings",
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
        "/responses",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/lora-adapters",
        "/slots/<int:id_slot>",
    ),
}
"""Routes of llama-server that we do not have yet; they answer 501."""
_VOCAB_TYPES = ("none", "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2")


def register(app: Flask, state: ServerState) -> None:
    """Add the routes to the application."""

    def health() -> Response:
        return json_response({"status": "ok"})

    def models() -> Response:
        return json_response(models_json(state))

    def props() -> Response:
        return json_response(props_json(state))

    def post_props() -> Response:
        raise not_supported("POST /props is not supported by this server yet")

    def slots() -> Response:
        return json_response(slots_json(state, request.args.get("fail_on_no_slot", "")))

    def tokenize() -> Response:
        return json_response({"tokens": tokenize_json(state, parse_body(request))})

    def detokenize() -> Response:
        body = parse_body(request)
        tokens = token_ids(state.model.tokenizer, body["tokens"]) if "tokens" in body else []
        return json_response({"content": state.model.tokenizer.decode(tokens, special=True)})

    def lora_adapters() -> Response:
        return json_response([])

    def missing(**_: Any) -> Response:
        raise not_supported(f"{request.path} is not supported by this server yet")

    for method, view, paths in (
        ("GET", health, ("/health", "/v1/health")),
        ("GET", models, ("/models", "/v1/models")),
        ("GET", props, ("/props",)),
        ("POST", post_props, ("/props",)),
        ("GET", slots, ("/slots",)),
        ("GET", lora_adapters, ("/lora-adapters",)),
        ("GET", missing, _MISSING["GET"]),
        ("POST", missing, _MISSING["POST"]),
        ("POST", tokenize, ("/tokenize",)),
        ("POST", detokenize, ("/detokenize",)),
    ):
        for path in paths:
            app.add_url_rule(path, f"{method} {path}", view, methods=[method])


def models_json(state: ServerState) -> Json:
    """The one model, in Ollama's form (`models`) and OpenAI's (`data`)."""
    model, tokenizer = state.model, state.model.tokenizer
    kind = tokenizer.vocab_type
    details = {
        "parent_model": "",
        "format": "gguf",
        "family": "",
        "families": [""],
        "parameter_size": "",
        "quantization_level": "",
    }
    entry = {
        "name": model.name,
        "model": model.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": details,
    }
    meta = {
        "vocab_type": _VOCAB_TYPES.index(kind) if kind in _VOCAB_TYPES else 0,
        "n_vocab": tokenizer.n_vocab,
        "n_ctx": state.generator.n_ctx,
        "n_ctx_train": model.facts.n_ctx_train,
        "n_embd": model.facts.n_embd,
        "n_params": model.facts.n_params,
        "size": model.facts.size_bytes,
        "ftype": model.facts.ftype,
    }
    info = {
        "id": model.name,
        "aliases": list(model.aliases) or [model.name],
        "tags": [],
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": int(time.time()),
        "owned_by": "llamacpp",
        "meta": meta,
    }
    return {"models": [entry], "object": "list", "data": [info]}


def props_json(state: ServerState) -> Json:
    """`/props`."""
    model, tokenizer = state.model, state.model.tokenizer
    params = TaskParams(sampling=state.defaults.sampling)

    def text_of(token: int | None) -> str:
        return "" if token is None else tokenizer.decode([token], special=True)

    return {
        "default_generation_settings": {
            "params": settings_json(params, is_short=True),
            "n_ctx": state.generator.n_ctx,
        },
        "total_slots": state.generator.n_slots,
        "model_alias": model.name,
        "model_ftype": model.facts.ftype,
        "model_path": model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": "<__media__>",
        "endpoint_slots": state.options.is_slots_endpoint_on,
        "endpoint_props": False,
        "endpoint_metrics": False,
        "ui": False,
        "ui_settings": {},
        "chat_template": model.template.source,
        "chat_template_caps": {},
        "bos_token": text_of(tokenizer.bos),
        "eos_token": text_of(tokenizer.eos),
        "build_info": BUILD_INFO,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }


def slots_json(state: ServerState, fail_on_no_slot: str) -> list[Json]:
    """`/slots`; what runs in a slot is described where the engine tells its request."""
    if not state.options.is_slots_endpoint_on:
        raise not_supported("/slots is switched off: start the server without --no-slots")
    slots = state.generator.slots()
    if fail_on_no_slot and all(slot.is_processing for slot in slots):
        raise NotReadyError("no slot available")
    entries = []
    for slot in slots:
        entry: Json = {"id": slot.id, "n_ctx": slot.n_ctx, "speculative": False, "is_processing": slot.is_processing}
        params = state.params_of(slot.request_id)
        if slot.is_processing and params is not None:
            limit = params.sampling.n_predict
            entry["id_task"] = slot.request_id
            entry["n_prompt_tokens"] = slot.n_prompt_tokens
            entry["params"] = settings_json(params, is_short=True)
            entry["next_token"] = [
                {
                    "has_next_token": True,
                    "has_new_line": False,
                    "n_remain": -1 if limit < 0 else max(limit - slot.n_decoded, 0),
                    "n_decoded": slot.n_decoded,
                }
            ]
        entries.append(entry)
    return entries


def tokenize_json(state: ServerState, body: Json) -> list[Any]:
    """Token ids, or ids with their pieces: text, or byte values where a piece is not UTF-8."""
    if not has(body, "content"):
        return []
    tokenizer = state.model.tokenizer
    tokens = tokenize_mixed(
        tokenizer,
        body["content"],
        add_special=read_bool(body, "add_special", False),
        parse_special=read_bool(body, "parse_special", True),
    )
    if not read_bool(body, "with_pieces", False):
        return tokens
    return [{"id": token, "piece": _piece_json(tokenizer.piece(token, True))} for token in tokens]


def _piece_json(raw: bytes) -> str | list[int]:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
