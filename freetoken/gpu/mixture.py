"""Routed experts of a prompt: tokens sorted by expert, matrices decoded to fp16 a group at a time, grouped products.

The host reads how many tokens each expert has (the one wait of a layer; the device sorts meanwhile) and cuts the layer
into groups whose fp16 matrices and hidden rows fit the scratch. Each token's rows are added in the order of its
experts' numbers, whatever the groups: so neither scratch, nor slots, nor the plan of `experts.stream` changes a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from freetoken.blocks import Experts, Weight
from freetoken.experts.stream import ExpertStream, Part
from freetoken.kernels.dequant import PLANES, RAW, dequantise
from freetoken.kernels.glu import ACTIVATIONS
from freetoken.kernels.grouped import Rows, expert_glu_rows, expert_products, tile_for, tiles
from freetoken.kernels.prompt_rows import add_expert_rows, halve_rows

__all__ = ["Keep", "Mixture", "Scratch", "upload"]

SMALL_BYTES = 32 << 10
N_WAITING_GROUPS = 3
"""Groups of experts that are still being copied, where their order is free: while one is computed, others come."""
TAIL_TOKENS = 64
"""Last tokens of a chunk whose experts are told apart for `Keep`."""


class Keep(Protocol):
    """Told what a layer had staged, before it is overwritten: experts that may be kept in slots."""

    def __call__(self, layer: int, tail_counts: np.ndarray, staged: np.ndarray, bases: tuple[int, ...]) -> None:
        """`tail_counts` int [n_expert]: routed pairs of the chunk's last tokens. `staged` int [n]: the experts that are
        in the buffer, expert e of bank b at bases[b] + e * its bytes, in the file's form."""


SCRATCH_BYTES = 224 << 20
ROWS_BYTES = 80 << 20
"""What rows of routed pairs may take of the scratch; the rest is for fp16 matrices."""


