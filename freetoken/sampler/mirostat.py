"""Mirostat 1 and 2 (Basu et al., 2021): keep the surprise of the drawn tokens near a target."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from freetoken.sampler.candidates import Candidates
from freetoken.sampler.steps import top_k

__all__ = ["Mirostat"]

_M = 100
"""Tokens from which version 1 estimates the exponent of Zipf's law."""


class Mirostat:
    """Cuts the candidates by the running bound `mu`, draws one, and learns from its surprise (in bits)."""

    def __init__(self, version: int, n_vocab: int, tau: float, eta: float) -> None:
        self.mu = 2.0 * tau
        self._version, self._n_vocab, self._tau, self._eta = version, n_vocab, tau, eta

    def choose(self, candidates: Candidates, draw: Callable[[np.ndarray], int]) -> int:
        """Entry number of the drawn token; `candidates` is cut to what it was drawn from."""
        candidates.sort()
        if self._version == 1:
            top_k(candidates, max(int(self._n_kept(candidates.probabilities())), 1))
        else:
            with np.errstate(divide="ignore"):
                surprise = -np.log2(candidates.probabilities())
            above = np.flatnonzero(surprise > self.mu)
            candidates.keep(slice(max(int(above[0]), 1) if len(above) else None), is_sorted=True)
        probabilities = candidates.probabilities()
        index = draw(probabilities)
        self.mu -= self._eta * (-math.log2(float(probabilities[index])) - self._tau)
        return index

    def _n_kept(self, probabilities: np.ndarray) -> float:
        """Version 1: how many tokens give the wanted surprise if the probabilities follow Zipf's law."""
        p = probabilities[:_M].astype(np.float64)
        p = p[p > 0]
        if len(p) < 2:
            return 1.0
        i = np.arange(len(p) - 1)
        t = np.log((i + 2) / (i + 1))
        s = float(t @ np.log(p[:-1] / p[1:]) / (t @ t))
        epsilon = s - 1
        try:
            k = ((epsilon * 2**self.mu) / (1 - float(self._n_vocab) ** -epsilon)) ** (1 / s)
        except (ZeroDivisionError, OverflowError):
            return len(probabilities)
        return min(k, float(len(probabilities))) if isinstance(k, float) and k == k else 1.0
