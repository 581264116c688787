"""An engine without a model: says what a script tells it to, at the pace that it is told, and notes what happened."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from freetoken.errors import ContextExceededError, NotReadyError, RequestError
from freetoken.rebuild import CacheChange, CacheStatus, KvStatus, Rebuilds
from freetoken.request import (
    DoneEvent,
    EngineState,
    ErrorEvent,
    Event,
    PromptEvent,
    Request,
    SlotInfo,
    Timings,
    TokenEvent,
    TokenProb,
)

Script = Callable[[Request], Sequence[int | Exception]]


@dataclass
class FakeEngine:
    """A `Generator` with real slots and a real queue; every request is answered by `script`.

    A script gives token ids, of which `eos` ends the answer, and exceptions, which fail it. It is repeated when it
    ends before the request's limit does, if `is_endless`.
    """

    script: Script
    n_slots: int = 2
    n_ctx: int = 256
    eos: int = -1
    prefill_s: float = 0.0
    token_s: float = 0.0
    chunk_tokens: int = 32
    is_endless: bool = False
    state: EngineState = EngineState.READY
    failure: Exception | None = None
    load_progress: float = 1.0
    started: list[Request] = field(default_factory=list)
    """Requests that got a slot, in order."""
    finished: dict[int, float] = field(default_factory=dict)
    """By request id: when its slot was free again."""

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._busy: dict[int, Request] = {}
        self.rebuilds = Rebuilds()
        for slot in range(self.n_slots):
            threading.Thread(target=self._serve, args=(slot,), daemon=True).start()

    def submit(self, request: Request) -> None:
        if self.state is not EngineState.READY:
            raise NotReadyError("Loading model")
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if len(request.prompt) >= self.n_ctx:
            raise ContextExceededError(len(request.prompt), self.n_ctx)
        self._inbox.put(request)

    def slots(self) -> list[SlotInfo]:
        busy = dict(self._busy)
        return [
            SlotInfo(i, self.n_ctx, i in busy, request_id=busy[i].id if i in busy else None)
            for i in range(self.n_slots)
        ]

    def cache_status(self) -> CacheStatus:
        return CacheStatus("none", "there is no model", None, None, KvStatus(1, 0, 1, 256, self.n_ctx))

    def rebuild(self, change: CacheChange) -> CacheStatus:
        raise RequestError(f"nothing to rebuild: {change}")

    def start(self) -> None:
        """For `ft serve`: there is nothing to load."""

    def close(self) -> None:
        """For `ft serve`: the threads are daemons."""

    def _serve(self, slot: int) -> None:
        while True:
            request = self._inbox.get()
            if request.cancelled.is_set():
                request.events.put(DoneEvent("cancelled", Timings(0, 0, 0.0, 0, 0.0)))
                continue
            self.started.append(request)
            self._busy[slot] = request
            last = self._answer(request, slot)
            del self._busy[slot]
            self.finished[request.id] = time.monotonic()
            request.events.put(last)

    def _answer(self, request: Request, slot: int) -> Event:
        """Everything but the last event, which is returned."""
        started = time.monotonic()
        n_prompt, n_made = len(request.prompt), 0

        def done(reason: str, **more: object) -> DoneEvent:
            elapsed_ms = (time.monotonic() - started) * 1e3
            timings = Timings(1, n_prompt - 1, 2.0, n_made, elapsed_ms)
            return DoneEvent(reason, timings, id_slot=slot, **more)  # type: ignore[arg-type]

        for n_done in [1, *range(self.chunk_tokens, n_prompt, self.chunk_tokens), n_prompt]:
            if request.cancelled.is_set():
                return done("cancelled")
            if request.return_progress:
                request.events.put(PromptEvent(n_prompt, 1, n_done))
            time.sleep(self.prefill_s)
        limit = request.params.n_predict
        while True:
            for item in self.script(request):
                if isinstance(item, Exception):
                    return ErrorEvent(item)
                if request.cancelled.is_set():
                    return done("cancelled")
                if 0 <= limit <= n_made:
                    return done("limit")
                if n_prompt + n_made >= self.n_ctx:
                    return done("limit", truncated=True)
                time.sleep(self.token_s)
                n_made += 1
                if item == self.eos and not request.params.ignore_eos:
                    return done("eos", eos_token=item)
                request.events.put(self._token(item, request.params.n_probs))
            if not self.is_endless:
                return done("limit")

    @staticmethod
    def _token(token: int, n_probs: int) -> TokenEvent:
        if not n_probs:
            return TokenEvent(token)
        top = tuple(TokenProb(token + i, -0.5 * (i + 1)) for i in range(min(n_probs, 2)))
        return TokenEvent(token, -0.5, top)
