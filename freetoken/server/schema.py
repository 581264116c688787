"""JSON body of a completion -> `TaskParams`: llama-server's table of fields, their limits, aliases and defaults."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from freetoken.request import SamplingParams
from freetoken.server.fields import (
    FLOAT_MAX,
    INT32_MAX,
    Number,
    has,
    read_bool,
    read_int,
    read_string,
    read_strings,
)
from freetoken.server.json import f32
from freetoken.server.refuse import invalid, not_supported
from freetoken.server.samplers import parse_logit_bias, parse_samplers
from freetoken.tokenizer import Tokenizer

__all__ = ["Defaults", "TaskParams", "read_params", "settings_json"]

log = logging.getLogger(__name__)

SEED_RANDOM = 2**32 - 1
"""The seed that llama-server prints where none is set."""

_SAMPLING = (
    Number("n_predict", ("n_predict", "max_completion_tokens", "max_tokens"), True, -1, INT32_MAX, is_hard=True),
    Number("top_k", ("top_k",), True, 0, INT32_MAX),
    Number("top_p", ("top_p",), False, 0.0, 1.0),
    Number("min_p", ("min_p",), False, 0.0, 1.0),
    Number("top_n_sigma", ("top_n_sigma",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("xtc_probability", ("xtc_probability",), False, 0.0, 1.0),
    Number("xtc_threshold", ("xtc_threshold",), False, 0.0, 1.0),
    Number("typical_p", ("typical_p",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("temperature", ("temperature",), False, 0.0, FLOAT_MAX),
    Number("dynatemp_range", ("dynatemp_range",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("dynatemp_exponent", ("dynatemp_exponent",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("repeat_last_n", ("repeat_last_n",), True, 0, INT32_MAX, is_hard=True),
    Number("repeat_penalty", ("repeat_penalty",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("frequency_penalty", ("frequency_penalty",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("presence_penalty", ("presence_penalty",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("dry_multiplier", ("dry_multiplier",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("dry_base", ("dry_base",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("dry_allowed_length", ("dry_allowed_length",), True, 0, INT32_MAX, is_hard=True),
    Number("dry_penalty_last_n", ("dry_penalty_last_n",), True, 0, INT32_MAX, is_hard=True),
    Number("mirostat", ("mirostat",), True, 0, 2),
    Number("mirostat_tau", ("mirostat_tau",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("mirostat_eta", ("mirostat_eta",), False, -FLOAT_MAX, FLOAT_MAX),
    Number("min_keep", ("min_keep",), True, 0, INT32_MAX, is_hard=True),
    Number("n_probs", ("n_probs", "logprobs"), True, -INT32_MAX - 1, INT32_MAX),
)

_FLOATS = {f.name for f in fields(SamplingParams) if f.type == "float"}


@dataclass(frozen=True)
class TaskParams:
    """Everything that a completion's body may set. Names are llama-server's."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    include_usage: bool = False
    cache_prompt: bool = True
    return_tokens: bool = False
    return_progress: bool = False
    timings_per_token: bool = False
    verbose: bool = False
    sse_ping_interval: int = 30
    n_keep: int = 0
    n_discard: int = 0
    n_cmpl: int = 1
    t_max_predict_ms: int = -1
    id_slot: int = -1
    stop: tuple[str, ...] = ()
    response_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class Defaults:
    """What the command line set, for fields that a body does not have."""

    sampling: SamplingParams
    cache_prompt: bool
    sse_ping_interval: int
    n_slots: int


def read_params(body: Mapping[str, Any], defaults: Defaults, tokenizer: Tokenizer) -> TaskParams:
    """The parameters of a body. Raises RequestError naming the field that is wrong or that we do not have."""
    refuse_missing_features(body)
    options = body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    return TaskParams(
        sampling=_read_sampling(body, defaults.sampling, tokenizer),
        stream=read_bool(body, "stream", False),
        include_usage=read_bool(options, "include_usage", False),
        cache_prompt=read_bool(body, "cache_prompt", defaults.cache_prompt),
        return_tokens=read_bool(body, "return_tokens", False),
        return_progress=read_bool(body, "return_progress", False),
        timings_per_token=read_bool(body, "timings_per_token", False),
        verbose=read_bool(body, "verbose", False),
        sse_ping_interval=read_int(body, "sse_ping_interval", defaults.sse_ping_interval, low=-1),
        n_keep=read_int(body, "n_keep", 0, low=-1),
        n_discard=read_int(body, "n_discard", 0, low=0),
        n_cmpl=_read_n_cmpl(body, defaults.n_slots),
        t_max_predict_ms=read_int(body, "t_max_predict_ms", -1, low=-1, high=2**63 - 1),
        id_slot=read_int(body, "id_slot", -1),
        stop=tuple(word for word in read_strings(body, "stop", ()) if word),
        response_fields=read_strings(body, "response_fields", ()),
    )


