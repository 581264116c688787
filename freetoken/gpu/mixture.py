"""Routed experts of a prompt: tokens sorted by expert, matrices decoded to fp16 a group at a time, grouped products.

The host reads how many tokens each expert has (the one wait of a layer; the device sorts meanwhile) and cuts the layer
into groups whose fp16 matrices and hidden rows fit the scratch. Each token's rows are added in the order of its
experts' numbers, whatever the groups: so neither scratch, nor slots, nor the plan of `experts.stream` changes a bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from freetoken.blocks import Experts, Weight
from freetoken.experts.stream import ExpertStream, Part
from freetoken.kernels.dequant import PLANES, RAW, dequantise
from freetoken.kernels.glu import ACTIVATIONS
from freetoken.kernels.grouped import Rows, Tile, expert_glu_rows, expert_products, tile_for, tiles
from freetoken.kernels.prompt_rows import add_expert_rows, halve_rows

__all__ = ["Keep", "Mixture", "Scratch", "upload"]

TAIL_TOKENS = 64
"""Last tokens of a chunk whose experts are told apart for `Keep`."""


class Keep(Protocol):
    """Told what a layer had staged, before it is overwritten: experts that may be kept in slots."""

    def __call__(self, layer: int, tail_counts: np.ndarray, staged: np.ndarray, bases: tuple[int, ...]) -> None:
        """`tail_counts` int [n_expert]: routed pairs of the chunk's last tokens. `staged` int [n]: the experts that are
        in the buffer, expert e of bank b at bases[b] + e * its bytes, in the file's form."""


