"""The slot cache in plain numpy: its state as flat arrays and the rules of one step. `kernels.slots` does the same in
one GPU launch; tests compare both bit for bit, so what stands here is the law. Also: which slot sizes there are.

State (`SlotState`). A slot is room for one expert. Slots of one size form a pool; pools follow one another in `owner`
and `stamp`, and a slot is named by its place in its pool. Each layer takes slots of one pool.

* `slot_of` [n_layer, n_expert]: the slot that holds an expert, or -1.
* `last_use` [n_layer, n_expert]: the tick at which an expert was last routed, wherever it ran; -1 for never. It stays
  when the expert is evicted.
* `owner` [n_slots]: layer * n_expert + expert, or -1.
* `stamp` [n_slots]: the tick of the slot's last use. Slot i of all pools begins with i - n_slots: free slots come first
  and in order. RESERVED: not the cache's for now (a prefill buffer).
* `clock` [1]: the next tick. Every routed expert of a step takes one tick of its own, so stamps are never equal.
* `counters` [n_layer, 5]: hits, misses, fills, experts of the CPU set, bytes filled.

One step of a layer, given ids [n_tokens, k]:

1. If `clock` >= limit, the clock and every tick lose limit // 2 (exactly the past, unless it is older than that: then
   a stamp becomes that of a free slot, a last use -1). RESERVED stays.
2. Distinct experts in order of first occurrence, tokens outermost: d = 0, 1, ... of n. An id outside [0, n_expert) is
   padding: no expert. Expert d gets tick clock + n - 1 - d: the first is used last, as the router likes it most.
3. An expert with a slot is a hit; its stamp becomes its tick. The others are m misses.
4. q = min(table[m], slots of the pool whose stamp is below the step's first clock). So no slot is taken that was routed
   in this step, nor a reserved one.
5. The misses in order of preference. "recent": by last use before this step, latest first, at a tie (never used) the
   lower d. "lowest": by expert number. The first q are filled, the v-th into the pool's slot with the v-th lowest
   stamp, whose owner loses it; its stamp becomes its new expert's tick.
6. The rest is the CPU set, in order of d. Residency does not change for it.
7. Every routed expert's last use becomes its tick; clock += n; counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from freetoken.errors import OptionError

__all__ = [
    "CLOCK_LIMIT",
    "COUNTERS",
    "FILL_ORDERS",
    "RESERVED",
    "Pool",
    "SizeClass",
    "SlotState",
    "StepResult",
    "size_classes",
    "slots_per_class",
]

COUNTERS = ("hits", "misses", "fills", "cpu", "bytes")
FILL_ORDERS = ("recent", "lowest")
RESERVED = 2**31 - 1
CLOCK_LIMIT = 2**31 - 2**16
"""Ticks are int32; a step takes far fewer ticks than what is left above this."""
MAX_WASTE = 0.10


@dataclass(frozen=True)
class SizeClass:
    """Layers that share slots of `slot_bytes`."""

    slot_bytes: int
    layers: tuple[int, ...]


def size_classes(expert_bytes: list[int], max_waste: float = MAX_WASTE) -> tuple[SizeClass, ...]:
    """The fewest slot sizes that waste at most a share of the slots' memory, small ones first.

    `expert_bytes` has one expert's slot size for each layer, 0 where a layer takes no slots. Waste is what a cache of
    every expert would leave unused. Among equally many sizes the one that wastes least; at a tie the lower borders.
    """
    sizes = sorted({size for size in expert_bytes if size > 0})
    if not sizes:
        return ()
    counts = [expert_bytes.count(size) for size in sizes]
    used = sum(size * n for size, n in zip(sizes, counts, strict=True))
    borders = [0, len(sizes)]
    for n_classes in range(1, len(sizes) + 1):
        total, borders = _best_borders(sizes, counts, n_classes)
        if total - used <= max_waste * total:
            break
    classes = []
    for first, end in pairwise(borders):
        layers = tuple(i for i, size in enumerate(expert_bytes) if size in sizes[first:end])
        classes.append(SizeClass(sizes[end - 1], layers))
    return tuple(classes)


def _best_borders(sizes: list[int], counts: list[int], n_classes: int) -> tuple[int, list[int]]:
    """Least total bytes of one slot for each layer with so many classes of neighbouring sizes, and their borders."""
    n = len(sizes)
    best: list[tuple[int, list[int]] | None] = [None] * (n + 1)
    best[0] = (0, [0])
    for _ in range(n_classes):
        following: list[tuple[int, list[int]] | None] = [None] * (n + 1)
        for end in range(1, n + 1):
            for first in range(end):
                before = best[first]
                if before is None:
                    continue
                total = before[0] + sizes[end - 1] * sum(counts[first:end])
                known = following[end]
                if known is None or total < known[0]:
                    following[end] = (total, [*before[1], end])
        best = following
    found = best[n]
    assert found is not None
    return found


def slots_per_class(classes: tuple[SizeClass, ...], n_expert: int, budget_bytes: int, n_min: int) -> tuple[int, ...]:
    """Slots of each class within a budget: `n_min` (2 * tokens * top_k of the largest captured step) or all of its
    experts, beyond that the same share of every class's experts, and what is then left to the first ones.

    Raises OptionError where the budget does not hold the first part.
    """
    wanted = [len(c.layers) * n_expert for c in classes]
    least = [min(n_min, n) for n in wanted]
    need = sum(n * c.slot_bytes for n, c in zip(least, classes, strict=True))
    if need > budget_bytes:
        raise OptionError(
            f"expert cache of {budget_bytes} bytes: at least {need} are needed for {sum(least)} experts: give the "
            "cache more memory, or serve fewer requests at once"
        )
    total = sum(n * c.slot_bytes for n, c in zip(wanted, classes, strict=True))
    share = min(1.0, (budget_bytes - need) / (total - need)) if total > need else 0.0
    counts = [low + int((n - low) * share) for low, n in zip(least, wanted, strict=True)]
    for i, c in enumerate(classes):
        left = budget_bytes - sum(n * k.slot_bytes for n, k in zip(counts, classes, strict=True))
        counts[i] = min(wanted[i], counts[i] + left // c.slot_bytes)
    return tuple(counts)


@dataclass(frozen=True)
class Pool:
    """Slots of one size: `n` of them from `first` on in the arrays of all pools."""

    first: int
    n: int
    slot_bytes: int


@dataclass(frozen=True)
class StepResult:
    """What a step hands on. `slots` int32 [n_tokens, k] has -1 for the CPU set and padding; `hit_slots` and
    `fill_slots` are the same with -1 where the slot is of the other kind. Lists hold distinct experts."""

    slots: np.ndarray
    hit_slots: np.ndarray
    fill_slots: np.ndarray
    fills: list[tuple[int, int]]
    """(expert, slot) in order of preference."""
    cpu: list[int]
    n_distinct: int
    n_hits: int
    n_misses: int

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Distinct experts, hits, misses, fills, CPU set: the kernel's `counts`."""
        return self.n_distinct, self.n_hits, self.n_misses, len(self.fills), len(self.cpu)


