"""Both tokenizers' common ground: control tokens, SmolLM2's tokenizer from its GGUF, the rendering of a dialogue.

Never imports torch: the worker processes of the text stages use it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from freetoken.gguf import ModelFile
from tools.tiny_vocab import byte_symbols

__all__ = ["CONTROL", "END", "PAD", "START", "SYSTEM", "new_tokenizer", "render", "token_bytes", "tokenizer_of"]

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD, START, END = 0, 1, 2
"""<|endoftext|>, <|im_start|>, <|im_end|>: the same ids in SmolLM2's vocabulary and in ours."""
SYSTEM = "You are a helpful assistant. Answer clearly and in simple sentences."
"""The system message under which the teacher answers; its answers are shorter and plainer than under its own."""
CONTROL_TYPE = 3


def tokenizer_of(file: ModelFile) -> Tokenizer:
    """SmolLM2's tokenizer, made from the file's metadata."""
    tokens = list(file.metadata["tokenizer.ggml.tokens"])
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata["tokenizer.ggml.merges"]]
    types = np.asarray(file.metadata["tokenizer.ggml.token_type"])
    out = new_tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    out.add_special_tokens([AddedToken(tokens[i], special=True) for i in np.flatnonzero(types == CONTROL_TYPE)])
    return out


def new_tokenizer(model: models.BPE) -> Tokenizer:
    """A byte-level BPE whose words are single digits and GPT-2's words: llama.cpp calls that "smollm"."""
    out = Tokenizer(model)
    digits = pre_tokenizers.Digits(individual_digits=True)
    out.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    out.decoder = decoders.ByteLevel()
    return out


def render(turns: Sequence[str], system: str = "") -> str:
    """ChatML of turns user, assistant, user ...; the last turn ends with its <|im_end|>."""
    roles = [("system", system)] if system else []
    roles += [("assistant" if i % 2 else "user", turn) for i, turn in enumerate(turns)]
    return "\n".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in roles)


def token_bytes(tokens: list[str]) -> list[bytes]:
    """The bytes of each token; of control tokens those of their name."""
    value = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    out = []
    for token in tokens:
        is_control = token.startswith("<|") and token.endswith("|>")
        out.append(token.encode() if is_control else bytes(value[c] for c in token if c in value))
    return out
