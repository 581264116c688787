"""The model that ships with the project: found without -m, small enough, and able to answer."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from freetoken.chat import load_template, prompt_tokens
from freetoken.cli import default_model as module
from freetoken.cli import flags
from freetoken.cli.default_model import FILE_NAME, default_model
from freetoken.cli.parser import Parser
from freetoken.errors import OptionError
from freetoken.gguf import open_model
from freetoken.spec import read_spec
from freetoken.tokenizer import Tokenizer
from tools.ours import Ours
from tools.peer import Peer

SHIPPED = Path(__file__).resolve().parent.parent / "models" / FILE_NAME
MAX_BYTES = 24_000_000
needs_model = pytest.mark.skipif(not SHIPPED.exists(), reason=f"{SHIPPED} is not there")


def arguments(*words: str) -> argparse.Namespace:
    parser = Parser("ft test", "")
    flags.add_model_flags(parser)
    return parser.parse_args(list(words))


def test_the_shipped_model_is_taken_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PACKAGE", tmp_path / "freetoken")
    monkeypatch.delenv("LLAMA_ARG_MODEL", raising=False)
    with pytest.raises(OptionError, match="-m FILE"):
        flags.model_options(arguments())
    for folder in (tmp_path / "models", tmp_path / "freetoken" / "models"):
        folder.mkdir(parents=True)
        (folder / FILE_NAME).write_bytes(b"GGUF")
        assert flags.model_options(arguments()).path == folder / FILE_NAME
    assert flags.model_options(arguments("-m", "other.gguf")).path == Path("other.gguf")


@needs_model
def test_its_geometry_is_what_the_card_says() -> None:
    assert default_model() == SHIPPED
    assert SHIPPED.stat().st_size <= MAX_BYTES
    with open_model(SHIPPED) as file:
        spec = read_spec(file)
        widths = {tensor.shape[0] for tensor in file.tensors.values() if len(tensor.shape) > 1}
        assert file.metadata["general.license"] == "apache-2.0"
    assert spec.architecture == "qwen3moe"
    assert spec.n_layer >= 6 and spec.n_expert >= 16 and 2 <= spec.n_expert_used <= 4
    assert all(width % 256 == 0 for width in widths)
    assert spec.n_ctx_train >= 2048


@needs_model
def test_it_answers_as_its_weights_in_fp32_would(tmp_path: Path) -> None:
    from tools.dequantise import dequantise_file

    tokenizer = Tokenizer(SHIPPED)
    template = load_template(None, tokenizer)
    tokens = prompt_tokens(tokenizer, template, [{"role": "user", "content": "What is the capital of France?"}])
    with Ours(SHIPPED, n_ctx=256) as ours:
        answer = ours.greedy(tokens, 32, tokenizer.eog_tokens)
    assert "Paris" in tokenizer.decode(answer)
    with Peer(dequantise_file(SHIPPED, tmp_path / "fp32.gguf"), n_ctx=256, exact=True) as peer:
        logits = peer.decode([*tokens, *answer[:-1]], every=True)[len(tokens) - 1 :]
    for row, token in zip(logits, answer, strict=True):
        assert row.max() - row[token] <= 0.1


@needs_model
@pytest.mark.parametrize("question", ["Who are you?", "Tell me a short story about a brave mouse."])
def test_its_answers_end(question: str) -> None:
    tokenizer = Tokenizer(SHIPPED)
    tokens = prompt_tokens(tokenizer, load_template(None, tokenizer), [{"role": "user", "content": question}])
    with Ours(SHIPPED, n_ctx=1024) as ours:
        answer = ours.greedy(tokens, 512, tokenizer.eog_tokens)
    assert answer[-1] in tokenizer.eog_tokens
    assert len(answer) > 8
