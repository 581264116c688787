"""The candidates of one draw: token ids and their logits, never the caller's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Candidates"]

_BLOCK = 64
"""Tokens of one block in `largest`: small enough for many blocks, large enough for a quick maximum."""


class Candidates:
    """Logits fp32 [n] and their token ids, all of the vocabulary at first. `is_sorted`: largest logit first.

    At equal logits the lower id comes first, in every order made here.
    """

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits
        self.ids: np.ndarray | None = None
        """int64 [n]; None means that entry i is token i."""
        self.is_sorted = False
        self._is_own = False

    def __len__(self) -> int:
        return len(self.logits)

    def own(self) -> np.ndarray:
        """The logits, free to be changed."""
        if not self._is_own:
            self.logits = self.logits.copy()
            self._is_own = True
        return self.logits

    def replace(self, logits: np.ndarray) -> None:
        """Take fresh logits of the same candidates."""
        self.logits = logits
        self._is_own = True

    def token(self, index: int) -> int:
        """Token id of an entry."""
        return index if self.ids is None else int(self.ids[index])

    def token_ids(self) -> np.ndarray:
        """Token ids of all entries, int64 [n]."""
        return np.arange(len(self.logits)) if self.ids is None else self.ids

    def keep(self, index: np.ndarray | slice, is_sorted: bool) -> None:
        """Keep these entries, in this order."""
        self.ids = index if self.ids is None and isinstance(index, np.ndarray) else self.token_ids()[index]
        self.logits = self.logits[index]
        self._is_own = not isinstance(index, slice) or self._is_own
        self.is_sorted = is_sorted

    def positions(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where these tokens are: entry numbers, and which of the tokens are candidates (bool mask)."""
        if self.ids is None:
            present = (tokens >= 0) & (tokens < len(self.logits))
            return tokens[present], present
        order = np.argsort(self.ids)
        at = np.searchsorted(self.ids, tokens, sorter=order).clip(max=len(order) - 1)
        found = order[at]
        present = self.ids[found] == tokens
        return found[present], present

    def largest(self, k: int) -> np.ndarray:
        """Entry numbers of the k largest logits, largest first; k is cut to the number of entries."""
        n = len(self.logits)
        k = min(k, n)
        if self.is_sorted:
            return np.arange(k)
        if k * 2 > n:
            return np.argsort(-self.logits, kind="stable")[:k]
        chosen = np.flatnonzero(self.logits >= self._threshold(k))
        return np.asarray(chosen[np.argsort(-self.logits[chosen], kind="stable")[:k]])

    def _threshold(self, k: int) -> Any:
        """A logit that at least k entries reach, and not many more.

        The k-th largest of the maxima of blocks is reached by at least k entries, and quicker to find than the k-th
        largest of all.
        """
        n_blocks = len(self.logits) // _BLOCK
        if k > n_blocks:
            return np.partition(self.logits, len(self.logits) - k)[len(self.logits) - k]
        maxima = self.logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        return np.partition(maxima, n_blocks - k)[n_blocks - k]

    def sort(self) -> None:
        """Largest logit first."""
        if not self.is_sorted:
            self.keep(np.argsort(-self.logits, kind="stable"), is_sorted=True)

    def top(self) -> int:
        """Entry number of the largest logit."""
        return 0 if self.is_sorted else int(np.argmax(self.logits))

    def probabilities(self) -> np.ndarray:
        """softmax of the logits, fp32 [n]."""
        p = np.exp(self.logits - self.logits[self.top()])
        return np.asarray(p / p.sum())
