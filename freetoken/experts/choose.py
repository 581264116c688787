"""Which share of a layer's misses the backend `hybrid` fills: a fixed one for now, in place of measured times."""

from __future__ import annotations

import numpy as np

from freetoken.experts.split import Q16, q16_table

__all__ = ["hybrid_table"]

FILLED = 0.4
"""Between what a fast link with six threads and what one with fourteen would choose."""


def hybrid_table(n_max: int, max_fetch: int = -1, min_fill: int = 0) -> np.ndarray:
    """int32 [n_max + 1]: fills wanted by number of misses, at least `min_fill`, and at most `max_fetch` unless -1."""
    return q16_table(n_max, round(FILLED * Q16), None if max_fetch < 0 else max_fetch, min_fill)
