"""What crosses between GPU and CPU in the middle of a step, by kernels on memory that both see: a layer's input rows
and the experts of its CPU set on the way there, one row a routed expert on the way back.

Stream order makes it safe to use the same memory in all layers: `gpu.meet`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.launch import options, wait

__all__ = ["clear_places", "hand_over", "take_rows"]

WORDS = 16
"""Of a place (`experts.executor`); the second half of them begins with `done`."""
COLUMNS = 1024
"""Of one program of `take_rows`."""


@triton.jit(do_not_specialize=["first", "count"])
def clear_places_kernel(flags, first, count, WORDS: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr):
    wait(IS_CHAINED)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    done = flags + (first + i).to(tl.int64) * WORDS + WORDS // 2
    tl.store(done, tl.zeros([BLOCK], tl.int64), mask=i < count)


@triton.jit(do_not_specialize=["n_expert"])
def hand_over_kernel(
    x, ids, routes, host_x, host_ids, n_expert, n_ids,
    N: tl.constexpr, BLOCK: tl.constexpr, N_IDS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """One program a token; the first also writes which experts the CPU computes."""
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    wait(IS_CHAINED)
    row = tl.load(x + token * N + at, mask=at < N, other=0.0)
    if token == 0:
        i = tl.arange(0, N_IDS)
        e = tl.load(ids + i, mask=i < n_ids, other=-1)
        slot = tl.load(routes + i, mask=i < n_ids, other=-1)
        is_cpu = (slot < 0) & (e >= 0) & (e < n_expert)
        tl.store(host_ids + i, tl.where(is_cpu, e, -1), mask=i < n_ids)
    tl.store(host_x + token * N + at, row, mask=at < N)


@triton.jit(do_not_specialize=["n_expert"])
def take_rows_kernel(
    ids, routes, host_rows, rows, n_expert, N: tl.constexpr, BLOCK: tl.constexpr, IS_CHAINED: tl.constexpr
):  # fmt: skip
    pair = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait(IS_CHAINED)
    e = tl.load(ids + pair)
    slot = tl.load(routes + pair)
    if (slot < 0) & (e >= 0) & (e < n_expert):
        start = pair.to(tl.int64) * N
        values = tl.load(host_rows + start + at, mask=at < N, other=0.0)
        tl.store(rows + start + at, values, mask=at < N)


def clear_places(flags: torch.Tensor, first: int, count: int, like: torch.Tensor) -> None:
    """`done` of places [first, first + count) becomes 0; flags int64 [n_places * WORDS], on the device of `like`."""
    check("flags", flags, torch.int64, len(flags))
    if not 0 <= first <= first + count <= len(flags) // WORDS:
        raise ValueError(f"places {first} + {count} of {len(flags) // WORDS}")
    grid = (triton.cdiv(count, 64),)
    clear_places_kernel[grid](flags, first, count, WORDS=WORDS, BLOCK=64, num_warps=2, **options(like))


def hand_over(
    x: torch.Tensor,
    ids: torch.Tensor,
    routes: torch.Tensor,
    n_expert: int,
    host_x: torch.Tensor,
    host_ids: torch.Tensor,
) -> None:
    """Copy x fp32 [n, width], and ids int32 [n, k] where `routes` has no slot, else -1, to host memory that the device
    can write."""
    n, width = x.shape
    check("x", x, torch.float32, n, width)
    check("host_x", host_x, torch.float32, n, width)
    check("ids", ids, torch.int32, *routes.shape)
    check("routes", routes, torch.int32, *ids.shape)
    check("host_ids", host_ids, torch.int32, ids.numel())
    block = next_power_of_2(width)
    hand_over_kernel[(n,)](
        x, ids, routes, host_x, host_ids, n_expert, ids.numel(),
        N=width, BLOCK=block, N_IDS=next_power_of_2(ids.numel()), num_warps=max(1, min(8, block // 256)), **options(x),
    )  # fmt: skip


def take_rows(
    ids: torch.Tensor, routes: torch.Tensor, n_expert: int, host_rows: torch.Tensor, rows: torch.Tensor
) -> None:
    """Copy the rows fp32 [pairs, width] of the CPU set to the device."""
    n, width = rows.shape
    check("rows", rows, torch.float32, n, width)
    check("host_rows", host_rows, torch.float32, n, width)
    check("ids", ids, torch.int32, *routes.shape)
    check("routes", routes, torch.int32, *ids.shape)
    if ids.numel() != n:
        raise ValueError(f"{ids.numel()} ids of {n} rows")
    block = min(COLUMNS, next_power_of_2(width))
    grid = (n, triton.cdiv(width, block))
    take_rows_kernel[grid](
        ids, routes, host_rows, rows, n_expert,
        N=width, BLOCK=block, num_warps=max(1, min(8, block // 128)), **options(rows),
    )  # fmt: skip
