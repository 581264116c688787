"""Stage `evaluate`: what the model card says, measured on the exported files; writes card.json and the picture.

Needs llama-cpp-python and our native library: it runs where the project is installed.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freetoken.chat import load_template, prompt_tokens
from freetoken.gguf import open_model
from freetoken.tokenizer import Tokenizer
from tools.dequantise import dequantise_file
from tools.ours import Ours
from tools.peer import Peer
from tools.synth_check import hit_rate, overlap
from tools.train_default_model.judge import judge_answers, threshold
from tools.train_default_model.picture import expert_load
from tools.train_default_model.prompts import held_out_prompts
from tools.train_default_model.teacher import Teacher
from tools.train_default_model.tokens import token_bytes
from tools.train_default_model.vocab import load_tokenizer
from tools.train_default_model.work import load_json, save_json, say

__all__ = ["CARD_QUESTIONS", "best_or_near", "evaluate", "routes_of", "same_greedy"]

CARD_QUESTIONS = (
    "Hello!",
    "Who are you?",
    "What is the capital of France?",
    "What is the capital of Japan?",
    "What is the opposite of hot?",
    "What is 3 + 4?",
    "What day comes after Monday?",
    "How many legs does a spider have?",
    "Why is the sky blue?",
    "Where do penguins live?",
    "What do bees make?",
    "Explain gravity to a child.",
    "How do I make a cup of tea?",
    "Give me three tips for sleeping well.",
    "I feel sad today. What can I do?",
    "Tell me a short story about a brave mouse.",
    "Write a short story about a robot in a garden.",
    "Write a short poem about the sea.",
    "Name three fruits.",
    "What did my neighbor eat this morning?",
)
NEAR_NATS = 0.1
CAPACITIES = (0.25, 0.37, 0.5)
ROUTED_DIALOGUES = 100


class Chat:
    """The file's vocabulary and template: questions to tokens, tokens to text."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer(path)
        self._template = load_template(None, self.tokenizer)

    def tokens(self, question: str) -> list[int]:
        return prompt_tokens(self.tokenizer, self._template, [{"role": "user", "content": question}])

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)


def greedy_answers(path: Path, chat: Chat, questions: Sequence[str], n: int, *, exact: bool) -> list[list[int]]:
    """Our greedy tokens for each question, the end token included."""
    with Ours(path, n_ctx=1024, exact=exact) as ours:
        return [ours.greedy(chat.tokens(q), n, chat.tokenizer.eog_tokens) for q in questions]


def same_greedy(path: Path, chat: Chat, questions: Sequence[str], n: int) -> list[bool]:
    """For each question, whether llama.cpp's greedy tokens on the same (F32) file are ours."""
    ours = greedy_answers(path, chat, questions, n, exact=True)
    with Peer(path, n_ctx=1024, n_threads=2, exact=True) as peer:
        return [peer.greedy(chat.tokens(q), n) == mine for q, mine in zip(questions, ours, strict=True)]


def best_or_near(path: Path, chat: Chat, questions: Sequence[str], n: int) -> dict[str, Any]:
    """Our greedy tokens on a quantised file, and how far each is from the best of its weights in fp32 (llama.cpp)."""
    answers = greedy_answers(path, chat, questions, n, exact=False)
    gaps: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        plain = dequantise_file(path, Path(name) / "fp32.gguf")
        with Peer(plain, n_ctx=1024, n_threads=2, exact=True) as peer:
            for question, answer in zip(questions, answers, strict=True):
                peer.clear()
                start = chat.tokens(question)
                logits = peer.decode(start + answer[:-1], every=True)[len(start) - 1 :]
                gaps += [float(row.max() - row[token]) for row, token in zip(logits, answer, strict=True)]
    return {"tokens": len(gaps), "best": sum(g == 0 for g in gaps), "largest_gap_nats": max(gaps)}


def routes_of(path: Path, streams: Sequence[Sequence[int]]) -> np.ndarray:
    """int [tokens, layer, used]: experts that llama.cpp routes each stream's tokens to, all streams in a row."""
    seen: dict[int, list[np.ndarray]] = {}

    def keep(name: str, values: np.ndarray) -> None:
        seen.setdefault(int(name.rpartition("-")[2]), []).append(values.copy())

    with Peer(path, n_ctx=1024, n_threads=2, capture=(("ffn_moe_topk-",), keep)) as peer:
        for stream in streams:
            peer.clear()
            peer.decode(stream, every=True)
    return np.stack([np.concatenate(seen[layer]) for layer in sorted(seen)], axis=1)


def their_pieces(teacher_path: Path) -> list[bytes]:
    """The bytes of each of the teacher's tokens."""
    with open_model(teacher_path) as file:
        return token_bytes(list(file.metadata["tokenizer.ggml.tokens"]))


