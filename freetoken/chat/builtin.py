"""Templates that have a name in llama.cpp (`--chat-template NAME`), written as short Jinja sources.

A format is a table: what is printed for a message of each role, before the first and for the answer to come. In it
`{role}`, `{Role}` (first letter large), `{ROLE}` (all large), `{content}` and `{text}` (content without white space
around) stand for parts of the message. Formats with state are Jinja as it is. Source of the formats: llama.cpp,
src/llama-chat.cpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

__all__ = ["BUILTIN_NAMES", "builtin_source"]


@dataclass(frozen=True)
class _Format:
    """What each role prints; `other` is for all roles without an entry of their own, None prints nothing."""

    answer: str = ""
    other: str | None = None
    system: str | None = None
    user: str | None = None
    assistant: str | None = None
    tool: str | None = None
    first: str = ""


def _any(pattern: str, answer: str, first: str = "", assistant: str | None = None) -> _Format:
    return _Format(answer=answer, other=pattern, first=first, assistant=assistant)


def _roles(system: str, user: str, assistant: str, answer: str, *, tool: str | None = None, first: str = "") -> _Format:
    return _Format(answer=answer, system=system, user=user, assistant=assistant, tool=tool, first=first)


def _exaone(bar: str, end: str, gap: str) -> tuple[str, str, str, str]:
    """system, assistant, tool and answer of the EXAONE family."""
    system, assistant, tool = (f"{bar.format(r)}{gap}{{text}}{end}\n" for r in ("system", "assistant", "tool"))
    return system, assistant, tool, bar.format("assistant") + gap


_X3, _XM = _exaone("[|{}|]", "[|endofturn|]", ""), _exaone("<|{}|>", "<|endofturn|>", "\n")
_GRANITE = "<|start_of_role|>{role}<|end_of_role|>{content}<|end_of_text|>\n"
_ROLE_LINE = "<|{role}|>\n{content}"

_FORMATS: Final[dict[str, _Format]] = {
    "chatml": _any("<|im_start|>{role}\n{content}<|im_end|>\n", "<|im_start|>assistant\n"),
    "phi3": _any(_ROLE_LINE + "<|end|>\n", "<|assistant|>\n"),
    "phi4": _any("<|im_start|>{role}<|im_sep|>{content}<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    "falcon3": _any(_ROLE_LINE + "\n", "<|assistant|>\n"),
    "zephyr": _any(_ROLE_LINE + "<|endoftext|>\n", "<|assistant|>\n"),
    "openchat": _Format(
        system="{content}<|end_of_turn|>",
        other="GPT4 Correct {Role}: {content}<|end_of_turn|>",
        answer="GPT4 Correct Assistant:",
    ),
    "vicuna": _roles("{content}\n\n", "USER: {content}\n", "ASSISTANT: {content}</s>\n", "ASSISTANT:"),
    "vicuna-orca": _roles("SYSTEM: {content}\n", "USER: {content}\n", "ASSISTANT: {content}</s>\n", "ASSISTANT:"),
    "deepseek": _roles(
        "{content}",
        "### Instruction:\n{content}\n",
        "### Response:\n{content}\n<|EOT|>\n",
        "### Response:\n",
    ),
    "deepseek2": _roles(
        "{content}\n\n", "User: {content}\n\n", "Assistant: {content}<｜end▁of▁sentence｜>", "Assistant:"
    ),
    "deepseek3": _roles(
        "{content}\n\n",
        "<｜User｜>{content}",
        "<｜Assistant｜>{content}<｜end▁of▁sentence｜>",
        "<｜Assistant｜>",
    ),
    "deepseek-ocr": _any("{content}", ""),
    "command-r": _roles(
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{text}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{text}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{text}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    "llama3": _any(
        "<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "llama4": _any(
        "<|header_start|>{role}<|header_end|>\n\n{text}<|eot|>", "<|header_start|>assistant<|header_end|>\n\n"
    ),
    "chatglm3": _any("<|{role}|>\n {content}", "<|assistant|>", first="[gMASK]sop"),
    "chatglm4": _any(_ROLE_LINE, "<|assistant|>\n", first="[gMASK]<sop>"),
    "glmedge": _any(_ROLE_LINE, "<|assistant|>"),
    "minicpm": _Format(user="<用户>{text}<AI>", other="{text}"),
    "exaone3": _roles(_X3[0], "[|user|]{text}\n", _X3[1], _X3[3]),
    "exaone4": _roles(_X3[0], "[|user|]{text}\n", _X3[1], _X3[3], tool=_X3[2]),
    "exaone-moe": _roles(_XM[0], "<|user|>\n{text}<|endofturn|>\n", _XM[1], _XM[3], tool=_XM[2]),
    "granite-4.0": _any(_GRANITE, "<|start_of_role|>assistant<|end_of_role|>"),
    "megrez": _any("<|role_start|>{role}<|role_end|>{content}<|turn_end|>", "<|role_start|>assistant<|role_end|>"),
    "yandex": _Format(
        user=" Пользователь: {content}\n\n", assistant=" Ассистент: {content}\n\n", answer=" Ассистент:[SEP]"
    ),
    "bailing": _Format(
        user="<role>HUMAN</role>{content}", other="<role>{ROLE}</role>{content}", answer="<role>ASSISTANT</role>"
    ),
    "bailing-think": _Format(
        user="<role>HUMAN</role>{content}", other="<role>{ROLE}</role>{content}", answer="<role>ASSISTANT</role><think>"
    ),
    "mistral-v7": _Format(
        system="[SYSTEM_PROMPT] {content}[/SYSTEM_PROMPT]", user="[INST] {content}[/INST]", other=" {content}</s>"
    ),
    "mistral-v7-tekken": _Format(
        system="[SYSTEM_PROMPT]{content}[/SYSTEM_PROMPT]", user="[INST]{content}[/INST]", other="{content}</s>"
    ),
    "smolvlm": _Format(
        system="{content}\n\n",
        user="User: {content}<end_of_utterance>\n",
        other="Assistant: {content}<end_of_utterance>\n",
        answer="Assistant:",
        first="<|im_start|>",
    ),
    "hunyuan-moe": _Format(
        system="<|startoftext|>{content}<|extra_4|>",
        assistant="{content}<|eos|>",
        other="<|startoftext|>{content}<|extra_0|>",
    ),
    "gpt-oss": _any(
        "<|start|>{role}<|message|>{content}<|end|>",
        "<|start|>assistant",
        assistant="<|start|>assistant<|message|>{content}<|return|>",
    ),
    "kimi-k2": _Format(
        system="<|im_system|>system<|im_middle|>{content}<|im_end|>",
        user="<|im_user|>user<|im_middle|>{content}<|im_end|>",
        assistant="<|im_assistant|>assistant<|im_middle|>{content}<|im_end|>",
        tool="<|im_system|>tool<|im_middle|>{content}<|im_end|>",
        other="{content}<|im_end|>",
        answer="<|im_assistant|>assistant<|im_middle|>",
    ),
    "seed_oss": _any(
        "<seed:bos>{role}\n{content}<seed:eos>",
        "<seed:bos>assistant\n",
        assistant="<seed:bos>assistant\n{text}<seed:eos>",
    ),
    "grok-2": _roles(
        "System: {text}<|separator|>\n\n",
        "Human: {text}<|separator|>\n\n",
        "Assistant: {content}<|separator|>\n\n",
        "Assistant:",
    ),
    "solar-open": _any("<|begin|>{role}<|content|>{content}<|end|>", "<|begin|>assistant"),
}
_FORMATS["granite-4.1"] = _FORMATS["granite-4.0"]
_FORMATS["granite"] = _FORMATS["granite-4.0"]


def _mistral(lead: str, trail: str, answer: str) -> str:
    """v1, v3 and v3-tekken: a system text opens the turn that its user text closes."""
    return (
        "{%- set ns = namespace(open=false) -%}{%- for m in messages -%}"
        f"{{%- if not ns.open -%}}{{{{ '{lead}[INST]{trail}' }}}}{{%- set ns.open = true -%}}{{%- endif -%}}"
        "{%- if m.role == 'system' -%}{{ m.content ~ '\\n\\n' }}"
        f"{{%- elif m.role == 'user' -%}}{{{{ m.content ~ '{lead}[/INST]' }}}}"
        f"{{%- else -%}}{{{{ '{trail}' ~ {answer} ~ '</s>' }}}}{{%- set ns.open = false -%}}"
        "{%- endif -%}{%- endfor -%}"
    )


def _llama2(system: str, again: str = "[INST] ", content: str = "m.content") -> str:
    return (
        "{{ '[INST] ' }}{%- set ns = namespace(open=true) -%}{%- for m in messages -%}"
        f"{{%- if not ns.open -%}}{{{{ '{again}' }}}}{{%- set ns.open = true -%}}{{%- endif -%}}"
        f"{{%- if m.role == 'system' -%}}{{{{ {system} }}}}"
        f"{{%- elif m.role == 'user' -%}}{{{{ {content} ~ ' [/INST]' }}}}"
        f"{{%- else -%}}{{{{ {content} ~ '</s>' }}}}{{%- set ns.open = false -%}}"
        "{%- endif -%}{%- endfor -%}"
    )


def _system_in_user(start: str, user: str, other: str, answer: str, system: str) -> str:
    """Gemma and Orion have no system role: its text goes in front of the next user text."""
    return (
        "{%- set ns = namespace(system='') -%}{%- for m in messages -%}"
        f"{{%- if m.role == 'system' -%}}{{%- set ns.system = ns.system ~ {system} -%}}"
        f"{{%- elif m.role == 'user' -%}}{{{{ {start} }}}}"
        "{%- if ns.system -%}{{ ns.system ~ '\\n\\n' }}{%- set ns.system = '' -%}{%- endif -%}"
        f"{{{{ {user} }}}}{{%- else -%}}{{{{ {other} }}}}{{%- endif -%}}{{%- endfor -%}}"
        f"{{%- if add_generation_prompt -%}}{{{{ '{answer}' }}}}{{%- endif -%}}"
    )


_SYS = "'<<SYS>>\\n' ~ {} ~ '\\n<</SYS>>\\n\\n'"
_SOURCES: Final[dict[str, str]] = {
    "mistral-v1": _mistral(" ", " ", "m.content"),
    "mistral-v3": _mistral("", " ", "(m.content | trim)"),
    "mistral-v3-tekken": _mistral("", "", "m.content"),
    "llama2": _llama2("m.content ~ '\\n'"),
    "llama2-sys": _llama2(_SYS.format("m.content")),
    "llama2-sys-bos": _llama2(_SYS.format("m.content"), again="<s>[INST] "),
    "llama2-sys-strip": _llama2(_SYS.format("(m.content | trim)"), content="(m.content | trim)"),
    "gemma": _system_in_user(
        "'<start_of_turn>user\\n'",
        "(m.content | trim) ~ '<end_of_turn>\\n'",
        "'<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' ~ (m.content | trim)"
        " ~ '<end_of_turn>\\n'",
        "<start_of_turn>model\\n",
        "(m.content | trim)",
    ),
    "orion": _system_in_user("'Human: '", "m.content ~ '\\n\\nAssistant: </s>'", "m.content ~ '</s>'", "", "m.content"),
    "monarch": (
        "{%- for m in messages -%}{{ ('' if loop.first else '<s>') ~ m.role ~ '\\n' ~ m.content ~ '</s>\\n' }}"
        "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<s>assistant\\n' }}{%- endif -%}"
    ),
    "rwkv-world": (
        "{%- for m in messages -%}{%- if m.role == 'system' -%}{{ 'System: ' ~ (m.content | trim) ~ '\\n\\n' }}"
        "{%- elif m.role == 'user' -%}{{ 'User: ' ~ (m.content | trim) ~ '\\n\\n' }}"
        "{%- if loop.last -%}{{ 'Assistant:' }}{%- endif -%}"
        "{%- elif m.role == 'assistant' -%}{{ 'Assistant: ' ~ (m.content | trim) ~ '\\n\\n' }}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "gigachat": (
        "{{ '<s>' }}{%- for m in messages -%}{%- if loop.first and m.role == 'system' -%}"
        "{{ m.content ~ '<|message_sep|>' }}{%- elif m.role == 'user' -%}"
        "{{ 'user<|role_sep|>' ~ m.content ~ '<|message_sep|>available functions<|role_sep|>[]<|message_sep|>' }}"
        "{%- elif m.role == 'assistant' -%}{{ 'assistant<|role_sep|>' ~ m.content ~ '<|message_sep|>' }}"
        "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{ 'assistant<|role_sep|>' }}{%- endif -%}"
    ),
    "bailing2": (
        "{%- if not messages or messages[0].role != 'system' -%}"
        "{{ '<role>SYSTEM</role>detailed thinking off<|role_end|>' }}{%- endif -%}"
        "{%- for m in messages -%}{{ '<role>' ~ ('HUMAN' if m.role == 'user' else m.role | upper) ~ '</role>' "
        "~ m.content ~ '<|role_end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<role>ASSISTANT</role>' }}{%- endif -%}"
    ),
    "hunyuan-dense": (
        "{%- for m in messages -%}{%- if loop.first and m.role == 'system' -%}"
        "{{ m.content ~ '<｜hy_place▁holder▁no▁3｜>' }}{%- elif m.role == 'assistant' -%}"
        "{{ '<｜hy_Assistant｜>' ~ m.content ~ '<｜hy_place▁holder▁no▁2｜>' }}{%- elif m.role == 'user' -%}"
        "{{ '<｜hy_User｜>' ~ m.content ~ '<｜hy_Assistant｜>' }}{%- endif -%}{%- endfor -%}"
    ),
    "hunyuan-vl": (
        "{{ '<｜hy_begin▁of▁sentence｜>' }}{%- for m in messages -%}{%- if loop.first and m.role == 'system' -%}"
        "{{ m.content ~ '<｜hy_place▁holder▁no▁3｜>' }}{%- elif m.role == 'user' -%}"
        "{{ m.content ~ '<｜hy_User｜>' }}{%- elif m.role == 'assistant' -%}"
        "{{ m.content ~ '<｜hy_Assistant｜>' }}{%- endif -%}{%- endfor -%}"
    ),
    "pangu-embedded": (
        "{%- set names = {'system': '系统', 'user': '用户', 'assistant': '助手', 'tool': '工具', 'function': '方法'}"
        " -%}"
        "{%- if messages and messages[0].role != 'system' -%}{{ '[unused9]系统：[unused10]' }}{%- endif -%}"
        "{%- for m in messages -%}{%- if m.role in names -%}"
        "{{ '[unused9]' ~ names[m.role] ~ '：' ~ m.content ~ '[unused10]' }}{%- endif -%}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '[unused9]助手：' }}{%- endif -%}"
    ),
}

BUILTIN_NAMES: Final = tuple(sorted({*_FORMATS, *_SOURCES}))
"""The names that `--chat-template` takes."""

_PARTS = {
    "{role}": "m.role",
    "{Role}": "m.role[:1] | upper ~ m.role[1:]",
    "{ROLE}": "m.role | upper",
    "{content}": "m.content",
    "{text}": "(m.content | trim)",
}


def builtin_source(name: str) -> str:
    """The Jinja source of a built-in template. Raises KeyError for an unknown name."""
    return _SOURCES[name] if name in _SOURCES else _source(_FORMATS[name])


def _source(form: _Format) -> str:
    roles = {"system": form.system, "user": form.user, "assistant": form.assistant, "tool": form.tool}
    branches = [f"m.role == '{role}' -%}}{_print(text)}" for role, text in roles.items() if text is not None]
    lines = [_print(form.first), "{%- for m in messages -%}"]
    if branches:
        lines.append("{%- if " + "{%- elif ".join(branches))
        if form.other is not None:
            lines.append("{%- else -%}" + _print(form.other))
        lines.append("{%- endif -%}")
    else:
        lines.append(_print(form.other or ""))
    lines.append("{%- endfor -%}")
    if form.answer:
        lines.append("{%- if add_generation_prompt -%}" + _print(form.answer) + "{%- endif -%}")
    return "".join(lines)


def _print(pattern: str) -> str:
    """A Jinja expression that prints a pattern of the tables above."""
    pieces = [p for p in re.split(r"(\{[A-Za-z]+\})", pattern) if p]
    terms = [_PARTS.get(piece) or "'" + piece.replace("\n", "\\n") + "'" for piece in pieces]
    return "{{ " + " ~ ".join(terms) + " }}" if terms else ""
