"""jinja2's sandbox set up as chat templates expect it (as transformers and llama.cpp do)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import ChainableUndefined, Template, TemplateError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import SandboxedEnvironment

__all__ = ["TemplateRefusal", "compile_template"]

Clock = Callable[[], datetime]


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`; the message is its own."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks an assistant's text for training and prints it as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Sandbox(SandboxedEnvironment):
    """Forgives what llama.cpp forgives: members of undefined values, and adding none or undefined to a text.

    Lists may be appended to (some templates collect results so): templates get copies of everything.
    """

    intercepted_binops = frozenset("+")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(right, str) and _is_nothing(left):
            return right
        if isinstance(left, str) and _is_nothing(right):
            return left
        return super().call_binop(context, operator, left, right)


def _is_nothing(value: Any) -> bool:
    return value is None or isinstance(value, Undefined)


def compile_template(source: str, clock: Clock) -> Template:
    """A template ready to render. Raises jinja2.TemplateSyntaxError, which has the line."""
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, undefined=ChainableUndefined, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["safe"] = str  # without jinja2's Markup, which escapes for HTML what is added to it
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment.from_string(source)


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    """What filters such as `map` give is a generator."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
