"""Routed experts of a prompt: tokens sorted by expert, then products of each expert's rows.

Where rows are few, products decode weights on the way (kernels.coded); if then every expert has a slot too, the device
needs nothing of the host and nobody waits. Else the host reads how many tokens each expert has, the one wait of a
layer, and cuts the layer into groups: those that are there first, those that are still being copied after them; and
where rows are many, so that a group's decoded matrices and hidden rows fit the scratch. Each token's rows are added in
the order of its experts' numbers, whatever the groups: so neither scratch, nor slots, nor the plan of `experts.stream`
changes a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from freetoken.blocks import Experts, Weight
from freetoken.experts.stream import ExpertStream, Part
from freetoken.gpu.scratch import Scratch, upload
from freetoken.kernels.coded import (
    CodedMatrices,
    can_be_coded,
    coded_tile,
    expert_coded_glu,
    expert_coded_products,
)
from freetoken.kernels.dequant import PLANES, RAW, dequantise
from freetoken.kernels.glu import ACTIVATIONS
from freetoken.kernels.grouped import Rows, expert_glu_rows, expert_products, tile_for, tiles
from freetoken.kernels.prompt_rows import add_expert_rows, halve_rows
from freetoken.kernels.prompt_sort import Sorted, count_pairs, list_tiles, sort_pairs, sort_room

__all__ = ["Keep", "Mixture", "Scratch"]

N_WAITING_GROUPS = 3
"""Groups of experts that are still being copied, where their order is free: while one is computed, others come."""
TAIL_TOKENS = 64
"""Last tokens of a chunk whose experts are told apart for `Keep`."""
CODED_ROWS = 16
"""Mean rows of an expert up to which weights are decoded on the way into the product."""


class Keep(Protocol):
    """Takes experts over that a layer had staged, before they are overwritten."""

    def __call__(self, layer: int, tail_counts: np.ndarray, part: Part, slot_of: np.ndarray) -> None:
        """`tail_counts` int [n_expert]: routed pairs of the chunk's last tokens. `part.staged` says which experts are
        in the buffer. `slot_of` int32 [n_layer, n_expert], the stream's, to be kept true."""

    def begin(self) -> None:
        """A chunk begins."""

    def flush(self) -> None:
        """Decode steps may follow."""


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
class _Kind:
    """What of a layer decides how it is computed; layers of one kind share their room."""

    n_pairs: int
    n_expert: int
    n_ff: int
    n_embd: int
    is_coded: bool


class _Space:
    """Room for hidden rows and results in the scratch, and the rest of it for matrices."""

    def __init__(self, kind: _Kind, scratch: Scratch) -> None:
        n_ff, d = kind.n_ff, kind.n_embd
        room, self.max_rows = scratch.for_rows(6 * n_ff + 4 * d, kind.n_pairs)
        self.hidden = room.take(torch.float32, self.max_rows, n_ff)
        self.rows = room.take(torch.float32, self.max_rows, d)
        self.halved = Rows(room.take(torch.float16, self.max_rows, n_ff), room.take(torch.float32, self.max_rows))
        self.weights = room.rest()