class SlotState:
    """The arrays above, and the rules. `expert_bytes` [n_layer] is what one fill copies."""

    def __init__(
        self,
        n_expert: int,
        expert_bytes: list[int],
        classes: tuple[SizeClass, ...],
        n_slots: tuple[int, ...],
        clock_limit: int = CLOCK_LIMIT,
    ) -> None:
        self.n_expert = n_expert
        self.expert_bytes = tuple(expert_bytes)
        self.clock_limit = clock_limit
        pools: list[Pool] = []
        self.pool_of: dict[int, Pool] = {}
        for size_class, n in zip(classes, n_slots, strict=True):
            pools.append(Pool(sum(p.n for p in pools), n, size_class.slot_bytes))
            self.pool_of.update(dict.fromkeys(size_class.layers, pools[-1]))
        self.pools = tuple(pools)
        total, n_layer = sum(n_slots), len(expert_bytes)
        self.slot_of = np.full((n_layer, n_expert), -1, np.int32)
        self.last_use = np.full((n_layer, n_expert), -1, np.int32)
        self.owner = np.full(total, -1, np.int32)
        self.stamp = np.arange(-total, 0, dtype=np.int32)
        self.clock = np.zeros(1, np.int32)
        self.counters = np.zeros((n_layer, len(COUNTERS)), np.int64)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The state by name, as the device holds it."""
        return {n: getattr(self, n) for n in ("slot_of", "last_use", "owner", "stamp", "clock", "counters")}

    def step(self, layer: int, ids: np.ndarray, table: np.ndarray, fill_order: str = "recent") -> StepResult:
        """One layer's step; `ids` int32 [n_tokens, k], `table` int32: fills wanted by number of misses."""
        if fill_order not in FILL_ORDERS:
            raise ValueError(f"fill order {fill_order!r}, expected one of {FILL_ORDERS}")
        if self.clock[0] >= self.clock_limit:
            self._rebase()
        clock, pool = int(self.clock[0]), self.pool_of[layer]
        stamp = self.stamp[pool.first : pool.first + pool.n]
        slot_of, last_use = self.slot_of[layer], self.last_use[layer]
        experts = [e for e in dict.fromkeys(int(i) for i in ids.reshape(-1)) if 0 <= e < self.n_expert]
        n = len(experts)
        ticks = {e: clock + n - 1 - d for d, e in enumerate(experts)}
        hits = [e for e in experts if slot_of[e] >= 0]
        misses = [e for e in experts if slot_of[e] < 0]
        for e in hits:
            stamp[slot_of[e]] = ticks[e]
        evictable = [s for s in np.argsort(stamp, kind="stable") if stamp[s] < clock]
        q = min(int(table[len(misses)]), len(misses), len(evictable))
        preferred = sorted(misses, key=lambda e: -last_use[e] if fill_order == "recent" else e)
        fills = [(e, int(s)) for e, s in zip(preferred[:q], evictable[:q], strict=True)]
        for e, s in fills:
            self._give(pool, layer, e, s, ticks[e])
        for e in experts:
            last_use[e] = ticks[e]
        self.clock[0] += n
        cpu = [e for e in misses if slot_of[e] < 0]
        self.counters[layer] += (len(hits), len(misses), q, len(cpu), q * self.expert_bytes[layer])
        return self._result(ids, slot_of, fills, cpu, (n, len(hits), len(misses)))

    def _result(
        self,
        ids: np.ndarray,
        slot_of: np.ndarray,
        fills: list[tuple[int, int]],
        cpu: list[int],
        counts: tuple[int, int, int],
    ) -> StepResult:
        is_expert = (ids >= 0) & (ids < self.n_expert)
        slots = np.where(is_expert, slot_of[np.where(is_expert, ids, 0)], -1).astype(np.int32)
        is_fill = np.isin(ids, [e for e, _ in fills])
        minus = np.int32(-1)
        return StepResult(slots, np.where(is_fill, minus, slots), np.where(is_fill, slots, minus), fills, cpu, *counts)

    def _give(self, pool: Pool, layer: int, expert: int, slot: int, tick: int) -> None:
        """A slot to an expert; its owner loses it."""
        at = pool.first + slot
        if self.owner[at] >= 0:
            self.slot_of.reshape(-1)[self.owner[at]] = -1
        self.owner[at] = layer * self.n_expert + expert
        self.slot_of[layer, expert] = slot
        self.stamp[at] = tick

    def _rebase(self) -> None:
        shift = self.clock_limit // 2
        free = np.arange(-len(self.stamp), 0, dtype=np.int32)
        moved = np.where(self.stamp >= shift, self.stamp - shift, free)
        self.stamp[:] = np.where(self.stamp == RESERVED, self.stamp, moved)
        self.last_use[:] = np.where(self.last_use >= shift, self.last_use - shift, -1)
        self.clock[0] -= shift

    # --- whole slots, for prefill ----------------------------------------------------------------------------------

    def reserve(self, pool: Pool, first: int, n: int) -> None:
        """Take slots [first, first + n) of a pool out of the cache; their experts lose them."""
        at = slice(pool.first + first, pool.first + first + n)
        owners = self.owner[at][self.owner[at] >= 0]
        self.slot_of.reshape(-1)[owners] = -1
        self.owner[at] = -1
        self.stamp[at] = RESERVED

    def release(self, pool: Pool, first: int, n: int) -> None:
        """Give reserved slots back, free."""
        at = np.arange(pool.first + first, pool.first + first + n)
        self.owner[at] = -1
        self.stamp[at] = at - len(self.stamp)

    def adopt(self, layer: int, experts: np.ndarray, slots: np.ndarray) -> None:
        """Seed slots with experts that a prefill left there, the last given the most recent.

        The experts must differ and have no slot, the slots be reserved or free. Stamps are also the last uses.
        """
        pool, n = self.pool_of[layer], len(experts)
        ticks = np.arange(n, dtype=np.int32) + self.clock[0]
        self.slot_of[layer, experts] = slots
        self.last_use[layer, experts] = ticks
        self.owner[pool.first + slots] = layer * self.n_expert + experts
        self.stamp[pool.first + slots] = ticks
        self.clock[0] += n

    def take_over(self, owners: np.ndarray, at: np.ndarray) -> None:
        """Give slots to experts whose bytes a prefill has put there, the last given the most recent.

        `owners` are layer * n_expert + expert, `at` the slots' places in the arrays of all pools; both differ. Who had
        the slots loses them. Stamps are also the last uses.
        """
        lost = self.owner[at][self.owner[at] >= 0]
        self.slot_of.reshape(-1)[lost] = -1
        first = np.array([self.pool_of[int(owner) // self.n_expert].first for owner in owners], np.int32)
        ticks = np.arange(len(owners), dtype=np.int32) + self.clock[0]
        self.slot_of.reshape(-1)[owners] = at - first
        self.last_use.reshape(-1)[owners] = ticks
        self.owner[at] = owners
        self.stamp[at] = ticks
        self.clock[0] += len(owners)
