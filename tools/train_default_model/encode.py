"""Stage `encode`: cleaned dialogues in our tokens, aligned with the teacher's.

For each of our tokens: whether it belongs to an answer, and `source`, the teacher's token at whose end it begins (-1
where none does): the teacher's prediction after that token is a prediction of ours. Written dialogues have none, since
there the teacher would be wrong.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from freetoken.gguf import open_model
from tools.train_default_model.tokens import PAD, token_bytes
from tools.train_default_model.vocab import load_tokenizer
from tools.train_default_model.work import Clock, save_arrays, say

__all__ = ["Dataset", "align", "encode", "first_tokens", "load_dataset"]

_ANSWER = re.compile(rb"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.DOTALL)


@dataclass
class Dataset:
    """All dialogues, flat. `offsets` and `teacher_offsets` have one entry more than there are dialogues."""

    tokens: np.ndarray
    """uint16 [n], ours; each dialogue ends with <|endoftext|>."""
    answer: np.ndarray
    """bool [n]: the token is part of an answer or ends it."""
    source: np.ndarray
    """int16 [n]: the teacher's token in the dialogue after which this one begins, or -1."""
    offsets: np.ndarray
    teacher: np.ndarray
    teacher_offsets: np.ndarray
    held: np.ndarray
    """bool, a dialogue each: kept for evaluation."""


class _Worker:
    ours: Tokenizer
    our_bytes: np.ndarray
    their_pieces: list[bytes]
    their_bytes: np.ndarray


def _start(folder: Path, teacher: Path) -> None:
    _Worker.ours = load_tokenizer(folder)
    _Worker.our_bytes = _lengths(our_pieces(_Worker.ours))
    with open_model(teacher) as file:
        _Worker.their_pieces = token_bytes(list(file.metadata["tokenizer.ggml.tokens"]))
    _Worker.their_bytes = _lengths(_Worker.their_pieces)


