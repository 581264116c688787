"""The model at work: threads, KV cache and recorded programs of one open file. Called by the engine thread only.

`prefill` stores a prompt (`cpu.prefill` for long chunks, native steps for short ones), `decode` one more token
of each of several sequences. Both count the tokens in their sequences once keys and values are stored, so that a call
that raises leaves every sequence as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListOf
from typing import Any, Protocol

import numpy as np

from freetoken import arch, native, numa
from freetoken.batch import Batch, Stopped
from freetoken.cores import expert_threads
from freetoken.cpu.decode import Decoder
from freetoken.errors import RequestError
from freetoken.gguf import ModelFile
from freetoken.gpu import ahead
from freetoken.gpu.driver import Device
from freetoken.gpu.verdict import choose_device
from freetoken.kvcache import PAGE, KVCache, KVShape, Sequence, capacity_for, check_cache_types, n_pages_for
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.rebuild import CacheChange, CacheStatus, KvStatus, SlotStatus, Statistics
from freetoken.sampler import Sampler
from freetoken.spec import ModelSpec

__all__ = ["MAX_STEPPED", "Launched", "Runner", "import_prefill"]

MAX_STEPPED = 48
"""Chunks up to this long run as decode steps of 8 tokens: their bits are those of tokens that come one by one, and
torch is not needed. Measured, ms a token as steps and by `cpu.prefill`: SmolLM2 Q4_1 on 1 thread 2.4 and 2.3 at 32
tokens, 2.7 and 1.9 at 64, 2.5 and 1.8 at 128; 4 layers of Qwen3-30B-A3B 6.2 and 6.9 at 48, 6.3 and 5.7 at 64, 6.3 and
4.0 at 128, on 2 threads alike. Weights without a native product of many tokens would be better off with 128."""


CHOICE_POSITIONS = 1024
"""Context of the text by which backends are timed after loading."""


class LongPass(Protocol):
    """`cpu.prefill.Prefill` as it is used here."""

    def run(
        self, batch: Batch, should_stop: Callable[[], bool] | None, between_layers: Callable[[], bool] | None
    ) -> np.ndarray:
        """Logits fp32 [n_outputs, n_vocab]. Raises Stopped."""


class Placement(Protocol):
    """`gpu.place.Placement` as it is used here."""

    plan: GpuPlan


class OnGpu(Protocol):
    """`gpu.model.GpuModel` as it is used here."""

    max_stepped: int
    """Chunks up to this long run as decode steps."""
    n_chunk: int
    first_layer: int
    """Layers before it run on the CPU."""
    plan: GpuPlan

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None,
        hidden: np.ndarray | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Logits fp32 [n_outputs, n_vocab]; `hidden` are the states behind the layers on the CPU. Raises Stopped.

        `between_layers` may run steps of other sequences between the layers of a long chunk, and says whether it did.
        """

    def expert_counters(self) -> np.ndarray | None:
        """Of all layers, None without experts."""

    def slot_status(self) -> SlotStatus | None:
        """None where no experts take slots."""

    def statistics(self) -> Statistics | None: ...

    def backend(self) -> tuple[str, str]:
        """How misses run now, and why."""

    def resized(self, change: CacheChange, n_pages: int) -> GpuPlan:
        """The plan for another size. Raises OptionError for what does not fit."""

    def rebuild(self, plan: GpuPlan, moves: ListOf[tuple[int, int]]) -> None:
        """Take the plan's slots and pages. Raises EngineError where it failed and all is as before but for the pages
        moved."""

    def launch(self, batch: Batch, chains: ListOf[Any], uniforms: ListOf[float], *, follows: bool) -> Launched:
        """Start a decode step that samples."""

    def warm_up(self, on_progress: Callable[[float], None]) -> None:
        """Run what makes the first requests quick."""

    is_undecided: bool
    """Whether `choose_backend` has something to choose."""

    def choose_backend(self, page_table: np.ndarray, n_positions: int) -> None:
        """Time the ways to run experts that are in no slot, by steps in these pages."""

    def warm_more(self, should_stop: Callable[[], bool]) -> bool:
        """Run one more program ahead of need, if any is left: whether one was."""

    def close(self) -> None: ...


class Launched(Protocol):
    """A decode step under way that samples its tokens itself."""

    def wait(self) -> tuple[list[int], list[int]]:
        """Tokens, and for each 0, or 1 where the host must sample it."""


