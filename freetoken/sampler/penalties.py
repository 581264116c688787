"""Penalties for tokens that occurred among the last ones: repeat, frequency and presence."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from freetoken.sampler.candidates import Candidates

__all__ = ["Penalties"]


class Penalties:
    """Counts the tokens of the window as they are accepted. `last_n` -1 is no limit, 0 switches it off."""

    def __init__(self, last_n: int, repeat: float, frequency: float, presence: float) -> None:
        self.is_active = last_n != 0 and not (repeat == 1.0 and frequency == 0.0 and presence == 0.0)
        self._window: deque[int] = deque()
        self._last_n = last_n
        self._counts: dict[int, int] = {}
        self._repeat, self._frequency = np.float32(repeat), np.float32(frequency)
        self._presence = np.float32(presence)

    def start(self, history: Iterable[int]) -> None:
        """Count what came before the first draw."""
        for token in history:
            self.accept(token)

    def accept(self, token: int) -> None:
        """Count one more token."""
        if not self.is_active:
            return
        self._counts[token] = self._counts.get(token, 0) + 1
        if self._last_n < 0:
            return
        self._window.append(token)
        if len(self._window) > self._last_n:
            oldest = self._window.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def apply(self, candidates: Candidates) -> None:
        """Lower the logits of the window's tokens: divided (or multiplied below 0) by repeat, then subtracted."""
        n = len(self._counts)
        if not self.is_active or not n:
            return
        tokens = np.fromiter(self._counts.keys(), np.int64, n)
        counts = np.fromiter(self._counts.values(), np.float32, n)
        at, present = candidates.positions(tokens)
        logits = candidates.own()
        old = logits[at]
        new = np.where(old <= 0, old * self._repeat, old / self._repeat)
        logits[at] = new - (counts[present] * self._frequency + self._presence)
        candidates.is_sorted = False
