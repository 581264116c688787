"""`ft run`'s chat and the command lines of `ft info`, without a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from freetoken.cli.main import main
from freetoken.cli.run import print_answer, typed_lines


def test_an_interrupted_answer_keeps_what_was_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def pieces() -> Iterator[str]:
        yield "Once"
        yield " upon"
        raise KeyboardInterrupt

    shown: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        print_answer(pieces(), shown)
    assert shown == ["Once", " upon"]
    assert capsys.readouterr().out == "Once upon"
    print_answer(iter(["a", "b"]), shown := [])
    assert shown == ["a", "b"]
    assert capsys.readouterr().out == "ab\n"


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_chat_ends_with_the_input_or_an_interrupt_at_the_prompt(
    monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    lines = iter(["hello", "  ", "bye"])

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise end
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert list(typed_lines()) == ["hello", "bye"]


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (["info", "--help"], 0, "usage: ft info FILE"),
        (["info", "--version"], 0, "version: "),
        (["info"], 2, "no model is named: ft info FILE"),
        (["info", "a.gguf", "b.gguf"], 2, "unexpected argument 'b.gguf' (see ft info --help)"),
        (["run", "a.gguf"], 2, "unexpected argument 'a.gguf': every value follows its flag, a model's file -m"),
        (["run", "-hf", "a/b"], 2, "unknown flag -hf (see ft run --help)"),
    ],
)
def test_command_lines(argv: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert word in out + err
