"""The tensors of one forward pass: what the runner hands to the implementations of `blocks.Ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Batch", "Stopped"]


@dataclass(frozen=True)
class Batch:
    """n token rows. Rows of one sequence stand in the order of their positions, and its pages cover all of them.

    The runner fills every field: `tokens` int32 [n]; `positions` int32 [n], the place of each in its sequence;
    `page_tables` one int32 [max_pages] for each row, its sequence's; `n_outputs` how many of the last rows want logits.
    """

    tokens: np.ndarray
    positions: np.ndarray
    page_tables: Sequence[np.ndarray]
    n_outputs: int

    @property
    def n(self) -> int:
        return len(self.tokens)


class Stopped(Exception):
    """A pass was given up between two layers; the cache holds no more tokens than before."""
