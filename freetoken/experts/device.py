"""The slot cache on a device: the state of `slots.SlotState` as tensors, one kernel launch for a layer's step.

The engine's thread calls `step` inside a captured graph; everything else stands between graphs. Nothing here waits for
the device but `counters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from freetoken.experts.slots import FILL_ORDERS, RESERVED, Pool, SlotState
from freetoken.kernels.slots import SlotTensors, StepOutputs, slot_step

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SlotCache"]


class SlotCache:
    """Slots of all layers. `split` int32 [n_max + 1] for all layers or [n_layer, n_max + 1]: fills wanted by number of
    misses, n_max at least the tokens times the experts of one."""

    def __init__(self, state: SlotState, device: torch.device | str, *, split: np.ndarray, fill_order: str) -> None:
        if fill_order not in FILL_ORDERS:
            raise ValueError(f"fill order {fill_order!r}, expected one of {FILL_ORDERS}")
        self._n_expert = state.n_expert
        self._pool_of = dict(state.pool_of)
        self._expert_bytes = state.expert_bytes
        self._clock_limit = state.clock_limit
        self._by_recency = fill_order == "recent"
        self._device = device
        firsts = [state.pool_of[i].first if i in state.pool_of else 0 for i in range(len(self._expert_bytes))]
        self._first_of_layer = torch.tensor(firsts, dtype=torch.int32, device=device)
        self._outputs: dict[tuple[int, int], StepOutputs] = {}
        self.tensors = SlotTensors(**{name: torch.tensor(a, device=device) for name, a in state.arrays.items()})
        self._split = torch.tensor(np.broadcast_to(split, (len(self._expert_bytes), split.shape[-1])), device=device)

    def outputs(self, n_tokens: int, k: int) -> StepOutputs:
        """Where steps of that many tokens write: one set for all layers, made once."""
        key = n_tokens, k
        if key not in self._outputs:
            self._outputs[key] = StepOutputs.empty(n_tokens, k, self._device)
        return self._outputs[key]

    def step(self, layer: int, ids: torch.Tensor, out: StepOutputs | None = None) -> StepOutputs:
        """Route ids int32 [n_tokens, k]; results stand in `out`, by default those of `outputs`."""
        if out is None:
            out = self.outputs(*ids.shape)
        pool = self._pool_of[layer]
        slot_step(
            self.tensors,
            layer,
            pool.first,
            pool.n,
            ids,
            self._split[layer],
            out,
            expert_bytes=self._expert_bytes[layer],
            clock_limit=self._clock_limit,
            by_recency=self._by_recency,
        )
        return out

    def set_split(self, split: np.ndarray) -> None:
        """Another table of the same length, in place: captured graphs see it."""
        self._split.copy_(torch.from_numpy(np.broadcast_to(split, tuple(self._split.shape)).copy()))

    def counters(self, layers: Sequence[int] | None = None) -> np.ndarray:
        """int64 [n_layer, 5] in the order of `slots.COUNTERS`; waits for a copy, not for steps to come."""
        values: np.ndarray = self.tensors.counters.cpu().numpy()
        return values if layers is None else values[list(layers)]

    def reserve(self, pool: Pool, first: int, n: int) -> None:
        """`SlotState.reserve`."""
        t, at = self.tensors, slice(pool.first + first, pool.first + first + n)
        # an owner of -1 indexes the spare place at the end: choosing by a mask would wait for the device
        flat = torch.cat([t.slot_of.reshape(-1), t.slot_of.new_empty(1)])
        flat[t.owner[at].long()] = -1
        t.slot_of.copy_(flat[:-1].reshape(t.slot_of.shape))
        t.owner[at] = -1
        t.stamp[at] = RESERVED

    def release(self, pool: Pool, first: int, n: int) -> None:
        """`SlotState.release`."""
        t, start = self.tensors, pool.first + first
        t.owner[start : start + n] = -1
        free = torch.arange(start - len(t.stamp), start + n - len(t.stamp), dtype=torch.int32, device=self._device)
        t.stamp[start : start + n] = free

    def adopt(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> None:
        """`SlotState.adopt` with int32 tensors."""
        t, at, who = self.tensors, self._pool_of[layer].first + slots.long(), experts.long()
        ticks = torch.arange(len(experts), dtype=torch.int32, device=self._device) + t.clock
        t.slot_of[layer, who] = slots
        t.last_use[layer, who] = ticks
        t.owner[at] = layer * self._n_expert + experts
        t.stamp[at] = ticks
        t.clock.add_(len(experts))

    def take_over(self, owners: torch.Tensor, at: torch.Tensor) -> None:
        """`SlotState.take_over` with int32 tensors."""
        t, where, who = self.tensors, at.long(), owners.long()
        # a lost owner of -1 indexes a spare place, as in `reserve`
        flat = torch.cat([t.slot_of.reshape(-1), t.slot_of.new_empty(1)])
        flat[t.owner[where].long()] = -1
        flat[who] = at - self._first_of_layer[who // self._n_expert]
        t.slot_of.copy_(flat[:-1].reshape(t.slot_of.shape))
        ticks = torch.arange(len(owners), dtype=torch.int32, device=self._device) + t.clock
        t.last_use.view(-1)[who] = ticks
        t.owner[where] = owners
        t.stamp[where] = ticks
        t.clock.add_(len(owners))
