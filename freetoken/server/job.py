"""The engine requests of one HTTP request: submitted together, read from one queue, cancelled together."""

from __future__ import annotations

import logging
import queue
import socket

from freetoken.request import DoneEvent, Event, PromptEvent, Request
from freetoken.server.generation import NO_TIMINGS, Choice, Final, Step
from freetoken.server.state import ServerState

__all__ = ["Job"]

Item = tuple[Choice, list[Step]]

log = logging.getLogger(__name__)


class _Mailbox(queue.SimpleQueue[Event]):
    """One request's `events`, which passes everything on to the job's queue with the request's index."""

    def __init__(self, index: int, shared: queue.SimpleQueue[tuple[int, Event]]) -> None:
        self._index = index
        self._shared = shared

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        self._shared.put((self._index, item))


class Job:
    """Runs the choices of one HTTP request. Used by one HTTP thread; `cancel` may come from any."""

    def __init__(self, state: ServerState, choices: list[Choice], client: socket.socket | None) -> None:
        self._state = state
        self._choices = choices
        self._events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._n_open = len(choices)
        self._watch = None if client is None else state.watcher.watch(client, self.cancel)
        try:
            for i, choice in enumerate(choices):
                choice.request.events = _Mailbox(i, self._events)
                state.add(choice)
                self._submit(choice.request)
        except BaseException:
            self.close()
            raise

    def _submit(self, request: Request) -> None:
        """Hand a request to the engine; an empty prompt ends at once with no text, as in llama-server."""
        if request.prompt:
            self._state.generator.submit(request)
            return
        request.events.put(PromptEvent(0, 0, 0))
        request.events.put(DoneEvent("none", NO_TIMINGS))

    @property
    def is_open(self) -> bool:
        """Whether more is to come."""
        return self._n_open > 0

    def next(self, timeout_s: float | None) -> Item | None:
        """The next event's steps, None when there was none in time. Raises what made a request fail."""
        try:
            index, event = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        choice = self._choices[index]
        try:
            steps = choice.feed(event)
        finally:
            if choice.is_done:
                self._n_open -= 1
                self._state.remove(choice)
        if choice.is_done:
            _log_end(choice, steps[-1])
        return choice, steps

    def first(self) -> Item:
        """Wait until the engine has taken up one of the requests; raises its error where that is the first thing."""
        while True:
            item = self.next(None)
            assert item is not None
            if item[1]:
                return item

    def results(self) -> list[tuple[Choice, Final]]:
        """Wait for all; in the order of the choices."""
        finals: dict[int, Final] = {}
        while self.is_open:
            item = self.next(None)
            assert item is not None
            choice, steps = item
            for step in steps:
                if isinstance(step, Final):
                    finals[choice.index] = step
        return [(choice, finals[choice.index]) for choice in self._choices]

    def cancel(self) -> None:
        """Let the engine drop what runs."""
        for choice in self._choices:
            choice.request.cancelled.set()

    def close(self) -> None:
        """Cancel what still runs and forget the client. May be called twice."""
        if self._watch is not None:
            self._state.watcher.unwatch(self._watch)
            self._watch = None
        self.cancel()
        for choice in self._choices:
            self._state.remove(choice)


def _log_end(choice: Choice, step: Step) -> None:
    """One line for a finished request."""
    assert isinstance(step, Final)
    t = step.timings
    log.info(
        "request %d on slot %d: prompt %d tokens (%d reused) in %.1f ms, %.1f tok/s; "
        "generated %d tokens in %.1f ms, %.1f tok/s; stop: %s",
        choice.request.id,
        step.id_slot,
        t.prompt_n,
        t.cache_n,
        t.prompt_ms,
        1e3 * t.prompt_n / t.prompt_ms if t.prompt_ms > 0 else 0.0,
        t.predicted_n,
        t.predicted_ms,
        1e3 * max(t.predicted_n - 1, 0) / t.predicted_ms if t.predicted_ms > 0 else 0.0,
        step.stop_type,
    )
