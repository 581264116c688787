"""Attention of a chunk of one sequence over its pages: fp16 products, fp32 sums, no scores in memory.

A program takes a block of queries of one head and walks through the positions that they see. Not under the law of
decode steps (docs/numerics.md, section 8).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check, next_power_of_2
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.pages import PAGE
from freetoken.kernels.prompt_rows import check_rows

__all__ = ["attend_chunk"]


@triton.jit
def step(
    total, top, weight, q, query, k, v, table, head, at, high, n_kv,
    DIM: tl.constexpr, D: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """BLOCK positions from `at` on. `query` are the queries' positions [m]."""
    d = tl.arange(0, D)
    dv = tl.arange(0, DV)
    n = tl.arange(0, BLOCK)
    page = tl.load(table + at // 256).to(tl.int64)
    first = (page * n_kv + head) * 256 + at % 256
    keys_at = k + first * DIM + n[None, :] * DIM + d[:, None]
    values_at = v + first * DIM_V + n[:, None] * DIM_V + dv[None, :]
    if IS_MASKED:  # positions past the chunk were never written
        is_there = at + n < high
        keys = tl.load(keys_at, mask=is_there[None, :] & (d[:, None] < DIM), other=0.0)
        values = tl.load(values_at, mask=is_there[:, None] & (dv[None, :] < DIM_V), other=0.0)
    elif D != DIM or DV != DIM_V:
        keys = tl.load(keys_at, mask=d[:, None] < DIM, other=0.0)
        values = tl.load(values_at, mask=dv[None, :] < DIM_V, other=0.0)
    else:
        keys = tl.load(keys_at)
        values = tl.load(values_at)
    scores = tl.dot(q, keys.to(tl.float16))  # in units of ln 2, but for a softcap
    if SOFTCAP > 0:
        capped = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634 / SOFTCAP)) + 1.0))
        scores = capped * 1.4426950408889634
    if IS_MASKED:
        position = at + n
        seen = position[None, :] <= query[:, None]
        if WINDOW > 0:
            seen = seen & (position[None, :] > query[:, None] - WINDOW)
        scores = tl.where(seen, scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    p = tl.exp2(scores - new_top[:, None])
    if IS_MASKED:
        p = tl.where(seen, p, 0.0)  # a row that has seen nothing yet has -1e30 as its top
    shrink = tl.exp2(top - new_top)
    weight = weight * shrink + tl.sum(p, axis=1)
    total = tl.dot(p.to(tl.float16), values.to(tl.float16), total * shrink[:, None])
    return total, new_top, weight


@triton.jit
def walk(
    total, top, weight, q, query, k, v, table, head, low, high, n_kv,
    DIM: tl.constexpr, D: tl.constexpr, DIM_V: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    IS_MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, IS_WHILE: tl.constexpr,
):  # fmt: skip
    """Positions low...high - 1; low is a multiple of BLOCK. Only `for` loads ahead; Triton's interpreter has no range
    over numbers of the device, so there it is `while`."""
    if IS_WHILE:
        at = low
        while at < high:
            total, top, weight = step(total, top, weight, q, query, k, v, table, head, at, high, n_kv,
                                      DIM, D, DIM_V, DV, BLOCK, IS_MASKED, WINDOW, SOFTCAP)  # fmt: skip
            at += BLOCK
    else:
        for at in range(low, high, BLOCK):
            total, top, weight = step(total, top, weight, q, query, k, v, table, head, at, high, n_kv,
                                      DIM, D, DIM_V, DV, BLOCK, IS_MASKED, WINDOW, SOFTCAP)  # fmt: skip
    return total, top, weight


@triton.jit(do_not_specialize=["n", "start"])
def attend_chunk_kernel(
    q, k, v, table, out, n, start, scale, n_kv, q_stride, out_stride,
    N_HEAD: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, DIM_V: tl.constexpr,
    DV: tl.constexpr, M_BLOCK: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    IS_WHILE: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    row0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * M_BLOCK  # the longest first
    row = row0 + tl.arange(0, M_BLOCK)
    d = tl.arange(0, D)
    at = q + row.to(tl.int64)[:, None] * q_stride + head * DIM + d[None, :]
    queries = tl.load(at, mask=(row[:, None] < n) & (d[None, :] < DIM), other=0.0) * scale
    if SOFTCAP == 0:
        queries = queries * 1.4426950408889634
    queries = queries.to(tl.float16)
    query = start + row
    end = start + tl.minimum(row0 + M_BLOCK, n)
    total = tl.zeros([M_BLOCK, DV], tl.float32)
    top = tl.full([M_BLOCK], -1e30, tl.float32)
    weight = tl.zeros([M_BLOCK], tl.float32)
    if WINDOW > 0:
        low = tl.maximum(start + row0 - WINDOW + 1, 0) // BLOCK * BLOCK
    else:
        low = (start + row0) // BLOCK * BLOCK
        total, top, weight = walk(total, top, weight, queries, query, k, v, table, head // GROUP, 0, low, n_kv,
                                  DIM, D, DIM_V, DV, BLOCK, False, WINDOW, SOFTCAP, IS_WHILE)  # fmt: skip
    total, top, weight = walk(total, top, weight, queries, query, k, v, table, head // GROUP, low, end, n_kv,
                              DIM, D, DIM_V, DV, BLOCK, True, WINDOW, SOFTCAP, IS_WHILE)  # fmt: skip
    dv = tl.arange(0, DV)
    to = out + row.to(tl.int64)[:, None] * out_stride + head * DIM_V + dv[None, :]
    tl.store(to, total / weight[:, None], mask=(row[:, None] < n) & (dv[None, :] < DIM_V))


def attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    *,
    start: int,
    n_head: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    capability: int = 0,
) -> None:
    """out fp32 [n, n_head * head_dim_v]: queries q fp32 [n, n_head * head_dim] at positions start... see what they may.
    Rows may lie apart; `out` may be q itself where heads are as wide.

    `k` [capacity, n_kv, 256, head_dim] and `v` are one layer's pages, `table` int32 the sequence's; keys and values of
    the chunk have been stored. `window` w: the last w positions, 0 all. `capability` as in grouped.tile_for.
    """
    n = q.shape[0]
    n_kv, dim, dim_v = k.shape[1], k.shape[3], v.shape[3]
    check_rows("q", q, n, n_head * dim)
    check_rows("out", out, n, n_head * dim_v)
    check("k", k, k.dtype, k.shape[0], n_kv, PAGE, dim)
    check("v", v, k.dtype, k.shape[0], n_kv, PAGE, dim_v)
    check("table", table, torch.int32, len(table))
    if n_head % n_kv or k.dtype not in (torch.float16, torch.float32):
        raise ValueError(f"{n_head} heads over {n_kv} of {k.dtype}")
    d, dv = max(next_power_of_2(dim), 16), max(next_power_of_2(dim_v), 16)
    m, block, warps, stages = _shape(max(d, dv), k.dtype.itemsize, capability)
    if n:
        launch(
            attend_chunk_kernel,
            (ceil_div(n, m), n_head, 1),
            (q, k, v, table, out, n, start, scale, n_kv, q.stride(0), out.stride(0)),
            (n_head, n_head // n_kv, dim, d, dim_v, dv, m, block, window, softcap, capability == 0),
            warps,
            stages,
        )


def _shape(width: int, element_bytes: int, capability: int) -> tuple[int, int, int, int]:
    """Queries and positions of a tile, warps and stages."""
    if capability == 0:
        return 32, 64, 4, 1
    if capability < 80 or element_bytes == 4:
        return (64, 32, 4, 1) if width <= 128 else (32, 16, 4, 1)
    if capability in (90, 100):
        return (128, 128, 8, 3) if width <= 128 else (64, 64, 4, 2)
    return (64, 64, 4, 2) if width <= 128 else (64, 32, 4, 2)
