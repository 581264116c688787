"""The expert pool on its way to the device while a prompt is computed: layers ahead of need, or what a layer routes to.

A layer's experts are taken in units, which are whole layers where the staging memory holds two of the largest, else
parts of a layer. A unit's missing experts are copied, in the file's form, into one of two buffers by a stream of its
own; experts that have a slot stay there. With the plan "stream" the next units are copied while one is computed; with
"on_demand" only routed experts are copied, once the router has spoken. Either way `parts` hands out addresses, tops up
what is neither staged nor resident, and lets the computing stream wait for the copies: the plan moves time, not bits.

Called by the prompt's mixture of experts; knows neither kernels nor architectures.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from freetoken import native
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, Run

__all__ = ["ExpertPool", "ExpertStream", "Part", "choose_plan"]

logger = logging.getLogger(__name__)

ALIGNMENT = 256
N_SLICES = 4
"""A unit is copied in so many slices, each with an event of its own: the first experts need not wait for the last."""
INDEPENDENT = 0.3
"""Tokens of a text repeat each other's experts: n of them choose as many as this share of n would, chosen blindly."""
COPY_RATE, DECODE_RATE, PRODUCT_RATE = 52e9, 600e9, 150e12
"""Bytes copied, weights decoded and operations done in a second. Only their ratios count, and only roughly."""
ROUTE_S, EXPOSED = 0.5e-3, 0.6
"""What a layer on demand takes beyond its copies: from the copies of one layer to the router's word in the next, and
this share of the computation. Fits to layers of Qwen3-30B-A3B with 37% of the experts in slots (random tokens, ms a
layer streamed and on demand): 5.3 and 7.7 at 4096 tokens, 4.7 and 6.2 at 512, 4.5 and 5.4 at 64, 4.3 and 3.5 at 16."""
FORGOTTEN = 0.2
"""Where nothing is learnt of a text, what was learnt before loses this share: texts change."""


class ExpertPool(Protocol):
    """What the engine gives: where experts lie on the host and which have slots."""

    @property
    def layers(self) -> Sequence[LayerBanks | None]:
        """By layer, None for a layer without routed experts."""

    @property
    def offsets(self) -> Mapping[int, tuple[int, ...]]:
        """Where gate, up and down start in a slot of a layer."""

    @property
    def staging(self) -> torch.Tensor:
        """uint8 [n] on the device, nobody else's during a chunk; may be empty where no expert is ever missing."""

    def pool(self, layer: int) -> torch.Tensor | None:
        """uint8 [n_slots, slot_bytes] on the device; None where a layer takes no slots."""

    def slot_of(self) -> np.ndarray:
        """int32 [n_layer, n_expert]: slots on the host, -1 for none. May wait for the device."""

    @property
    def n_used(self) -> int:
        """Experts of a token."""

    @property
    def edges(self) -> Sequence[int]:
        """Host addresses at which locked ranges begin: no copy may cross one."""


def choose_plan(
    n_tokens: int, layer: LayerBanks, n_used: int, n_missing: float, independent: float = INDEPENDENT
) -> str:
    """ "stream" or "on_demand" for a layer of which n_missing experts have no slot.

    Streaming copies everything missing under the computation; on demand copies what is routed, but then the device
    waits for it.
    """
    n_expert = layer.banks[0].n_expert
    share = 1 - (1 - n_used / n_expert) ** (n_tokens * independent)
    copy = n_missing * layer.expert_bytes / COPY_RATE
    weights = sum(bank.rows * bank.cols for bank in layer.banks)
    compute = share * n_expert * weights / DECODE_RATE + 2 * n_tokens * n_used * weights / PRODUCT_RATE
    if not n_missing:
        return "on_demand"
    return "stream" if max(copy, compute) < share * copy + EXPOSED * compute + ROUTE_S else "on_demand"


# --- copies ----------------------------------------------------------------------------------------------------------


class HostCopies:
    """Copies where the device is the host itself: done at once, nothing to wait for."""

    def copy(self, runs: np.ndarray) -> None:
        """Runs uint64 [n, 3] of (device address, host address, bytes)."""
        for to, start, n_bytes in runs.tolist():
            ctypes.memmove(to, start, n_bytes)

    def copied(self) -> Any:
        """An event after all copies so far."""

    def computed(self) -> Any:
        """An event after all that the computing stream has been given so far."""

    def copy_after(self, event: Any) -> None: ...

    def compute_after(self, event: Any) -> None: ...


