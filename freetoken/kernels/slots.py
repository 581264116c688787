"""One layer's step of the slot cache as one launch of one program, in place on the device. Rules, state and every tie:
`freetoken.experts.slots`; this does the same bit for bit. No host synchronisation.

Why stamps and a repeated minimum, not a list: a step has few victims (misses of one layer, less the CPU set; 2 or 3 in
a single stream), while hits are many. A linked list would unlink every hit through dependent loads of some 0.3 us each.
Stamps cost a hit one store. The victims are found in one pass over the pool: each lane keeps its share of the stamps in
registers, and each victim is one minimum over the block (no two stamps are equal, so it names one slot), 0.1 to 0.2 us.
A step whose experts are all there reads no stamps at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.launch import options, wait

__all__ = ["MAX_IDS", "SlotTensors", "StepOutputs", "slot_step"]

MAX_IDS = 128
"""Tokens times experts of one; the comparisons of all pairs stay in registers."""
N_COUNTS = 5
_RESERVED = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class SlotTensors:
    """The state on the device: the arrays of `experts.slots.SlotState`, same names, shapes and types."""

    slot_of: torch.Tensor
    last_use: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    clock: torch.Tensor
    counters: torch.Tensor

    def __post_init__(self) -> None:
        n_layer, n_expert = self.slot_of.shape
        _check("slot_of", self.slot_of, torch.int32, (n_layer, n_expert))
        _check("last_use", self.last_use, torch.int32, (n_layer, n_expert))
        _check("owner", self.owner, torch.int32, (len(self.stamp),))
        _check("stamp", self.stamp, torch.int32, (len(self.stamp),))
        _check("clock", self.clock, torch.int32, (1,))
        _check("counters", self.counters, torch.int64, (n_layer, N_COUNTS))


@dataclass(frozen=True)
class StepOutputs:
    """Where a step writes, int32. Lists are valid up to their count in `counts`.

    `routes` [3, n_tokens, k]: slot of each (token, rank) or -1 for the CPU set and padding; the same for hits only; for
    fills only. `fill_expert`, `fill_slot`, `cpu_expert` [n_tokens * k]. `counts` [5]: distinct experts, hits, misses,
    fills, CPU set.
    """

    routes: torch.Tensor
    fill_expert: torch.Tensor
    fill_slot: torch.Tensor
    cpu_expert: torch.Tensor
    counts: torch.Tensor

    def __post_init__(self) -> None:
        three, n_tokens, k = self.routes.shape
        n = n_tokens * k
        if three != 3 or not 0 < n <= MAX_IDS:
            raise ValueError(f"routes of shape {tuple(self.routes.shape)}, expected [3, n_tokens, k], n*k <= {MAX_IDS}")
        _check("routes", self.routes, torch.int32, (3, n_tokens, k))
        for name in ("fill_expert", "fill_slot", "cpu_expert"):
            _check(name, getattr(self, name), torch.int32, (n,))
        _check("counts", self.counts, torch.int32, (N_COUNTS,))

    @classmethod
    def empty(cls, n_tokens: int, k: int, device: torch.device | str) -> StepOutputs:
        """Outputs for steps of that many tokens."""
        n = n_tokens * k
        shapes = ((3, n_tokens, k), (n,), (n,), (n,), (N_COUNTS,))
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


def slot_step(
    state: SlotTensors,
    layer: int,
    first_slot: int,
    n_slots: int,
    ids: torch.Tensor,
    table: torch.Tensor,
    out: StepOutputs,
    *,
    expert_bytes: int,
    clock_limit: int,
    by_recency: bool,
) -> None:
    """Route ids int32 [n_tokens, k] of a layer whose pool has slots [first_slot, first_slot + n_slots).

    `table` int32 [more than n_tokens * k]: fills wanted by number of misses; the host may rewrite it between steps.
    """
    n_layer, n_expert = state.slot_of.shape
    n_ids = ids.numel()
    _check("ids", ids, torch.int32, tuple(out.routes.shape[1:]))
    _check("table", table, torch.int32, (len(table),))
    if not 0 <= layer < n_layer or n_slots < 1 or not 0 <= first_slot <= len(state.stamp) - n_slots:
        raise ValueError(f"layer {layer} of {n_layer}, slots {first_slot} + {n_slots} of {len(state.stamp)}")
    if len(table) <= n_ids:
        raise ValueError(f"a table of {len(table)} entries, expected {n_ids + 1} or more for {n_ids} ids")
    block_n, block_s = _blocks(n_ids, n_slots)
    _slot_step[(1,)](
        ids, table, state.slot_of, state.last_use, state.owner, state.stamp, state.clock, state.counters,
        out.routes, out.fill_expert, out.fill_slot, out.cpu_expert, out.counts,
        layer, n_ids, first_slot, n_slots, len(state.stamp), n_expert, state.slot_of.numel(), expert_bytes, clock_limit,
        BY_RECENCY=by_recency, BLOCK_N=block_n, BLOCK_S=block_s, num_warps=_warps(block_n, block_s), num_stages=1,
        **options(ids),
    )  # fmt: skip


def _blocks(n_ids: int, n_slots: int) -> tuple[int, int]:
    """Lanes over the ids and over a pool's slots."""
    return max(16, triton.next_power_of_2(n_ids)), max(32, triton.next_power_of_2(n_slots))


