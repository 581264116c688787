"""The field `prompt` -> token ids: text, ids, both mixed, an object with `prompt_string`, or an array of these."""

from __future__ import annotations

from typing import Any

from freetoken.server.fields import json_type
from freetoken.server.refuse import invalid, not_supported
from freetoken.tokenizer import Tokenizer

__all__ = ["token_ids", "tokenize_mixed", "tokenize_prompts"]

_SHAPES = (
    "Field 'prompt': expected a string, an array of strings and token ids, an object with 'prompt_string', or an array "
    "of these"
)


def tokenize_prompts(tokenizer: Tokenizer, prompt: Any) -> list[list[int]]:
    """One token list for each prompt. An array with a number in it is one prompt, any other array several."""
    if isinstance(prompt, list) and not any(_is_number(part) for part in prompt):
        prompts = [_tokenize_one(tokenizer, part) for part in prompt]
    else:
        prompts = [_tokenize_one(tokenizer, prompt)]
    if not prompts:
        raise invalid('"prompt" must not be empty')
    return prompts


def _tokenize_one(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if prompt.get("multimodal_data"):
            raise not_supported("Field 'multimodal_data' is not supported by this server yet")
        prompt = prompt["prompt_string"]
    if not isinstance(prompt, str | list):
        raise invalid(_SHAPES)
    return tokenize_mixed(tokenizer, prompt, add_special=True, parse_special=True)


def tokenize_mixed(tokenizer: Tokenizer, prompt: Any, *, add_special: bool, parse_special: bool) -> list[int]:
    """Tokens of a string or of an array of strings and token ids; BOS only where a string comes first."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special, parse_special)
    if not isinstance(prompt, list):
        raise invalid(f"type must be string or array, but is {json_type(prompt)}")
    tokens: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, str):
            tokens += tokenizer.encode(part, add_special and i == 0, parse_special)
        elif _is_number(part):
            tokens += token_ids(tokenizer, [part])
        else:
            raise invalid(_SHAPES)
    return tokens


def token_ids(tokenizer: Tokenizer, values: Any) -> list[int]:
    """A JSON array of token ids, each checked against the vocabulary."""
    if not isinstance(values, list):
        raise invalid(f"Field 'tokens': type must be array, but is {json_type(values)}")
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise invalid(f"a token id must be an integer, but is {json_type(value)} ({str(value)[:40]})")
        if not 0 <= value < tokenizer.n_vocab:
            raise invalid(f"token id {str(value)[:20]} is outside the vocabulary of {tokenizer.n_vocab} tokens")
    return values


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