class Mixture:
    """Runs the layers of one model. `keep` hears of staged experts once a layer's are computed."""

    def __init__(self, stream: ExpertStream, scratch: Scratch, capability: int, device: torch.device) -> None:
        self._stream, self._scratch, self._capability, self._device = stream, scratch, capability, device
        self.keep: Keep | None = None
        """Set for a chunk that ends a prompt."""
        self._space: tuple[_Kind, _Space] | None = None
        self._pairs: tuple[tuple[int, int, int, bool], Sorted] | None = None
        self._host = _HostCopy(device)
        self._resident: dict[int, tuple[np.ndarray, torch.Tensor]] = {}
        n_expert = max(layer.banks[0].n_expert for layer in stream.layers if layer is not None)
        self._planes = torch.full((n_expert,), PLANES, dtype=torch.int32, device=device)

    def run(
        self, layer: int, x: Rows, ids: torch.Tensor, weights: torch.Tensor, bank: Experts, activation: str,
        y: torch.Tensor,
    ) -> None:  # fmt: skip
        """y fp32 [n, n_embd] = weighted sum of what the chosen experts, ids int32 [n, k], make of x [n, n_embd]."""
        n, k = ids.shape
        if n == 0:
            return
        pairs = self._pairs_of(n, k, bank.n_expert)
        sort_pairs(ids, weights, pairs)
        kind = self._kind(ids.numel(), bank)
        work = _Layer(bank, kind, self._space_of(kind), ACTIVATIONS[activation], self._capability, x, pairs, y)
        slots = self._stream.resident(layer)
        if slots is not None and kind.is_coded and work.max_rows == ids.numel():
            work.run_resident(self._addresses(layer, slots), self._planes[: bank.n_expert])
            return
        keep = self.keep
        if keep is not None:
            count_pairs(ids[max(n - TAIL_TOKENS, 0) :], pairs.tail_counts)
        self._host.fetch(pairs.summary)
        summary = self._host.wait()
        counts = np.diff(summary[: bank.n_expert + 1])
        tail = summary[bank.n_expert + 1 :].reshape(-1, bank.n_expert).sum(axis=0) if keep is not None else counts
        start = 0
        for part in self._stream.parts(layer, counts):
            mine = counts[part.first : part.end]
            if mine.any():
                work.run(part, mine, start)
            start += int(mine.sum())
            if keep is not None and part.staged is not None:
                part.wait(part.end)
                keep(layer, tail, part, self._stream.slot_of)
        work.add_rows(start)

    def _kind(self, n_pairs: int, bank: Experts) -> _Kind:
        types = bank.gate.type, bank.up.type, bank.down.type
        is_coded = (
            n_pairs <= CODED_ROWS * bank.n_expert
            and types[0] == types[1]
            and all(can_be_coded(each, self._capability) for each in types)
        )
        return _Kind(n_pairs, bank.n_expert, bank.gate.rows, bank.down.rows, is_coded)

    def _space_of(self, kind: _Kind) -> _Space:
        if self._space is None or self._space[0] != kind:
            self._space = kind, _Space(kind, self._scratch)
        return self._space[1]

    def _pairs_of(self, n: int, k: int, n_expert: int) -> Sorted:
        key = n, k, n_expert, self.keep is not None
        if self._pairs is None or self._pairs[0] != key:
            self._pairs = key, sort_room(n, k, n_expert, self._device, TAIL_TOKENS if key[3] else 0)
        return self._pairs[1]

    def _addresses(self, layer: int, addresses: np.ndarray) -> torch.Tensor:
        """int64 [3, n_expert] on the device; uploaded again where a slot has changed."""
        known = self._resident.get(layer)
        if known is None or not np.array_equal(known[0], addresses):
            known = self._resident[layer] = addresses, upload(addresses.copy(), self._device)
        return known[1]


