"""The one thread that owns the model: admit, prefill, decode, sample, emit.

The HTTP threads call `submit` and read events; everything else here runs on the engine's thread. A slot serves one
request at a time and keeps its tokens in the KV cache afterwards, so that the next prompt with the same beginning
starts after it. Scheduling: one prefill chunk of one request, then one decode step of all that generate, in turn;
in long chunks also between layers (`turns`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from freetoken import native
from freetoken.beside import beside
from freetoken.errors import (
    ContextExceededError,
    DeviceLostError,
    EngineError,
    FreeTokenError,
    NotReadyError,
    OptionError,
    RequestError,
)
from freetoken.gguf import ModelFile, open_model
from freetoken.kvcache import KVCacheFull
from freetoken.options import EngineOptions, ModelOptions
from freetoken.rebuild import CacheChange, CacheStatus, Rebuild, Rebuilds
from freetoken.request import (
    DoneEvent,
    EngineState,
    ErrorEvent,
    PromptEvent,
    Request,
    SlotInfo,
    Timings,
    TokenEvent,
)
from freetoken.runner import Launched, Runner
from freetoken.sampler import SampledToken, Sampler
from freetoken.slot import Slot, leave_pages
from freetoken.spec import ModelSpec, read_spec
from freetoken.tokenizer import Tokenizer
from freetoken.turns import Turns

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

N_SLOTS_AUTO = 4
"""Slots where -np is not given; they share one pool of context, as llama-server's unified cache does."""
SWEEP_S = 0.02
"""How often the queue, which may be long, is searched for requests whose clients have left."""
MAX_AHEAD = 2
"""Decode steps under way at once: one that runs, and one that waits for its tokens."""
SLOT_SIMILARITY = 0.1
"""Least share of a prompt that a slot must hold already to be preferred over the longest idle one."""


