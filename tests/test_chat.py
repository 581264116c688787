"""Chat templates: built-in ones and files' against llama.cpp, messages of all shapes, refusals, and the one BOS."""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import logging
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from freetoken.chat import BUILTIN_NAMES, ChatTemplate, load_template, prompt_tokens
from freetoken.chat.builtin import builtin_source
from freetoken.errors import ModelFileError, OptionError, RequestError
from freetoken.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
CLOCK = datetime(2026, 1, 2, 3, 4, 5)

CHATML = builtin_source("chatml")
STRICT = """{%- for m in messages -%}
  {%- if m.role == 'system' and not loop.first -%}{{ raise_exception('System message must be at the beginning.') }}
  {%- elif m.role not in ['system', 'user', 'assistant', 'tool'] -%}{{ raise_exception('Unknown role ' ~ m.role) }}
  {%- endif -%}
  {{- '[' ~ m.role ~ ']' ~ m.content -}}
  {%- for call in m.tool_calls -%}
    {%- for key, value in call.function.arguments | items -%}{{ '<' ~ key ~ '=' ~ value ~ '>' }}{%- endfor -%}
  {%- endfor -%}
{%- endfor -%}"""


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def llama_cpp_text(name: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    chat = (llama_cpp.llama_chat_message * len(messages))(
        *((m["role"].encode(), m["content"].encode()) for m in messages)
    )
    buffer = ctypes.create_string_buffer(1 << 14)
    n = llama_cpp.llama_chat_apply_template(
        name.encode(), chat, len(messages), add_generation_prompt, buffer, len(buffer)
    )
    assert n >= 0, name
    return buffer.raw[:n].decode()


def test_all_names_of_llama_cpp_are_there() -> None:
    n = llama_cpp.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    llama_cpp.llama_chat_builtin_templates(names, n)
    assert {name.decode() for name in names if name} == set(BUILTIN_NAMES)


@pytest.mark.parametrize("name", BUILTIN_NAMES)
def test_builtin_templates_equal_llama_cpp(name: str) -> None:
    conversation = [
        system("You are a helpful assistant "),
        user(" Hello\n"),
        {"role": "assistant", "content": "Hi there"},
        user("Who are you"),
        {"role": "assistant", "content": "   I am it   "},
        user("Another question"),
    ]
    if name == "yandex":  # has no system role: llama.cpp drops the text there, with Jinja it joins the user's, as here
        del conversation[0]
    template = ChatTemplate(builtin_source(name), "", "")
    for messages in (conversation, conversation[1:], conversation[1:3], conversation[:2], conversation[3:4]):
        for add_generation_prompt in (True, False):
            expected = llama_cpp_text(name, messages, add_generation_prompt)
            assert template.render(messages, None, add_generation_prompt) == expected


@pytest.mark.weights
def test_template_files_equal_llama_cpps_engine(llama_cpp_source: Path) -> None:
    """Every template of its `models/templates` with plain, long, thinking and tool chats; made by a tool from it."""
    cases = json.loads((GOLDEN / "chat_cases.json").read_text())
    golden = json.loads((GOLDEN / "chat_templates.json").read_text())["templates"]
    for file, expected in golden.items():
        source = (llama_cpp_source / "models" / "templates" / file).read_text()
        template = ChatTemplate(source, "<s>", "</s>", clock=lambda: CLOCK)
        for case in cases:
            arguments = case["messages"], case["tools"], case["add_generation_prompt"]
            try:
                text = template.render(*arguments, **case["extra"])
                got = hashlib.sha256(text.encode()).hexdigest()[:16]
            except RequestError:
                got = "refused"
            assert got == expected[case["name"]], (file, case["name"])
    assert len(golden) >= 60


@pytest.mark.weights
def test_the_texts_that_llama_cpp_tests(llama_cpp_source: Path) -> None:
    """Templates and the expected texts of tests/test-chat-template.cpp, read from there."""
    conversation = [
        system("You are a helpful assistant"),
        user("Hello"),
        {"role": "assistant", "content": "Hi there"},
        user("Who are you"),
        {"role": "assistant", "content": "   I am an assistant   "},
        user("Another question"),
    ]
    n = 0
    for entry in _cpp_cases((llama_cpp_source / "tests" / "test-chat-template.cpp").read_text()):
        template = ChatTemplate(entry["template_str"], entry.get("bos_token", ""), entry.get("eos_token", ""))
        expected = entry.get("expected_output_jinja") or entry["expected_output"]
        assert template.render(conversation) == expected, entry["name"]
        n += 1
    assert n >= 30


def _cpp_cases(code: str) -> list[dict[str, str]]:
    """The string fields of `test_cases`; those with further messages, or not for Jinja, are left out."""
    code = code[code.index("std::vector<TestCase> test_cases") :]
    field = re.compile(r'/\* \.(\w+)\s*=? \*/\s*(?:U8C\()?((?:"(?:[^"\\]|\\.)*"\s*)+)')
    cases = []
    for block in re.split(r"(?=/\* \.name= \*/)", code)[1:]:
        if "supported_with_jinja= */ false" in block or "extra_conversation" in block:
            continue
        cases.append({name: ast.literal_eval(f"({literal})") for name, literal in field.findall(block)})
    return cases


def test_later_system_messages_join_the_first() -> None:
    """B01: a template that refuses them elsewhere gets one; a template that takes them gets them where they are."""
    messages = [system("A"), user("1"), {"role": "developer", "content": "B"}, user("2")]
    assert ChatTemplate(STRICT, "", "").render(messages) == "[system]A\n\nB[user]1[user]2"
    assert ChatTemplate(STRICT, "", "").render(messages[1:]) == "[system]B[user]1[user]2"
    late = ChatTemplate(CHATML, "", "").render(messages, None, False)
    assert late.index("user\n1") < late.index("system\nB") < late.index("user\n2")


def test_a_template_without_a_system_role_gets_it_in_the_next_message() -> None:
    source = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
    template = ChatTemplate(source, "", "")
    assert template.render([system("A"), user("1"), system("B"), user("2")]) == "[user]A\n\nB\n1[user]2"
    assert template.render([system("A")]) == ""


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": "x"}', {"a": 1, "b": "x"}])
def test_tool_arguments_reach_the_template_as_an_object(arguments: Any) -> None:
    """B02: the same prompt for JSON text and for an object."""
    template = ChatTemplate(STRICT, "", "")
    assert template.abilities.object_arguments
    assert template.render([user("q"), call(arguments)]) == "[user]q[assistant]<a=1><b=x>"


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", "", "[" * 100_000])
def test_tool_arguments_that_are_no_object_never_crash(arguments: str) -> None:
    """B07: a template that needs an object refuses with 400; one that prints them prints the text."""
    with pytest.raises(RequestError, match="chat template cannot render") as refused:
        ChatTemplate(STRICT, "", "").render([user("q"), call(arguments)])
    assert refused.value.http_status == 400
    printing = STRICT[: STRICT.index("    {%- for key")] + "{{ call.function.arguments }}{%- endfor -%}{%- endfor -%}"
    assert ChatTemplate(printing, "", "").render([user("q"), call(arguments)]) == "[user]q[assistant]" + arguments


def test_gpt_oss_keeps_content_rather_than_thinking_beside_a_tool_call() -> None:
    """B03: the template forbids both; thinking goes first."""
    source = """{# <|channel|> #}{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}
{{- raise_exception('Cannot pass both content and thinking') }}{% endif %}
{{- m.content }}({{ m.thinking }}){% endfor %}"""
    template = ChatTemplate(source, "", "")
    both = {**call("{}"), "content": "text", "reasoning_content": "why"}
    assert template.render([user("q"), both]) == "q()text()"
    assert template.render([user("q"), {**both, "content": None}]) == "q()(why)"
    assert template.render([{"role": "assistant", "content": "a", "reasoning_content": "why"}]) == "a(why)"


def test_refusals_are_the_templates_own_words() -> None:
    with pytest.raises(RequestError, match="refuses these messages: Unknown role martian") as refused:
        ChatTemplate(STRICT, "", "").render([{"role": "martian", "content": "x"}])
    assert refused.value.http_status == 400


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[99].content.x() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ range(10 ** 9) | list }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_a_template_that_fails_is_a_refused_request(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, "", "").render([user()])


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "x"}, "'role' is missing"),
        ({"role": 3, "content": "x"}, "'role' is missing"),
        ({"role": "user"}, "expected 'content' or 'tool_calls'"),
        ({"role": "user", "content": 5}, "string or an array"),
        (user([{"text": "x"}]), "has no 'type'"),
        (user(["x"]), "has no 'type'"),
        (user([{"type": "text"}]), "no string 'text'"),
        (user([{"type": "image_url", "image_url": {"url": "data:"}}]), "image input is not supported"),
        (user([{"type": "input_audio"}]), "audio input is not supported"),
        (user([{"type": "hologram"}]), r"unsupported content\[\].type"),
        ({"role": "assistant", "content": "", "tool_calls": {"a": 1}}, "'tool_calls' is no array"),
        ({"role": "assistant", "content": "", "tool_calls": [{"type": "retrieval"}]}, r"tool_calls\[0\]: .*'function'"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, r"tool_calls\[0\]: .*'name'"),
        ({"role": "assistant", "content": "x", "reasoning_content": 4}, "'reasoning_content' is no string"),
    ],
)
def test_malformed_messages_are_named(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        ChatTemplate(CHATML, "", "").render([user(), message])


def test_contents() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}", "", "")
    assert (
        plain.render([user(parts), {"role": "assistant", "content": None, "tool_calls": []} | call("{}")])
        == "one\ntwo||"
    )
    typed = ChatTemplate("{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}", "", "")
    assert typed.abilities.typed_content and not typed.abilities.string_content
    assert typed.render([user(parts), user("three")]) == "one|two|three|"


