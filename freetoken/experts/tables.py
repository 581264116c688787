"""The split of every layer as one table, from a profile. No torch.

What the engine's slot steps look up (`split` has the rules for one format); made at start, and again where another
profile or another variant of the table is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from freetoken.experts.profile import Entry, ExpertFormat, Times
from freetoken.experts.split import Q16, bounded_table, makespan, measured_table, q16_table, times

__all__ = ["fill_tables", "layer_seconds", "miss_seconds", "split_tables", "unmeasured_table"]

UNMEASURED = 0.4
"""Share of misses to fill between what a fast link with six threads and what one with fourteen would choose."""

USUAL_MISSES = (2, 3, 4)
"""Misses of a layer in a step at the hit rates that caches of a third of the experts reach."""


def fill_tables(n_layer: int, n_max: int, cpu_layers: Collection[int] = ()) -> np.ndarray:
    """int32 [n_layer, n_max + 1]: every miss is filled, but those of `cpu_layers`."""
    tables = np.tile(np.arange(n_max + 1, dtype=np.int32), (n_layer, 1))
    tables[sorted(cpu_layers)] = 0
    return tables


def unmeasured_table(n_max: int) -> np.ndarray:
    """int32 [n_max + 1] for all layers where nothing can be measured: in Triton's interpreter."""
    return q16_table(n_max, round(UNMEASURED * Q16))


def split_tables(
    entry: Entry | None,
    layers: Sequence[ExpertFormat | None],
    n_max: int,
    *,
    max_fetch: int = -1,
    min_fill: int = 0,
    cpu_layers: Collection[int] = (),
    cpu_factor: float = 1.0,
) -> np.ndarray:
    """int32 [n_layer, n_max + 1]: how many of m misses of a layer are filled.

    `max_fetch` caps them (-1: no cap, 0: none is ever filled), `min_fill` is the least; misses of `cpu_layers` all go
    to the CPU. `cpu_factor` is how many times as long as measured the CPU is taken to need. A format that the profile
    lacks follows the rule of two bandwidths; with nothing known at all every miss is filled.
    """
    limit = None if max_fetch < 0 else max_fetch
    found: dict[ExpertFormat, np.ndarray] = {}
    tables = fill_tables(len(layers), n_max)
    for i, kind in enumerate(layers):
        if i in cpu_layers:
            tables[i] = 0
        elif kind is not None:
            if kind not in found:
                found[kind] = _table(entry, kind, n_max, limit, min_fill, cpu_factor)
            tables[i] = found[kind]
        elif limit is not None:
            tables[i] = bounded_table(list(range(n_max + 1)), limit)
    return tables


def _table(
    entry: Entry | None, kind: ExpertFormat, n_max: int, limit: int | None, min_fill: int, cpu_factor: float
) -> np.ndarray:
    known = None if entry is None else entry.formats.get(kind)
    if known is not None and known.fill and known.cpu:
        (fill, beside), (cpu, cpu_beside) = _times(known, n_max)
        alone = fill, cpu * cpu_factor
        return measured_table(beside, cpu_beside * cpu_factor, limit, min_fill, alone=alone)
    share = Q16 if entry is None else entry.fraction(kind)
    if 0 < share < Q16:
        odds = share / (Q16 - share) * cpu_factor
        share = round(Q16 * odds / (1.0 + odds))
    return q16_table(n_max, share, limit, min_fill)


def _times(known: Times, n_max: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Of fills and of the CPU: alone, and beside the other, where noise must not make them quicker than alone."""
    pairs = []
    for alone, beside in ((known.fill, known.fill_beside), (known.cpu, known.cpu_beside)):
        one = times(alone, n_max)
        pairs.append((one, np.maximum(one, times(beside, n_max)) if beside else one))
    return pairs[0], pairs[1]


def layer_seconds(known: Times, n_fills: int, n_cpu: int) -> float:
    """What a layer's misses take by the profile, where so many are filled beside so many on the CPU."""
    (fill, beside), (cpu, cpu_beside) = _times(known, max(n_fills, n_cpu))
    return makespan(beside[n_fills], cpu_beside[n_cpu], fill[n_fills], cpu[n_cpu])


def miss_seconds(entry: Entry | None, layers: Sequence[ExpertFormat | None], tables: np.ndarray) -> float:
    """What a miss costs by the profile under a table: of a layer with a few misses, on average; 0.0 where unknown."""
    costs: dict[tuple[ExpertFormat, int], float] = {}
    found = []
    for kind, table in zip(layers, tables, strict=True):
        known = None if kind is None or entry is None else entry.formats.get(kind)
        if kind is None or known is None or not known.fill or not known.cpu:
            continue
        for m in USUAL_MISSES:
            q = int(table[min(m, len(table) - 1)])
            if (kind, m << 16 | q) not in costs:
                costs[kind, m << 16 | q] = layer_seconds(known, q, m - q) / m
            found.append(costs[kind, m << 16 | q])
    return float(np.mean(found)) if found else 0.0
