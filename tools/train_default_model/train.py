"""Stage `train`: the student by next token and by the teacher's hints; stops in time, goes on from its checkpoint.

The schedule follows the time: a short warm-up, a constant rate, a linear fall to nothing over the last part; weights
are rounded to the shipped types from ROUND_FROM on. With `n_steps` (the dense twin) it follows the steps instead.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tools.train_default_model.annotate import load_hints
from tools.train_default_model.batches import Batch, Feed
from tools.train_default_model.compiling import compiled
from tools.train_default_model.encode import Dataset, load_dataset, our_pieces
from tools.train_default_model.model import Geometry, Layer, Student, initialise
from tools.train_default_model.optimizer import Optimizer
from tools.train_default_model.vocab import load_tokenizer
from tools.train_default_model.work import Clock, load_json, save_arrays, save_json, say

__all__ = ["TrainOptions", "held_out", "load_student", "train"]

WARM_UP_STEPS = 60
FALL_FROM = 0.4
ROUND_FROM = 0.6
SAVE_EVERY_S = 120.0


@dataclass(frozen=True)
class TrainOptions:
    """Sizes of a step and weights of the losses."""

    rows: int = 32
    n: int = 2048
    hint_weight: float = 0.7
    balance_weight: float = 0.01
    z_weight: float = 0.001
    seed: int = 1
    n_steps: int = 0
    is_compiled: bool = True
    is_grouped: bool = True
    is_rounding: bool = True
    held_docs: int = 2000


def loss_of(
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    hint_ids: torch.Tensor | None,
    hint_probs: torch.Tensor | None,
    hint_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is minimised, next-token loss alone) in nats, weighted means over the rows of hidden [n, d]."""
    logits = F.linear(hidden, embedding)
    total = torch.logsumexp(logits.float(), -1)
    hard = total - logits.gather(1, targets[:, None])[:, 0].float()
    scale = weights / weights.sum()
    if hint_ids is None or hint_probs is None:
        loss = (hard * scale).sum()
        return loss, loss.detach()
    mass = hint_probs.sum(-1)
    soft = total - (hint_probs * logits.gather(1, hint_ids).float()).sum(-1) / mass.clamp_min(1e-6)
    share = torch.where(mass > 0, hint_weight, 0.0)
    return ((hard + share * (soft - hard)) * scale).sum(), (hard * scale).sum().detach()


class Trainer:
    """One student in training."""

    def __init__(self, folder: Path, name: str, g: Geometry, options: TrainOptions, device: torch.device) -> None:
        self.folder, self.name, self.options, self.device = folder, name, options, device
        self.data = load_dataset(folder)
        hints = load_hints(folder, len(self.data.tokens), device)
        say(name, f"{len(self.data.tokens) / 1e6:.2f} M tokens, hints: {'yes' if hints else 'no'}")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Student(g, dtype, is_grouped=options.is_grouped).to(device)
        state = load_json(folder / f"{name}.json")
        masters = load_student(folder, name) if state else initialise(self.model, options.seed)
        self.step, self.progress = int(state.get("steps", 0)), float(state.get("progress", 0.0))
        self.started_at = self.progress
        self.optimizer = Optimizer(self.model, masters)
        self.feed = Feed(self.data, hints, device, options.rows, options.n, options.seed + self.step)
        is_wanted = options.is_compiled and device.type == "cuda"
        self._layer = compiled(Layer.forward, is_wanted=is_wanted)
        self._loss = compiled(loss_of, is_wanted=is_wanted)

    def run(self, budget_s: float) -> None:
        """Train until the progress is 1 or the time is over."""
        clock, saved = Clock(budget_s), Clock(1e9, SAVE_EVERY_S)
        warm_s = 0.0
        first = self.step
        for batch in self.feed:
            tensors = self._first_step(batch) if self.step == first else self._train_step(batch)
            self.step += 1
            if self.step - first == 3:
                self._wait()
                warm_s = clock.elapsed_s
                say(self.name, f"first steps took {warm_s:.1f} s")
            self._move(clock, warm_s)
            if clock.is_due():
                self._report(tensors, clock, warm_s, first)
            if saved.is_due():
                self.save()
            if self.progress >= 1 or clock.is_over:
                break
        self._wait()
        self.save()

    def _first_step(self, batch: Batch) -> torch.Tensor:
        """One update; where it fails, again in a plainer way: uncompiled, then with every expert computed."""
        for is_last in (False, False, True):
            try:
                tensors = self._train_step(batch)
                self._wait()
                return tensors
            except Exception as error:
                if is_last:
                    raise
                say(self.name, f"the first step failed ({type(error).__name__}: {str(error)[:400]})")
                is_plain = self._layer is Layer.forward
                self._layer, self._loss = Layer.forward, loss_of
                for layer in self.model.layers:
                    layer.is_grouped = layer.is_grouped and not is_plain  # type: ignore[assignment, operator]
                self.optimizer.write()
        raise AssertionError("unreachable")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _move(self, clock: Clock, warm_s: float) -> None:
        """Progress from steps where their number is given, else from the time after the compilation."""
        if self.options.n_steps:
            self.progress = self.step / self.options.n_steps
        else:
            passed = max(clock.elapsed_s - warm_s, 0.0) / max(clock.budget_s - warm_s, 1e-3)
            self.progress = self.started_at + (1 - self.started_at) * min(passed, 1.0)
        self.optimizer.is_rounding = self.options.is_rounding and self.progress >= ROUND_FROM

    def _train_step(self, batch: Batch) -> torch.Tensor:
        """One update; [loss, next-token loss, balance, z, largest share of an expert] on the device."""
        o = self.options
        hidden, losses, counts = self.model.hidden(batch.tokens, self._layer)
        loss, hard = self._loss(
            hidden.flatten(0, 1),
            self.model.token_embd,
            batch.targets.flatten(),
            batch.weights.flatten(),
            batch.hint_ids,
            batch.hint_probs,
            o.hint_weight,
        )
        (loss + o.balance_weight * losses[0] + o.z_weight * losses[1]).backward()
        fall = 1.0 if self.progress < FALL_FROM else (1 - self.progress) / (1 - FALL_FROM)
        self.optimizer.step(max(fall, 0.0) * min(1.0, (self.step + 1) / WARM_UP_STEPS))
        share = (counts / counts.sum(-1, keepdim=True).clamp_min(1)).max()
        return torch.stack([loss.detach(), hard, *losses.detach(), share])

    def _report(self, tensors: torch.Tensor, clock: Clock, warm_s: float, first: int) -> None:
        loss, hard, balance, z, share = tensors.tolist()
        n_tokens = self.options.rows * self.options.n
        rate = (self.step - first - 3) * n_tokens / max(clock.elapsed_s - warm_s, 1e-3)
        say(
            self.name,
            f"step {self.step}, {self.progress:.0%}, epoch {self.feed.epoch}, loss {loss:.3f}, next token {hard:.3f}, "
            f"balance {balance:.3f}, z {z:.2f}, busiest {share:.0%}, {rate / 1e3:.0f} k/s",
        )
        row = {"step": self.step, "progress": self.progress, "loss": loss, "hard": hard, "balance": balance}
        with (self.folder / f"{self.name}-log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} in step {self.step}: the last checkpoint stays as it is")

    def save(self) -> None:
        """Write weights, then what is known of them."""
        masters = {name: value.numpy() for name, value in self.optimizer.masters().items()}
        save_arrays(self.folder / f"{self.name}.npz", masters)
        facts = {"steps": self.step, "progress": self.progress, "geometry": asdict(self.model.g)}
        facts |= {"tokens": self.step * self.options.rows * self.options.n, "epoch": self.feed.epoch}
        save_json(self.folder / f"{self.name}.json", facts)


