"""The routed experts of all layers at work: all resident on the GPU (`fused`), or slots that misses fill (`offload`),
beside which the CPU computes all (`cpu`) or some (`hybrid`) of the misses.

Slots, their state and the fills are `freetoken.experts`'; here they become launches of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from freetoken import blocks, native
from freetoken.beside import beside
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks
from freetoken.experts.device import SlotCache
from freetoken.experts.memory import SlotMemory
from freetoken.experts.slots import SizeClass, SlotState
from freetoken.experts.split import bounded_table
from freetoken.experts.survivors import Survivors
from freetoken.experts.tables import unmeasured_table
from freetoken.gpu.ahead import timed
from freetoken.gpu.arena import Arena
from freetoken.gpu.meet import Meetings
from freetoken.gpu.residents import load_residents
from freetoken.kernels.activations import MAX_TOKENS, quantize
from freetoken.kernels.glu import ACTIVATIONS
from freetoken.kernels.matvec import TYPE_CLASS, Bank, Source, expert_down, expert_glu

__all__ = ["GpuExperts", "ProgramExperts", "Staging"]

Launch = Callable[[], None]


@dataclass(frozen=True)
class Staging:
    """Slots [first, first + n) of pool number `pool`."""

    pool: int
    first: int
    n: int


class GpuExperts:
    """The experts of a model in slots: `n_slots` of each size class. Where a class has a slot for every expert of its
    layers they are all loaded by `load_residents`, and its layers need no slot steps.

    The banks' pages must be readable by the device at their addresses.
    """

    def __init__(
        self,
        layers: Sequence[LayerBanks | None],
        classes: tuple[SizeClass, ...],
        n_slots: tuple[int, ...],
        n_used: int,
        device: torch.device,
        *,
        n_planes: int = 2,
        fill_order: str = "recent",
        staging: Staging | int = 0,
        edges: Sequence[int] = (),
        passing: Sequence[int] = (),
        meet: Callable[[], Meetings] | None = None,
        slow_fills: float = 0.0,
        hybrid: Callable[[int], np.ndarray] = unmeasured_table,
    ) -> None:
        """`staging` names the slots that a prompt's experts stream through, or how many bytes are set aside for it;
        `edges` are host addresses that no copy may cross (`ExpertPool`). Layers of `passing` leave all misses to the
        CPU where it takes part; `meet` makes its part, when it is first wanted; `hybrid` gives that backend's
        table for up to so many misses. `slow_fills` is `SlotMemory`'s."""
        self.layers = layers
        self.n_used = n_used
        self.edges = edges
        n_own = staging if isinstance(staging, int) else 0
        self._own_staging = torch.empty(n_own, dtype=torch.uint8, device=device)
        self._staging = None if isinstance(staging, int) else staging
        self._device = device
        self._n_planes = n_planes
        self.n_expert = max(layer.banks[0].n_expert for layer in layers if layer is not None)
        expert_bytes = [0 if layer is None else layer.expert_bytes for layer in layers]
        self.state = SlotState(self.n_expert, expert_bytes, classes, n_slots)
        n_max = MAX_TOKENS * n_used
        self._every_miss = bounded_table(list(range(n_max + 1)))
        self.cache = SlotCache(self.state, device, split=self._every_miss, fill_order=fill_order)
        self.memory = SlotMemory(layers, self.state, device, slow_fills)
        self.survivors = Survivors(self.state, self.cache, self.memory, device)
        self._first_slot = _complete(classes, n_slots, self.n_expert)
        self._number = {layer.banks[0].name: i for i, layer in enumerate(layers) if layer is not None}
        self._loading: Future[None] | None = None
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._passing, self._meet, self._hybrid = tuple(passing), meet, hybrid
        self.meetings: Meetings | None = None
        self._meets: frozenset[int] = frozenset()
        self._is_met = False
        self._table = self._every_miss

    @property
    def offsets(self) -> dict[int, tuple[int, ...]]:
        """Where gate, up and down start in a slot of a layer."""
        return self.memory.offsets

    @property
    def staging(self) -> torch.Tensor:
        """What a prompt streams through; `streaming` takes slots of it out of the cache."""
        if self._staging is None:
            return self._own_staging
        memory = self.memory.of_pool(self.state.pools[self._staging.pool])
        return memory[self._staging.first : self._staging.first + self._staging.n].view(-1)

    def pool(self, layer: int) -> torch.Tensor | None:
        """uint8 [n_slots, slot_bytes] on the device; None where a layer takes no slots."""
        return self.memory.pools.get(layer)

    def slot_of(self) -> np.ndarray:
        """int32 [n_layer, n_expert]: slots on the host, -1 for none. Waits for the device."""
        tensors = self.cache.tensors
        both = torch.cat([tensors.slot_of.reshape(-1), tensors.stamp]).cpu().numpy()
        n = tensors.slot_of.numel()
        self.survivors.look(both[n:])
        found: np.ndarray = both[:n].reshape(tuple(tensors.slot_of.shape))
        return found

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Within it the staging slots are a prompt's; their experts lose them."""
        if self._staging is None:
            yield
            return
        pool, where = self.state.pools[self._staging.pool], self._staging
        self.cache.reserve(pool, where.first, where.n)
        try:
            yield
        finally:
            self.cache.release(pool, where.first, where.n)

    @property
    def is_fused(self) -> bool:
        """Whether every expert stays in a slot of its own."""
        return len(self._first_slot) == len(self._number)

    def is_complete(self, layer: int) -> bool:
        """Whether every expert of a layer stays in a slot of its own."""
        return layer in self._first_slot

    def load_residents(self, pool: native.Pool) -> None:
        """Begin to fill the slots of complete layers, in a thread and on a stream of their own, beside whatever else is
        loaded: `settle` must come before their use. `pool` copies."""
        every = torch.arange(self.n_expert, dtype=torch.int32, device=self._device)
        for layer, first in self._first_slot.items():
            self.cache.adopt(layer, every, every + first)
        if self._side is None:
            load_residents(self.layers, self._first_slot, self.memory, pool, None)
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        self._loading = beside("residents", partial(self._load, pool))

    def settle(self) -> None:
        """Wait for the residents' copies. Raises what they met."""
        loading, self._loading = self._loading, None
        if loading is not None:
            with timed("waiting for residents"):
                loading.result()
            self._join()

    def _load(self, pool: native.Pool) -> None:
        with timed("copying residents"):
            torch.cuda.set_device(self._device)
            load_residents(self.layers, self._first_slot, self.memory, pool, self._side)

    def counters(self) -> np.ndarray:
        """int64 [n_layer, 5] in the order of `slots.COUNTERS`."""
        return self.cache.counters()

    def use_split(self, backend: str, table: np.ndarray | None = None) -> None:
        """From the next step on: "offload" fills every miss, "cpu" none, "hybrid" as many as a table says, int32
        [n_max + 1] for all layers or [n_layer, n_max + 1], by default `experts.choose`'s.

        Raises EngineError where the CPU cannot take part.
        """
        tables = {"offload": self._every_miss, "cpu": np.zeros_like(self._every_miss)}
        if backend == "hybrid":
            tables["hybrid"] = self._hybrid(len(self._every_miss) - 1) if table is None else table
        elif backend not in tables:
            raise EngineError(f"experts' backend {backend!r}, expected offload, cpu or hybrid")
        split = [i for i in self.state.pool_of if i not in self._first_slot]
        meets = frozenset(split if backend != "offload" else set(split) & set(self._passing))
        if meets and self.meetings is None:
            if self._meet is None:
                raise EngineError(f"experts' backend {backend!r} needs the CPU beside the GPU, which has no part here")
            self.meetings = self._meet()
        rows = np.broadcast_to(tables[backend], (len(self.layers), len(self._every_miss))).copy()
        rows[list(meets & set(self._passing))] = 0
        self._meets, self._table, self._is_met = meets, rows, True
        self.cache.set_split(rows)

    def meeting_layers(self) -> frozenset[int]:
        """Layers in which the next step meets the CPU. None of them while the CPU is away (`Meetings.is_there`)."""
        if self.meetings is None or not self._meets:
            return frozenset()
        is_met = self.meetings.is_there()
        if is_met != self._is_met:
            self._is_met = is_met
            self.cache.set_split(self._table if is_met else self._every_miss)
        return self._meets if is_met else frozenset()

    def close(self) -> None:
        """End the CPU's part; harmless when repeated."""
        if self.meetings is not None:
            self.meetings.close()
            self.meetings, self._meets = None, frozenset()

    def number(self, bank: blocks.Experts) -> int:
        """Which layer's experts these are."""
        return self._number[bank.gate.name]

    def launches(
        self,
        bank: blocks.Experts,
        x: dict[int, Source],
        ids: torch.Tensor,
        rows: torch.Tensor,
        activation: str,
        arena: Arena,
        meetings: Meetings | None = None,
    ) -> list[Launch]:
        """What writes rows fp32 [pairs, n_embd] for ids int32 [n, k]; x holds the input rows by class. With `meetings`
        the CPU computes what is in no slot."""
        layer = self.number(bank)
        products = self._products(layer, bank, x, rows, activation, arena)
        pool = self.memory.pools[layer]
        if layer in self._first_slot:
            first = self._first_slot[layer]
            return products(pool[first : first + bank.n_expert], ids)
        step = self.cache.outputs(*ids.shape)
        ask: list[Launch] = []
        answer: list[Launch] = []
        if meetings is not None:
            given = x[0]
            assert isinstance(given, torch.Tensor)
            ask = meetings.ask(layer, given, ids, step.routes[0], activation)
            answer = meetings.answer(layer, ids, step.routes[0], rows)
        return [
            partial(self._step, layer, ids),
            partial(self._fill_beside, layer, step),
            *ask,
            *products(pool, step.routes[1]),
            self._join,
            *products(pool, step.routes[2]),
            *answer,
        ]

    def _products(
        self,
        layer: int,
        bank: blocks.Experts,
        x: dict[int, Source],
        rows: torch.Tensor,
        activation: str,
        arena: Arena,
    ) -> Callable[[torch.Tensor, torch.Tensor], list[Launch]]:
        """Launches that compute the pairs whose slot a list names."""
        offsets = self.memory.offsets[layer]
        gate, up, down = (
            Bank(w.type, w.rows, w.cols, at) for w, at in zip((bank.gate, bank.up, bank.down), offsets, strict=True)
        )
        sources = x[TYPE_CLASS[gate.type]], x[TYPE_CLASS[up.type]]
        n_pairs, cls = rows.shape[0], TYPE_CLASS[down.type]
        hidden = arena.rows(n_pairs, gate.rows)
        quantised = arena.activation(cls, n_pairs, gate.rows) if cls else None

        def make(slots: torch.Tensor, ids: torch.Tensor) -> list[Launch]:
            made: list[Launch] = [
                partial(expert_glu, slots, ids, (gate, up), sources, hidden.value, ACTIVATIONS[activation])
            ]
            if quantised is not None:
                made.append(partial(quantize, hidden.value, quantised.value, self._n_planes))
            h: Source = hidden.value if quantised is None else quantised.value
            made.append(partial(expert_down, slots, ids, down, h, rows))
            return made

        return make

    def _step(self, layer: int, ids: torch.Tensor) -> None:
        self.cache.step(layer, ids)

    def _fill_beside(self, layer: int, step: object) -> None:
        """Start the fills of a layer's step beside what follows."""
        if self._side is None:
            self.memory.fill(layer, step)  # type: ignore[arg-type]
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self.memory.fill(layer, step)  # type: ignore[arg-type]

    def _join(self) -> None:
        """Wait for the fills."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)


class ProgramExperts:
    """The experts as one program launches them, `lower.ExpertLaunches`. `places` are where it asks, in order."""

    def __init__(self, experts: GpuExperts, meets: frozenset[int]) -> None:
        """A program that meets the CPU in these layers."""
        self._experts, self._meets = experts, meets
        self.places: list[int] = []

    def takes_rows(self, bank: blocks.Experts) -> bool:
        return self._experts.number(bank) in self._meets

    def launches(
        self,
        bank: blocks.Experts,
        x: dict[int, Source],
        ids: torch.Tensor,
        rows: torch.Tensor,
        activation: str,
        arena: Arena,
    ) -> list[Launch]:
        meetings = self._experts.meetings if self.takes_rows(bank) else None
        if meetings is not None:
            self.places.append(meetings.place(len(ids), self._experts.number(bank)))
        return self._experts.launches(bank, x, ids, rows, activation, arena, meetings)


def _complete(classes: tuple[SizeClass, ...], n_slots: tuple[int, ...], n_expert: int) -> dict[int, int]:
    """The first slot of each layer whose experts all have slots of their own."""
    return {
        layer: i * n_expert
        for size_class, n in zip(classes, n_slots, strict=True)
        if n >= len(size_class.layers) * n_expert
        for i, layer in enumerate(size_class.layers)
    }
