"""Prefill on the GPU: a long chunk of one sequence, with fp16 operands and fp32 sums (docs/numerics.md, section 8).

Rows go into a product as fp16 with a power of two for each; quantised matrices are decoded to fp16, on the way into the
product or in a scratch of fixed size; fp32 matrices (routers) are multiplied in fp32. Only the head has the arithmetic
of a decode step. All work is queued on the current stream; a layer of routed experts waits once for its counts, unless
all its experts are there and its rows are few (gpu.mixture). The steps are made once (gpu.prompt); their rows stand in
one buffer (gpu.rows), so that a chunk takes memory by its length alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from freetoken import blocks
from freetoken.batch import Batch, Stopped
from freetoken.blocks import ROPE_BLOCK, Model, RopeTable, Weight
from freetoken.experts.stream import ExpertPool, ExpertStream
from freetoken.gpu import driver
from freetoken.gpu.dense import Dense
from freetoken.gpu.mixture import Keep, Mixture
from freetoken.gpu.prompt import DenseWeights, PromptProgram, PromptTrace
from freetoken.gpu.rows import RowMemory
from freetoken.gpu.scratch import Scratch, upload
from freetoken.kernels.grouped import Rows

__all__ = ["DenseWeights", "DevicePages", "Prefill"]

Tensor = torch.Tensor

MAX_ROPE_BLOCKS = 32
"""Blocks of 256 positions whose angles stay on the device: 4 MiB at a rotation of 128 values."""

LogitsOfRows = Callable[[Tensor, Weight], Tensor]
"""Logits fp32 [n, n_vocab] of rows fp32 [n, n_embd], by the arithmetic of a decode step."""


class DevicePages(Protocol):
    """Pages of keys and values: for each layer [capacity, n_kv, 256, width]."""

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...


class Prefill:
    """Runs chunks of one sequence. Used by the engine thread only."""

    def __init__(
        self,
        model: Model,
        weights: DenseWeights,
        pages: DevicePages,
        head_logits: LogitsOfRows,
        device: torch.device,
        pool: ExpertPool | None = None,
        *,
        scratch: Scratch,
        n_chunk: int = 0,
        keep: Keep | None = None,
        first_layer: int = 0,
    ) -> None:
        """`pool` holds the routed experts of a model that has some; `keep` may take staged ones over at the end of a
        prompt. Memory for chunks of `n_chunk` tokens is taken at the first. Layers before `first_layer` run
        elsewhere."""
        self._model, self._weights, self.pages = model, weights, pages
        self.head_logits, self.device = head_logits, device
        self._scratch, self._n_chunk = scratch, n_chunk
        self._first_layer = first_layer
        self.capability = 0
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self.capability = 10 * major + minor
        self.use_experts(pool, keep)
        banks = [] if pool is None else [layer for layer in pool.layers if layer is not None]
        self.layer_of = {layer.banks[0].name: layer.layer for layer in banks}
        self._program: PromptProgram | None = None
        self._buffer: Tensor | None = None
        self._angles: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[int, RopeTable] = {}

    def use_experts(self, pool: ExpertPool | None, keep: Keep | None) -> None:
        """From the next chunk on the experts are here; None lets go of those of before."""
        copy_function = driver.memcpy_async_address() if self.device.type == "cuda" else 0
        self._keep = keep
        self.stream = None if pool is None else ExpertStream(pool, self.device, copy_function)
        self.mixture = (
            None if self.stream is None else Mixture(self.stream, self._scratch, self.capability, self.device)
        )

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
        plan: str | None = None,
        hidden: np.ndarray | None = None,
    ) -> Tensor:
        """Queue a chunk; logits fp32 [n_outputs, n_vocab] on the device. Raises Stopped. `hidden` fp32 [n, n_embd] are
        the states behind the first `first_layer` layers, which ran elsewhere.

        `between_layers` is called before each layer but the first and may run decode steps of others; it says whether
        experts may have changed slots. `plan` "stream" or "on_demand" overrides the cost model.
        """
        with torch.inference_mode():
            program = self.program(0 if hidden is None else hidden.shape[1])
            chunk = _Chunk(self, batch, should_stop, between_layers, self._memory(program, batch), hidden)
            if self.stream is not None and self.mixture is not None:
                self.mixture.keep = self._keep if batch.n_outputs else None
                if self._keep is not None:
                    self._keep.begin()
                self.stream.begin(batch.n, batch.n_outputs, plan)
            try:
                for step in program.steps:
                    step.run(chunk)
            finally:
                if self.stream is not None:
                    self.stream.end()
                self.flush()
            return chunk.logits

    def _write_down(self, trace: PromptTrace, n_embd: int) -> None:
        model, n_layer = self._model, len(self.pages.k)
        x = trace.entry(n_embd) if self._first_layer else model.start(trace)
        x = model.run_layers(trace, x, self._first_layer, n_layer)
        if self._first_layer == n_layer:
            x = trace.outputs(x)  # no last layer has done so
        model.finish(trace, x)

    def program(self, n_embd: int = 0) -> PromptProgram:
        """The steps, made by the first chunk; rows that come from elsewhere are n_embd wide."""
        if self._program is None:
            trace = PromptTrace()
            self._write_down(trace, n_embd)
            dense = Dense(self._scratch, self.capability, self.device)
            self._program = PromptProgram(trace, self._weights, dense)
        return self._program

    def flush(self) -> None:
        """Let decode steps follow: the cache hears of experts that were kept."""
        if self._keep is not None:
            self._keep.flush()

    def _memory(self, program: PromptProgram, batch: Batch) -> RowMemory:
        need = program.plan.n_bytes(batch.n, batch.n_outputs)
        if self._buffer is None or len(self._buffer) < need:
            self._buffer = None  # before there is another
            n_bytes = max(need, program.plan.n_bytes(self._n_chunk, 1))
            self._buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return RowMemory(self._buffer, program.plan, batch.n, batch.n_outputs)

    def angles(self, table: RopeTable, start: int, n: int) -> Tensor:
        """Cosines and sines of positions, fp32 [n, 2, n_rot / 2]."""
        self._tables[id(table)] = table  # so that no other takes its number
        first, last = start // ROPE_BLOCK, (start + n - 1) // ROPE_BLOCK
        blocks_ = []
        for block in range(first, last + 1):
            key = id(table), block
            if key not in self._angles:
                if len(self._angles) >= MAX_ROPE_BLOCKS:
                    del self._angles[next(iter(self._angles))]
                positions = np.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK)
                self._angles[key] = upload(table.cos_sin(positions), self.device)
            blocks_.append(self._angles[key])
        at = start - first * ROPE_BLOCK
        whole = blocks_[0] if len(blocks_) == 1 else torch.cat(blocks_)
        return whole[at : at + n]


class _Chunk:
    """A chunk under way (`prompt.Chunk`)."""

    def __init__(
        self,
        owner: Prefill,
        batch: Batch,
        should_stop: Callable[[], bool] | None,
        between_layers: Callable[[], bool] | None,
        memory: RowMemory,
        hidden: np.ndarray | None,
    ) -> None:
        self._owner = owner
        self._n = batch.n
        self._should_stop, self._between_layers = should_stop, between_layers
        self.memory, self.hidden = memory, hidden
        self.tokens = batch.tokens
        self.start = int(batch.positions[0])
        self.table = upload(np.ascontiguousarray(batch.page_tables[0], np.int32), owner.device)
        self.k, self.v = owner.pages.k, owner.pages.v
        self.capability = owner.capability
        self.head = owner.head_logits
        self.logits = torch.empty(0)
        self._angles: dict[int, Tensor] = {}

    def between(self, layer: int) -> None:
        """Between two layers: give up, or let others run, whose tensors outlive this chunk."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        if layer and self._between_layers is not None:
            self._owner.flush()
            with torch.inference_mode(False):
                has_moved = self._between_layers()
            if has_moved and self._owner.stream is not None:
                self._owner.stream.refresh()

    def angles(self, table: RopeTable) -> Tensor:
        found = self._angles.get(id(table))
        if found is None:
            found = self._angles[id(table)] = self._owner.angles(table, self.start, self._n)
        return found

    def experts(self, bank: blocks.Experts, x: Rows, ids: Tensor, weights: Tensor, activation: str, y: Tensor) -> None:
        assert self._owner.mixture is not None, "a model with experts needs their pool"
        self._owner.mixture.run(self._owner.layer_of[bank.gate.name], x, ids, weights, bank, activation, y)
