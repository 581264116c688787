"""`ChatTemplate`: a Jinja chat template and its rendering. All HTTP threads share one; it does not change."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateSyntaxError

from freetoken.chat.abilities import Abilities, find_abilities
from freetoken.chat.environment import Clock, TemplateRefusal, compile_template
from freetoken.chat.messages import adapt_messages, read_messages
from freetoken.errors import OptionError, RequestError

__all__ = ["ChatTemplate"]

_ESCAPED_BUG = (
    '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}'
)
"""A check in gpt-oss templates that refuses old answers; llama.cpp takes it out too."""


class ChatTemplate:
    """A template, the texts of BOS and EOS, and whether the tokenizer adds them by itself (they are then cut off).

    `tool_use` is the source for requests with tools where a file has one of its own. Raises OptionError with the line
    for a source that is not Jinja.
    """

    def __init__(
        self,
        source: str,
        bos: str,
        eos: str,
        *,
        adds_bos: bool = False,
        adds_eos: bool = False,
        tool_use: str | None = None,
        clock: Clock = datetime.now,
    ) -> None:
        self.source = source.replace(_ESCAPED_BUG, "{%- if false %}")
        self.bos, self.eos = bos, eos
        self._adds_bos, self._adds_eos = adds_bos, adds_eos
        self._clock = clock
        try:
            self._template = compile_template(self.source, clock)
        except TemplateSyntaxError as error:
            raise OptionError(f"chat template, line {error.lineno}: {error.message}") from error
        self.tool_use = (
            None
            if tool_use is None
            else ChatTemplate(tool_use, bos, eos, adds_bos=adds_bos, adds_eos=adds_eos, clock=clock)
        )

    @cached_property
    def abilities(self) -> Abilities:
        """What this template can do, tried out at the first use."""
        return find_abilities(self._try)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text, to be tokenised with add_special and parse_special: exactly one BOS results.

        `extra` are the request's `chat_template_kwargs`; `enable_thinking` is true unless they say otherwise. Raises
        RequestError for messages that are malformed or that the template refuses, with its own words.
        """
        if tools and self.tool_use is not None:
            return self.tool_use.render(messages, tools, add_generation_prompt, **extra)
        adapted = adapt_messages(read_messages(messages), self.abilities, self.source)
        now = self._clock()
        variables: dict[str, Any] = {
            "enable_thinking": True,
            "datetime": now.strftime("%b %d %Y"),
            "date_string": now.strftime("%d %b %Y"),
            **_synonyms(extra),
            **extra,
        }
        text = self._run(adapted, tools, add_generation_prompt, variables)
        if self._adds_bos and self.bos:
            text = text.removeprefix(self.bos)
        if self._adds_eos and self.eos:
            text = text.removesuffix(self.eos)
        return text

    def _run(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        context = {**copy.deepcopy(dict(variables)), "messages": messages}
        context |= {"bos_token": self.bos, "eos_token": self.eos}
        if tools:
            context["tools"] = copy.deepcopy(tools)
        if add_generation_prompt:
            context["add_generation_prompt"] = True
        try:
            return self._template.render(context)
        except TemplateRefusal as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is a program of its own and may fail in any way
            reason = str(error) or type(error).__name__
            raise RequestError(f"the chat template cannot render these messages: {reason[:400]}") from error

    def _try(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._run(messages, tools, True, {})
        except RequestError:
            return None


def _synonyms(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Names that template authors gave to two wishes (llama.cpp sets the same)."""
    result: dict[str, Any] = {}
    keep = extra.get("preserve_reasoning")
    if isinstance(keep, bool):
        result = {"preserve_thinking": keep} | dict.fromkeys(
            ("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keep
        )
    effort = extra.get("reasoning_effort")
    if isinstance(effort, str):
        result["reasoning_strength"] = effort
    return result