class Engine:
    """Loads a model in its own thread and serves requests from it; see `request.Generator` for what others may use."""

    def __init__(
        self, model: ModelOptions, options: EngineOptions, tokenizer: Tokenizer | Future[Tokenizer] | None = None
    ) -> None:
        """`tokenizer` is the model's, where the caller has read it already, or begun to."""
        self._tokenizer_given = tokenizer
        self._model_options = model
        self._options = options
        self._state = EngineState.LOADING
        self._failure: Exception | None = None
        self._load_progress = 0.0
        self._inbox: queue.SimpleQueue[Request | Rebuild | None] = queue.SimpleQueue()
        self._rebuilds = Rebuilds()
        self._ordered: collections.deque[Rebuild] = collections.deque()
        self._waiting: collections.deque[Request] = collections.deque()
        self._slots: list[Slot] = []
        self._swept = 0.0
        self._turn = 0
        self._turns = Turns(self._decode_all)
        self._n_ctx = 0
        self._closing = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    # --- for other threads ---------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def failure(self) -> Exception | None:
        return self._failure

    @property
    def n_ctx(self) -> int:
        return self._n_ctx

    @property
    def n_slots(self) -> int:
        return self._options.n_parallel if self._options.n_parallel > 0 else N_SLOTS_AUTO

    @property
    def load_progress(self) -> float:
        return self._load_progress

    def start(self) -> None:
        """Begin loading; returns at once."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Block until the model answers; raises what made loading fail."""
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Cancel what runs, end the thread and free the model."""
        self._closing.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NotReadyError while loading, RequestError for a prompt that cannot be served."""
        if self._state is not EngineState.READY or self._closing.is_set():
            raise NotReadyError("Loading model")
        if not request.prompt:
            raise RequestError("the prompt is empty: it must hold at least one token")
        if len(request.prompt) >= self._n_ctx:
            raise ContextExceededError(len(request.prompt), self._n_ctx)
        if request.id_slot >= self.n_slots:
            raise RequestError(f"id_slot {request.id_slot}: the server has slots 0 to {self.n_slots - 1}")
        self._inbox.put(request)
        if self._closing.is_set():  # perhaps too late for the engine to see it
            raise NotReadyError("the engine has stopped")

    def slots(self) -> list[SlotInfo]:
        """A snapshot of all slots."""
        return [
            SlotInfo(
                s.id, self._n_ctx, (r := s.request) is not None, s.n_prompt, s.n_decoded, None if r is None else r.id
            )
            for s in self._slots
        ]

    def expert_counters(self) -> np.ndarray | None:
        """int64 [n_layer, 5] by `experts.slots.COUNTERS`, None where no experts take slots. Stops no step."""
        return self._runner.expert_counters() if self._state is EngineState.READY else None

    def cache_status(self) -> CacheStatus:
        """Slots, their statistics and pages, as of now. Raises NotReadyError while loading."""
        if self._state is not EngineState.READY:
            raise NotReadyError("Loading model")
        status = self._runner.cache_status()
        return dataclasses.replace(status, is_rebuilding=self._rebuilds.is_under_way, last_rebuild=self._rebuilds.last)

    def rebuild(self, change: CacheChange) -> CacheStatus:
        """Change the caches' size between two steps; returns when that is done. Raises RequestError for a change that
        cannot be, with 409 while there is another, and EngineError for one that failed, after which all is as before.
        """
        if self._state is not EngineState.READY or self._closing.is_set():
            raise NotReadyError("Loading model")
        with self._rebuilds.begin(change) as ordered:
            self._inbox.put(ordered)
            if self._closing.is_set():  # perhaps too late for the engine to see it
                raise NotReadyError("the engine has stopped")
            status = ordered.done.result()
        return dataclasses.replace(status, is_rebuilding=False)

    # --- the engine thread ---------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._failure = _failure(f"{self._model_options.path}: loading failed", error)
            self._state = EngineState.FAILED
            self._ready.set()
            return
        self._state = EngineState.READY
        self._ready.set()
        try:
            while not self._closing.is_set():
                self._step()
        except Exception as error:
            self._failure = _failure("the engine failed", error)
            self._state = EngineState.FAILED
        finally:
            self._closing.set()
            self._drain()
            self._runner.close()
            self._file.close()

    def _load(self) -> None:
        started = time.monotonic()
        self._file: ModelFile = open_model(self._model_options.path)
        self._spec: ModelSpec = read_spec(self._file)
        self._load_progress = 0.1
        tokenizer = self._tokenizer_given or beside("vocabulary", self._read_vocabulary)
        total = self._options.n_ctx or self._spec.n_ctx_train
        n_ctx = total if self._options.n_parallel <= 0 else max(total // self.n_slots, 1)
        self._runner = Runner(self._file, self._spec, self._options, n_ctx=n_ctx, n_sequences=self.n_slots)
        self._load_progress = 0.4
        self._n_ctx = self._runner.n_ctx
        self._slots = [Slot(i, self._runner.new_sequence()) for i in range(self.n_slots)]
        self._load_progress = 0.5
        self._runner.warm_up(self._warmed)
        self._tokenizer = tokenizer.result() if isinstance(tokenizer, Future) else tokenizer
        self._load_progress = 1.0
        logger.info(
            "%s: %d slots of %d tokens, %d threads, %s kernels, weights ready in %.2f s",
            self._spec.architecture,
            self.n_slots,
            self._n_ctx,
            self._runner.n_threads,
            native.variant(),
            time.monotonic() - started,
        )

    def _read_vocabulary(self) -> Tokenizer:
        return Tokenizer(self._file.shards[0].path, self._file.metadata)

    def _warmed(self, done: float) -> None:
        self._load_progress = 0.5 + 0.5 * done

    def _step(self) -> None:
        """One round: new requests, one prefill chunk, one decode step."""
        is_idle = not self._waiting and all(s.request is None for s in self._slots)
        if is_idle and self._inbox.empty() and self._runner.warm_more(lambda: not self._inbox.empty()):
            return  # one at a time: a request waits for no more than that
        self._receive(block=is_idle)
        while self._ordered:
            self._carry_out(self._ordered.popleft())
        self._drop_cancelled()
        self._admit()
        self._seat()
        prefilling = [s for s in self._slots if s.is_prefilling]
        if prefilling:
            self._turn += 1
            self._guard([prefilling[self._turn % len(prefilling)]], self._prefill)
        self._decode_all()

    def _decode_all(self) -> bool:
        """A decode step of all that generate, also between the layers of a prompt; False where nobody does."""
        decoding = [s for s in self._slots if s.is_decoding and not s.is_cancelled]
        if decoding:
            self._guard(decoding, self._decode)
        return bool(decoding)

    def _receive(self, block: bool) -> None:
        while True:
            try:
                request = self._inbox.get(block=block)
            except queue.Empty:
                return
            block = False
            if isinstance(request, Rebuild):
                self._ordered.append(request)
            elif request is not None:
                self._waiting.append(request)

    def _carry_out(self, ordered: Rebuild) -> None:
        """A rebuild, while no step is under way and no prompt in the middle of a chunk. Raises DeviceLostError."""
        started, change = time.monotonic(), ordered.change
        failure: FreeTokenError | None = None
        try:
            leave_pages(self._slots, self._waiting, *self._runner.new_capacity(change))
            self._runner.rebuild(change)
            self._n_ctx = self._runner.n_ctx
        except OptionError as error:
            failure = RequestError(str(error))
        except Exception as error:
            failure = _failure("rebuilding the cache failed", error)
        self._rebuilds.note(change, started, failure)
        if failure is None:
            logger.info("cache rebuilt in %.2f s: %s", time.monotonic() - started, change)
            ordered.done.set_result(self.cache_status())
            return
        ordered.done.set_exception(failure)
        if isinstance(failure, DeviceLostError):
            raise failure

    def _drop_cancelled(self) -> None:
        if time.monotonic() - self._swept > SWEEP_S:
            for _ in range(len(self._waiting)):
                request = self._waiting.popleft()
                if not _is_over(request):
                    self._waiting.append(request)
            self._swept = time.monotonic()
        for slot in self._slots:
            if slot.is_cancelled:
                self._finish(slot, "cancelled")

    def _admit(self) -> None:
        """Give idle slots to waiting requests in their order; one whose wished slot is busy holds up nobody."""
        passed = []
        while self._waiting and any(s.request is None for s in self._slots):
            request = self._waiting.popleft()
            if _is_over(request):
                continue
            slot = self._choose_slot(request)
            if slot is None:
                passed.append(request)
                continue
            slot.request = request
            self._guard([slot], self._assign)
        self._waiting.extendleft(reversed(passed))

    def _choose_slot(self, request: Request) -> Slot | None:
        """The wished slot; else the one that holds the longest useful prefix; else the longest idle one."""
        idle = [s for s in self._slots if s.request is None]
        if request.id_slot >= 0:
            return next((s for s in idle if s.id == request.id_slot), None)
        if not idle:
            return None
        if request.cache_prompt:
            held, best = max(((s.sequence.common_prefix(request.prompt), s) for s in idle), key=lambda pair: pair[0])
            if held > SLOT_SIMILARITY * len(request.prompt):
                return best
        return min(idle, key=lambda s: s.last_used)

    def _assign(self, slots: list[Slot]) -> None:
        """Set a slot up for the request that it has been given."""
        slot, request = slots[0], slots[0].request
        assert request is not None
        slot.has_room, slot.n_decoded, slot.first_token, slot.started = False, 0, 0.0, time.monotonic()
        held = slot.sequence.common_prefix(request.prompt) if request.cache_prompt else 0
        held = min(held, len(request.prompt) - 1)  # one token must run to give logits
        slot.sequence.truncate(held)
        slot.sampler = Sampler(request.params, self._tokenizer, request.prompt)
        slot.todo = list(request.prompt[held:])
        slot.n_cached, slot.n_prompt = held, len(request.prompt)

    def _seat(self) -> None:
        """Reserve the cache for whole prompts, the oldest request first, so that no two of them stop half-way."""
        for slot in sorted((s for s in self._slots if s.is_waiting), key=lambda s: s.started):
            request = slot.request
            assert request is not None
            slot.has_room = self._make_room(slot, len(slot.todo))
            if not slot.has_room:
                return
            if request.return_progress:
                request.events.put(PromptEvent(slot.n_prompt, slot.n_cached, slot.n_cached))

    def _prefill(self, slots: list[Slot]) -> None:
        slot = slots[0]
        assert slot.request is not None
        chunk = slot.todo[: self._runner.n_chunk]
        is_last = len(chunk) == len(slot.todo)
        request = slot.request
        self._turns.begin()
        logits = self._runner.prefill(
            slot.sequence, chunk, want_logits=is_last, should_stop=request.cancelled.is_set, between_layers=self._turns
        )
        if request.cancelled.is_set():
            return
        del slot.todo[: len(chunk)]
        if request.return_progress:
            request.events.put(PromptEvent(slot.n_prompt, slot.n_cached, len(slot.sequence.tokens)))
        if logits is not None:
            self._emit(logits, slots)

    def _decode(self, slots: list[Slot]) -> None:
        slots = [s for s in slots if self._make_room(s, 1)]
        slots = [s for s in slots if s.request is not None]
        if not slots:
            return
        if not self._decode_ahead(slots):
            logits = self._runner.decode([s.sequence for s in slots], [s.todo[0] for s in slots])
            for slot, row in zip(slots, logits, strict=True):
                self._guard([slot], functools.partial(self._emit, row))

    def _decode_ahead(self, slots: list[Slot]) -> bool:
        """Decode steps that sample their tokens themselves, each launched before the tokens of the one before are read;
        until something else is to be done. False where the host must sample the next tokens."""
        samplers = [s.sampler for s in slots if s.sampler is not None]
        chains = self._runner.chains(samplers)
        if chains is None:
            return False
        sequences, requests = [s.sequence for s in slots], [s.request for s in slots]
        under_way: collections.deque[Launched] = collections.deque()
        while True:
            ahead = len(under_way)
            if ahead == 0 or (ahead < MAX_AHEAD and self._may_go_on(slots, requests, ahead)):
                tokens, draws = [s.todo[0] for s in slots], [each.draw_ahead(ahead) for each in samplers]
                under_way.append(self._runner.launch(sequences, tokens, chains, draws, ahead))
                if ahead + 1 < MAX_AHEAD:
                    continue
            sampled, status = under_way.popleft().wait()
            living = [s.request is not None and s.request is r for s, r in zip(slots, requests, strict=True)]
            if any(code for code, is_living in zip(status, living, strict=True) if is_living):
                return False  # what follows took a wrong token
            for slot, token, is_living in zip(slots, sampled, living, strict=True):
                if is_living:
                    self._guard([slot], functools.partial(self._take_sampled, token))
            if not under_way and not self._may_go_on(slots, requests, 0):
                return True

    def _may_go_on(self, slots: list[Slot], requests: list[Request | None], ahead: int) -> bool:
        """Whether one more step of the same requests may be launched, with so many under way. Reserves its room."""
        others = [s for s in self._slots if s.request is not None and s not in slots]
        if others or not self._inbox.empty() or self._closing.is_set():
            return False
        if self._waiting and (len(slots) < len(self._slots) or time.monotonic() - self._swept > SWEEP_S):
            return False
        for slot, request in zip(slots, requests, strict=True):
            if request is None or slot.request is not request or request.cancelled.is_set():
                return False
            limit = request.params.n_predict
            if 0 <= limit <= slot.n_decoded + ahead or len(slot.sequence) + ahead + 1 > self._n_ctx:
                return False
            try:
                slot.sequence.reserve(ahead + 1)
            except KVCacheFull:
                return False
        return True

    def _take_sampled(self, token: int, slots: list[Slot]) -> None:
        """A token that the GPU has sampled for a slot's request."""
        slot = slots[0]
        assert slot.sampler is not None
        slot.sequence.extend([slot.todo[0]])
        slot.sampler.take_ahead()
        self._take(slot, SampledToken(token))

    def _emit(self, logits: np.ndarray, slots: list[Slot]) -> None:
        """Sample from the logits of a slot's last token and tell its request."""
        slot = slots[0]
        request, sampler = slot.request, slot.sampler
        assert request is not None and sampler is not None
        if request.params.n_predict == 0:
            self._finish(slot, "limit")
            return
        self._take(slot, sampler.sample(logits))

    def _take(self, slot: Slot, sampled: SampledToken) -> None:
        """Count a sampled token and tell the slot's request."""
        request, sampler, token = slot.request, slot.sampler, sampled.token
        assert request is not None and sampler is not None
        sampler.accept(token)
        if slot.n_decoded == 0:
            slot.first_token = time.monotonic()
            logger.debug("first token %.3f s after its request came to a slot", slot.first_token - slot.started)
        slot.n_decoded += 1
        slot.todo = [token]
        if self._tokenizer.is_eog(token) and not request.params.ignore_eos:
            self._finish(slot, "eos", eos_token=token)
            return
        request.events.put(TokenEvent(token, sampled.logprob, sampled.top))
        if 0 <= request.params.n_predict <= slot.n_decoded:
            self._finish(slot, "limit")
        elif len(slot.sequence.tokens) + 1 > self._n_ctx:
            self._finish(slot, "limit", truncated=True)

    def _make_room(self, slot: Slot, n_tokens: int) -> bool:
        """Reserve cache pages for a slot, evicting what can be computed again.

        Where running requests fill the cache the slot waits if it has not begun its prompt, and ends truncated if it
        already generates.
        """
        while True:
            try:
                slot.sequence.reserve(n_tokens)
                return True
            except KVCacheFull:
                if self._evict(slot):
                    continue
            if slot.is_decoding:
                self._finish(slot, "limit", truncated=True)
            return False

    def _evict(self, slot: Slot) -> bool:
        """Free pages for a slot: of idle slots, the longest unused first; else of one whose request waits for room
        too, the youngest first. A request that waits lets the running ones end before it takes from others like it."""
        idle = [s for s in self._slots if s.request is None and s.sequence.tokens]
        if idle:
            min(idle, key=lambda s: s.last_used).sequence.truncate(0)
            return True
        waiting = [s for s in self._slots if s.is_waiting and s is not slot and s.sequence.tokens]
        if not waiting or (slot.is_waiting and any(s.has_room and s.request is not None for s in self._slots)):
            return False
        victim = max(waiting, key=lambda s: s.started)
        assert victim.request is not None
        victim.sequence.truncate(0)
        victim.todo, victim.n_cached = list(victim.request.prompt), 0
        return True

    def _finish(self, slot: Slot, reason: str, *, eos_token: int | None = None, truncated: bool = False) -> None:
        assert slot.request is not None
        done = DoneEvent(reason, slot.timings(), eos_token, truncated, slot.id)
        request = slot.request
        slot.request, slot.sampler, slot.todo = None, None, []
        slot.last_used = time.monotonic()
        request.events.put(done)

    def _guard(self, slots: list[Slot], work: Callable[[list[Slot]], None]) -> None:
        """Run work for slots; what it raises goes to the requests that it worked for, and their slots are emptied."""
        try:
            work(slots)
        except Exception as error:
            failure = _failure("the engine failed", error)
            for slot in slots:
                request = slot.request
                slot.request, slot.sampler, slot.todo = None, None, []
                slot.sequence.truncate(0)
                if request is not None:
                    request.events.put(ErrorEvent(failure))
            if isinstance(failure, DeviceLostError):
                raise failure from None

    def _drain(self) -> None:
        """At the end of the thread: end every request, so that no reader waits for ever."""
        self._receive(block=False)
        for ordered in self._ordered:
            ordered.done.set_exception(self._failure or NotReadyError("the engine has stopped"))
        running = [s.request for s in self._slots if s.request is not None]
        for request in [*self._waiting, *running]:
            if self._failure is not None:
                request.events.put(ErrorEvent(self._failure))
            else:
                request.events.put(DoneEvent("cancelled", Timings(0, 0, 0.0, 0, 0.0)))


def _failure(what: str, error: Exception) -> FreeTokenError:
    """An error as requests are told of it; one that nobody foresaw goes to the log with its trace."""
    if isinstance(error, FreeTokenError):
        return error
    logger.exception(what)
    return EngineError(f"{what}: {type(error).__name__}: {error}")


def _is_over(request: Request) -> bool:
    """Whether a queued request was cancelled; it then gets its last event."""
    is_over = request.cancelled.is_set()
    if is_over:
        request.events.put(DoneEvent("cancelled", Timings(0, 0, 0.0, 0, 0.0)))
    return is_over
