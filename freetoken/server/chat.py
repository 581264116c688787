"""An OpenAI chat body -> the fields of a completion: checks the messages, renders the template.

Reasoning and tool calls are not parsed out of the answer yet: everything is `content`.
"""

from __future__ import annotations

from typing import Any

from freetoken.chat import ChatTemplate, read_messages
from freetoken.server.fields import has, json_type, read_bool, read_int, read_string, read_strings
from freetoken.server.refuse import invalid, not_supported

__all__ = ["completion_body", "render_prompt"]

Json = dict[str, Any]


def completion_body(body: Json, template: ChatTemplate, default_kwargs: dict[str, object]) -> Json:
    """The body with `prompt`, `stop` and `n_probs` as /completion wants them; everything else is kept."""
    result = dict(body)
    result["stop"] = list(read_strings(body, "stop", ()))
    result["prompt"] = render_prompt(body, template, default_kwargs)
    wants_logprobs = body.get("logprobs")
    if wants_logprobs is not None and not isinstance(wants_logprobs, bool):
        raise invalid(f"Field 'logprobs': type must be boolean, but is {json_type(wants_logprobs)}")
    result.pop("logprobs", None)
    if wants_logprobs:
        result["n_probs"] = read_int(body, "top_logprobs", 20, low=0)
    elif has(body, "top_logprobs"):
        raise invalid("Field 'top_logprobs': needs 'logprobs': true")
    return result


def render_prompt(body: Json, template: ChatTemplate, default_kwargs: dict[str, object]) -> str:
    """The prompt text of a chat body. A last message of the assistant is continued, not closed."""
    if body.get("tools") or body.get("functions"):
        raise not_supported("Field 'tools' is not supported by this server yet")
    if body.get("echo"):
        raise not_supported("Field 'echo' is not supported by this server yet")
    choice = body.get("tool_choice")
    if choice is not None and choice not in ("auto", "none"):
        raise not_supported("Field 'tool_choice' is not supported by this server yet")
    messages = checked_messages(body)
    kwargs = _template_kwargs(body, default_kwargs)
    add_generation_prompt = read_bool(body, "add_generation_prompt", True)
    wish = body.get("continue_final_message")
    if wish not in (None, False, True, "content"):
        raise not_supported("Field 'continue_final_message' is not supported by this server yet, but for 'content'")
    if wish and add_generation_prompt:
        raise invalid("Field 'continue_final_message': needs 'add_generation_prompt': false")
    is_assistant = bool(messages) and messages[-1]["role"] == "assistant"
    if not messages or not (wish or is_assistant):
        return template.render(messages, None, add_generation_prompt, **kwargs)
    if not wish and len(messages) > 1 and messages[-2]["role"] == "assistant":
        raise invalid("messages: an answer is continued at the end, but the last two messages are the assistant's")
    if is_assistant and messages[-1].get("tool_calls"):
        raise invalid("messages: an answer with tool calls cannot be continued")
    return template.render(messages[:-1], None, True, **kwargs) + _text_of(messages[-1])


def checked_messages(body: Json) -> list[Json]:
    """`messages`, each with a role and a content of text."""
    if "messages" not in body:
        raise invalid("'messages' is required")
    messages = body["messages"]
    if not isinstance(messages, list):
        raise invalid("Expected 'messages' to be an array")
    return read_messages(messages)


def _text_of(message: Json) -> str:
    """A message's content as one text; parts are joined with new lines."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _template_kwargs(body: Json, defaults: dict[str, object]) -> Json:
    """Variables for the template: the command line's, the body's `chat_template_kwargs` and `reasoning_effort`."""
    own = body.get("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise invalid(f"Field 'chat_template_kwargs': type must be object, but is {json_type(own)}")
    kwargs: Json = {**defaults, **(own or {})}
    if not isinstance(kwargs.get("enable_thinking", True), bool):
        raise invalid("Field 'chat_template_kwargs': the type of 'enable_thinking' must be boolean")
    effort = read_string(body, "reasoning_effort", "")
    if effort == "none":
        kwargs["enable_thinking"] = False
        kwargs.pop("reasoning_effort", None)
    elif effort:
        kwargs["reasoning_effort"] = effort
    clash = {"messages", "tools", "add_generation_prompt", "self"} & kwargs.keys()
    if clash:
        raise invalid(f"Field 'chat_template_kwargs': {', '.join(sorted(clash))} cannot be set there")
    return kwargs