class Runner:
    """Owns what a model needs to run; `close` gives the threads back."""

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        options: EngineOptions,
        *,
        n_ctx: int | None = None,
        n_sequences: int = 1,
        placement: Placement | None = None,
    ) -> None:
        """`n_ctx` is the longest sequence (default: the options' or the model's context). n_sequences share the pages:
        each can be full where `options.n_parallel` is given, else their total is `n_ctx`. Runs on the GPU that the
        options name, where it can be used, or where `placement` says; a context that was not given may shrink to it.

        Raises ModelFileError for missing or misshapen tensors, OptionError for an unknown cache type, and EngineError
        where the cache cannot be reserved.
        """
        check_cache_types(options)
        self._file, self._numa = file, options.numa
        cpus = numa.place(options.numa)  # before weights are read
        self.n_ctx = n_ctx or options.n_ctx or spec.n_ctx_train
        self._model = arch.build(file, spec)
        card = None if placement is not None else choose_device(options)
        start = None if card is None else ahead.begin(file, spec, card, options)
        self.n_threads = options.n_threads or native.physical_cores()
        self.n_threads_batch = options.n_threads_batch or self.n_threads
        self.n_threads_experts = options.moe_cpu_threads or min(self.n_threads, expert_threads(native.physical_cores()))
        self.n_chunk = options.n_chunk
        self._cpus = cpus
        self._pool = _pool(self.n_threads, cpus)
        if card is not None and start is not None:
            placement = self._place(file, spec, options, card, start, n_sequences)
        is_same = self.n_threads_batch == self.n_threads
        self._pool_batch = self._pool if is_same else _pool(self.n_threads_batch, cpus)
        self._pool_experts: native.Pool | None = None
        self.gpu: OnGpu | None = None
        shapes = [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]
        if placement is not None:
            self.n_ctx, first = placement.plan.n_ctx, placement.plan.first_layer
            self.cache = KVCache(shapes[:first], placement.plan.n_pages, options.cache_type_k)
            if first:
                self._decoder = Decoder(
                    self._pool, self._model, self.cache, n_pages_for(self.n_ctx), options.n_planes, n_layers=first
                )
            try:
                gpu: OnGpu = import_gpu().GpuModel(
                    file, spec, options, self._model, placement, self._pool, self._experts_pool
                )
            except BaseException:
                if start is not None:
                    start.drop()
                raise
            self.gpu, self.n_chunk = gpu, gpu.n_chunk
        else:
            capacity = capacity_for(self.n_ctx, n_sequences, is_shared=options.n_parallel <= 0)
            self.cache = KVCache(shapes, capacity, options.cache_type_k)
            self._decoder = Decoder(self._pool, self._model, self.cache, n_pages_for(self.n_ctx), options.n_planes)
        self._prefill: LongPass | None = None
        self._options, self._n_sequences = options, n_sequences
        self._max_ctx = self.n_ctx

    def _place(
        self,
        file: ModelFile,
        spec: ModelSpec,
        options: EngineOptions,
        card: Device,
        start: ahead.Start,
        n_sequences: int,
    ) -> Placement | None:
        placed: Placement | None = None
        try:
            placed = import_gpu().place(file, spec, options, card, self.n_ctx, n_sequences, start)
        finally:
            if placed is None:
                start.drop()
        return placed

    def new_sequence(self) -> Sequence:
        """An empty sequence that the caller keeps, truncates for reuse, and releases."""
        return self.cache.new_sequence(max(self.n_ctx, self._max_ctx))

    def warm_up(self, on_progress: Callable[[float], None] = lambda done: None) -> None:
        """Run one token, so that the first request finds the program recorded and the weights read. `on_progress` hears
        how much of it is done, from 0 to 1."""
        if self.gpu is not None:
            self.gpu.warm_up(on_progress)
            if self.gpu.is_undecided:
                self._choose_backend(self.gpu)
        if self.gpu is None or self.gpu.first_layer:
            sequence = self.new_sequence()
            try:
                self.decode([sequence], [0])
            finally:
                sequence.release()
        numa.tell_places(self._numa, [shard.mapping for shard in self._file.shards])

    def _choose_backend(self, gpu: OnGpu) -> None:
        sequence = self.new_sequence()
        try:
            n_positions = min(self.n_ctx, CHOICE_POSITIONS)
            sequence.reserve(n_positions)
            gpu.choose_backend(sequence.page_table, n_positions)
        finally:
            sequence.release()

    def warm_more(self, should_stop: Callable[[], bool]) -> bool:
        """While idle: prepare one more kind of request, if any is left: whether one was. It may be stopped."""
        return self.gpu is not None and self.gpu.warm_more(should_stop)

    def prefill(
        self,
        sequence: Sequence,
        tokens: ListOf[int],
        *,
        want_logits: bool = True,
        should_stop: Callable[[], bool] | None = None,
        on_progress: Callable[[int], None] | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray | None:
        """Append tokens to a sequence; fp32 logits [n_vocab] after the last one, or None where not wanted or stopped.

        `should_stop` is asked before every piece and every layer of a long one; the sequence then holds the pieces
        before. `on_progress` hears how many of the tokens are stored. `between_layers` is called between the layers of
        a long piece; it may decode other sequences, and says whether it did. Raises KVCacheFull before
        anything is stored.
        """
        sequence.reserve(len(tokens))
        logits, n_done = None, 0
        for piece in self._pieces(tokens):
            if should_stop is not None and should_stop():
                return None
            n_done += len(piece)
            try:
                wants = want_logits and n_done == len(tokens)
                logits = self._run_piece(sequence, piece, wants, should_stop, between_layers)
            except Stopped:
                return None
            sequence.extend(piece)
            if on_progress is not None:
                on_progress(n_done)
        return logits

    def decode(self, sequences: ListOf[Sequence], tokens: ListOf[int]) -> np.ndarray:
        """Append one token to each sequence (all different); fp32 logits [n, n_vocab]. Raises KVCacheFull."""
        for sequence in sequences:
            sequence.reserve(1)
        logits = []
        for first in range(0, len(sequences), native.MAX_TOKENS):
            some = sequences[first : first + native.MAX_TOKENS]
            positions = np.asarray([len(s) for s in some], np.int32)
            these = np.asarray(tokens[first : first + len(some)], np.int32)
            logits.append(self._run(Batch(these, positions, [s.page_table for s in some], len(some))))
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.extend([token])
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def expert_counters(self) -> np.ndarray | None:
        """int64 [n_layer, 5] by `experts.slots.COUNTERS`, None where no experts take slots."""
        return None if self.gpu is None else self.gpu.expert_counters()

    def cache_status(self) -> CacheStatus:
        """As of now, for any thread."""
        cache, gpu = self.cache, self.gpu
        n_held = cache.n_held
        kv = KvStatus(cache.capacity, n_held, cache.capacity - n_held, PAGE, self.n_ctx)
        if gpu is None:
            return CacheStatus("cpu-only", "all layers run on the CPU: there are no slots", None, None, kv)
        return CacheStatus(*gpu.backend(), gpu.slot_status(), gpu.statistics(), kv)

    def new_capacity(self, change: CacheChange) -> tuple[int, int]:
        """Pages, and tokens of the longest sequence, after a change. Raises RequestError for what this runner cannot
        do."""
        if self.gpu is None:
            raise RequestError("there is no cache to rebuild: all layers run on the CPU")
        n_pages, n_ctx = self.cache.capacity, self.n_ctx
        if change.has_kv and self.gpu.first_layer:
            raise RequestError("the context cannot change its size while the first layers run on the CPU")
        is_shared = self._options.n_parallel <= 0
        if change.n_ctx is not None:
            n_ctx = change.n_ctx if is_shared else change.n_ctx // self._n_sequences
            if not 0 < n_ctx <= self._max_ctx:
                raise RequestError(
                    f"n_ctx {change.n_ctx}: sequences of {n_ctx} tokens, from 1 to the {self._max_ctx} tokens that the "
                    "server was started with are possible: start it with a larger -c"
                )
            n_pages = capacity_for(n_ctx, self._n_sequences, is_shared=is_shared)
        elif change.kv_pages is not None:
            n_pages = change.kv_pages
            n_ctx = min(self._max_ctx, n_pages * PAGE)
        return n_pages, n_ctx

    def rebuild(self, change: CacheChange) -> None:
        """Another number of slots or pages, between two steps. Sequences keep what they hold.

        Raises RequestError and OptionError for what cannot be, KVCacheFull where sequences hold more pages: then
        nothing has changed; EngineError where it failed and the old size is back.
        """
        n_pages, n_ctx = self.new_capacity(change)
        assert self.gpu is not None
        plan = self.gpu.resized(change, n_pages)
        self.gpu.rebuild(plan, self.cache.compact(n_pages))
        if n_pages != self.cache.capacity:
            self.cache.resize(n_pages)
        self.n_ctx = n_ctx

    def chains(self, samplers: ListOf[Sampler]) -> list[Any] | None:
        """How the GPU samples for these requests, None where the host must for one of them, or the device is none."""
        if self.gpu is None or self.gpu.first_layer or len(samplers) > native.MAX_TOKENS:
            return None
        found = [import_gpu().device_chain(sampler) for sampler in samplers]
        return None if None in found else found

    def launch(
        self, sequences: ListOf[Sequence], tokens: ListOf[int], chains: ListOf[Any], uniforms: ListOf[float], ahead: int
    ) -> Launched:
        """Start a decode step that samples, with `ahead` others of these sequences under way; if there are any it takes
        the last one's tokens. The caller has reserved room, and counts the tokens in the sequences when it has them.
        """
        assert self.gpu is not None
        positions = np.asarray([len(s) + ahead for s in sequences], np.int32)
        batch = Batch(np.asarray(tokens, np.int32), positions, [s.page_table for s in sequences], len(sequences))
        return self.gpu.launch(batch, chains, uniforms, follows=ahead > 0)

    def follow(self, sequence: Sequence, tokens: ListOf[int]) -> None:
        """Append tokens one by one, each in a decode step of its own, for measuring: a GPU samples in each and has the
        next step before it ends, as it has when the engine generates."""
        if self.gpu is None or self.gpu.first_layer:
            for token in tokens:
                self.decode([sequence], [token])
            return
        sequence.reserve(len(tokens))
        chains, under_way = [import_gpu().GREEDY], deque[Launched]()
        for position, token in enumerate(tokens, len(sequence)):
            batch = Batch(np.array([token], np.int32), np.array([position], np.int32), [sequence.page_table], 1)
            under_way.append(self.gpu.launch(batch, chains, [0.0], follows=False))
            if len(under_way) == 2:
                under_way.popleft().wait()
        for step in under_way:
            step.wait()
        sequence.extend(tokens)

    def close(self) -> None:
        """Free the GPU and end the threads. The runner must not be used afterwards."""
        if self.gpu is not None:
            self.gpu.close()
        self._pool.close()
        self._pool_batch.close()
        if self._pool_experts is not None:
            self._pool_experts.close()

    def _experts_pool(self) -> native.Pool:
        """The threads for experts beside a GPU: those of layers on the CPU where they are as many."""
        if self.n_threads_experts == self.n_threads:
            return self._pool
        if self._pool_experts is None:
            self._pool_experts = _pool(self.n_threads_experts, self._cpus)
        return self._pool_experts

    def _pieces(self, tokens: ListOf[int]) -> Iterator[ListOf[int]]:
        """What runs at once: chunks of `EngineOptions.n_chunk`, short ones cut into steps."""
        for first in range(0, len(tokens), self.n_chunk):
            chunk = tokens[first : first + self.n_chunk]
            max_stepped = MAX_STEPPED if self.gpu is None else self.gpu.max_stepped
            size = native.MAX_TOKENS if len(chunk) <= max_stepped else len(chunk)
            for at in range(0, len(chunk), size):
                yield chunk[at : at + size]

    def _run_piece(
        self,
        sequence: Sequence,
        piece: ListOf[int],
        want_logits: bool,
        should_stop: Callable[[], bool] | None,
        between_layers: Callable[[], bool] | None,
    ) -> np.ndarray | None:
        n, start = len(piece), len(sequence)
        positions = np.arange(start, start + n, dtype=np.int32)
        is_short = n <= native.MAX_TOKENS
        n_outputs = 1 if want_logits or is_short else 0  # a program without outputs would be one more to record
        batch = Batch(np.asarray(piece, np.int32), positions, [sequence.page_table] * n, n_outputs)
        logits = self._run(batch, should_stop, between_layers)
        return logits[0] if want_logits else None

    def _run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        if self.gpu is None:
            return self._run_on_cpu(batch, should_stop, between_layers)
        hidden = self._run_on_cpu(batch, should_stop, between_layers) if self.gpu.first_layer else None
        return self.gpu.run(batch, should_stop, hidden, between_layers)

    def _run_on_cpu(
        self, batch: Batch, should_stop: Callable[[], bool] | None, between_layers: Callable[[], bool] | None
    ) -> np.ndarray:
        """Logits, or hidden states where layers on a GPU follow."""
        if batch.n <= native.MAX_TOKENS:
            return self._decoder.run(batch)
        return self._long_pass().run(batch, should_stop, between_layers)

    def _long_pass(self) -> LongPass:
        if self._prefill is None:
            make = import_prefill()
            n_layers = self.gpu.first_layer if self.gpu is not None else None
            self._prefill = make(self._pool_batch, self._model, self.cache, self._decoder.head_logits, n_layers)
        return self._prefill


def import_gpu() -> Any:
    """`freetoken.gpu.model`, which comes with torch and triton: imported where a GPU may be used, waited for here."""
    return ahead.modules().result()


def import_prefill() -> Callable[..., LongPass]:
    """`cpu.prefill.Prefill`. It comes with torch, whose import takes a second or two and 150 MB, and neither decode nor
    short prompts need it: so it is imported by the first long prompt, or ahead of it by whoever calls this from a
    thread of its own."""
    from freetoken.cpu.prefill import Prefill

    return Prefill


def _pool(n_threads: int, cpus: ListOf[int] | None) -> native.Pool:
    """A pool pinned to the CPUs that `--numa` chose, over and over where they are fewer than threads; else to physical
    cores, where there is one for each thread and no quota moves us about."""
    if cpus is not None:
        return native.Pool(n_threads, [cpus[i % len(cpus)] for i in range(n_threads)])
    cpus = native.physical_cpus()
    is_pinned = n_threads <= len(cpus) and native.cpu_quota() is None
    return native.Pool(n_threads, cpus[:n_threads] if is_pinned else None)