def test_what_templates_expect_of_the_engine() -> None:
    def run(source: str, **extra: Any) -> str:
        return ChatTemplate(source, "<s>", "</s>", clock=lambda: CLOCK).render([user()], None, True, **extra)

    assert run("{{ bos_token ~ eos_token }}") == "<s></s>"
    assert run("{{ x | tojson }}", x={"b": "<é&'>", "a": [1, None, True]}) == '{"b": "<é&\'>", "a": [1, null, true]}'
    assert run("{{ [1, 2] | tojson(indent=2) }}") == "[\n  1,\n  2\n]"
    assert run("{{ x | map(attribute='a') | tojson }}", x=[{"a": 1}]) == "[1]"
    assert (
        run("{{ strftime_now('%d %b %Y') }} {{ date_string }} {{ datetime }}") == "02 Jan 2026 02 Jan 2026 Jan 02 2026"
    )
    skipping = "{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}"
    assert run("{% for i in range(9) %}" + skipping + "{{ i }}{% endfor %}") == "013"
    assert run("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    assert run("  {% if true %}\n  x\n  {% endif %}\n") == "  x\n"
    assert run("{{ 'a' + nothing + 'b' + none }}{{ nothing.at.all }}{{ 'x' in nothing }}") == "abFalse"
    assert run("{{ ''.__class__.__mro__ }}") == ""
    assert run("{{ '<b>'|safe + '<i>' }}") == "<b><i>"
    assert run("{{ enable_thinking }}") == "True"
    assert run("{{ enable_thinking }}", enable_thinking=False) == "False"
    assert run("{{ clear_thinking }} {{ preserve_thinking }}", preserve_reasoning=True) == "False True"
    assert run("{{ reasoning_strength }}", reasoning_effort="low") == "low"
    assert run("{{ tools is defined }} {{ add_generation_prompt }}") == "False True"


def test_a_template_cannot_change_what_requests_share() -> None:
    tools, shared = [{"type": "function", "function": {"name": "f"}}], ["x"]
    source = "{% set _ = tools.append(1) %}{% set _ = shared.append(2) %}{{ tools | length }}{{ shared | length }}"
    template = ChatTemplate(source, "", "")
    assert [template.render([user()], tools, shared=shared) for _ in range(2)] == ["22", "22"]
    assert (len(tools), len(shared)) == (1, 1)


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(OptionError, match="chat template, line 2: "):
        ChatTemplate("{% if x %}\n{% endfor %}", "", "")


def test_a_template_of_its_own_for_tools() -> None:
    template = ChatTemplate("plain", "", "", tool_use="with {{ tools | length }}")
    assert template.render([user()]) == "plain"
    assert template.render([user()], [{"type": "function", "function": {"name": "f"}}]) == "with 1"


class FakeTokenizer(Tokenizer):
    """A tokenizer of characters; BOS is 1 and written <s>."""

    def __init__(self, add_bos: bool, templates: dict[str, str] | None = None) -> None:
        self.path = Path("model.gguf")
        self.bos, self.eos, self.add_bos, self.add_eos = 1, 2, add_bos, False
        self._named_templates = templates or {}
        self.chat_template = self._named_templates.get("default")

    def piece(self, token: int, special: bool = False) -> bytes:
        return {1: b"<s>", 2: b"</s>"}[token]

    def encode(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        assert isinstance(text, str)
        pieces = re.split("(<s>)", text)
        ids = [i for p in pieces for i in ([1] if p == "<s>" else [100 + ord(c) for c in p])]
        return [1, *ids] if add_special and self.add_bos else ids

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("add_bos", "source"), [(True, "{{ bos_token }}hi"), (True, "hi"), (False, "{{ bos_token }}hi")]
)
def test_exactly_one_bos(add_bos: bool, source: str) -> None:
    tokenizer = FakeTokenizer(add_bos, {"default": source})
    tokens = prompt_tokens(tokenizer, load_template(None, tokenizer), [user()])
    assert tokens == [1, 100 + ord("h"), 100 + ord("i")]


def test_which_template_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = FakeTokenizer(False, {"default": "{{ 'file' }}", "tool_use": "{{ 'tools' }}"})
    assert load_template(None, tokenizer).render([user()]) == "file"
    assert load_template(None, tokenizer).render([user()], [{"type": "function"}]) == "tools"
    assert load_template("{{ 'mine' }}", tokenizer).render([user()], [{"type": "function"}]) == "mine"
    assert load_template("zephyr", tokenizer).render([user("x")]) == "<|user|>\nx<|endoftext|>\n<|assistant|>\n"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        fallback = load_template(None, FakeTokenizer(False))
    assert ["ChatML is used" in r.getMessage() for r in caplog.records] == [True]
    assert fallback.render([user("x")]) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_bad_choices_of_a_template() -> None:
    with pytest.raises(OptionError, match=r"'zefyr' is neither .*chatml.*zephyr"):
        load_template("zefyr", FakeTokenizer(False))
    with pytest.raises(OptionError, match="line 1"):
        load_template("{% if %}", FakeTokenizer(False))
    with pytest.raises(ModelFileError, match=r"model.gguf: chat template, line 1.*--chat-template"):
        load_template(None, FakeTokenizer(False, {"default": "{% if %}"}))


@pytest.mark.weights
def test_smollm2_chat(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    tokens = prompt_tokens(tokenizer, load_template(None, tokenizer), [user("What is the capital of France?")])
    text = tokenizer.decode(tokens, special=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    assert tokens[0] == tokenizer.bos and tokens[1] != tokenizer.bos
