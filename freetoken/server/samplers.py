"""The fields `samplers` and `logit_bias`, in the forms that llama-server reads."""

from __future__ import annotations

import logging
import math
from typing import Any

from freetoken.server.fields import json_type
from freetoken.server.refuse import invalid
from freetoken.server.sampler_names import samplers_by_letter, samplers_by_name
from freetoken.tokenizer import Tokenizer

__all__ = ["parse_logit_bias", "parse_samplers"]

log = logging.getLogger(__name__)


def parse_samplers(value: Any) -> tuple[str, ...]:
    """The field `samplers`: an array of names or a string of letters."""
    if isinstance(value, str):
        return samplers_by_letter(value)
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid("Field 'samplers': must be an array of names or a string of letters")
    return samplers_by_name(value)


def parse_logit_bias(value: Any, tokenizer: Tokenizer) -> dict[int, float]:
    """The field `logit_bias`: [[token or text, bias or false], ...] or {"token or text": bias or false}.

    Biases of one token add up. Entries of another shape and tokens outside the vocabulary are skipped, as llama-server
    does, with a line in the log.
    """
    if isinstance(value, dict):
        entries = [_from_key(key, bias) for key, bias in value.items()]
    elif isinstance(value, list):
        entries = [tuple(entry) for entry in value if isinstance(entry, list) and len(entry) == 2]
    else:
        raise invalid(f"Field 'logit_bias': type must be array or object, but is {json_type(value)}")
    biases: dict[int, float] = {}
    for target, given in entries:
        bias = _bias(given)
        if bias is None:
            continue
        for token in _tokens(target, tokenizer):
            biases[token] = biases.get(token, 0.0) + bias
    return biases


def _from_key(key: str, bias: Any) -> tuple[int | str, Any]:
    """An object's key: a number is a token id, anything else is text."""
    text = key.strip()
    is_number = text.lstrip("+-").isdecimal() and text.isascii() and len(text) < 12
    return (int(text) if is_number else key), bias


def _bias(value: Any) -> float | None:
    if value is False:
        return -math.inf
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30:
        return float(value)
    log.warning("logit_bias: %r is no bias", value)
    return None


def _tokens(target: Any, tokenizer: Tokenizer) -> list[int]:
    if isinstance(target, str):
        return tokenizer.encode(target, add_special=False, parse_special=False)
    if isinstance(target, int) and not isinstance(target, bool) and 0 <= target < tokenizer.n_vocab:
        return [target]
    log.warning("logit_bias: %r is no token of this model", target)
    return []