def our_pieces(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of each of our tokens."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    return token_bytes([token for token, _ in sorted(vocab.items(), key=lambda item: item[1])])


def _lengths(pieces: list[bytes]) -> np.ndarray:
    return np.array([len(piece) for piece in pieces])


def align(our_lengths: np.ndarray, their_lengths: np.ndarray) -> np.ndarray:
    """int16, one of our tokens each: the teacher's token whose end is this token's start, or -1."""
    starts = np.cumsum(our_lengths) - our_lengths
    ends = np.cumsum(their_lengths)
    at = np.searchsorted(ends, starts).clip(max=len(ends) - 1)
    return np.where(ends[at] == starts, at, -1).astype(np.int16)


def _encode_shard(path: Path, target: Path) -> int:
    """Encode one cleaned shard; the number of our tokens."""
    with np.load(path) as file:
        theirs, offsets, held, keys = (file[name] for name in ("tokens", "offsets", "held", "keys"))
    is_own = "-own-" in path.name
    token_list = theirs.tolist()
    pieces = _Worker.their_pieces
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    texts = [b"".join(pieces[t] for t in token_list[a:b]) for a, b in spans]
    encodings = _Worker.ours.encode_batch([text.decode() for text in texts], add_special_tokens=False)
    parts, answers, sources = [np.zeros(0, np.uint16)], [np.zeros(0, bool)], [np.zeros(0, np.int16)]
    for (a, b), text, encoding in zip(spans, texts, encodings, strict=True):
        ids = np.array([*encoding.ids, PAD], dtype=np.uint16)
        lengths = _Worker.our_bytes[ids]
        starts = np.cumsum(lengths) - lengths
        is_answer = np.zeros(len(ids), dtype=bool)
        for match in _ANSWER.finditer(text):
            is_answer |= (starts >= match.start(1)) & (starts < match.end(1))
        parts.append(ids)
        answers.append(is_answer)
        source = align(lengths, _Worker.their_bytes[theirs[a:b]])
        sources.append(np.full_like(source, -1) if is_own else source)
    arrays = {"tokens": np.concatenate(parts), "answer": np.concatenate(answers), "source": np.concatenate(sources)}
    arrays |= {"offsets": np.cumsum([len(part) for part in parts]), "held": held, "keys": keys}
    save_arrays(target, arrays | {"teacher": theirs, "teacher_offsets": offsets})
    return len(arrays["tokens"])


def encode(folder: Path, teacher: Path, *, n_processes: int, budget_s: float) -> None:
    """Encode every cleaned shard that is not encoded yet."""
    clock = Clock(budget_s)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one core
    n = 0
    with ProcessPoolExecutor(n_processes, get_context("spawn"), _start, (folder, teacher)) as pool:
        targets = {path: folder / path.name.replace("clean", "enc") for path in sorted(folder.glob("clean-*.npz"))}
        jobs = [pool.submit(_encode_shard, path, to) for path, to in targets.items() if not to.exists()]
        for job in jobs:
            if clock.is_over:
                job.cancel()
            else:
                n += job.result()
    say("encode", f"{n / 1e6:.2f} M tokens in {clock.elapsed_s:.0f} s")
    merge(folder)


def load_dataset(folder: Path) -> Dataset:
    """What `merge` wrote."""
    with np.load(folder / "dataset.npz") as file:
        return Dataset(**{name: file[name] for name in file.files})


def merge(folder: Path) -> None:
    """Write dataset.npz: all encoded shards; of dialogues that occur twice (by checksum) the first."""
    names = ("tokens", "answer", "source", "offsets", "teacher", "teacher_offsets", "held", "keys")
    shards = []
    for path in sorted(folder.glob("enc-*.npz")):
        with np.load(path) as file:
            shards.append({name: file[name] for name in names})
    if not shards:
        raise FileNotFoundError(f"{folder}: no encoded shards: run the stages before this one")
    out = {name: np.concatenate([s[name] for s in shards]) for name in names if "offsets" not in name}
    for name in ("offsets", "teacher_offsets"):
        lengths = np.concatenate([np.diff(s[name]) for s in shards])
        out[name] = np.concatenate([[0], np.cumsum(lengths)])
    _, first = np.unique(out.pop("keys"), return_index=True)
    data = _select(Dataset(**out), np.sort(first))
    save_arrays(folder / "dataset.npz", {field.name: getattr(data, field.name) for field in fields(data)})
    say("encode", f"{len(data.held)} of {len(out['held'])} dialogues are different, {data.held.sum()} held out")


def _select(data: Dataset, chosen: np.ndarray) -> Dataset:
    """The chosen dialogues."""
    n_docs = len(data.offsets) - 1
    if len(chosen) == n_docs:
        return data
    is_in = np.zeros(n_docs, dtype=bool)
    is_in[chosen] = True
    ours, theirs = np.diff(data.offsets), np.diff(data.teacher_offsets)
    keep, keep_teacher = np.repeat(is_in, ours), np.repeat(is_in, theirs)
    return Dataset(
        tokens=data.tokens[keep],
        answer=data.answer[keep],
        source=data.source[keep],
        offsets=np.concatenate([[0], np.cumsum(ours[is_in])]),
        teacher=data.teacher[keep_teacher],
        teacher_offsets=np.concatenate([[0], np.cumsum(theirs[is_in])]),
        held=data.held[is_in],
    )


def first_tokens(ours: Tokenizer, their_pieces: list[bytes]) -> np.ndarray:
    """int64 [teacher's vocabulary]: our first token in each of the teacher's tokens; of a broken character its byte."""
    single = {piece: i for i, piece in enumerate(our_pieces(ours)) if len(piece) == 1}
    out = np.zeros(len(their_pieces), dtype=np.int64)
    for i, piece in enumerate(their_pieces):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = ""
        ids = ours.encode(text, add_special_tokens=False).ids if text else []
        out[i] = ids[0] if ids else single.get(piece[:1], PAD)
    return out
