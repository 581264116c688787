"""What the HTTP threads share: the options, the model once it is there, and the requests that run."""

from __future__ import annotations

import dataclasses
import threading

from freetoken.errors import NotReadyError
from freetoken.options import ServerOptions
from freetoken.request import EngineState, Generator, SamplingParams
from freetoken.server.generation import Choice
from freetoken.server.model import ServedModel
from freetoken.server.schema import Defaults, TaskParams
from freetoken.server.watcher import Watcher

__all__ = ["ServerState"]


class ServerState:
    """Shared by all HTTP threads. `attach` is called once, by the thread that loads."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.watcher = Watcher()
        self._lock = threading.Lock()
        self._model: ServedModel | None = None
        self._generator: Generator | None = None
        self._running: dict[int, Choice] = {}
        self._is_closing = False

    def attach(self, model: ServedModel, generator: Generator) -> None:
        """Give the model and its engine, which may still be loading."""
        self._model, self._generator = model, generator

    @property
    def is_ready(self) -> bool:
        """Whether requests are served."""
        generator = self._generator
        return generator is not None and generator.state is EngineState.READY and not self._is_closing

    @property
    def model(self) -> ServedModel:
        """Raises NotReadyError before `attach`."""
        if self._model is None:
            raise NotReadyError("Loading model")
        return self._model

    @property
    def generator(self) -> Generator:
        """Raises NotReadyError before `attach`."""
        if self._generator is None:
            raise NotReadyError("Loading model")
        return self._generator

    @property
    def defaults(self) -> Defaults:
        """What the command line set for fields that a request leaves out."""
        options = self.options
        return Defaults(
            sampling=dataclasses.replace(SamplingParams(), **options.default_sampling),  # type: ignore[arg-type]
            cache_prompt=options.cache_prompt,
            sse_ping_interval=options.sse_ping_interval_s,
            n_slots=self.generator.n_slots,
        )

    def add(self, choice: Choice) -> None:
        """Note a running request. Raises NotReadyError while the server closes."""
        with self._lock:
            if self._is_closing:
                raise NotReadyError("the server is shutting down")
            self._running[choice.request.id] = choice

    def remove(self, choice: Choice) -> None:
        """Forget a request that has ended."""
        with self._lock:
            self._running.pop(choice.request.id, None)

    def params_of(self, request_id: int | None) -> TaskParams | None:
        """Parameters of a running request."""
        choice = self._running.get(request_id) if request_id is not None else None
        return None if choice is None else choice.params

    def close(self) -> None:
        """Cancel everything that runs and take nothing new."""
        with self._lock:
            self._is_closing = True
            for choice in self._running.values():
                choice.request.cancelled.set()

    def dispose(self) -> None:
        """Free what `close` leaves in use; after the HTTP threads have ended."""
        self.watcher.close()
