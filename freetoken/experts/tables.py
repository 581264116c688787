"""The split of every layer as one table, from a profile. No torch.

What the engine's slot steps look up (`split` has the rules for one format); made at start, and again where another
profile or another variant of the table is tried.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from freetoken.experts.profile import Entry, ExpertFormat, Times
from freetoken.experts.split import Q16, bounded_table, makespan, measured_table, q16_table, times

__all__ = ["fill_tables", "layer_seconds", "split_tables"]


def fill_tables(n_layer: int, n_max: int, cpu_layers: Collection[int] = ()) -> np.ndarray:
    """int32 [n_layer, n_max + 1]: every miss is filled, but those of `cpu_layers`."""
    tables = np.tile(np.arange(n_max + 1, dtype=np.int32), (n_layer, 1))
    tables[sorted(cpu_layers)] = 0
    return tables


def split_tables(
    entry: Entry | None,
    layers: Sequence[ExpertFormat | None],
    n_max: int,
    *,
    max_fetch: int = -1,
    min_fill: int = 0,
    cpu_layers: Collection[int] = (),
    slack: float = 0.0,
) -> np.ndarray:
    """int32 [n_layer, n_max + 1]: how many of m misses of a layer are filled.

    `max_fetch` caps them (-1: no cap, 0: none is ever filled), `min_fill` is the least; misses of `cpu_layers` all go
    to the CPU. `slack` is `measured_table`'s. A format that the profile lacks follows the rule of two bandwidths; with
    nothing known at all every miss is filled.
    """
    limit = None if max_fetch < 0 else max_fetch
    found: dict[ExpertFormat, np.ndarray] = {}
    tables = fill_tables(len(layers), n_max)
    for i, kind in enumerate(layers):
        if i in cpu_layers:
            tables[i] = 0
        elif kind is not None:
            if kind not in found:
                found[kind] = _table(entry, kind, n_max, limit, min_fill, slack)
            tables[i] = found[kind]
        elif limit is not None:
            tables[i] = bounded_table(list(range(n_max + 1)), limit)
    return tables


def _table(
    entry: Entry | None, kind: ExpertFormat, n_max: int, limit: int | None, min_fill: int, slack: float
) -> np.ndarray:
    known = None if entry is None else entry.formats.get(kind)
    if known is not None and known.fill and known.cpu:
        (fill, beside), (cpu, cpu_beside) = _times(known, n_max)
        return measured_table(beside, cpu_beside, limit, min_fill, slack, alone=(fill, cpu))
    return q16_table(n_max, Q16 if entry is None else entry.fraction(kind), limit, min_fill)


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
