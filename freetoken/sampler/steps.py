"""The stateless steps of the chain. Formulas and edge cases: llama.cpp, src/llama-sampler.cpp."""

from __future__ import annotations

import numpy as np

from freetoken.sampler.candidates import Candidates

__all__ = ["min_p", "temperature", "top_k", "top_n_sigma", "top_p", "typical", "xtc"]

_FIRST_TRY = 256
"""Entries that `top_p` orders before it orders more of them."""


def top_k(candidates: Candidates, k: int) -> None:
    """Keep the k largest logits; 0 or less keeps all."""
    if k > 0:
        candidates.keep(candidates.largest(k), is_sorted=True)


def top_p(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep the most probable tokens until their probabilities add up to p."""
    if p >= 1.0:
        return
    probabilities = candidates.probabilities()
    k, n_kept = _FIRST_TRY, 0
    while not n_kept:
        order = candidates.largest(k)
        reached = np.flatnonzero(np.cumsum(probabilities[order]) >= np.float32(p))
        reached = reached[reached + 1 >= min_keep]
        if len(reached):
            n_kept = int(reached[0]) + 1
        elif len(order) == len(candidates):
            n_kept = len(order)
        k *= 8
    candidates.keep(order[:n_kept], is_sorted=True)


def min_p(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep tokens at least p times as probable as the most probable one."""
    if p <= 0.0:
        return
    threshold = candidates.logits[candidates.top()] + np.log(np.float32(p))
    passed = candidates.logits >= threshold
    n = int(np.count_nonzero(passed))
    if n >= max(min_keep, 1):
        candidates.keep(np.flatnonzero(passed), candidates.is_sorted)
    else:
        candidates.keep(candidates.largest(max(min_keep, 1)), is_sorted=True)


def typical(candidates: Candidates, p: float, min_keep: int) -> None:
    """Keep the tokens whose surprise is closest to the entropy until their probabilities add up to more than p."""
    if p >= 1.0:
        return
    candidates.sort()
    probabilities = candidates.probabilities()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    entropy = np.sum(probabilities * np.where(probabilities > 0, surprise, 0), dtype=np.float32)
    order = np.argsort(np.abs(surprise - entropy), kind="stable")
    reached = np.flatnonzero(np.cumsum(probabilities[order]) > np.float32(p))
    reached = reached[reached + 1 >= min_keep]
    n = int(reached[0]) + 1 if len(reached) else len(order)
    candidates.keep(order[:n], is_sorted=False)


def top_n_sigma(candidates: Candidates, n: float) -> None:
    """Ban tokens whose logit is more than n standard deviations below the largest."""
    if n <= 0.0 or len(candidates) <= 1:
        return
    logits = candidates.logits
    finite = logits[logits != -np.inf]
    if len(finite):
        threshold = finite.max() - np.float32(n) * np.float32(finite.std())
        candidates.replace(np.where(logits < threshold, np.float32(-np.inf), logits))


def xtc(candidates: Candidates, threshold: float, min_keep: int) -> None:
    """Drop all tokens at least `threshold` probable but the least probable of them."""
    if threshold > 0.5 or len(candidates) < 2:
        return
    candidates.sort()
    n_above = int(np.count_nonzero(candidates.probabilities() >= np.float32(threshold)))
    last = max(n_above - 1, 0)
    if last > 0 and len(candidates) - last >= min_keep:
        candidates.keep(slice(last, None), is_sorted=True)


def temperature(candidates: Candidates, value: float, spread: float = 0.0, exponent: float = 1.0) -> None:
    """Divide the logits by a temperature; with a spread it follows the entropy. 0 or less leaves only the largest, as
    does one so small that fp32 cannot hold the quotients."""
    if spread > 0.0:
        if len(candidates) <= 1:
            return
        candidates.sort()
        value = _dynamic_temperature(candidates, value, spread, exponent)
    if value > 0.0:
        scaled = candidates.logits / np.float32(value)
        if np.isfinite(scaled.max()):
            candidates.replace(scaled)
            return
    top = candidates.top()
    logits = np.full_like(candidates.logits, -np.inf)
    logits[top] = candidates.logits[top]
    candidates.replace(logits)


def _dynamic_temperature(candidates: Candidates, value: float, spread: float, exponent: float) -> float:
    probabilities = candidates.probabilities()
    positive = probabilities[probabilities > 0]
    entropy = -float(np.sum(positive * np.log(positive), dtype=np.float32))
    share = max(entropy, 0.0) / float(np.log(len(candidates)))
    low, high = max(0.0, value - spread), value + spread
    return low + (high - low) * float(np.float64(share) ** exponent)