def held_out_streams(folder: Path, pieces: list[bytes], n: int) -> list[list[int]]:
    """The first `n` held-out dialogues of the teacher in our tokens."""
    with np.load(folder / "held-out-docs.npz") as file:
        tokens, offsets = file["tokens"], file["offsets"]
    texts = [b"".join(pieces[t] for t in tokens[a:b]).decode() for a, b in itertools.pairwise(offsets[: n + 1])]
    return [encoding.ids for encoding in load_tokenizer(folder).encode_batch(texts, add_special_tokens=False)]


def times_trained(folder: Path, pieces: list[bytes], questions: Sequence[str]) -> list[list[int]]:
    """For each question, how often it stands in the training text with a generated answer and with a written one."""
    turns = [f"<|im_start|>user\n{question}<|im_end|>".encode() for question in questions]
    counts = [[0, 0] for _ in questions]
    for path in sorted(folder.glob("clean-*.npz")):
        with np.load(path) as file:
            text = b"".join([pieces[t] for t in file["tokens"].tolist()])
        for count, turn in zip(counts, turns, strict=True):
            count["-own-" in path.name] += text.count(turn)
    return counts


def evaluate(
    folder: Path, files: dict[str, Path], teacher_path: Path, target: Path, *, n_answers: int, n_tokens: int
) -> dict[str, Any]:
    """Measure everything; `files` has "shipped" and "F32"; card.json and expert-load.svg go to `target`."""
    shipped, plain = files["shipped"], files["F32"]
    chat = Chat(shipped)
    card: dict[str, Any] = {"file_bytes": shipped.stat().st_size}
    for name in ("student", "dense"):
        card[name] = load_json(folder / f"{name}-held-out.json") | {"training": load_json(folder / f"{name}.json")}
    card["text"], card["hints"] = load_json(folder / "clean.json"), load_json(folder / "hints.json")
    answers = greedy_answers(shipped, chat, CARD_QUESTIONS, n_tokens, exact=False)
    card["samples"] = [[q, chat.text(a)] for q, a in zip(CARD_QUESTIONS, answers, strict=True)]
    say("evaluate", "samples are there")
    card["same_greedy_f32"] = same_greedy(plain, chat, CARD_QUESTIONS, n_tokens)
    say(
        "evaluate", f"F32, the same greedy tokens in llama.cpp: {sum(card['same_greedy_f32'])} of {len(CARD_QUESTIONS)}"
    )
    card["best_or_near"] = best_or_near(shipped, chat, CARD_QUESTIONS, n_tokens)
    say("evaluate", f"shipped file against fp32: {card['best_or_near']}")
    pieces = their_pieces(teacher_path)
    card["times_trained"] = times_trained(folder, pieces, CARD_QUESTIONS)
    card["routing"], card["expert_counts"] = _routing(shipped, held_out_streams(folder, pieces, ROUTED_DIALOGUES))
    expert_load(card["expert_counts"], target / "expert-load.svg")
    say("evaluate", f"routing: {card['routing']}")
    card["held_out_answers"] = _held_out_answers(shipped, chat, folder, teacher_path, n_answers, n_tokens)
    save_json(target / "card.json", card)
    return card


def _routing(path: Path, streams: list[list[int]]) -> tuple[dict[str, float], list[list[int]]]:
    """Hit rates of one LRU over (layer, expert), the share of a token's experts that its predecessor chose; and how
    often each expert of each layer was chosen."""
    with open_model(path) as file:
        n_expert = file.metadata.get_int("qwen3moe.expert_count", 0)
    routes = routes_of(path, streams)
    out = {f"lru_hit_rate_{capacity:.2f}": hit_rate(routes, n_expert, capacity) for capacity in CAPACITIES}
    counts = [np.bincount(layer.ravel(), minlength=n_expert).tolist() for layer in routes.swapaxes(0, 1)]
    return out | {"adjacent_overlap": overlap(routes), "tokens": float(len(routes))}, counts


def _held_out_answers(
    path: Path, chat: Chat, folder: Path, teacher_path: Path, n_answers: int, n_tokens: int
) -> dict[str, Any]:
    """The share of good answers on held-out prompts, by the rule of `judge`."""
    teacher = Teacher(teacher_path, "cpu", torch.float32)
    limit = threshold(teacher, folder, n_answers)
    prompts = held_out_prompts(n_answers)
    answers = [chat.text(a) for a in greedy_answers(path, chat, prompts, n_tokens, exact=False)]
    verdicts = judge_answers(teacher, prompts, answers, limit)
    n = len(verdicts)
    shares = {key: sum(getattr(v, key) for v in verdicts) / n for key in ("is_fluent", "is_on_topic", "is_good")}
    say("evaluate", f"{n} held-out prompts, limit {limit:.2f} nats: {shares}")
    rows = [[p, a, asdict(v)] for p, a, v in zip(prompts, answers, verdicts, strict=True)]
    return {"limit_nats": limit, "shares": shares, "answers": rows}