def _warps(block_n: int, block_s: int) -> int:
    """Few, as each minimum waits for all of them; enough that a thread holds some 32 stamps or 32 pairs."""
    return min(16, max(1, block_s // 1024, block_n * block_n // 1024))


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected contiguous {dtype} {shape}")


@triton.jit
def _rebase(stamp_ptr, n_stamps, last_use_ptr, n_experts, shift, BLOCK: tl.constexpr):
    """All ticks less `shift`: step 1 of the rules."""
    lane = tl.arange(0, BLOCK)
    start = 0
    while start < n_stamps:
        i = start + lane
        stamp = tl.load(stamp_ptr + i, mask=i < n_stamps, other=0)
        moved = tl.where(stamp >= shift, stamp - shift, i - n_stamps)
        tl.store(stamp_ptr + i, tl.where(stamp == _RESERVED, stamp, moved), mask=i < n_stamps)
        start += BLOCK
    start = 0
    while start < n_experts:
        i = start + lane
        used = tl.load(last_use_ptr + i, mask=i < n_experts, other=0)
        tl.store(last_use_ptr + i, tl.where(used >= shift, used - shift, -1), mask=i < n_experts)
        start += BLOCK


_NUMBERS = (
    "layer n_ids first_slot n_slots n_stamps n_expert n_experts expert_bytes clock_limit"  # one binary for all layers
)


@triton.jit(do_not_specialize=_NUMBERS.split())
def _slot_step(
    ids_ptr, table_ptr, slot_of_ptr, last_use_ptr, owner_ptr, stamp_ptr, clock_ptr, counters_ptr,
    routes_ptr, fill_expert_ptr, fill_slot_ptr, cpu_expert_ptr, counts_ptr,
    layer, n_ids, first_slot, n_slots, n_stamps, n_expert, n_experts, expert_bytes, clock_limit,
    BY_RECENCY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    wait(IS_CHAINED)
    clock = tl.load(clock_ptr)
    if clock >= clock_limit:
        shift = clock_limit // 2
        _rebase(stamp_ptr, n_stamps, last_use_ptr, n_experts, shift, 1024)
        tl.debug_barrier()
        clock -= shift
    row = layer * n_expert
    i = tl.arange(0, BLOCK_N)
    e = tl.load(ids_ptr + i, mask=i < n_ids, other=-1)
    wanted_of = tl.load(table_ptr + 1 + i, mask=i < n_ids, other=0)  # lane i: of i + 1 misses; no wait later
    is_expert = (e >= 0) & (e < n_expert)
    slot = tl.load(slot_of_ptr + row + e, mask=is_expert, other=-1)
    used = tl.load(last_use_ptr + row + e, mask=is_expert, other=-1)

    # distinct experts: `head` is an expert's first place, `d` its number in that order; copies share their first's
    same = (e[:, None] == e[None, :]) & is_expert[None, :]
    head = tl.min(tl.where(same, i[None, :], BLOCK_N), axis=1)
    is_first = is_expert & (head == i)
    d = tl.sum((is_first[None, :] & (i[None, :] < head[:, None])).to(tl.int32), axis=1)
    n = tl.sum(is_first.to(tl.int32), axis=0)
    is_miss = is_first & (slot < 0)
    is_hit = is_first & (slot >= 0)
    n_misses = tl.sum(is_miss.to(tl.int32), axis=0)
    tick = clock + n - 1 - d
    tl.debug_barrier()  # all warps have read what is now written: each holds copies of these lanes
    tl.store(stamp_ptr + first_slot + slot, tick, mask=is_hit)
    tl.store(last_use_ptr + row + e, tick, mask=is_first)

    n_fills = 0
    is_filled = is_expert & (slot < -1)
    new_slot = slot
    wanted = tl.minimum(tl.sum(tl.where(i + 1 == n_misses, wanted_of, 0), axis=0), n_misses)
    if wanted > 0:
        tl.debug_barrier()  # the hits' stamps are written
        s = tl.arange(0, BLOCK_S)
        stamp = tl.load(stamp_ptr + first_slot + s, mask=s < n_slots, other=_RESERVED)
        if BY_RECENCY:
            later = used[None, :] > used[:, None]
            is_before = later | ((used[None, :] == used[:, None]) & (d[None, :] < d[:, None]))
        else:
            is_before = e[None, :] < e[:, None]
        place = tl.sum((is_miss[None, :] & is_before).to(tl.int32), axis=1)

        stamp = tl.where(stamp < clock, stamp, _RESERVED)
        n_fills = tl.minimum(wanted, tl.sum((stamp < clock).to(tl.int32), axis=0))
        v = 0
        while v < n_fills:  # a `for` over a tensor fails in Triton 3.6's interpreter with numpy 2.4
            is_victim = stamp == tl.min(stamp, axis=0)
            tl.store(fill_slot_ptr + v + tl.zeros_like(s), s, mask=is_victim)
            stamp = tl.where(is_victim, _RESERVED, stamp)
            v += 1
        tl.debug_barrier()  # victims are written, every read of residency is done

        is_filled = is_expert & (slot < 0) & (place < n_fills)
        new_slot = tl.load(fill_slot_ptr + place, mask=is_filled, other=-1)
        new_slot = tl.where(is_filled, new_slot, slot)
        is_new = is_filled & is_first
        at = first_slot + new_slot
        before = tl.load(owner_ptr + at, mask=is_new, other=-1)
        tl.debug_barrier()  # all warps have read the owners
        tl.store(slot_of_ptr + before, tl.full([BLOCK_N], -1, tl.int32), mask=is_new & (before >= 0))
        tl.store(slot_of_ptr + row + e, new_slot, mask=is_new)
        tl.store(owner_ptr + at, row + e, mask=is_new)
        tl.store(stamp_ptr + at, tick, mask=is_new)
        tl.store(fill_expert_ptr + place, e, mask=is_new)

    is_cpu = is_miss & (new_slot < 0)
    cpu_place = tl.sum((is_cpu[None, :] & (d[None, :] < d[:, None])).to(tl.int32), axis=1)
    tl.store(cpu_expert_ptr + cpu_place, e, mask=is_cpu)
    nowhere = tl.full([BLOCK_N], -1, tl.int32)
    tl.store(routes_ptr + i, new_slot, mask=i < n_ids)
    tl.store(routes_ptr + n_ids + i, tl.where(is_filled, nowhere, new_slot), mask=i < n_ids)
    tl.store(routes_ptr + 2 * n_ids + i, tl.where(is_filled, new_slot, nowhere), mask=i < n_ids)
    _count(counts_ptr, counters_ptr + layer * 5, n, n_misses, n_fills, expert_bytes)
    tl.store(clock_ptr, clock + n)


@triton.jit
def _count(counts_ptr, counters_ptr, n, n_misses, n_fills, expert_bytes):
    """This step's counts, and the layer's counters: added without waiting for the old values."""
    c = tl.arange(0, 8)
    n_hits = n - n_misses
    n_cpu = n_misses - n_fills
    step = tl.where(c == 0, n, tl.where(c == 1, n_hits, tl.where(c == 2, n_misses, tl.where(c == 3, n_fills, n_cpu))))
    tl.store(counts_ptr + c, step, mask=c < 5)
    n_bytes = tl.cast(n_fills, tl.int64) * expert_bytes
    few = tl.where(c == 0, n_hits, tl.where(c == 1, n_misses, tl.where(c == 2, n_fills, n_cpu))).to(tl.int64)
    tl.atomic_add(counters_ptr + c, tl.where(c == 4, n_bytes, few), mask=c < 5, sem="relaxed")
