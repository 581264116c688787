"""What a model runs before anybody asks: the step of one sequence at load, and a prompt too where the kernels have yet
to be compiled; the shapes of first requests while idle. Used by the engine thread only.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from freetoken.batch import Stopped
from freetoken.errors import DeviceLostError
from freetoken.gpu.ahead import timed
from freetoken.gpu.verdict import cache_folder
from freetoken.kernels.compile_ahead import listening

__all__ = ["TrialRuns", "WarmUp"]

logger = logging.getLogger(__name__)

STEPS = ((1, True), (8, False), (8, False), (2, False), (4, False), (1, False))
"""Rows, and whether they are sampled: the second run of the usual step, which captures it; then what prompts are cut
into, of which eights come most and are captured too."""
PROMPTS = (64, 512)
SAY_EVERY_S = 2.0
FIRST_SHARE = 0.6
"""Of a first start's compilation: the kernels of the usual step."""

OnProgress = Callable[[float], None]


class TrialRuns(Protocol):
    """`gpu.model.GpuModel` as it is used here."""

    max_stepped: int
    first_layer: int

    def try_step(self, n: int, *, is_sampled: bool, on_kernel: Callable[[int, int], None] | None = None) -> int:
        """Run a step of n rows for nothing; kernels that were not on disk."""

    def try_prompt(self, n: int, should_stop: Callable[[], bool]) -> None:
        """Run a prompt of n tokens for nothing. Raises Stopped."""


class WarmUp:
    """`load` before the first request, then `more` while there is none."""

    def __init__(self, model: TrialRuns) -> None:
        self._model = model
        self._later: collections.deque[tuple[str, int, bool]] = collections.deque()
        self._shapes: list[tuple[str, int, bool]] = []

    def load(self, on_progress: OnProgress) -> None:
        """Run the step of one sequence; where its kernels had to be compiled, what first prompts take too.

        `on_progress` hears how much is done, from 0 to 1. Raises what the step raises."""
        progress = CompileProgress(on_progress)
        with timed("first program"):
            samples = not self._model.first_layer  # behind layers on the CPU nothing is sampled on the GPU
            n_compiled = self._model.try_step(1, is_sampled=samples, on_kernel=progress.kernels)
        prompts = [("prompt", n, False) for n in PROMPTS if n > self._model.max_stepped]  # shorter ones run as steps
        steps = [("step", n, is_sampled) for n, is_sampled in STEPS if samples or not is_sampled]
        shapes = [*steps[:2], *prompts[:1], *steps[2:], *prompts[1:]]
        if n_compiled:
            self._later.append(prompts[0] if prompts else steps[1])
            progress.share(FIRST_SHARE, 1 - FIRST_SHARE)
            self.more(lambda: False, progress)
        self._later.extend(shapes)
        self._shapes = shapes
        on_progress(1.0)

    def again(self) -> None:
        """All programs are gone: what `load` ran is to be run anew, while idle."""
        self._later.clear()
        self._later.extend([*self._shapes[:1], *self._shapes])

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to run, nor running."""
        return not self._later

    def more(self, should_stop: Callable[[], bool], progress: CompileProgress | None = None) -> bool:
        """Run the next shape, if any is left: whether one was. One that is stopped comes again; a failure is logged."""
        if not self._later:
            return False
        kind, n, is_sampled = self._later[0]
        try:
            with timed(f"warm-up of a {kind} of {n}"):
                if kind == "prompt":
                    with listening(progress.compiled) if progress is not None else nullcontext():
                        self._model.try_prompt(n, should_stop)
                else:
                    on_kernel = None if progress is None else progress.kernels
                    self._model.try_step(n, is_sampled=is_sampled, on_kernel=on_kernel)
        except Stopped:
            return True
        except DeviceLostError:
            raise
        except Exception as error:
            logger.warning("warming up a %s of %d failed: %s: %s", kind, n, type(error).__name__, error)
        self._later.popleft()
        return True


class CompileProgress:
    """Says every few seconds how many kernels are compiled, where that takes long."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._first, self._size = 0.0, FIRST_SHARE
        self._done = 0.0
        self._n_for_prompts = 0
        self._said = time.monotonic()

    def share(self, first: float, size: float) -> None:
        """What follows is this part of the whole."""
        self._first, self._size = first, size
        self._tell(first)

    def kernels(self, n_done: int, n: int) -> None:
        """So many kernels of a program are ready."""
        self._tell(self._first + self._size * n_done / max(n, 1))
        self._say(f"{n_done} of {n}")

    def compiled(self) -> None:
        """One more kernel of a prompt was compiled; nobody knows how many there will be."""
        self._n_for_prompts += 1
        self._say(f"{self._n_for_prompts} for prompts")

    def _say(self, how_many: str) -> None:
        if time.monotonic() - self._said > SAY_EVERY_S:
            self._said = time.monotonic()
            logger.info("compiling kernels for the first time (kept in %s): %s", cache_folder(), how_many)

    def _tell(self, done: float) -> None:
        self._done = max(self._done, done)
        self._on_progress(self._done)
