"""DRY ("don't repeat yourself"): the longer a repeat that a token would continue, the larger its penalty.

Rules as in llama.cpp (after the sampler of that name in text-generation-webui and KoboldCpp).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from freetoken.sampler.candidates import Candidates

__all__ = ["Dry", "DryVocabulary"]

_MAX_BREAKER_BYTES = 40
_MAX_TAIL_TOKENS = 20
_MAX_FOUND = 64
"""Searches remembered for a vocabulary; clients choose the texts, so there must be an end."""
_LOG_FLOAT_MAX = 88.7228391

Breakers = dict[int, list[tuple[int, ...]]]
"""Token -> the tails that make it (followed by the tail) contain a breaker; an empty tail: the token alone does."""


class DryVocabulary(Protocol):
    """What DRY asks of a vocabulary."""

    n_vocab: int

    def piece(self, token: int, special: bool) -> bytes: ...

    def encode(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]: ...


_FOUND: Final[weakref.WeakKeyDictionary[DryVocabulary, dict[str, Breakers]]] = weakref.WeakKeyDictionary()
"""Breakers already searched for: a search reads the whole vocabulary (some 0.1 s)."""


class Dry:
    """Remembers the accepted tokens. `last_n` -1 looks at all of them, 0 switches it off."""

    def __init__(
        self,
        vocab: DryVocabulary,
        multiplier: float,
        base: float,
        allowed_length: int,
        last_n: int,
        breakers: Sequence[str],
    ) -> None:
        self.is_active = multiplier != 0.0 and base >= 1.0 and last_n != 0
        self._multiplier, self._base, self._allowed, self._last_n = multiplier, base, allowed_length, last_n
        self._tokens: list[int] = []
        self._breakers = _all_breakers(vocab, breakers) if self.is_active else {}
        self._max_exponent = int(_LOG_FLOAT_MAX / math.log(base)) if base > 1.000001 else 0

    def start(self, history: Iterable[int]) -> None:
        """Remember what came before the first draw."""
        if self.is_active:
            self._tokens.extend(history)

    def accept(self, token: int) -> None:
        """Remember one more token."""
        if self.is_active:
            self._tokens.append(token)

    def apply(self, candidates: Candidates) -> None:
        """Subtract multiplier * base ** (repeat - allowed_length) from every token that would continue a repeat."""
        window = self._tokens if self._last_n < 0 else self._tokens[-self._last_n :]
        if not self.is_active or len(window) <= self._allowed:
            return
        limit = self._repeat_limit(window)
        if limit < self._allowed:
            return
        repeats = self._continued_repeats(np.asarray(window), limit)
        repeats = {t: n for t, n in repeats.items() if () not in self._breakers.get(t, ())}
        if not repeats:
            return
        exponents = [n - self._allowed for n in repeats.values()]
        if self._max_exponent > 0:
            exponents = [min(e, self._max_exponent) for e in exponents]
        penalties = np.array([self._multiplier * self._base**e for e in exponents], np.float32)
        at, present = candidates.positions(np.fromiter(repeats, np.int64, len(repeats)))
        candidates.own()[at] -= penalties[present]
        candidates.is_sorted = False

    def _repeat_limit(self, window: Sequence[int]) -> int:
        """Tokens since the last sequence breaker: no repeat is counted across it."""
        n = len(window)
        for back in range(n):
            tails = self._breakers.get(window[n - 1 - back])
            if tails is not None:
                after = window[n - back :]
                fitting = [len(t) for t in tails if len(t) <= back and tuple(after[: len(t)]) == t]
                if fitting:
                    return back - max(fitting)
        return n

    def _continued_repeats(self, window: np.ndarray, limit: int) -> dict[int, int]:
        """Token -> length of the longest repeat (at least `allowed`) that it would continue, cut to `limit`.

        An earlier position has a repeat of length n when the n tokens that end there equal the last n.
        """
        last = len(window) - 1
        if self._max_exponent > 0:
            limit = min(limit, max(self._allowed, 0) + self._max_exponent)  # longer ones have the same penalty
        at = np.arange(last)
        longest: dict[int, int] = {}
        for length in range(limit + 1):
            if length >= self._allowed:
                for token in np.unique(window[at + 1]).tolist():
                    longest[token] = length
            if length < limit:
                at = at[at >= length]
                at = at[window[at - length] == window[last - length]]
            if not len(at):
                break
        return longest


def _all_breakers(vocab: DryVocabulary, breakers: Sequence[str]) -> Breakers:
    known = _FOUND.setdefault(vocab, {})
    merged: Breakers = {}
    for breaker in breakers:
        if not breaker:
            continue
        if breaker not in known:
            if len(known) == _MAX_FOUND:
                del known[next(iter(known))]
            known[breaker] = _find_breaker(vocab, breaker.encode("utf-8", "replace")[:_MAX_BREAKER_BYTES])
        for token, tails in known[breaker].items():
            merged.setdefault(token, []).extend(tails)
    return merged


def _find_breaker(vocab: DryVocabulary, breaker: bytes) -> Breakers:
    """Tokens that contain the breaker, and those that end with its beginning, with the tokens of its rest."""
    found: Breakers = {}
    tails = [tuple(vocab.encode(breaker[n:], False, False)[:_MAX_TAIL_TOKENS]) for n in range(1, len(breaker))]
    for token in range(vocab.n_vocab):
        piece = vocab.piece(token, True)
        if breaker in piece:
            found[token] = [()]
        else:
            ends = {tails[n - 1] for n in range(1, len(breaker)) if piece.endswith(breaker[:n])}
            if ends:
                found[token] = sorted(ends)
    return found