class Scratch:
    """Memory of a prompt's products: `weights` fp16 and `rows` bytes; two tensors whatever the model."""

    def __init__(self, device: torch.device, weights_bytes: int = 128 << 20, rows_bytes: int = 96 << 20) -> None:
        self.weights = torch.empty(weights_bytes // 2, dtype=torch.float16, device=device)
        self.rows = torch.empty(rows_bytes, dtype=torch.uint8, device=device)

    def matrices(self, *shape: int) -> torch.Tensor:
        """fp16 [shape] at the start of `weights`."""
        return self.weights[: int(np.prod(shape))].view(shape)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@dataclass(frozen=True)
class Group:
    """Experts (numbers within a part) computed together, with rows [first, end) of the sorted pairs."""

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
        wait = _count(ids, bank.n_expert)
        pairs = _sort(ids, weights)
        y = torch.zeros((ids.shape[0], bank.down.rows), dtype=torch.float32, device=ids.device)
        counts, tail = wait()
        active = max(int((counts > 0).sum()), 1)
        shape = _Shape(bank, activation, self._scratch, ids.numel() / active, self._capability)
        start = 0
        for part in self._stream.parts(layer, counts):
            mine = counts[part.first : part.end]
            groups = cut(mine, start, shape.max_experts(int((mine > 0).sum())), shape.max_rows)
            if groups:
                tables = _Tables(part, mine, groups, start, shape, y.device)
                for i, group in enumerate(groups):
                    part.wait(part.first + int(group.experts[-1]))
                    shape.run(x, pairs, group, tables, i, y)
            start += int(mine.sum())
            if self._keep is not None and part.staged is not None:
                staged = part.first + np.flatnonzero(part.staged.experts)
                self._keep(layer, tail, staged, part.bases)
        return y


def _count(ids: torch.Tensor, n_expert: int) -> _Counts:
    counts = torch.zeros((2, n_expert), dtype=torch.int32, device=ids.device)
    for row, some in enumerate((ids, ids[-TAIL_TOKENS:])):
        flat = some.reshape(-1)
        counts[row].scatter_add_(0, flat.long(), torch.ones_like(flat))
    return _Counts(counts)


class _Counts:
    """Counts on their way to the host; called, it waits for them."""

    def __init__(self, counts: torch.Tensor) -> None:
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


class _Tables:
    """What the groups of a part need on the device, uploaded in one piece: for group i, addresses and forms of its gate
    and up matrices, then of down, and its tiles."""

    def __init__(
        self, part: Part, counts: np.ndarray, groups: list[Group], start: int, shape: _Shape, device: torch.device
    ) -> None:
        starts = start + np.cumsum(counts) - counts
        addresses, forms, listed = [], [], []
        for group in groups:
            e = group.experts
            form = np.where(part.is_slot[e], PLANES, RAW)
            addresses.append(part.addresses[:, e].reshape(-1))
            forms.append(np.tile(form, 3))
            begin = np.maximum(starts[e], group.first)
            rows = np.minimum(starts[e] + counts[e], group.end) - begin
            listed.append(tiles(rows, group.first, shape.tile_glu.m).reshape(-1))
            listed.append(tiles(rows, group.first, shape.tile_down.m).reshape(-1))
        wide = np.concatenate(addresses)
        narrow = np.concatenate([*forms, *listed]).astype(np.int32)
        data = upload(np.concatenate([wide.view(np.uint8), narrow.view(np.uint8)]), device)
        sizes = [len(a) for a in addresses]
        self.addresses = data[: wide.nbytes].view(torch.int64).split(sizes)
        parts = data[wide.nbytes :].view(torch.int32).split([*sizes, *(len(t) for t in listed)])
        self.forms = parts[: len(groups)]
        self.tiles = [t.view(-1, 3) for t in parts[len(groups) :]]


class _Shape:
    """A layer's matrices, and how its groups are cut and computed."""

    def __init__(self, bank: Experts, activation: str, scratch: Scratch, rows_each: float, capability: int) -> None:
        self._bank, self._activation = bank, ACTIVATIONS[activation]
        self._scratch = scratch
        self.tile_glu: Tile = tile_for(rows_each, capability, is_double=True)
        self.tile_down: Tile = tile_for(rows_each, capability)
        self._n_ff, self._d = bank.gate.rows, bank.down.rows
        self.max_rows = max(scratch.rows.numel() // self._row_bytes - 1, 1)

    @property
    def _row_bytes(self) -> int:
        """Of a pair: its hidden row in fp32 and in fp16 with its scale, and its output row, each from a multiple of 16."""
        return 6 * self._n_ff + 4 + 4 * self._d + 4 * 16

    def max_experts(self, n_active: int) -> int:
        """Experts in a group: as many as fit the scratch, spread evenly over the groups."""
        fit = max(self._scratch.weights.numel() // (2 * self._n_ff * self._bank.gate.cols), 1)
        n_groups = -(-max(n_active, 1) // fit)
        return -(-max(n_active, 1) // n_groups)

    def run(self, x: Rows, pairs: Sorted, group: Group, tables: _Tables, i: int, y: torch.Tensor) -> None:
        """Add what a group's experts make of their rows."""
        n, n_experts = group.end - group.first, len(group.experts)
        addresses, forms = tables.addresses[i], tables.forms[i]
        room = _Room(self._scratch.rows)
        hidden, rows = room.take(torch.float32, n, self._n_ff), room.take(torch.float32, n, self._d)
        halved = Rows(room.take(torch.float16, n, self._n_ff), room.take(torch.float32, n))
        bank = self._bank
        for first, end in self._parts(n_experts, 2, bank.gate):
            w = self._scratch.matrices(2, n_experts, end - first, bank.gate.cols)
            self._decode(bank.gate, bank.up, addresses, forms, w, first)
            expert_glu_rows(
                x, pairs.index, tables.tiles[2 * i], w, hidden[:, first:end], self.tile_glu,
                first=group.first, activation=self._activation,
            )  # fmt: skip
        halve_rows(hidden, halved.x, halved.scale)
        at = slice(2 * n_experts, 3 * n_experts)
        for first, end in self._parts(n_experts, 1, bank.down):
            w = self._scratch.matrices(n_experts, end - first, bank.down.cols)
            dequantise(bank.down.type, addresses[at], forms[at], w, matrix_rows=self._d, first_row=first)
            out = rows[:, first:end]
            expert_products(halved, tables.tiles[2 * i + 1], w, out, self.tile_down, first=group.first)
        add_expert_rows(rows, pairs.positions, pairs.weights, y, group.first, group.end)

    def _parts(self, n_experts: int, n_banks: int, w: Weight) -> list[tuple[int, int]]:
        """Ranges of a matrix's rows that fit the scratch at once."""
        fit = self._scratch.weights.numel() // (n_banks * n_experts * w.cols)
        step = w.rows if fit >= w.rows else max(fit // 64 * 64, 1)
        return [(first, min(first + step, w.rows)) for first in range(0, w.rows, step)]

    def _decode(
        self, gate: Weight, up: Weight, addresses: torch.Tensor, forms: torch.Tensor, w: torch.Tensor, first: int
    ) -> None:
        n = w.shape[1]
        if gate.type == up.type:
            both = slice(0, 2 * n)
            dequantise(
                gate.type, addresses[both], forms[both], w.view(2 * n, *w.shape[2:]),
                matrix_rows=gate.rows, first_row=first,
            )  # fmt: skip
            return
        for i, bank in enumerate((gate, up)):
            at = slice(i * n, (i + 1) * n)
            dequantise(bank.type, addresses[at], forms[at], w[i], matrix_rows=bank.rows, first_row=first)


class _Room:
    """Tensors one after another in one buffer, each from a multiple of 16 bytes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        n_bytes = int(np.prod(shape)) * dtype.itemsize
        part = self._buffer[self._at : self._at + n_bytes].view(dtype).view(shape)
        self._at += -(-n_bytes // 16) * 16
        return part
