"""Which template a model is served with: the user's, the file's, or ChatML."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from freetoken.chat.builtin import BUILTIN_NAMES, builtin_source
from freetoken.chat.template import ChatTemplate
from freetoken.errors import ModelFileError, OptionError
from freetoken.tokenizer import Tokenizer

__all__ = ["load_template", "prompt_tokens"]

log = logging.getLogger(__name__)


def load_template(choice: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of `choice` (a built-in name or a Jinja source), else the file's, else ChatML with a warning.

    Raises OptionError for a choice that is neither, ModelFileError for a template in the file that is not Jinja.
    """
    bos, eos = (_text(tokenizer, token) for token in (tokenizer.bos, tokenizer.eos))
    adds_bos, adds_eos = tokenizer.add_bos, tokenizer.add_eos
    tool_use = None
    if choice:
        source = _chosen(choice)
    elif tokenizer.chat_template or tokenizer.chat_template_named("tool_use"):
        tool_use = tokenizer.chat_template_named("tool_use")
        source = tokenizer.chat_template or tool_use or ""
    else:
        log.warning("%s: no chat template in the file: ChatML is used", tokenizer.path.name)
        source = builtin_source("chatml")
    try:
        return ChatTemplate(source, bos, eos, adds_bos=adds_bos, adds_eos=adds_eos, tool_use=tool_use)
    except OptionError as error:
        if choice:
            raise
        raise ModelFileError(f"{tokenizer.path}: {error}; choose another with --chat-template") from error


def _chosen(choice: str) -> str:
    if choice in BUILTIN_NAMES:
        return builtin_source(choice)
    if "{{" in choice or "{%" in choice:
        return choice
    raise OptionError(
        f"--chat-template: {choice[:60]!r} is neither a Jinja template nor a known name: "
        f"expected one of {', '.join(BUILTIN_NAMES)}"
    )


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token, True).decode("utf-8", "replace")


def prompt_tokens(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **extra: Any,
) -> list[int]:
    """Token ids of a chat, with the one BOS that the vocabulary wants. The template must be this tokenizer's."""
    text = template.render(messages, tools, add_generation_prompt, **extra)
    return tokenizer.encode(text, add_special=True, parse_special=True)
