"""Waiting for an engine to load, with a bar where standard error is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Protocol

from tqdm import tqdm

from freetoken.request import EngineState

__all__ = ["wait_while_loading"]

_POLL_S = 0.01


class _Loading(Protocol):
    @property
    def state(self) -> EngineState: ...

    @property
    def load_progress(self) -> float: ...


def wait_while_loading(engine: _Loading, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Until the engine is ready or has failed."""
    form = "{desc} {bar} {percentage:3.0f}%"
    is_hidden = not sys.stderr.isatty()
    with tqdm(total=100, desc="loading", leave=False, bar_format=form, disable=is_hidden) as bar:
        while engine.state is EngineState.LOADING and not should_stop():
            bar.update(round(engine.load_progress * 100) - bar.n)
            time.sleep(_POLL_S)
