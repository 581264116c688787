"""Stage `clean`: from raw shards to dialogues worth learning, in the teacher's tokens; written dialogues join here.

An answer is dropped, with all turns after it, where it loops, breaks off without a whole sentence, leaves English
letters, or speaks of another model. What is left is counted by reason.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from freetoken.gguf import open_model
from tools.train_default_model.authored import dialogue
from tools.train_default_model.prompts import is_held_out
from tools.train_default_model.tokens import END, render, token_bytes, tokenizer_of
from tools.train_default_model.work import Clock, save_arrays, save_json, say

__all__ = ["clean", "judge"]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are a friendly and honest assistant.",
    "Answer in simple words.",
    "You are a storyteller for children.",
)
SYSTEM_SHARE = 12
"""One dialogue in so many begins with a system turn."""

_FOREIGN = re.compile(r"[^\x20-\x7e\n’‘“”–—…é°]")
_WRONG_SELF = re.compile(
    r"smollm|hugging ?face|openai|chatgpt|\bgpt\b|language model|\bAI (assistant|model|chatbot)|as an? (AI|artificial)|"
    r"\bhelpful (AI|assistant)|\bI'?m an AI\b|\bI am an AI\b|digital (assistant|being)|\bI'?m designed to|"
    r"\bI was (created|trained)",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"unable to (assist|help)|(can'?t|cannot|can not) (assist|help)|your (request|query)|sorry for your loss|"
    r"provide (me with )?(the|more) (information|context|details)|help me with something",
    re.IGNORECASE,
)
_STORY = re.compile(r"\b(story|fairy tale)\b(?! of five| that uses)")
MIN_STORY = 220
"""Characters; a story of one sentence is none."""
_LEFTOVER = re.compile(r"\[[A-Z][^\]]*\]|https?:|www\.|```|^#|\bdef |<\w+>|\\", re.MULTILINE)
_SENTENCE_END = re.compile(r"(?:(?<=[^\W\d])|(?<=[\"”')%])|(?<=\d\d))[.!?]+[\"”')*]*(?=\s|$)")
"""The end of a sentence, not the dot of a list's number."""
_COMPLAINTS = (
    (_FOREIGN, "foreign"),
    (_WRONG_SELF, "wrong self"),
    (_LEFTOVER, "leftover"),
    (_REFUSAL, "refusal"),
)
_SENTENCE = re.compile(r"[^.!?\n]+")


def judge(answer: str, is_cut: bool) -> tuple[str, int]:
    """(reason of refusal or "", characters to keep) of one answer."""
    keep = len(answer)
    if is_cut:
        ends = [m.end() for m in _SENTENCE_END.finditer(answer)]
        if not ends or ends[-1] < 40:
            return "cut off", 0
        keep = ends[-1]
        answer = answer[:keep]
    text = answer.strip()
    if len(text) < 2 or text[0].islower():
        return "empty", 0
    if text != answer or not _SENTENCE_END.search(text[-6:]):
        return "no end", 0
    for pattern, reason in _COMPLAINTS:
        if pattern.search(text):
            return reason, 0
    return ("loop", 0) if _loops(text) else ("", keep)


def _loops(text: str) -> bool:
    """A sentence said twice, or too few different runs of four words."""
    sentences = [s.strip().lower() for s in _SENTENCE.findall(text) if len(s) > 16]
    if len(set(sentences)) < len(sentences):
        return True
    words = text.lower().split()
    runs = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return len(runs) > 8 and len(set(runs)) < 0.85 * len(runs)


class _Worker:
    """What a process needs: the teacher's tokenizer and the bytes of its tokens."""

    tokenizer: Tokenizer
    pieces: list[bytes]
    user: list[int]
    assistant: list[int]


def _start(teacher: Path) -> None:
    with open_model(teacher) as file:
        _Worker.tokenizer = tokenizer_of(file)
        _Worker.pieces = token_bytes(list(file.metadata["tokenizer.ggml.tokens"]))
    _Worker.user = _encode("<|im_start|>user\n")
    _Worker.assistant = _encode("<|im_start|>assistant\n")


def _encode(text: str) -> list[int]:
    return list(_Worker.tokenizer.encode(text, add_special_tokens=False).ids)


def _split(tokens: list[int]) -> Iterator[tuple[list[int], list[int], bool]]:
    """(user's content, answer, whether it is cut) of each pair of turns."""
    starts = [i for i, token in enumerate(tokens) if token == _Worker.user[0]]
    for a, b in zip(starts[::2], starts[1::2], strict=False):
        end = next((i for i in range(b, len(tokens)) if tokens[i] == END), len(tokens))
        user = tokens[a + len(_Worker.user) : b - 2]
        yield user, tokens[b + len(_Worker.assistant) : end], end == len(tokens)


