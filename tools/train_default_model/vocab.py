"""Stage `vocab`: our byte-level BPE, trained on the cleaned text, and how it is written into a GGUF."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from freetoken.gguf import open_model
from tools.train_default_model.tokens import CONTROL, END, PAD, new_tokenizer, token_bytes
from tools.train_default_model.work import Clock, say

__all__ = ["CHAT_TEMPLATE", "add_vocabulary", "load_tokenizer", "train_vocabulary"]

PRE_TOKENIZER = "smollm"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NORMAL_TYPE, CONTROL_TYPE = 1, 3


def _texts(shards: list[Path], pieces: list[bytes], n_bytes: int) -> Iterator[str]:
    """Dialogues without markers, from every shard in turn, until `n_bytes` are out."""
    share = n_bytes // max(1, len(shards))
    table = [b"\n" if i <= END else piece for i, piece in enumerate(pieces)]
    for shard in shards:
        with np.load(shard) as file:
            tokens, offsets = file["tokens"].tolist(), file["offsets"].tolist()
        done = 0
        for a, b in itertools.pairwise(offsets):
            text = b"".join(table[t] for t in tokens[a:b]).decode(errors="ignore")
            done += len(text)
            yield text
            if done > share:
                break


def train_vocabulary(folder: Path, teacher: Path, *, n_vocab: int, n_bytes: int) -> None:
    """Write vocab.json, unless it is there."""
    target = folder / "vocab.json"
    if target.exists():
        return
    clock = Clock(0)
    with open_model(teacher) as file:
        pieces = token_bytes(list(file.metadata["tokenizer.ggml.tokens"]))
    tokenizer = new_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        min_frequency=2,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(sorted(folder.glob("clean-*.npz")), pieces, n_bytes), trainer)
    partial = target.with_name("vocab.part")
    tokenizer.save(str(partial))
    partial.rename(target)
    say("vocab", f"{tokenizer.get_vocab_size()} tokens in {clock.elapsed_s:.0f} s")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The trained tokenizer."""
    return Tokenizer.from_file(str(folder / "vocab.json"))


def add_vocabulary(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Tokens, types, merges, special ids and the chat template as llama.cpp reads them."""
    model = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL_TYPE if token in CONTROL else NORMAL_TYPE for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(PAD)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(END)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)
