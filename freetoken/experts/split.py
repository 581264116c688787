"""How many of a layer's misses are filled: q for every count of misses m, as a table that the slot step looks up.

With measured times (`ft bench bw`) q minimises the longer of two branches that run beside each other: copying q experts
over PCIe, computing m - q on the CPU. Without a profile the Q16 rule takes their bandwidths' ratio. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

__all__ = [
    "Q16",
    "bound",
    "bounded_table",
    "fraction_q16",
    "makespan",
    "measured_table",
    "q16_fills",
    "q16_table",
    "times",
]

Q16 = 1 << 16
_TIE = 1e-9
"""Costs that differ by rounding only are equal."""


def fraction_q16(b_p: float, b_h: float) -> int:
    """phi = B_P / B_H in Q16, at most 1: where the CPU is not faster than the link every miss is filled."""
    if b_p <= 0:
        return 0
    return Q16 if b_h <= b_p else round(b_p / b_h * Q16)


def q16_fills(m: int, frac_q16: int) -> int:
    """The integer next to m * phi that minimises max(q * (1 - phi), (m - q) * phi); the lower one at a tie.

    That cost is the longer of q*S/B_P and (m-q)*S/(B_H-B_P), scaled by phi*(1-phi)*B_H/S (arXiv 2608.16157, Eq. 3).
    """

    def cost(q: int) -> int:
        return max(q * (Q16 - frac_q16), (m - q) * frac_q16)

    low = (m * frac_q16) >> 16
    return min(m, low if cost(low) <= cost(low + 1) else low + 1)


def bound(q: int, m: int, max_fetch: int | None, min_fill: int) -> int:
    """q within [min_fill, max_fetch] and [0, m]; the upper bounds win."""
    q = max(q, min_fill)
    if max_fetch is not None:
        q = min(q, max_fetch)
    return max(0, min(q, m))


def bounded_table(q: list[int], max_fetch: int | None = None, min_fill: int = 0) -> np.ndarray:
    """int32 [len(q)]: the entry at m bounded. All misses filled: `bounded_table(list(range(n + 1)))`."""
    return np.array([bound(value, m, max_fetch, min_fill) for m, value in enumerate(q)], np.int32)


def q16_table(n_max: int, frac_q16: int, max_fetch: int | None = None, min_fill: int = 0) -> np.ndarray:
    """int32 [n_max + 1] of the Q16 rule."""
    return bounded_table([q16_fills(m, frac_q16) for m in range(n_max + 1)], max_fetch, min_fill)


def makespan(fill: float, cpu: float, fill_alone: float, cpu_alone: float) -> float:
    """Seconds of two branches that begin together. `fill` and `cpu` are what each takes while the other runs all along,
    the others what it takes alone: when the shorter one has ended, the rest of the longer one goes on alone."""
    if fill >= cpu:
        return cpu + (fill - cpu) * (fill_alone / fill if fill > 0 else 1.0)
    return fill + (cpu - fill) * (cpu_alone / cpu)


def measured_table(
    t_fill: np.ndarray,
    t_cpu: np.ndarray,
    max_fetch: int | None = None,
    min_fill: int = 0,
    slack: float = 0.0,
    *,
    alone: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """int32 [n + 1]: for every m the q with the least `makespan` of q fills and m - q experts on the CPU.

    `t_fill` and `t_cpu` are seconds by number of experts, fp64 [n + 1], measured while the other branch runs; `alone`
    the same without it, for what goes on when the other branch has ended. At a tie the larger q:
    a fill that costs this step nothing serves the next ones. `slack` widens the tie: it also takes a larger q whose
    time is within that share of the least.
    """
    alone = (t_fill, t_cpu) if alone is None else alone
    lengths = {len(values) for values in (t_fill, t_cpu, *alone)}
    if len(lengths) != 1:
        raise ValueError(f"times of {sorted(lengths)} counts of experts, expected equally many")
    best = []
    for m in range(len(t_fill)):
        pairs = ((q, m - q) for q in range(m + 1))
        cost = np.array([makespan(t_fill[q], t_cpu[n], alone[0][q], alone[1][n]) for q, n in pairs])
        best.append(int(np.flatnonzero(cost <= cost.min() * (1.0 + slack + _TIE))[-1]))
    return bounded_table(best, max_fetch, min_fill)


def times(points: Mapping[int, float], n_max: int) -> np.ndarray:
    """fp64 [n_max + 1]: seconds by number of experts, from some measured counts (1, 2, 4, 8, ...).

    Straight lines between the points and from (0, 0), past the last one with the last line's slope. No count takes
    longer than a larger one: noise only ever adds, so the lower time is the truer one.
    """
    known = sorted((n, t) for n, t in points.items() if n > 0)
    if not known:
        raise ValueError("no measured time: at least one number of experts is needed")
    xs, ys = (np.array([0.0, *values]) for values in zip(*known, strict=True))
    ys = np.minimum.accumulate(ys[::-1])[::-1]
    n = np.arange(n_max + 1, dtype=np.float64)
    slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
    inside: np.ndarray = np.interp(n, xs, ys)
    return np.where(n > xs[-1], ys[-1] + slope * (n - xs[-1]), inside)