class _HostCopy:
    """Integers on their way to the host, a copy at a time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._room = torch.empty(0, dtype=torch.int32)
        self._values = self._room

    def fetch(self, values: torch.Tensor) -> None:
        if self._event is None:
            self._values = values
            return
        if len(self._room) < len(values):
            self._room = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
        self._values = self._room[: len(values)]
        self._values.copy_(values, non_blocking=True)
        self._event.record()

    def wait(self) -> np.ndarray:
        """The values, until the next `fetch`."""
        if self._event is not None:
            self._event.synchronize()
        values: np.ndarray = self._values.numpy()
        return values


class _Layer:
    """One layer's work: its matrices, how they are cut, and rows that wait to be added."""

    def __init__(
        self, bank: Experts, kind: _Kind, space: _Space, activation: int, capability: int, x: Rows, pairs: Sorted,
        y: torch.Tensor,
    ) -> None:  # fmt: skip
        self._bank, self._kind, self._space, self._activation = bank, kind, space, activation
        self._capability = capability
        self._x, self._pairs, self._y = x, pairs, y
        self.max_rows = space.max_rows
        self._first_row = 0
        self._is_first = True
        mean = kind.n_pairs / kind.n_expert
        self._coded_tile = coded_tile(mean, capability)
        self._tile_glu = tile_for(mean, capability, is_double=True)
        self._tile_down = tile_for(mean, capability)

    def max_experts(self, n_active: int) -> int:
        """Experts in a group: as many as fit the scratch, spread evenly over the groups."""
        if self._kind.is_coded:
            return max(n_active, 1)
        fit = max(len(self._space.weights) // (2 * self._bank.gate.rows * self._bank.gate.cols), 1)
        n_groups = -(-max(n_active, 1) // fit)
        return -(-max(n_active, 1) // n_groups)

    def run_resident(self, addresses: torch.Tensor, forms: torch.Tensor) -> None:
        """Compute all experts at once, from int64 addresses [3, n_expert], without knowing which have rows."""
        kind, m = self._kind, self._coded_tile.m
        n_tiles = min(kind.n_pairs, kind.n_expert + kind.n_pairs // m)
        listed = torch.empty((n_tiles, 3), dtype=torch.int32, device=self._y.device)
        list_tiles(self._pairs.starts, listed, m, len(self._y))
        self._compute_coded(slice(0, kind.n_pairs), addresses, forms, listed)
        self.add_rows(kind.n_pairs)

    def run(self, part: Part, counts: np.ndarray, start: int) -> None:
        """Compute a part; counts are those of its experts, whose rows begin at `start`."""
        ends = start + counts.cumsum()
        max_experts = self.max_experts(int((counts > 0).sum()))
        if ends[-1] - self._first_row <= self.max_rows:
            groups = spread(counts, ends, part.is_slot, max_experts)
        else:
            groups = cut(counts, start, max_experts, self.max_rows)
        m = self._coded_tile.m
        heights = (m, m) if self._kind.is_coded else (self._tile_glu.m, self._tile_down.m)
        tables = _Tables(part, ends - counts, ends, groups, heights, self._y.device)
        for i, group in enumerate(groups):
            waiting = group.experts[~part.is_slot[group.experts]]
            if len(waiting):
                part.wait(part.first + int(waiting[-1]))
            if group.end - self._first_row > self.max_rows:
                self.add_rows(group.first)
            at = slice(group.first - self._first_row, group.end - self._first_row)
            addresses, forms = tables.addresses[i].view(3, -1), tables.forms[i]
            if self._kind.is_coded:
                self._compute_coded(at, addresses, forms, tables.tiles[2 * i])
            else:
                self._compute(at, addresses, forms, tables.tiles[2 * i], tables.tiles[2 * i + 1])

    def add_rows(self, end: int) -> None:
        """Add the rows of positions before `end` that wait."""
        first, self._first_row = self._first_row, end
        rows = self._space.rows[: end - first]
        pairs, is_first = self._pairs, self._is_first
        self._is_first = False
        add_expert_rows(rows, pairs.positions, pairs.weights, self._y, first, end, is_first=is_first)

    def _compute_coded(self, at: slice, addresses: torch.Tensor, forms: torch.Tensor, tile_list: torch.Tensor) -> None:
        """Rows of a group, which stand at `at`; addresses int64 [3, n] and forms int32 [n] of its matrices."""
        bank, space, base, tile = self._bank, self._space, self._first_row, self._coded_tile
        gate, up, down = (
            CodedMatrices(w.type, w.rows, w.cols, where, forms)
            for w, where in zip((bank.gate, bank.up, bank.down), addresses, strict=True)
        )
        expert_coded_glu(
            self._x, self._pairs.index, tile_list, gate, up, space.hidden, tile,
            first=base, activation=self._activation,
        )  # fmt: skip
        halve_rows(space.hidden[at], space.halved.x[at], space.halved.scale[at])
        expert_coded_products(space.halved, tile_list, down, space.rows, tile, first=base)

    def _compute(
        self, at: slice, addresses: torch.Tensor, forms: torch.Tensor, tiles_glu: torch.Tensor,
        tiles_down: torch.Tensor,
    ) -> None:  # fmt: skip
        n_experts, bank, base, space = addresses.shape[1], self._bank, self._first_row, self._space
        for first, end in self._parts(n_experts, 2, bank.gate):
            w = self._matrices(2, n_experts, end - first, bank.gate.cols)
            self._decode(addresses, forms, w, first)
            expert_glu_rows(
                self._x, self._pairs.index, tiles_glu, w, space.hidden[:, first:end], self._tile_glu,
                first=base, activation=self._activation,
            )  # fmt: skip
        halve_rows(space.hidden[at], space.halved.x[at], space.halved.scale[at])
        for first, end in self._parts(n_experts, 1, bank.down):
            w = self._matrices(n_experts, end - first, bank.down.cols)
            forms_down = forms[:n_experts]
            dequantise(bank.down.type, addresses[2], forms_down, w, matrix_rows=bank.down.rows, first_row=first)
            expert_products(space.halved, tiles_down, w, space.rows[:, first:end], self._tile_down, first=base)

    def _matrices(self, *shape: int) -> torch.Tensor:
        return self._space.weights[: math.prod(shape)].view(shape)

    def _parts(self, n_experts: int, n_banks: int, w: Weight) -> list[tuple[int, int]]:
        """Ranges of a matrix's rows that fit the scratch at once."""
        fit = len(self._space.weights) // (n_banks * n_experts * w.cols)
        step = w.rows if fit >= w.rows else max(fit // 64 * 64, min(fit, 16), 1)
        return [(first, min(first + step, w.rows)) for first in range(0, w.rows, step)]

    def _decode(self, addresses: torch.Tensor, forms: torch.Tensor, w: torch.Tensor, first: int) -> None:
        """Rows of gate and up from `first` on, w fp16 [2, n, rows, cols]."""
        n, gate, up = w.shape[1], self._bank.gate, self._bank.up
        if gate.type == up.type:
            both = w.view(2 * n, *w.shape[2:])
            dequantise(gate.type, addresses[:2].view(-1), forms, both, matrix_rows=gate.rows, first_row=first)
            return
        for i, bank in enumerate((gate, up)):
            dequantise(bank.type, addresses[i], forms[:n], w[i], matrix_rows=bank.rows, first_row=first)


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