def _bytes(tokens: list[int]) -> bytes:
    return b"".join(_Worker.pieces[t] for t in tokens)


def _good_turns(tokens: list[int], reasons: Counter[str]) -> list[list[int]]:
    """Contents of the turns worth keeping, in tokens: user, assistant, ..."""
    out: list[list[int]] = []
    for user, answer, is_cut in _split(tokens):
        if out and is_held_out(_bytes(user)):
            break
        try:
            text = _bytes(answer).decode()
        except UnicodeDecodeError:
            reasons["foreign"] += 1
            break
        reason, keep = judge(text, is_cut)
        if not reason and keep < MIN_STORY and _STORY.search(_bytes(user).decode(errors="replace")):
            reason = "short story"
        reasons[reason or "kept"] += 1
        if reason:
            break
        if is_cut:
            ends = np.cumsum([len(_Worker.pieces[t]) for t in answer])
            answer = answer[: int(np.searchsorted(ends, len(text[:keep].encode()), side="right"))]
            if not _SENTENCE_END.search(_bytes(answer).decode(errors="replace")[-6:]):
                break
        out += [user, answer]
        if is_cut:
            break
    return out


def _rendered(turns: list[list[int]], number: int) -> list[int]:
    """The dialogue's tokens, one in SYSTEM_SHARE with a system turn."""
    newline = _encode("\n")
    out: list[int] = []
    if number % SYSTEM_SHARE == 0:
        out += _encode(f"<|im_start|>system\n{SYSTEMS[number // SYSTEM_SHARE % len(SYSTEMS)]}<|im_end|>\n")
    for i, turn in enumerate(turns):
        out += (_Worker.assistant if i % 2 else _Worker.user) + turn + [END] + newline
    return out[:-1]


def _clean_shard(path: Path, target: Path) -> Counter[str]:
    """Clean one raw shard."""
    with np.load(path) as file:
        tokens, offsets = file["tokens"], file["offsets"]
    reasons: Counter[str] = Counter()
    docs, held, keys = [], [], []
    for a, b in itertools.pairwise(offsets):
        turns = _good_turns(tokens[a:b].tolist(), reasons)
        if turns:
            key = zlib.crc32(_bytes([t for turn in turns for t in turn]))
            docs.append(_rendered(turns, key))
            held.append(is_held_out(_bytes(turns[0])))
            keys.append(key)
    _save(target, docs, held, keys)
    return reasons


def _write_authored(seed: int, first: int, n: int, target: Path) -> Counter[str]:
    """`n` written dialogues from number `first` on."""
    docs, keys = [], []
    for i in range(first, first + n):
        text = render(dialogue(seed, i), SYSTEMS[i // SYSTEM_SHARE % len(SYSTEMS)] if i % SYSTEM_SHARE == 0 else "")
        docs.append(_encode(text))
        keys.append(zlib.crc32(f"own {i}".encode()))  # repetition is wanted here
    _save(target, docs, [False] * n, keys)
    return Counter(authored=n)


def _save(target: Path, docs: list[list[int]], held: list[bool], keys: list[int]) -> None:
    flat = np.array([t for doc in docs for t in doc], dtype=np.uint16)
    arrays = {"tokens": flat, "offsets": np.cumsum([0, *map(len, docs)])}
    save_arrays(target, arrays | {"held": np.array(held, dtype=bool), "keys": np.array(keys, dtype=np.uint32)})


def clean(folder: Path, teacher: Path, *, n_processes: int, authored_share: float, budget_s: float) -> None:
    """Clean every raw shard that is not clean yet, and add written dialogues in proportion."""
    clock = Clock(budget_s)
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(n_processes, get_context("spawn"), _start, (teacher,)) as pool:
        jobs = []
        for number, path in enumerate(sorted(folder.glob("raw-*.npz"))):
            with np.load(path) as file:
                n_authored = int(authored_share * (len(file["offsets"]) - 1))
            target = folder / path.name.replace("raw", "clean")
            if not target.exists():
                jobs.append(pool.submit(_clean_shard, path, target))
            own = folder / path.name.replace("raw", "clean-own")
            if not own.exists() and n_authored:
                jobs.append(pool.submit(_write_authored, 1, number * 100_000, n_authored, own))
        for job in jobs:
            if clock.is_over:
                job.cancel()
            else:
                total += job.result()
            if clock.is_due():
                say("clean", f"{total}")
    save_json(folder / "clean.json", dict(total))
    say("clean", f"{dict(total)} in {clock.elapsed_s:.0f} s")
