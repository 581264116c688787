"""Decode on the CPU: a forward pass of up to 8 tokens as one recorded program of native operations.

`Decoder.run` refills fixed input buffers and replays the program of that many rows with one native call; the program is
recorded on first use, by running the model's `forward` over a `Recorder`. The arithmetic is docs/numerics.md's, so a
row's logits do not depend on the other rows. Nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import Experts, Model, Norm, RopeTable, Weight
from freetoken.cpu.stages import Parts, Stage
from freetoken.kvcache import KVCache

__all__ = ["Decoder", "Recorder"]

GATES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}

Buffer = np.ndarray
"""fp32, one-dimensional, 64-byte aligned."""


@dataclass
class Arena:
    """Buffers of one program. One whose `Rows` nobody holds any more serves a later operation, once a barrier has been
    recorded: its last reader is done by then."""

    free: dict[int, list[Buffer]] = field(default_factory=dict)
    spent: list[Buffer] = field(default_factory=list)
    n_bytes: int = 0

    def take(self, n_values: int) -> Buffer:
        spare = self.free.get(n_values)
        if spare:
            return spare.pop()
        self.n_bytes += 4 * n_values
        return native.aligned_zeros(n_values)

    def give_back(self, buffer: Buffer) -> None:
        self.spent.append(buffer)

    def pass_barrier(self) -> None:
        for buffer in self.spent:
            self.free.setdefault(len(buffer), []).append(buffer)
        self.spent.clear()


class Rows:
    """An `Act`: n rows of `width` fp32 values while the program runs. Its buffer goes back with the last reference.

    `quantised` keeps the blocks made of it for products, by class, so that products of one input share them.
    """

    def __init__(self, arena: Arena, n: int, width: int, *, part_of: Rows | None = None, first: int = 0) -> None:
        self.n = n
        self.width = width
        self.quantised: dict[int, Rows] = {}
        self._arena = arena
        self._part_of = part_of
        self._buffer: Buffer = arena.take(n * width) if part_of is None else part_of._buffer
        self.address = int(self._buffer.ctypes.data) + 4 * width * first

    def __del__(self) -> None:
        if self._part_of is None:
            self._arena.give_back(self._buffer)

    def values(self) -> np.ndarray:
        """The buffer as fp32 [n, width]."""
        return self._buffer[: self.n * self.width].reshape(self.n, self.width)


@dataclass(frozen=True)
class Inputs:
    """What changes from step to step, at fixed addresses: `tokens` and `positions` int32 [8], `page_table` int32 [8,
    max_pages], and for each rope table its cosines and sines fp32 [8, 2, n_rot / 2]."""

    tokens: np.ndarray
    positions: np.ndarray
    page_table: np.ndarray
    ropes: dict[int, tuple[RopeTable, np.ndarray]] = field(default_factory=dict)

    def rope(self, table: RopeTable) -> np.ndarray:
        """The buffer of a table."""
        if id(table) not in self.ropes:
            values = np.zeros((native.MAX_TOKENS, 2, table.n_rot // 2), np.float32)
            self.ropes[id(table)] = table, values
        return self.ropes[id(table)][1]

    def fill(self, batch: Batch) -> None:
        """Copy a batch's fields in."""
        n = batch.n
        self.tokens[:n] = batch.tokens
        self.positions[:n] = batch.positions
        for row, table in enumerate(batch.page_tables):
            self.page_table[row, : len(table)] = table
        for rope, values in self.ropes.values():
            values[:n] = rope.cos_sin(batch.positions)


