"""Decode steps between the layers of a long prompt, so that requests that generate do not wait for a whole chunk.

The engine hands `Turns` to the runner's `prefill`, which calls it between layers. Time alone decides: a step is due
when the prompt has had the model for INTERVAL_S, and for at least as long as the last step took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["INTERVAL_S", "Turns"]

INTERVAL_S = 0.05
"""How long a prompt runs before others have a turn."""


class Turns:
    """Used by the engine's thread only."""

    def __init__(self, step: Callable[[], bool], now: Callable[[], float] = time.monotonic) -> None:
        """`step` runs one decode step of all that generate; False where nobody does."""
        self._step, self._now = step, now
        self._since = 0.0
        self._took_s = 0.0
        self.n_taken = 0

    def begin(self) -> None:
        """A chunk begins; decode steps have just had their turn."""
        self._since = self._now()

    def __call__(self) -> bool:
        """Between two layers: whether a step was run."""
        started = self._now()
        if started - self._since < max(INTERVAL_S, self._took_s):
            return False
        has_run = self._step()
        self._since = self._now()
        if has_run:
            self._took_s = self._since - started
            self.n_taken += 1
        return has_run
