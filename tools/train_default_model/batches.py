"""Rows of packed dialogues on the device, shuffled anew each epoch; each row begins with a dialogue's beginning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tools.train_default_model.encode import Dataset

__all__ = ["Batch", "Feed", "pack"]

PROMPT_WEIGHT = 0.15
"""Weight in the loss of tokens that are not the answer's."""


@dataclass(frozen=True)
class Batch:
    """Inputs [rows, n], and for each the target, its weight, and the teacher's hints [rows * n, top] or None."""

    tokens: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    hint_ids: torch.Tensor | None
    hint_probs: torch.Tensor | None


def pack(offsets: np.ndarray, docs: np.ndarray, length: int) -> np.ndarray:
    """int64 [rows, length]: positions in the flat dataset of the dialogues `docs`, in that order.

    A row holds whole dialogues but for the last one, whose end is cut; the next row begins with the next dialogue.
    """
    lengths = np.diff(offsets)[docs]
    ends = np.cumsum(lengths)
    flat = np.arange(ends[-1]) + np.repeat(offsets[docs] - (ends - lengths), lengths)
    starts, start = [], 0
    while start + length <= ends[-1]:
        starts.append(start)
        start = int(ends[np.searchsorted(ends, start + length)])
    return flat[np.array(starts, dtype=np.int64)[:, None] + np.arange(length)]


class Feed:
    """Endless batches of `rows` rows of `n` tokens."""

    def __init__(
        self,
        data: Dataset,
        hints: tuple[torch.Tensor, torch.Tensor] | None,
        device: torch.device,
        rows: int,
        n: int,
        seed: int,
    ) -> None:
        self._offsets = data.offsets
        self._docs = np.flatnonzero(~data.held)
        self._tokens = torch.from_numpy(data.tokens.astype(np.int32)).to(device)
        self._answer = torch.from_numpy(data.answer).to(device)
        self._hints, self._device = hints, device
        self._rows, self._n = rows, n
        self._rng = np.random.default_rng(seed)
        self.epoch = 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            grid = pack(self._offsets, self._rng.permutation(self._docs), self._n + 1)
            if len(grid) < self._rows:
                raise ValueError(f"the dataset fills {len(grid)} rows of {self._n}, a batch has {self._rows}")
            where = torch.from_numpy(grid.astype(np.int32)).to(self._device)
            for i in range(0, len(grid) - self._rows + 1, self._rows):
                yield self._batch(where[i : i + self._rows].long())
            self.epoch += 1

    def _batch(self, at: torch.Tensor) -> Batch:
        tokens = self._tokens[at].long()
        follow = at[:, 1:]
        weights = torch.where(self._answer[follow], 1.0, PROMPT_WEIGHT)
        ids = probs = None
        if self._hints is not None:
            ids = self._hints[0][follow.flatten()].long()
            probs = self._hints[1][follow.flatten()].float()
        return Batch(tokens[:, :-1], tokens[:, 1:], weights, ids, probs)