class Recorder:
    """`blocks.Ops` that writes down native operations for n rows, of which the last n_outputs give logits."""

    def __init__(
        self, program: native.Program, cache: KVCache, inputs: Inputs, n: int, n_outputs: int, n_planes: int
    ) -> None:
        self._program = program
        self._cache = cache
        self._inputs = inputs
        self._n = n
        self._n_outputs = n_outputs
        self._n_planes = n_planes
        self._arena = Arena()
        self._stage = Stage()
        self._sum: tuple[Rows, Rows, Rows] | None = None

    def _add(
        self,
        code: int,
        n: int,
        *,
        p: Sequence[native.Address] = (),
        i: Sequence[int] = (),
        f: Sequence[float] = (),
        parts: Parts | None = None,
        reads: Sequence[Rows] = (),
        writes: Sequence[Rows] = (),
        reads_whole: Sequence[Rows] = (),
    ) -> None:
        """Record an operation; with `parts` also what of rows written in the program it reads and writes in them."""
        self.finish()
        addresses = ([rows.address for rows in some] for some in (reads, writes, reads_whole))
        joined = self._stage.join(parts, *addresses)
        if not self._program.add(code, n, p=p, i=i, f=f, joined=joined):
            self._arena.pass_barrier()

    def finish(self) -> None:
        """Record a sum that no norm has taken along. To be called after the last operation."""
        if self._sum is not None:
            (a, b, y), self._sum = self._sum, None
            self._add(native.OP_ADD, a.n, p=(a.address, b.address, y.address), i=(a.width,))

    def _rows(self, n: int, width: int) -> Rows:
        return Rows(self._arena, n, width)

    def _bytes(self, n_bytes: int) -> Rows:
        """Room for something that is not fp32 rows."""
        return Rows(self._arena, 1, -(-n_bytes // 4))

    def rows(self, n: int, width: int) -> Rows:
        """Rows that the caller fills before the program runs."""
        return self._rows(n, width)

    # --- products ------------------------------------------------------------------------------------------------

    def embed(self, weight: Weight, scale: float = 1.0) -> Rows:
        x = self._rows(self._n, weight.cols)
        self._add(
            native.OP_EMBED,
            self._n,
            p=(self._inputs.tokens, weight.data, x.address),
            i=(weight.type, weight.rows, weight.cols, weight.row_bytes),
            f=(scale,),
        )
        return x

    def _quantised(self, x: Rows, type_id: int) -> int:
        """Address of x as the products of a weight type take it."""
        cls = native.type_class(type_id)
        if cls == 0:
            return x.address
        if cls not in x.quantised:
            act = self._bytes(native.act_bytes(cls, x.width, x.n))
            self._add(
                native.OP_QUANTIZE,
                x.n,
                p=(x.address, act.address),
                i=(cls, x.width, self._n_planes, x.width),
                parts=Parts(x.n, 0, x.width),
                reads=[x],
                writes=[act],
            )
            x.quantised[cls] = act
        return x.quantised[cls].address

    def linear(self, x: Rows, weight: Weight) -> Rows:
        act = self._quantised(x, weight.type)
        y = self._rows(x.n, weight.rows)
        self._add(
            native.OP_MATVEC,
            x.n,
            p=(act, weight.data, y.address, weight.bias),
            i=(weight.type, weight.rows, weight.cols, weight.row_bytes, self._n_planes, x.width, weight.rows),
        )
        return y

    def head(self, x: Rows, weight: Weight) -> Rows:
        return self.linear(x, weight)

    # --- row by row ----------------------------------------------------------------------------------------------

    def rms_norm(self, x: Rows, norm: Norm) -> Rows:
        y = self._rows(x.n, x.width)
        width = len(norm.weight)
        if width < x.width:
            self._add(
                native.OP_RMS_NORM,
                x.n,
                p=(x.address, norm.weight, y.address),
                i=(width, x.width // width, x.width, x.width),
                f=(norm.eps,),
                parts=Parts(x.n, x.width // width, width),
                reads=[x],
                writes=[y],
            )
            return y
        a, b, total = x, None, None
        if self._sum is not None and self._sum[2] is x:
            a, b, total = self._sum
            self._sum = None
        self._add(
            native.OP_RMS_NORM,
            x.n,
            p=(a.address, norm.weight, y.address, b.address if b else None, total.address if total else None),
            i=(width, 1, width, width),
            f=(norm.eps,),
            parts=Parts(x.n, 0, width),
            reads_whole=[a] if b is None else [a, b],
            writes=[y] if total is None else [y, total],
        )
        return y

    def add(self, a: Rows, b: Rows) -> Rows:
        self.finish()
        y = self._rows(a.n, a.width)
        self._sum = a, b, y  # a norm of it may come next
        return y

    def scale(self, x: Rows, factor: float, softcap: float = 0.0) -> Rows:
        y = self._rows(x.n, x.width)
        self._add(native.OP_SCALE, x.n, p=(x.address, y.address), i=(x.width,), f=(factor, softcap))
        return y

    def glu(self, gate: Rows, up: Rows, activation: str) -> Rows:
        y = self._rows(gate.n, gate.width)
        self._add(
            native.OP_GLU,
            gate.n,
            p=(gate.address, up.address, y.address),
            i=(gate.width, native.ACTIVATIONS[activation], gate.width, gate.width),
            parts=Parts(gate.n, 0, gate.width),
            reads=[gate, up],
            writes=[y],
        )
        return y

    def gated_add(self, x: Rows, gate: Rows, base: Rows) -> Rows:
        y = self._rows(x.n, x.width)
        self._add(native.OP_GATED_ADD, x.n, p=(x.address, gate.address, base.address, y.address), i=(x.width,))
        return y

    def outputs(self, x: Rows) -> Rows:
        if x.n == self._n_outputs:
            return x
        return Rows(self._arena, self._n_outputs, x.width, part_of=x, first=x.n - self._n_outputs)

    def rope(self, x: Rows, n_head: int, table: RopeTable) -> Rows:
        self._add(
            native.OP_ROPE,
            x.n,
            p=(x.address, self._inputs.rope(table)),
            i=(n_head, x.width // n_head, table.n_rot, int(table.is_neox), x.width),
            parts=Parts(x.n, n_head, x.width // n_head),
            reads=[x],
            writes=[x],
        )
        return x

    # --- attention -----------------------------------------------------------------------------------------------

    def attention(
        self,
        layer: int,
        q: Rows,
        k: Rows,
        v: Rows,
        *,
        n_head: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Rows:
        keys, values = self._cache.k[layer], self._cache.v[layer]
        n_kv, dim_k, dim_v = keys.shape[1], keys.shape[3], values.shape[3]
        positions, table = self._inputs.positions, self._inputs.page_table
        n_pages = table.shape[1]
        element = int(self._cache.dtype == np.float16)
        self._add(
            native.OP_KV_STORE,
            q.n,
            p=(k.address, v.address, keys, values, positions, table),
            i=(n_kv, dim_k, dim_v, n_pages, k.width, v.width, element),
            parts=Parts(k.n, n_kv, dim_k),
            reads=[k],
            reads_whole=[v],
        )
        out = self._rows(q.n, n_head * dim_v)
        n_positions = n_pages * native.KV_PAGE
        scratch = self._bytes(native.attn_scratch_bytes(q.n, n_head, dim_v, n_positions, self._program.n_threads))
        self._add(
            native.OP_ATTENTION,
            q.n,
            p=(q.address, keys, values, out.address, positions, table, scratch.address, None),
            i=(n_kv, dim_k, dim_v, n_pages, n_head, window, element, q.width),
            f=(scale, softcap),
        )
        return out

    # --- experts -------------------------------------------------------------------------------------------------

    def route(
        self,
        logits: Rows,
        n_used: int,
        *,
        gate: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: np.ndarray | None = None,
    ) -> tuple[Rows, Rows]:
        ids, weights = self._rows(logits.n, n_used), self._rows(logits.n, n_used)
        self._add(
            native.OP_ROUTER,
            logits.n,
            p=(logits.address, ids.address, weights.address, bias),
            i=(logits.width, n_used, GATES[gate], int(normalise)),
            f=(scale,),
        )
        return ids, weights

    def experts(self, x: Rows, ids: Rows, weights: Rows, bank: Experts, activation: str = "silu") -> Rows:
        gate, up, down = bank.gate, bank.up, bank.down
        n, k, d, n_ff = x.n, ids.width, x.width, gate.rows
        act_gate = self._quantised(x, gate.type) if native.type_class(gate.type) else None
        act_up = self._quantised(x, up.type) if native.type_class(up.type) else None
        rows, y = self._rows(n, k * d), self._rows(n, d)
        scratch = self._bytes(native.experts_scratch_bytes(n, k, d, n_ff, self._program.n_threads))
        self._add(
            native.OP_EXPERTS,
            n,
            p=(
                x.address,
                ids.address,
                weights.address,
                gate.data[0],
                up.data[0],
                down.data[0],
                rows.address,
                y.address,
                scratch.address,
                act_gate,
                act_up if act_up != act_gate else None,
            ),
            i=(
                bank.n_expert,
                k,
                d,
                n_ff,
                gate.type,
                up.type,
                down.type,
                gate.row_bytes,
                up.row_bytes,
                down.row_bytes,
                native.ACTIVATIONS[activation],
                self._n_planes,
                bank.stride,
            ),
        )
        return y


@dataclass(frozen=True)
class Recorded:
    """A program with what it points at: its buffers live as long as `recorder` and the rows do."""

    program: native.Program
    recorder: Recorder
    source: Rows | None
    logits: Rows


class Decoder:
    """Runs forward passes of up to 8 rows of any sequences. Used by the engine thread only."""

    def __init__(
        self,
        pool: native.Pool,
        model: Model,
        cache: KVCache,
        max_pages: int,
        n_planes: int,
        n_layers: int | None = None,
    ) -> None:
        """With `n_layers` only the first so many layers run, and what comes out are hidden states of all rows."""
        self._pool = pool
        self._model = model
        self._n_layers = n_layers
        self._cache = cache
        self._n_planes = n_planes
        self._inputs = Inputs(
            np.zeros(native.MAX_TOKENS, np.int32),
            np.zeros(native.MAX_TOKENS, np.int32),
            np.zeros((native.MAX_TOKENS, max_pages), np.int32),
        )
        self._programs: dict[tuple[int, int], Recorded] = {}
        self._heads: dict[int, Recorded] = {}

    def run(self, batch: Batch) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab], the caller's own. With `n_layers` hidden
        states fp32 [n, n_embd] instead."""
        key = batch.n, batch.n if self._n_layers is not None else batch.n_outputs
        if key not in self._programs:
            self._programs[key] = self._record(*key)
        recorded = self._programs[key]
        self._inputs.fill(batch)
        recorded.program.run()
        return recorded.logits.values().copy()

    def head_logits(self, x: np.ndarray, weight: Weight) -> np.ndarray:
        """Logits of states that came from elsewhere: fp32 [n, rows] of x [n, cols], by the same arithmetic."""
        out = np.empty((len(x), weight.rows), np.float32)
        for first in range(0, len(x), native.MAX_TOKENS):
            some = x[first : first + native.MAX_TOKENS]
            if len(some) not in self._heads:
                self._heads[len(some)] = self._record_head(len(some), weight)
            recorded = self._heads[len(some)]
            assert recorded.source is not None
            recorded.source.values()[:] = some
            recorded.program.run()
            out[first : first + len(some)] = recorded.logits.values()
        return out

    def _recorder(self, n: int, n_outputs: int) -> tuple[native.Program, Recorder]:
        program = native.Program(self._pool)
        return program, Recorder(program, self._cache, self._inputs, n, n_outputs, self._n_planes)

    def _record(self, n: int, n_outputs: int) -> Recorded:
        program, recorder = self._recorder(n, n_outputs)
        if self._n_layers is None:
            result = self._model.forward(recorder)
        else:
            result = self._model.run_layers(recorder, self._model.start(recorder), 0, self._n_layers)
        recorder.finish()
        return Recorded(program, recorder, None, result)

    def _record_head(self, n: int, weight: Weight) -> Recorded:
        program, recorder = self._recorder(n, n)
        source = recorder.rows(n, weight.cols)
        return Recorded(program, recorder, source, recorder.head(source, weight))