def refuse_missing_features(body: Mapping[str, Any]) -> None:
    """Raise for fields of llama-server that would change the answer and that we do not have yet.

    Values that ask for nothing (null, empty, the default) pass.
    """
    for name in ("grammar", "lora", "grammar_triggers", "tools", "functions"):
        if body.get(name):
            raise not_supported(f"Field '{name}' is not supported by this server yet")
    if has(body, "json_schema"):
        raise not_supported("Field 'json_schema' is not supported by this server yet")
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        if read_int(body, name, -1, low=-1) >= 0:
            raise not_supported(f"Field '{name}' is not supported by this server yet")
    if read_string(body, "reasoning_format", "auto") not in ("auto", "none"):
        raise not_supported("Field 'reasoning_format' is not supported by this server yet, except for 'none'")
    kind = body.get("response_format")
    if kind is not None and (not isinstance(kind, dict) or kind.get("type", "text") != "text"):
        raise not_supported("Field 'response_format' is not supported by this server yet, except for type 'text'")
    if read_int(body, "n_indent", 0, low=0) > 0:
        raise not_supported("Field 'n_indent' is not supported by this server yet")
    target = Number("adaptive_target", ("adaptive_target",), False, -FLOAT_MAX, 1.0).read(body)
    if target is not None and target >= 0:
        raise not_supported("Field 'adaptive_target' is not supported by this server yet")
    if read_int(body, "n_cache_reuse", 0, low=0) > 0:
        log.debug("n_cache_reuse has no effect: only a common prefix is reused")


def _read_n_cmpl(body: Mapping[str, Any], n_slots: int) -> int:
    value = Number("n_cmpl", ("n_cmpl", "n"), True, 1, max(n_slots, 1), is_hard=True).read(body)
    return 1 if value is None else int(value)


def _read_sampling(body: Mapping[str, Any], base: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    values: dict[str, Any] = {}
    for number in _SAMPLING:
        value = number.read(body)
        if value is not None:
            values[number.attribute] = f32(value) if not number.is_integer else value
    if values.get("n_predict") == -1:
        del values["n_predict"]
    if values.get("dry_base", 1.0) < 1.0:
        del values["dry_base"]
    if "n_probs" in values:
        values["n_probs"] = min(max(int(values["n_probs"]), 0), tokenizer.n_vocab)
    if values.get("repeat_penalty", 1.0) <= 0.0:
        raise invalid("Field 'repeat_penalty': must be greater than 0")
    seed = Number("seed", ("seed",), True, -(2**63), 2**64 - 1, is_hard=True).read(body)
    if seed is not None:
        values["seed"] = None if int(seed) % 2**32 == SEED_RANDOM else int(seed) % 2**32
    if has(body, "dry_sequence_breakers"):
        values["dry_sequence_breakers"] = read_strings(body, "dry_sequence_breakers", ())
        if not values["dry_sequence_breakers"]:
            raise invalid("Field 'dry_sequence_breakers': must be a non-empty array of strings")
    if has(body, "samplers"):
        values["samplers"] = parse_samplers(body["samplers"])
    if has(body, "logit_bias"):
        values["logit_bias"] = parse_logit_bias(body["logit_bias"], tokenizer)
    values["ignore_eos"] = read_bool(body, "ignore_eos", base.ignore_eos)
    values["post_sampling_probs"] = read_bool(body, "post_sampling_probs", base.post_sampling_probs)
    return replace(base, **values)


def settings_json(params: TaskParams, *, is_short: bool = False) -> dict[str, Any]:
    """`generation_settings` as llama-server prints them; `is_short` is the form of /props and /slots."""
    s = params.sampling
    number = {name: f32(getattr(s, name)) for name in _FLOATS}
    long: dict[str, Any] = {} if is_short else {"dry_sequence_breakers": list(s.dry_sequence_breakers)}
    stop: dict[str, Any] = {} if is_short else {"stop": list(params.stop)}
    bias: dict[str, Any] = {} if is_short else {"logit_bias": _bias_json(s)}
    grammar: dict[str, Any] = (
        {} if is_short else {"grammar": "", "grammar_lazy": False, "grammar_triggers": [], "preserved_tokens": []}
    )
    return {
        "seed": SEED_RANDOM if s.seed is None else s.seed,
        "temperature": number["temperature"],
        "dynatemp_range": number["dynatemp_range"],
        "dynatemp_exponent": number["dynatemp_exponent"],
        "top_k": s.top_k,
        "top_p": number["top_p"],
        "min_p": number["min_p"],
        "top_n_sigma": number["top_n_sigma"],
        "xtc_probability": number["xtc_probability"],
        "xtc_threshold": number["xtc_threshold"],
        "typical_p": number["typical_p"],
        "repeat_last_n": s.repeat_last_n,
        "repeat_penalty": number["repeat_penalty"],
        "presence_penalty": number["presence_penalty"],
        "frequency_penalty": number["frequency_penalty"],
        "dry_multiplier": number["dry_multiplier"],
        "dry_base": number["dry_base"],
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_penalty_last_n,
        **long,
        "mirostat": s.mirostat,
        "mirostat_tau": number["mirostat_tau"],
        "mirostat_eta": number["mirostat_eta"],
        "adaptive_target": -1.0,
        "adaptive_decay": f32(0.9),
        **stop,
        "max_tokens": s.n_predict,
        "n_predict": s.n_predict,
        "n_keep": params.n_keep,
        "n_discard": params.n_discard,
        "ignore_eos": s.ignore_eos,
        "stream": params.stream,
        **bias,
        "n_probs": s.n_probs,
        "min_keep": s.min_keep,
        **grammar,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": list(s.samplers),
        "speculative.types": "none",
        "timings_per_token": params.timings_per_token,
        "post_sampling_probs": s.post_sampling_probs,
        "backend_sampling": False,
        "lora": [],
    }


def _bias_json(sampling: SamplingParams) -> list[dict[str, Any]]:
    """JSON has no infinity: a banned token has the bias null, as in llama-server."""
    return [
        {"bias": bias if math.isfinite(bias) else None, "token": token} for token, bias in sampling.logit_bias.items()
    ]