class Scratch:
    """Memory of a prompt's products, of one size whatever the model."""

    def __init__(self, device: torch.device, n_bytes: int = SCRATCH_BYTES) -> None:
        self.buffer = torch.empty(n_bytes // 256 * 256, dtype=torch.uint8, device=device)
        self.halves = self.buffer.view(torch.float16)

    def matrices(self, *shape: int) -> torch.Tensor:
        """fp16 [shape] at the start."""
        return self.halves[: math.prod(shape)].view(shape)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting: the driver takes a copy of small ones at once."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return (tensor.pin_memory() if tensor.nbytes > SMALL_BYTES else tensor).to(device, non_blocking=True)


@dataclass(frozen=True)
class Group:
    """Experts (numbers within a part) computed together; what they have of rows [first, end) of the sorted pairs."""

    experts: np.ndarray
    first: int
    end: int


def cut(counts: np.ndarray, start: int, max_experts: int, max_rows: int) -> list[Group]:
    """Groups of the experts with rows; counts [n], their rows follow one another from `start`. An expert with more than
    max_rows rows is a group several times."""
    groups: list[Group] = []
    members: list[int] = []
    first = at = start
    for expert in np.flatnonzero(counts).tolist():
        count = int(counts[expert])
        if members and (len(members) == max_experts or at + count - first > max_rows):
            groups.append(Group(np.array(members), first, at))
            members, first = [], at
        while count > max_rows:
            groups.append(Group(np.array([expert]), first, first + max_rows))
            first, at, count = first + max_rows, at + max_rows, count - max_rows
        members.append(expert)
        at += count
    if members:
        groups.append(Group(np.array(members), first, at))
    return groups


def spread(counts: np.ndarray, ends: np.ndarray, is_slot: np.ndarray, max_experts: int) -> list[Group]:
    """Groups where all rows fit at once: experts in slots first, for the others may not have come yet."""
    groups = []
    for some, n_least in ((is_slot, 1), (~is_slot, N_WAITING_GROUPS)):
        experts = np.flatnonzero((counts > 0) & some)
        n_groups = max(-(-len(experts) // max_experts), min(n_least, len(experts) // 8))
        for e in np.array_split(experts, n_groups) if len(experts) else ():
            groups.append(Group(e, int(ends[e[0]] - counts[e[0]]), int(ends[e[-1]])))
    return groups


@dataclass(frozen=True)
class Sorted:
    """Routed pairs by expert, pairs of one expert by token: `index` int32 [pairs], each one's token; `positions` int32
    and `weights` fp32 [n, k], where each token's pairs stand, in order."""

    index: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


class Mixture:
    """Runs the layers of one model. `keep` hears of staged experts once a layer's are computed."""

    def __init__(self, stream: ExpertStream, scratch: Scratch, capability: int, keep: Keep | None = None) -> None:
        self._stream = stream
        self._scratch = scratch
        self._capability = capability
        self._keep = keep

    def run(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, bank: Experts, activation: str
    ) -> torch.Tensor:
        """Weighted sum fp32 [n, n_embd] of what the chosen experts, ids int32 [n, k], make of x [n, n_embd]."""
        flat = ids.reshape(-1).long()
        wait = _Counts(flat, bank.n_expert)
        n_tail = TAIL_TOKENS * ids.shape[1]
        wait_tail = None if self._keep is None else _Counts(flat[-n_tail:], bank.n_expert)
        pairs = _sort(ids, weights)
        y = torch.zeros((ids.shape[0], bank.down.rows), dtype=torch.float32, device=ids.device)
        counts = wait()
        active = max(int((counts > 0).sum()), 1)
        work = _Layer(bank, activation, self._scratch, ids.numel(), active, self._capability, x, pairs, y)
        start = 0
        for part in self._stream.parts(layer, counts):
            mine = counts[part.first : part.end]
            if mine.any():
                work.run(part, mine, start)
            start += int(mine.sum())
            if self._keep is not None and wait_tail is not None and part.staged is not None:
                staged = part.first + np.flatnonzero(part.staged.experts)
                self._keep(layer, wait_tail(), staged, part.bases)
        work.add_rows(start)
        return y


class _Counts:
    """How many pairs each expert has, on its way to the host; called, it waits."""

    def __init__(self, ids: torch.Tensor, n_expert: int) -> None:
        counts = torch.zeros(n_expert, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, ids, torch.ones_like(ids))
        self._event = None
        self._host = counts
        if counts.is_cuda:
            self._host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            self._host.copy_(counts, non_blocking=True)
            self._event = torch.cuda.current_stream(counts.device).record_event()

    def __call__(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        values: np.ndarray = self._host.numpy()
        return values


def _sort(ids: torch.Tensor, weights: torch.Tensor) -> Sorted:
    n, k = ids.shape
    order = torch.argsort(ids.reshape(-1), stable=True)
    inverse = torch.empty(n * k, dtype=torch.int32, device=ids.device)
    inverse[order] = torch.arange(n * k, dtype=torch.int32, device=ids.device)
    positions, rank = inverse.view(n, k).sort(dim=1)
    return Sorted((order // k).to(torch.int32), positions, weights.gather(1, rank))


class _Layer:
    """One layer's work: its matrices, how they are cut, and rows that wait to be added."""

    def __init__(
        self, bank: Experts, activation: str, scratch: Scratch, n_pairs: int, n_active: int, capability: int,
        x: Rows, pairs: Sorted, y: torch.Tensor,
    ) -> None:  # fmt: skip
        self._bank, self._activation = bank, ACTIVATIONS[activation]
        self._x, self._pairs, self._y = x, pairs, y
        self._tile_glu = tile_for(n_pairs / n_active, capability, is_double=True)
        self._tile_down = tile_for(n_pairs / n_active, capability)
        n_ff, d = bank.gate.rows, bank.down.rows
        row_bytes = 6 * n_ff + 4 * d + 4
        available = min(ROWS_BYTES, scratch.buffer.numel() // 2) - 4 * 256
        self.max_rows = max(min(n_pairs, available // row_bytes), 1)
        room = _Room(scratch.buffer)
        self._hidden = room.take(torch.float32, self.max_rows, n_ff)
        self._rows = room.take(torch.float32, self.max_rows, d)
        self._halved = Rows(room.take(torch.float16, self.max_rows, n_ff), room.take(torch.float32, self.max_rows))
        self._weights = room.rest()
        self._first_row = 0

    def max_experts(self, n_active: int) -> int:
        """Experts in a group: as many as fit the scratch, spread evenly over the groups."""
        fit = max(len(self._weights) // (2 * self._bank.gate.rows * self._bank.gate.cols), 1)
        n_groups = -(-max(n_active, 1) // fit)
        return -(-max(n_active, 1) // n_groups)

    def run(self, part: Part, counts: np.ndarray, start: int) -> None:
        """Compute a part; counts are those of its experts, whose rows begin at `start`."""
        ends = start + counts.cumsum()
        max_experts = self.max_experts(int((counts > 0).sum()))
        if ends[-1] - self._first_row <= self.max_rows:
            groups = spread(counts, ends, part.is_slot, max_experts)
        else:
            groups = cut(counts, start, max_experts, self.max_rows)
        tables = _Tables(part, ends - counts, ends, groups, (self._tile_glu.m, self._tile_down.m), self._y.device)
        for i, group in enumerate(groups):
            waiting = group.experts[~part.is_slot[group.experts]]
            if len(waiting):
                part.wait(part.first + int(waiting[-1]))
            if group.end - self._first_row > self.max_rows:
                self.add_rows(group.first)
            self._compute(group, tables.addresses[i], tables.forms[i], tables.tiles[2 * i], tables.tiles[2 * i + 1])

    def add_rows(self, end: int) -> None:
        """Add the rows of positions before `end` that wait."""
        first, self._first_row = self._first_row, end
        rows = self._rows[: end - first]
        add_expert_rows(rows, self._pairs.positions, self._pairs.weights, self._y, first, end)

    def _compute(
        self, group: Group, addresses: torch.Tensor, forms: torch.Tensor, tiles_glu: torch.Tensor,
        tiles_down: torch.Tensor,
    ) -> None:  # fmt: skip
        n_experts, bank, base = len(group.experts), self._bank, self._first_row
        at = slice(group.first - base, group.end - base)
        hull = self._halved.x[at], self._halved.scale[at]
        for first, end in self._parts(n_experts, 2, bank.gate):
            w = self._matrices(2, n_experts, end - first, bank.gate.cols)
            self._decode(addresses, forms, w, first)
            expert_glu_rows(
                self._x, self._pairs.index, tiles_glu, w, self._hidden[:, first:end], self._tile_glu,
                first=base, activation=self._activation,
            )  # fmt: skip
        halve_rows(self._hidden[at], *hull)
        down = addresses[2 * n_experts :]
        for first, end in self._parts(n_experts, 1, bank.down):
            w = self._matrices(n_experts, end - first, bank.down.cols)
            dequantise(bank.down.type, down, forms[:n_experts], w, matrix_rows=bank.down.rows, first_row=first)
            expert_products(self._halved, tiles_down, w, self._rows[:, first:end], self._tile_down, first=base)

    def _matrices(self, *shape: int) -> torch.Tensor:
        return self._weights[: math.prod(shape)].view(shape)

    def _parts(self, n_experts: int, n_banks: int, w: Weight) -> list[tuple[int, int]]:
        """Ranges of a matrix's rows that fit the scratch at once."""
        fit = len(self._weights) // (n_banks * n_experts * w.cols)
        step = w.rows if fit >= w.rows else max(fit // 64 * 64, min(fit, 16), 1)
        return [(first, min(first + step, w.rows)) for first in range(0, w.rows, step)]

    def _decode(self, addresses: torch.Tensor, forms: torch.Tensor, w: torch.Tensor, first: int) -> None:
        """Rows of gate and up from `first` on, w fp16 [2, n, rows, cols]."""
        n, gate, up = w.shape[1], self._bank.gate, self._bank.up
        if gate.type == up.type:
            both = w.view(2 * n, *w.shape[2:])
            dequantise(gate.type, addresses[: 2 * n], forms, both, matrix_rows=gate.rows, first_row=first)
            return
        for i, bank in enumerate((gate, up)):
            at = slice(i * n, (i + 1) * n)
            dequantise(bank.type, addresses[at], forms[:n], w[i], matrix_rows=bank.rows, first_row=first)


class _Tables:
    """What a part's groups need on the device, uploaded in one piece: for group i `addresses[i]` int64 of its gate, up
    and down matrices, `forms[i]` int32 of gate and up, and `tiles[2 * i]` and the next, for tiles of either height."""

    def __init__(
        self, part: Part, begins: np.ndarray, ends: np.ndarray, groups: list[Group], heights: tuple[int, int],
        device: torch.device,
    ) -> None:  # fmt: skip
        form = np.where(part.is_slot, PLANES, RAW).astype(np.int32)
        addresses, narrow, listed = [], [], []
        for group in groups:
            e = group.experts
            addresses.append(part.addresses[:, e].reshape(-1))
            narrow.append(np.concatenate([form[e], form[e]]))
            rows = np.maximum(begins[e], group.first), np.minimum(ends[e], group.end)
            for height in heights[: 1 + (heights[0] != heights[1])]:
                listed.append(tiles(*rows, height).reshape(-1))
        n_wide, sizes = sum(len(a) for a in addresses), [len(n) for n in narrow] + [len(t) for t in listed]
        data = upload(np.concatenate([*(a.view(np.int32) for a in addresses), *narrow, *listed]), device)
        self.addresses = _split(data[: 2 * n_wide].view(torch.int64), [len(a) for a in addresses])
        parts = _split(data[2 * n_wide :], sizes)
        self.forms = parts[: len(groups)]
        found = [t.view(-1, 3) for t in parts[len(groups) :]]
        self.tiles = found if heights[0] != heights[1] else [t for t in found for _ in range(2)]


def _split(x: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    ends = np.cumsum(sizes).tolist()
    return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class _Room:
    """Tensors one after another in one buffer, each from a multiple of 256 bytes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        part = self._buffer[self._at : self._at + n_bytes].view(dtype).view(shape)
        self._at += -(-n_bytes // 256) * 256
        return part

    def rest(self) -> torch.Tensor:
        """What is left, as fp16."""
        return self._buffer[self._at :].view(torch.float16)
