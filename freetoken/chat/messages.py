"""Messages of a chat: checked as llama-server checks them, then adapted to what the template can do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from freetoken.chat.abilities import Abilities
from freetoken.errors import RequestError

__all__ = ["adapt_messages", "read_messages"]

Message = dict[str, Any]

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MEDIA = {"image_url": "image", "input_image": "image", "input_audio": "audio", "video_url": "video"}
_STEPFUN = "You have access to the following functions in JSONSchema format"


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Messages with the fields that templates know: role, content (a string or text parts), reasoning_content, name,
    tool_call_id, tool_calls. A content that is null or missing becomes "". Raises RequestError naming the message."""
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected a message to be an object, got {json.dumps(message)[:80]}")
    role = message.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}: 'role' is missing or is no string")
    calls = message.get("tool_calls")
    if "content" not in message and not calls:
        raise RequestError(f"{where}: expected 'content' or 'tool_calls'")
    result: Message = {"role": role, "content": _read_content(message.get("content"), where)}
    for name in ("reasoning_content", "name", "tool_call_id"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{where}: {name!r} is no string")
        if value:
            result[name] = value
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"{where}: 'tool_calls' is no array")
        result["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _read_content(content: Any, where: str) -> str | list[Message]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: 'content' must be a string or an array of parts")
    parts: list[Message] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            raise RequestError(f"{where}: a part of 'content' has no 'type'")
        if kind in _MEDIA:
            raise RequestError(f"{where}: {_MEDIA[kind]} input is not supported: send text only")
        if kind not in _TEXT_PARTS:
            raise RequestError(f"unsupported content[].type: {where} has {kind!r}, expected 'text'")
        text = part.get("refusal" if kind == "refusal" and "text" not in part else "text")
        if not isinstance(text, str):
            raise RequestError(f"{where}: a text part of 'content' has no string 'text'")
        parts.append({"type": "text", "text": text})
    return parts


def _read_call(call: Any, where: str) -> Message:
    if not isinstance(call, Mapping) or call.get("type", "function") != "function":
        raise RequestError(f"{where}: expected an object of type 'function'")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected a 'function' with a 'name'")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    result: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if isinstance(call.get("id"), str) and call["id"]:
        result["id"] = call["id"]
    return result


def adapt_messages(messages: list[Message], abilities: Abilities, source: str) -> list[Message]:
    """Messages in the form that the template of this source can render; the given ones may be changed.

    As llama.cpp does it, and besides: system messages that the template would refuse at their place join the first one
    (cases B01), and of content and thinking beside tool calls gpt-oss keeps the content (case B03).
    """
    if _STEPFUN in source:
        for message in messages:
            _trim(message)
    for message in messages:
        message["content"] = _adapt_content(message["content"], abilities)
    if "<|channel|>" not in source:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    messages = _place_system(messages, abilities)
    if abilities.object_arguments:
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    if "<|channel|>" in source:
        for message in messages:
            _adapt_harmony(message)
    return messages


def _trim(message: Message) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content.strip()
    else:
        for part in content:
            part["text"] = part["text"].strip()
    if "reasoning_content" in message:
        message["reasoning_content"] = message["reasoning_content"].strip()


def _adapt_content(content: str | list[Message], abilities: Abilities) -> str | list[Message]:
    if isinstance(content, str):
        if abilities.string_content:
            return content
        return [{"type": "text", "text": content}]
    return content if abilities.typed_content else _text_of(content)


def _text_of(content: str | list[Message]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _place_system(messages: list[Message], abilities: Abilities) -> list[Message]:
    """System messages where the template takes them: anywhere, first only, or not at all (then in the next message)."""
    late = [m for m in messages[1:] if _is_system(m)]
    if late and not abilities.late_system:
        systems = [m for m in messages if _is_system(m)]
        first: Message = {**systems[0], "content": "\n\n".join(_text_of(m["content"]) for m in systems)}
        messages = [first, *(m for m in messages if not _is_system(m))]
    if abilities.system or not messages or not _is_system(messages[0]):
        return messages
    system, rest = messages[0], messages[1:]
    if rest:
        rest[0] = {**rest[0], "content": _text_of(system["content"]) + "\n" + _text_of(rest[0]["content"])}
    return rest


def _parse_arguments(arguments: Any) -> Any:
    """The object that a JSON text holds; any other text stays a text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _adapt_harmony(message: Message) -> None:
    """gpt-oss reads `thinking` and refuses it beside content in a message with tool calls."""
    reasoning = message.pop("reasoning_content", None)
    if reasoning is None:
        return
    if not message.get("tool_calls"):
        message["thinking"] = reasoning
    elif not message["content"]:
        del message["content"]
        message["thinking"] = reasoning
