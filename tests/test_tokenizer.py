"""Vocabularies: ids against llama.cpp's own published ones and its high-level wrapper, streams, and poor files."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from gguf import GGUFWriter

from freetoken.errors import ModelFileError, RequestError
from freetoken.tokenizer import StreamDecoder, Tokenizer

AWKWARD = [
    "",
    " ",
    "\n\n \t\r\n",
    "Hello, world!",
    " leading and trailing ",
    "\u200b zero\u200dwidth \ufeff bom",
    "I'll don't WE'VE you're",
    "3 33 333 3333 33333 1,234.5e-6",
    "Ünïcödé ñandú — “quotes” …",
    "Привет, мир! ",
    "日本語のテキスト、한국어, ภาษาไทย",
    "مرحبا بالعالم שלום",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈 🇩🇪",
    "e\u0301 combining \u0323\u0307",
    "<|im_start|>user\n</s><s>[INST]<0x0A>▁",
    "def f(x):\n    return x**2  # ok\n\t\tif x:\n",
    "a" * 300,
    "=" * 70 + "\n" + " " * 33 + "x",
    "\x00\x01\x7f control",
    "\U0010fffd\ue000 private",
]

VOCABULARIES = ["llama-bpe", "llama-spm", "qwen2", "gpt-2", "phi-3", "falcon", "deepseek-llm", "bert-bge"]


def write_vocab(path: Path, *, without: tuple[str, ...] = (), **changes: Any) -> Path:
    """A byte-level BPE vocabulary of 256 bytes, three words and two control tokens; entries may be left out."""
    tokens = [*_byte_texts(), "he", "ll", "hell", "<|im_start|>", "<|im_end|>"]
    entries: dict[str, Any] = {
        "model": "gpt2",
        "pre": "default",
        "tokens": tokens,
        "token_type": [1] * 259 + [3, 3],
        "merges": ["h e", "l l", "he ll"],
        "eos_token_id": 260,
    }
    entries.update(changes)
    writer = GGUFWriter(path, "llama")
    for key, value in entries.items():
        if key in without:
            continue
        if isinstance(value, list):
            writer.add_array(f"tokenizer.ggml.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_string(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _byte_texts() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


@pytest.fixture
def small(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_vocab(tmp_path / "v.gguf"))


def joined(tokenizer: Tokenizer, tokens: list[int]) -> str:
    stream = StreamDecoder(tokenizer)
    return "".join(stream.push(token) for token in tokens) + stream.flush()


def test_small_vocabulary(small: Tokenizer) -> None:
    assert (small.vocab_type, small.n_vocab, small.eos, small.bos) == ("bpe", 261, 260, None)
    assert small.eog_tokens == {260} and small.is_eog(260) and not small.is_eog(65)
    assert small.is_control(259) and not small.is_control(256) and not small.is_control(-1)
    assert small.encode("hello", add_special=True, parse_special=True) == [258, ord("o")]
    assert small.encode("<|im_end|>", add_special=False, parse_special=True) == [260]
    assert len(small.encode("<|im_end|>", add_special=False, parse_special=False)) == 10
    assert small.piece(260) == b"" and small.piece(260, special=True) == b"<|im_end|>"
    assert small.nl == 10 and small.chat_template is None
    assert small.encode("x" * 5000, False, False) == [ord("x")] * 5000


@pytest.mark.parametrize("token", [-1, 261, 2**31 - 1, -(2**31)])
def test_a_foreign_id_is_refused(small: Tokenizer, token: int) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary of 261"):
        small.piece(token)


def test_text_that_is_not_utf8_is_replaced(small: Tokenizer) -> None:
    replacement = small.encode("\ufffd", False, False)
    assert small.encode(b"\x80", False, False) == replacement
    assert small.encode("\ud800", False, False) == replacement
    assert small.encode("\ud83d\ude00", False, False) == small.encode("😀", False, False)


@pytest.mark.parametrize(
    ("data", "pushed", "flushed"),
    [
        ("🙂".encode(), ["", "", "", "🙂"], ""),
        ("Ж".encode(), ["", "Ж"], ""),
        (b"\x80", ["\ufffd"], ""),
        (b"\xc0\xafx", ["\ufffd", "\ufffd", "x"], ""),
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3], ""),
        (b"a\xf0\x9f", ["a", "", ""], "\ufffd"),
        (b"\xf0\x9fA", ["", "", "\ufffdA"], ""),
    ],
)
def test_stream_gives_whole_characters(small: Tokenizer, data: bytes, pushed: list[str], flushed: str) -> None:
    stream = StreamDecoder(small)
    assert [stream.push(token) for token in data] == pushed
    assert stream.flush() == flushed
    assert stream.flush() == ""
    assert "".join(pushed) + flushed == small.decode(data) == data.decode("utf-8", "replace")


def test_any_stream_equals_the_whole_text(small: Tokenizer) -> None:
    rng = random.Random(3)
    hard = [0x80, 0xBF, 0xC0, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xF5, 0xFF, 65, 256, 259]
    for _ in range(3000):
        tokens = rng.choices(hard, k=rng.randint(0, 12))
        assert joined(small, tokens) == small.decode(tokens)


@pytest.mark.parametrize(
    ("name", "warning", "write"),
    [
        ("no pre", "no tokenizer.ggml.pre", lambda p: write_vocab(p, without=("pre",))),
        ("no eos", "no valid tokenizer.ggml.eos_token_id", lambda p: write_vocab(p, without=("eos_token_id",))),
        ("short types", "token_type has 100 of 261", lambda p: write_vocab(p, token_type=[1] * 100)),
        ("no merges", "merges are rebuilt", lambda p: write_vocab(p, without=("merges",))),
        ("short scores", "scores has 10 of 261", lambda p: write_vocab(p, scores=[0.0] * 10)),
    ],
)
def test_poor_vocabularies_work_with_one_warning(
    name: str, warning: str, write: Callable[[Path], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="freetoken"):
        tokenizer = Tokenizer(write(tmp_path / f"{name}.gguf"))
    assert [warning in record.getMessage() for record in caplog.records] == [True]
    assert tokenizer.encode("hello<|im_end|>", True, True) == [258, ord("o"), 260]
    assert tokenizer.is_control(259) and tokenizer.eog_tokens == {260}
    assert tokenizer.decode([258, ord("o")]) == "hello"


def test_a_default_eos_that_is_an_ordinary_token_does_not_end_texts(tmp_path: Path) -> None:
    for name, path in (
        ("none", write_vocab(tmp_path / "none.gguf", without=("eos_token_id",))),
        ("far", write_vocab(tmp_path / "far.gguf", eos_token_id=10**9)),
    ):
        tokenizer = Tokenizer(path)
        assert tokenizer.eos is None and not tokenizer.is_eog(11), name


def test_no_vocabulary_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, writer_changes in (("absent", {"without": ("model",)}), ("none", {"model": "no_vocab"})):
        tokenizer = Tokenizer(write_vocab(tmp_path / f"{name}.gguf", **writer_changes))  # type: ignore[arg-type]
        assert (tokenizer.vocab_type, tokenizer.eos, tokenizer.eog_tokens) == ("none", None, frozenset())
        assert tokenizer.decode([1, 2, 3]) == "" and joined(tokenizer, [4]) == ""
        with pytest.raises(RequestError, match="send token ids"):
            tokenizer.encode("text", True, True)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("message", "write"),
    [
        (
            "tokens 34 and 260 .* same text",
            lambda p: write_vocab(p, tokens=[*_byte_texts(), *"ĬĭĮį", '"']),
        ),
        ("llama.cpp cannot load the vocabulary: .*unknown tokenizer", lambda p: write_vocab(p, model="martian")),
        ("llama.cpp cannot load the vocabulary: .*unknown pre-tokenizer", lambda p: write_vocab(p, pre="martian")),
        ("tokens is missing", lambda p: write_vocab(p, without=("tokens",))),
        ("lacks 256 byte tokens", lambda p: write_vocab(p, model="llama", tokens=["<s>", "</s>", "é"])),
    ],
)
def test_hopeless_vocabularies_are_named(message: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer(write(tmp_path / "v.gguf"))


def test_not_a_model_file(tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes(b"GGUF but not really")
    for path in (tmp_path / "v.gguf", tmp_path / "nowhere.gguf"):
        with pytest.raises(ModelFileError):
            Tokenizer(path)


def test_special_tokens_that_do_not_exist_are_not_added(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(_byte_texts()[:11])
    writer.add_token_merges(["! !"])
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer(path)
    assert not tokenizer.add_bos and tokenizer.bos is None
    tokenizer.encode("x", add_special=True, parse_special=True)


@pytest.mark.weights
def test_ids_that_llama_cpp_publishes(llama_cpp_source: Path) -> None:
    """The `.inp` and `.out` files beside its vocabularies: texts and their ids, made by the models' own tokenizers."""
    n = 0
    for name in VOCABULARIES:
        path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
        tokenizer = Tokenizer(path)
        texts = Path(f"{path}.inp").read_text().split("\n__ggml_vocab_test__\n")
        lines = Path(f"{path}.out").read_text().splitlines()
        add_special = name == "bert-bge"
        for text, line in zip(texts, lines, strict=False):
            expected = [int(word) for word in line.split()]
            got = tokenizer.encode(text, add_special, False)
            assert (got[1:-1] if add_special else got) == expected, (name, text)
            n += 1
        tokenizer.close()
    assert n > 300


@pytest.mark.weights
@pytest.mark.parametrize("name", ["llama-bpe", "llama-spm", "qwen2", "gpt-2", "phi-3", "starcoder"])
def test_ids_and_texts_equal_llama_cpp(name: str, llama_cpp_source: Path) -> None:
    path = llama_cpp_source / "models" / f"ggml-vocab-{name}.gguf"
    tokenizer, oracle = Tokenizer(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in AWKWARD:
        for parse_special in (False, True):
            for add_special in (False, True):
                ids = tokenizer.encode(text, add_special, parse_special)
                assert ids == oracle.tokenize(text.encode(), add_special, parse_special), text
            assert joined(tokenizer, ids) == tokenizer.decode(ids)
    assert (tokenizer.n_vocab, tokenizer.eos) == (oracle.n_vocab(), oracle.token_eos())
    oracle.close()


@pytest.mark.weights
def test_smollm2(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    assert (tokenizer.n_vocab, tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (49152, 1, 2, False)
    assert tokenizer.piece(1, special=True) == b"<|im_start|>"
    assert tokenizer.chat_template is not None and "<|im_start|>" in tokenizer.chat_template
    text = "The capital of France is Paris. 🙂"
    assert tokenizer.decode(tokenizer.encode(text, True, True)) == text
