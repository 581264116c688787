"""The CPU's side of a GPU step: a native thread that computes experts where the GPU asks for them (freetoken.h).

A place belongs to one layer of steps of one size: its operations, and two flags in memory that both see. The engine
says which places a step will ask at before it launches it. A thread that does not answer within `limit_s`, or an
operation that fails, becomes an EngineError of `wait`, and the GPU's step still ends: a second thread looks after the
first, so that nobody who waits for the GPU, in whatever way, waits for ever.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np

from freetoken import native
from freetoken.errors import EngineError

__all__ = ["PLACE_BYTES", "Executor"]

PLACE_BYTES = 128
ASKED, DONE = 0, 64
"""Where in a place the flags are, uint64 each."""
POLL_S = 50e-6
_RELEASED = 1


class Executor:
    """Meets a GPU at `n_places` places. Used by the engine's thread; the native thread sleeps between steps.

    `flags` uint8 [n_places * PLACE_BYTES], 64-aligned and zero, is memory that the GPU sees too. The pool is shared
    with whoever else runs programs on it: calls take turns.
    """

    def __init__(self, pool: native.Pool, flags: np.ndarray, limit_s: float = 0.0) -> None:
        """The GPU is let go when it has asked and waits for longer than `limit_s`; 0: it waits for ever."""
        n_places, rest = divmod(flags.nbytes, PLACE_BYTES)
        if rest or not flags.flags.c_contiguous or flags.ctypes.data % 64:
            raise EngineError(f"flags of {flags.nbytes} bytes, expected {PLACE_BYTES} aligned ones a place")
        self._pool, self._flags = pool, flags
        self._programs: dict[int, native.Program] = {}
        self._handle: int | None = native.library().ft_meeting_create(pool.handle, n_places, flags.ctypes.data)
        if self._handle is None:
            raise EngineError("no thread could be started for the experts on the CPU")
        native.library().ft_meeting_limit(self._handle, limit_s)

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise EngineError("the experts' thread has ended")
        return self._handle

    def set(self, place: int, program: native.Program) -> None:
        """What to run at a place, at which no step is expected. The program is kept alive."""
        if native.library().ft_meeting_set(self.handle, place, program.operations, len(program)) != 0:
            raise EngineError(f"place {place} cannot be set: there is none, or a step is under way")
        self._programs[place] = program

    def expect(self, places: Sequence[int]) -> None:
        """A step is about to be launched that asks at these places in this order. Raises EngineError after a failure
        that has not been `reset`."""
        array = (ctypes.c_int32 * len(places))(*places)
        if native.library().ft_meeting_expect(self.handle, array, len(places)) != 0:
            raise EngineError(self.failure() or f"places {list(places)[:4]} are not all there")

    @property
    def pending(self) -> int:
        """Steps expected that have not ended."""
        return int(native.library().ft_meeting_pending(self.handle))

    def failure(self) -> str:
        """What has failed, "" for nothing."""
        place = ctypes.c_int32()
        code = native.library().ft_meeting_failure(self.handle, ctypes.byref(place))
        if code == 0:
            return ""
        if code == _RELEASED:
            return "the experts on the CPU took too long and were left out"
        return f"operation {-1 - code} of the experts on the CPU failed at place {place.value}"

    def wait(self, is_over: Callable[[], bool], seconds: float | None = None) -> None:
        """Until the GPU's step is over. Raises EngineError where experts failed, or where it takes longer than so many
        seconds, if any are given: then the GPU is let go on, and the caller must drop the step's results."""
        started = time.monotonic()
        while not is_over():
            waited = time.monotonic() - started
            if seconds is not None and waited > seconds:
                self.release()
                if waited > 2 * seconds:
                    break
            time.sleep(POLL_S)
        problem = self.failure()
        if problem:
            raise EngineError(problem)

    def release(self) -> None:
        """Let the GPU go on without the CPU until `reset`."""
        native.library().ft_meeting_release(self.handle)

    def reset(self) -> None:
        """Serve on after a failure, when the GPU's steps have ended. Raises EngineError while the thread has not come
        back."""
        if native.library().ft_meeting_reset(self.handle) != 0:
            raise EngineError("the experts on the CPU have not come back from a step that was given up")

    def spent(self) -> tuple[int, int, float]:
        """So far: places met, those of them at which operations ran, and seconds that these took."""
        values = [ctypes.c_uint64() for _ in range(3)]
        native.library().ft_meeting_spent(self.handle, *(ctypes.byref(value) for value in values))
        return values[0].value, values[1].value, values[2].value * 1e-9

    def slow_down(self, factor: float) -> None:
        """Make operations take so many times as long, those that run already too: another machine's CPU."""
        native.library().ft_meeting_slow_down(self.handle, factor)

    def close(self) -> None:
        """End the threads; harmless when repeated. No step may be under way."""
        handle, self._handle = self._handle, None
        if handle is not None:
            native.library().ft_meeting_destroy(handle)
