"""What a template can do, found by rendering small chats and looking for marks in the text.

llama.cpp answers the same questions by watching which values its own engine touches (common/jinja/caps.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Abilities", "find_abilities"]

Json = dict[str, Any]
Render = Callable[[list[Json], list[Json] | None], str | None]
"""Messages and tools -> text, or None where the template refuses or fails."""

_MARK, _MARK2, _VALUE = "MARK-ONE", "MARK-TWO", "mark value"


@dataclass(frozen=True)
class Abilities:
    """string_content / typed_content: message contents as a string / as a list of text parts.

    system: a first system message. late_system: system messages anywhere. object_arguments: a tool call's arguments
    as an object rather than as JSON text.
    """

    string_content: bool
    typed_content: bool
    system: bool
    late_system: bool
    object_arguments: bool


def find_abilities(render: Render) -> Abilities:
    """Try out a template."""
    as_string = render([_user(_MARK)], None) or ""
    as_parts = render([_user([{"type": "text", "text": _MARK}])], None) or ""
    typed = _MARK in as_parts and not any(quote + "text" + quote in as_parts for quote in "'\"")
    string = _MARK in as_string or not typed

    def content(text: str) -> str | list[Json]:
        return text if string else [{"type": "text", "text": text}]

    user, answer = _user(content("question")), {"role": "assistant", "content": content("answer")}
    first, late = ({"role": "system", "content": content(mark)} for mark in (_MARK, _MARK2))
    with_first = render([first, user], None) or ""
    with_late = render([first, user, answer, late, user], None) or ""
    only_late = render([user, answer, late, user], None) or ""
    system = _MARK in with_first
    return Abilities(
        string_content=string,
        typed_content=typed,
        system=system,
        late_system=system and _MARK in with_late and _MARK2 in with_late and _MARK2 in only_late,
        object_arguments=_takes_objects(render, user, content),
    )


def _user(content: str | list[Json]) -> Json:
    return {"role": "user", "content": content}


def _takes_objects(render: Render, user: Json, content: Callable[[str], str | list[Json]]) -> bool:
    """Whether arguments given as an object are written out, and not in Python's notation."""
    function = {"name": "tool1", "arguments": {"arg": _VALUE}}
    messages = [
        user,
        {
            "role": "assistant",
            "content": content(""),
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "content": content("result"), "tool_call_id": "call00001"},
        {"role": "assistant", "content": content("answer")},
        user,
    ]
    parameters = {
        "type": "object",
        "properties": {"arg": {"type": "string", "description": "text"}},
        "required": ["arg"],
    }
    schema = {"name": "tool1", "description": "a tool", "parameters": parameters}
    text = render(messages, [{"name": "tool", "type": "function", "function": schema}]) or ""
    return _VALUE in text and f"'arg': '{_VALUE}'" not in text
