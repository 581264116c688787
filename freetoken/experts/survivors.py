"""Experts that a prompt leaves in slots: those that its last tokens used, taken over from the staging memory.

A prompt streams missing experts past the cache, and what decodes after it wants the experts of its last tokens. When a
layer has been computed, its wanted experts that are staged go into slots that no later layer of the chunk reads: free
ones, then those of layers up to this one that the last tokens did not use, the longest unused first. The bytes move at
once, on the computing stream; the cache's state follows in one piece (`flush`), before any decode step.

The stream's view of who has a slot is kept true on the way, for layers to come.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from freetoken.experts.device import SlotCache
from freetoken.experts.memory import SlotMemory
from freetoken.experts.slots import RESERVED, SlotState
from freetoken.kernels.fills import fill

__all__ = ["Survivors"]

N_PROGRAMS = 256
"""Programs of a fill from the device's own memory, which nothing else waits for."""


class StagedPart(Protocol):
    """`stream.Part` as it is used here."""

    @property
    def first(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def staged(self) -> Any:
        """`experts`, bool [end - first]: which are in the buffer."""

    @property
    def bases(self) -> tuple[int, ...]:
        """For each bank, where expert 0 would lie."""


class Survivors:
    """Serves one chunk after another: `begin`, the layers in order, `flush`. Used by the engine's thread."""

    def __init__(self, state: SlotState, cache: SlotCache, memory: SlotMemory, device: torch.device) -> None:
        """Of `state` only its sizes are used."""
        self._state, self._cache, self._memory, self._device = state, cache, memory, device
        self._wanted = np.zeros(state.slot_of.shape, bool)
        self._stamp = state.stamp.copy()
        self._moves: list[tuple[np.ndarray, np.ndarray]] = []
        self.n_kept = 0
        """Experts taken over so far."""

    def begin(self) -> None:
        """A chunk begins: nothing is wanted yet."""
        self._wanted[:] = False

    def look(self, stamp: np.ndarray) -> None:
        """The cache's stamps, as of now; all that was taken over has been flushed."""
        assert not self._moves, "experts taken over that the cache does not know of"
        self._stamp = stamp.copy()

    def __call__(self, layer: int, tail_counts: np.ndarray, part: StagedPart, slot_of: np.ndarray) -> None:
        """A part of a layer has been computed. `tail_counts` int [n_expert]: how often the last tokens chose each;
        `slot_of` int32 [n_layer, n_expert] is brought up to date."""
        pool = self._state.pool_of.get(layer)
        if pool is None:
            return
        stamp = self._stamp[pool.first : pool.first + pool.n]
        layers = [i for i, each in self._state.pool_of.items() if each is pool]
        n_each = int((stamp != RESERVED).sum()) // len(layers)
        order = np.argsort(-tail_counts, kind="stable")[:n_each]
        order = order[tail_counts[order] > 0]
        self._wanted[layer, order] = True
        is_staged = np.zeros(self._state.n_expert, bool)
        is_staged[part.first : part.end] = part.staged.experts
        chosen = order[is_staged[order] & (slot_of[layer, order] < 0)]
        is_past = [i for i in layers if i < layer or (i == layer and part.end == self._state.n_expert)]
        slots = self._victims(layers, is_past, stamp, slot_of)
        n = min(len(chosen), len(slots))
        if n:
            self._take(layer, chosen[:n], slots[:n], part.bases, slot_of)

    def _victims(self, layers: list[int], past: list[int], stamp: np.ndarray, slot_of: np.ndarray) -> np.ndarray:
        """Slots of a pool that may be taken, the best first."""
        is_held = np.zeros(len(stamp), bool)
        held = slot_of[layers]
        is_held[held[held >= 0]] = True
        free = np.flatnonzero(~is_held & (stamp != RESERVED))
        theirs = slot_of[past]
        idle = theirs[(theirs >= 0) & ~self._wanted[past]]
        return np.concatenate([free, idle[np.argsort(stamp[idle], kind="stable")]])

    def _take(
        self, layer: int, experts: np.ndarray, slots: np.ndarray, bases: tuple[int, ...], slot_of: np.ndarray
    ) -> None:
        pool = self._state.pool_of[layer]
        layers = [i for i, each in self._state.pool_of.items() if each is pool]
        is_taken = np.zeros(pool.n + 1, bool)  # a slot of -1 reads the last
        is_taken[slots] = True
        slot_of[layers] = np.where(is_taken[slot_of[layers]], -1, slot_of[layers])
        slot_of[layer, experts] = slots
        self._stamp[pool.first + slots] = RESERVED - 1  # the latest
        self._moves.append((layer * self._state.n_expert + experts, pool.first + slots))
        self.n_kept += len(experts)
        data = np.concatenate([[0, 0, 0, len(experts), 0], experts, slots]).astype(np.int32)
        told = torch.from_numpy(data).to(self._device, non_blocking=True)
        banks = [replace(b, address=at) for b, at in zip(self._memory.banks(layer), bases, strict=True)]
        n, n_programs = len(experts), N_PROGRAMS if self._device.type == "cuda" else 2
        fill(banks, self._memory.pools[layer], told[5 : 5 + n], told[5 + n :], told[:5], n_programs=n_programs)

    def flush(self) -> None:
        """Tell the cache of what has been taken over."""
        if self._moves:
            owners, at = (np.concatenate(each).astype(np.int32) for each in zip(*self._moves, strict=True))
            self._moves.clear()
            both = torch.from_numpy(np.stack([owners, at])).to(self._device, non_blocking=True)
            self._cache.take_over(both[0], both[1])