def load_student(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Weights of a checkpoint in fp32 by GGUF's names."""
    with np.load(folder / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file.files}


@torch.no_grad()
def held_out(model: Student, data: Dataset, pieces: list[bytes], max_docs: int, length: int = 512) -> dict[str, Any]:
    """Perplexity per answer token and bits per byte over answers of held-out dialogues."""
    device = model.token_embd.device
    docs = np.flatnonzero(data.held)[:max_docs]
    sizes = torch.tensor([len(piece) for piece in pieces], device=device)
    nats = n_tokens = n_bytes = 0.0
    for i in range(0, len(docs), 32):
        rows, masks = [], []
        for d in docs[i : i + 32]:
            a, b = data.offsets[d], min(data.offsets[d + 1], data.offsets[d] + length + 1)
            pad = length + 1 - (b - a)
            rows.append(np.pad(data.tokens[a:b].astype(np.int64), (0, pad)))
            masks.append(np.pad(data.answer[a:b], (0, pad)))
        tokens = torch.from_numpy(np.stack(rows)).to(device)
        mask = torch.from_numpy(np.stack(masks)).to(device)[:, 1:]
        hidden = model.hidden(tokens[:, :-1])[0]
        logits = F.linear(hidden[mask], model.token_embd).float()
        targets = tokens[:, 1:][mask]
        nats += float(F.cross_entropy(logits, targets, reduction="sum"))
        n_tokens += len(targets)
        n_bytes += float(sizes[targets].sum())
    per_token, per_byte = nats / max(n_tokens, 1), nats / max(n_bytes, 1) / math.log(2)
    facts: dict[str, Any] = {"docs": len(docs), "tokens": int(n_tokens), "bytes": int(n_bytes)}
    return facts | {"perplexity": math.exp(min(per_token, 50)), "bits_per_byte": per_byte}


def train(
    folder: Path, name: str, g: Geometry, options: TrainOptions, device: torch.device, budget_s: float
) -> dict[str, Any]:
    """Train and measure; `NAME-held-out.json` has the figures with weights as they are and rounded."""
    trainer = Trainer(folder, name, g, options, device)
    trainer.run(budget_s)
    pieces = our_pieces(load_tokenizer(folder))
    facts: dict[str, Any] = {}
    for key, is_rounding in (("exact", False), ("rounded", True)):
        trainer.optimizer.is_rounding = is_rounding
        trainer.optimizer.write()
        facts[key] = held_out(trainer.model, trainer.data, pieces, options.held_docs)
        say(
            name,
            f"held out, {key}: perplexity {facts[key]['perplexity']:.3f}, {facts[key]['bits_per_byte']:.4f} bits/byte",
        )
    save_json(folder / f"{name}-held-out.json", facts)
    return facts
