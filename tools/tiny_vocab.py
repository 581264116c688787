"""A small byte-level BPE vocabulary and a ChatML template, both our own, for generated model files.

256 bytes, merges learnt from the paragraph below, filler tokens where a size is asked for, three control tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import gguf

__all__ = ["CHATML", "Vocabulary", "add_vocabulary", "byte_symbols", "make_vocabulary"]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

CORPUS = """
the small river ran under the old stone bridge and the children threw sticks into the water and watched them
drift away in the morning the baker opened his shop and the smell of warm bread went through the whole street
she asked him where the train was going and he answered that it would stop in every town along the coast
one two three four five six seven eight nine ten and then the counting began again with a different voice
please tell me what the capital of the country is and how many people live there when winter comes
"""

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NORMAL_TYPE, CONTROL_TYPE = 1, 3


@dataclass(frozen=True)
class Vocabulary:
    """Token texts in GPT-2's byte alphabet, their ggml token types, merges in rank order; ids of the control tokens."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    @property
    def eos(self) -> int:
        """<|im_end|>"""
        return self.tokens.index(CONTROL[2])

    @property
    def bos(self) -> int:
        """<|endoftext|>, also the padding token"""
        return self.tokens.index(CONTROL[0])


def byte_symbols() -> list[str]:
    """The printable character that GPT-2's byte-level BPE uses for each byte 0..255."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def learn_merges(n: int) -> list[tuple[str, str]]:
    """The first `n` byte-pair merges of CORPUS: the most frequent pair first, ties by text."""
    space = byte_symbols()[0x20]
    words = Counter(tuple(space + word) for word in CORPUS.split())
    merges: list[tuple[str, str]] = []
    while len(merges) < n:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = Counter({merge_word(word, best): count for word, count in words.items()})
    return merges


def merge_word(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    """`word` with every occurrence of `pair` joined."""
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def make_vocabulary(n_vocab: int) -> Vocabulary:
    """A vocabulary of exactly `n_vocab` tokens (at least 259): bytes, merged words, filler tokens, control tokens.

    Filler tokens never come out of the tokenizer (no merge leads to them); they read as " w123".
    """
    if n_vocab < 256 + len(CONTROL):
        raise ValueError(f"n_vocab is {n_vocab}; bytes and control tokens alone need {256 + len(CONTROL)}")
    room = n_vocab - 256 - len(CONTROL)
    merges = learn_merges(min(room, 200))
    tokens = byte_symbols() + [a + b for a, b in merges]
    space = byte_symbols()[0x20]
    tokens += [f"{space}w{i}" for i in range(n_vocab - len(CONTROL) - len(tokens))]
    types = [NORMAL_TYPE] * len(tokens) + [CONTROL_TYPE] * len(CONTROL)
    return Vocabulary([*tokens, *CONTROL], types, [f"{a} {b}" for a, b in merges])


def add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary, *, add_bos: bool = False) -> None:
    """Write the vocabulary and the ChatML template into `writer`'s metadata."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.bos)
    writer.add_eos_token_id(vocabulary.eos)
    writer.add_pad_token_id(vocabulary.bos)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHATML)