class CudaCopies(HostCopies):
    """Copies by the driver on a stream of their own."""

    def __init__(self, device: torch.device, copy_function: int) -> None:
        self._function = copy_function
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device

    def copy(self, runs: np.ndarray) -> None:
        result = native.copy_runs(self._function, runs, self._stream.cuda_stream)
        if result:
            raise EngineError(f"copying experts to the GPU failed with CUDA's error {result}")

    def copied(self) -> Any:
        return self._stream.record_event()

    def computed(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def copy_after(self, event: Any) -> None:
        self._stream.wait_event(event)

    def compute_after(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


# --- units -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Experts [first, end) of a layer, copied together. `regions`: where the first one stands in a buffer, for each run
    of the layer's memory; none where a buffer holds no expert."""

    layer: int
    first: int
    end: int
    regions: tuple[int, ...]


@dataclass
class Staged:
    """What a buffer holds of a unit: which experts, and an event for all of them below a number."""

    buffer: int
    experts: np.ndarray
    events: list[tuple[int, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Experts [first, end) of a layer, ready to be computed.

    `addresses` int64 [3, end - first] of gate, up and down on the device, 0 for an expert that is nowhere; `is_slot`
    bool [end - first]: in its slot, thus in planes. `staged` tells for a bank where expert 0 would lie if all were in
    the buffer, and which experts are.
    """

    first: int
    end: int
    addresses: np.ndarray
    is_slot: np.ndarray
    stream: ExpertStream
    staged: Staged | None
    bases: tuple[int, ...]

    def wait(self, expert: int) -> None:
        """Let what is computed from now on come after the copies of experts up to this one."""
        if self.staged is None:
            return
        while self.staged.events:
            end, event = self.staged.events.pop(0)
            self.stream.copies.compute_after(event)
            if end > expert:
                break


class ExpertStream:
    """Serves one chunk at a time: `begin`, `parts` for each layer in order, `end`. Used by the engine's thread."""

    def __init__(self, pool: ExpertPool, device: torch.device, copy_function: int = 0) -> None:
        """`copy_function` is the address of the driver's cuMemcpyHtoDAsync, for a device that is not the host."""
        self.copies = CudaCopies(device, copy_function) if device.type == "cuda" else HostCopies()
        self._pool = pool
        self._first = -(-pool.staging.data_ptr() // ALIGNMENT) * ALIGNMENT
        n_bytes = pool.staging.numel() - (self._first - pool.staging.data_ptr())
        self._buffer_bytes = max(n_bytes, 0) // 2 // ALIGNMENT * ALIGNMENT
        self._runs = {i: layer.runs for i, layer in enumerate(pool.layers) if layer is not None}
        self._run_cuts = {i: self._cuts(layer) for i, layer in enumerate(pool.layers) if layer is not None}
        self._units = {i: self._units_of(i, layer) for i, layer in enumerate(pool.layers) if layer is not None}
        if any(len(units) > 1 for units in self._units.values()):
            logger.warning(
                "prompts: GPU memory for streaming (%.0f MiB) holds less than two layers, they come in parts",
                pool.staging.numel() / 2**20,
            )
        self._ahead: dict[tuple[int, int], Staged] = {}
        self._queue: list[Unit] = []
        self.slot_of = np.zeros((0, 0), np.int32)
        """The pool's, as of `refresh` and with what has been taken over since."""
        self._is_free: list[Any] = [None, None]
        self._next_buffer = 0
        self._independent = INDEPENDENT
        self._n_tokens, self._shares = 0, list[float]()

    @property
    def layers(self) -> Sequence[LayerBanks | None]:
        """By layer, None for a layer without routed experts."""
        return self._pool.layers

    # --- a chunk -----------------------------------------------------------------------------------------------------

    def begin(self, n_tokens: int, n_outputs: int, plan: str | None = None) -> str:
        """Start a chunk; returns the plan, by default the cheaper one. The last layer sees n_outputs tokens only, so it
        is never streamed ahead unless they are many."""
        self.refresh()
        self._n_tokens, self._shares = n_tokens, []
        self._ahead.clear()
        self._is_free = [self.copies.computed()] * 2
        self._next_buffer = 0
        layers = {i: self._pool.layers[i] for i in self._units}
        n_missing = {i: int((self.slot_of[i] < 0).sum()) for i in layers}
        missing = [i for i in layers if n_missing[i]]
        if plan is None:
            largest = max(missing, key=lambda i: n_missing[i] * _banks(layers[i]).expert_bytes, default=None)
            plan = "on_demand"
            if largest is not None:
                mean = sum(n_missing.values()) / len(missing)
                plan = choose_plan(n_tokens, _banks(layers[largest]), self._pool.n_used, mean, self._independent)
        ahead = missing if plan == "stream" else []
        last = max(layers, default=-1)
        if ahead and ahead[-1] == last and n_outputs < n_tokens // 4:
            ahead = ahead[:-1]
        self._queue = [unit for i in ahead for unit in self._units[i] if self._missing(unit).any()]
        for _ in range(2):
            self._stage_next()
        return plan

    def refresh(self) -> None:
        """Look again at which experts have slots: after decode steps between two layers."""
        self.slot_of = self._pool.slot_of()

    def parts(self, layer: int, counts: np.ndarray) -> Iterator[Part]:
        """The layer's experts part by part; counts [n_expert] says how many tokens each has. A part's memory is its own
        until the next is asked for."""
        missing = self.slot_of[layer] < 0
        if missing.any():
            self._shares.append(float((counts[missing] > 0).mean()))
        for unit in self._units[layer]:
            staged = self._ahead.pop((layer, unit.first), None)
            was_ahead = staged is not None
            wanted = self._missing(unit) & (counts[unit.first : unit.end] > 0)
            if staged is not None:
                wanted &= ~staged.experts
            if wanted.any():
                if staged is None:
                    staged = Staged(self._take_buffer(), np.zeros_like(wanted))
                self._copy(unit, wanted, staged)
            yield self._part(unit, staged)
            if staged is not None:
                self._is_free[staged.buffer] = self.copies.computed()
            if was_ahead:
                self._stage_next()

    def resident(self, layer: int) -> np.ndarray | None:
        """Addresses int64 [3, n_expert] of a layer whose experts all have slots, None for others."""
        slots = self.slot_of[layer]
        pool = self._pool.pool(layer)
        if pool is None or (slots < 0).any() or any((layer, unit.first) in self._ahead for unit in self._units[layer]):
            return None
        starts = pool.data_ptr() + slots.astype(np.int64) * pool.shape[1]
        return np.asarray(starts + np.array(self._pool.offsets[layer])[:, None])

    def end(self) -> None:
        """End a chunk, also one given up: what is computed from now on comes after all copies."""
        self._queue, self._ahead = [], {}
        self.copies.compute_after(self.copies.copied())
        self._learn()

    def _learn(self) -> None:
        """Correct INDEPENDENT by what the layers but the last took of the experts that were missing, where that was not
        all of them."""
        share = float(np.mean(self._shares[:-1])) if len(self._shares) > 1 else 0.0
        if 0 < share < 0.98:
            n_expert = self.slot_of.shape[1]
            seen = np.log1p(-share) / (self._n_tokens * np.log1p(-self._pool.n_used / n_expert))
            self._independent = (self._independent + float(np.clip(seen, 0.05, 1.0))) / 2
        else:
            self._independent += FORGOTTEN * (INDEPENDENT - self._independent)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _cuts(self, layer: LayerBanks) -> list[list[int]]:
        """For each run the bytes, from its start, at which a copy must not go on."""
        edges = sorted(self._pool.edges)
        return [[e - run.address for e in edges if 0 < e - run.address < run.data.nbytes] for run in layer.runs]

    def _units_of(self, number: int, layer: LayerBanks) -> list[Unit]:
        n_expert = layer.banks[0].n_expert
        slack = len(layer.runs) * ALIGNMENT
        n = min(n_expert, max(self._buffer_bytes - slack, 0) // sum(run.stride for run in layer.runs))
        if n == 0:  # no harm where every expert has a slot
            return [Unit(number, 0, n_expert, ())]
        regions, at = [], 0
        for run in layer.runs:
            regions.append(at)
            at += -(-n * run.stride // ALIGNMENT) * ALIGNMENT
        return [Unit(number, i, min(i + n, n_expert), tuple(regions)) for i in range(0, n_expert, n)]

    def _missing(self, unit: Unit) -> np.ndarray:
        """bool [end - first]."""
        return np.asarray(self.slot_of[unit.layer, unit.first : unit.end] < 0)

    def _take_buffer(self) -> int:
        """The next buffer that no unit ahead waits in; copies into it come after its last use.

        Where both wait, what was staged last has to go: an expert has lost its slot since the chunk began.
        """
        if len(self._ahead) == 2:
            key, dropped = self._ahead.popitem()
            self._queue.insert(0, next(u for u in self._units[key[0]] if u.first == key[1]))
            self._is_free[dropped.buffer] = self.copies.computed()
        held = {staged.buffer for staged in self._ahead.values()}
        buffer = next(b for b in (self._next_buffer, 1 - self._next_buffer) if b not in held)
        self._next_buffer = 1 - buffer
        if self._is_free[buffer] is not None:
            self.copies.copy_after(self._is_free[buffer])
        return buffer

    def _stage_next(self) -> None:
        if self._queue and len(self._ahead) < 2:
            unit = self._queue.pop(0)
            staged = Staged(self._take_buffer(), np.zeros(unit.end - unit.first, bool))
            self._copy(unit, self._missing(unit), staged)
            self._ahead[unit.layer, unit.first] = staged

    def _start(self, buffer: int) -> int:
        """The buffer's address."""
        return self._first + buffer * self._buffer_bytes

    def _copy(self, unit: Unit, wanted: np.ndarray, staged: Staged) -> None:
        if not unit.regions:
            n_bytes = sum(run.stride for run in self._runs[unit.layer])
            raise EngineError(
                f"the GPU memory for streaming ({2 * self._buffer_bytes} bytes) does not hold two experts of layer "
                f"{unit.layer} ({n_bytes} bytes each): give the cache more slots"
            )
        n = unit.end - unit.first
        edges = np.linspace(0, n, N_SLICES + 1).astype(int) if n >= 4 * N_SLICES else np.array([0, n])
        wanted_runs = np.concatenate([_runs(wanted[a:b]) + a for a, b in itertools.pairwise(edges)])
        copies, slices = [], []
        for run, region, cuts in zip(self._runs[unit.layer], unit.regions, self._run_cuts[unit.layer], strict=True):
            mine = _copies(run, wanted_runs, unit.first, self._start(staged.buffer) + region, cuts)
            experts = (mine[:, 1] - np.uint64(run.address)) // np.uint64(run.stride)
            copies.append(mine)
            slices.append(np.searchsorted(edges, experts.astype(np.int64) - unit.first, side="right") - 1)
        listed, of_slice = np.concatenate(copies), np.concatenate(slices)
        for i, end in enumerate(edges[1:].tolist()):
            some = listed[of_slice == i]
            if len(some):
                self.copies.copy(some)
                staged.events.append((unit.first + end, self.copies.copied()))
        staged.experts = staged.experts | wanted

    def _part(self, unit: Unit, staged: Staged | None) -> Part:
        banks = _banks(self._pool.layers[unit.layer]).banks
        slots = self.slot_of[unit.layer, unit.first : unit.end].astype(np.int64)
        is_slot = slots >= 0
        addresses = np.zeros((len(banks), len(slots)), np.int64)
        pool = self._pool.pool(unit.layer)
        if pool is not None and is_slot.any():
            starts = pool.data_ptr() + slots * pool.shape[1]
            addresses[:] = np.where(is_slot, starts + np.array(self._pool.offsets[unit.layer])[:, None], 0)
        bases = [0] * len(banks)
        if staged is not None:
            there = staged.experts & ~is_slot
            for run, region in zip(self._runs[unit.layer], unit.regions, strict=True):
                experts = np.arange(unit.first, unit.end) * run.stride
                for i, start in run.starts.items():
                    bases[i] = self._start(staged.buffer) + region + start - unit.first * run.stride
                    addresses[i] += np.where(there, bases[i] + experts, 0)
        return Part(unit.first, unit.end, addresses, is_slot, self, staged, tuple(bases))


def _banks(layer: LayerBanks | None) -> LayerBanks:
    assert layer is not None
    return layer


def _runs(wanted: np.ndarray) -> np.ndarray:
    """[n, 2]: first and end of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted, [False]]).astype(np.int8)))
    return np.asarray(edges.reshape(-1, 2))


def _copies(run: Run, runs: np.ndarray, first: int, to: int, cuts: Sequence[int]) -> np.ndarray:
    """uint64 [n, 3] of (device address, host address, bytes) for runs of experts of a unit that begins with `first`.

    `cuts`: bytes of the run at which a copy ends and another begins.
    """
    size = run.stride
    ranges = (runs + first) * size
    for cut in cuts:
        i = int(np.searchsorted(ranges[:, 1], cut, side="right"))
        if i < len(ranges) and ranges[i, 0] < cut < ranges[i, 1]:
            ranges = np.insert(ranges, i, [ranges[i, 0], cut], axis=0)
            ranges[i + 1, 0] = cut
    start, end = ranges[:, 0], ranges[:, 1]
    return np.stack([to + start - first * size, run.address + start, end - start], axis=1).astype(np.uint64)
