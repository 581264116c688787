"""Whether an answer is grammatical and on topic, by a rule that needs no reader: the teacher's probabilities.

Fluent: the teacher's mean loss over the answer's tokens, given the prompt, is at most that of 95% of its own held-out
answers (sampled ones, cleaned as the training text was). On topic: the teacher finds the answer likelier after its
prompt than after another prompt. Good: both, and the answer passes the filter of the training text.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tools.train_default_model.clean import judge
from tools.train_default_model.teacher import Teacher
from tools.train_default_model.tokens import END, SYSTEM

__all__ = ["Verdict", "judge_answers", "threshold"]

SHARE = 0.95


@dataclass(frozen=True)
class Verdict:
    """One answer's figures: the teacher's mean loss in nats a token after its prompt and after another."""

    loss: float
    other_loss: float
    complaint: str
    is_fluent: bool

    @property
    def is_on_topic(self) -> bool:
        return self.loss < self.other_loss

    @property
    def is_good(self) -> bool:
        return self.is_fluent and self.is_on_topic and not self.complaint


@torch.inference_mode()
def answer_loss(teacher: Teacher, prompt: str, answer: str) -> float:
    """The teacher's mean loss of an answer and its end, in nats a token."""
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    encode = teacher.tokenizer.encode
    start = encode(head, add_special_tokens=False).ids
    end = [*encode(answer, add_special_tokens=False).ids, END]
    tokens = torch.tensor([start + end], device=teacher.embedding.device)
    logits = teacher.logits(teacher.hidden(tokens[:, :-1])[0, len(start) - 1 :])
    return float(F.cross_entropy(logits.float(), tokens[0, len(start) :]))


def threshold(teacher: Teacher, folder: Path, n: int) -> float:
    """The loss below which SHARE of the teacher's own `n` held-out answers (first turns) lie."""
    with np.load(folder / "held-out-docs.npz") as file:
        tokens, offsets = file["tokens"], file["offsets"]
    losses = []
    for a, b in itertools.pairwise(offsets):
        turns = b"".join(teacher.pieces[t] for t in tokens[a:b]).decode().split("<|im_start|>")
        if turns[1].startswith("user\n") and turns[2].startswith("assistant\n"):
            prompt, answer = (turn.split("\n", 1)[1].split("<|im_end|>")[0] for turn in turns[1:3])
            losses.append(answer_loss(teacher, prompt, answer))
        if len(losses) == n:
            break
    return float(np.quantile(losses, SHARE))


def judge_answers(teacher: Teacher, prompts: Sequence[str], answers: Sequence[str], limit: float) -> list[Verdict]:
    """A verdict for each answer; the other prompt is the next but two in the list."""
    out = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        loss = answer_loss(teacher, prompt, answer)
        other = answer_loss(teacher, prompts[(i + 3) % len(prompts)], answer)
        complaint, _ = judge(answer, is_cut=False)
        out.append(Verdict(loss, other, complaint, loss <= limit))
    return out
