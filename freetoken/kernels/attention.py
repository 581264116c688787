"""Attention of a decode step over pages (docs/numerics.md, section 6): splits, and what merges them.

A program takes some query heads of one KV head, one token, and every n-th of its splits of 256 positions; how many
heads and programs changes the speed only. Lengths are read on the device: programs without a split end. The one done
last merges the splits, in their order; a kernel of its own does so for odd widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.activations import Activation, arguments, put
from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.functions import exp
from freetoken.kernels.launch import options, wait
from freetoken.kernels.pages import PAGE, Pages, page_rows
from freetoken.kernels.sums import fold8, fold32, softcap

__all__ = ["Mask", "Partials", "attend", "heads_per_program", "max_splits"]


UNROLL = 64
"""Positions whose values a program loads at once."""
EDGE = tl.constexpr(16)
"""The same where a split begins and ends: compiling takes more than twice as long for twice as many."""


@dataclass(frozen=True)
class Mask:
    """How scores are formed: factor, soft cap (0: none), sliding window (0: none), sinks fp32 [n_head]."""

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class Partials:
    """Room for results of splits: `o` fp32 [n, n_head, max_splits, width], and largest score and sum `ml` fp32
    [n, n_head, max_splits, 2]. `o` holds a split's weights first, so width is at least 256. `arrived` int32 [n, n_head]
    counts programs that are done: zeros at first, and again after every launch."""

    o: torch.Tensor
    ml: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(n: int, n_head: int, n_splits: int, dim_v: int, device: torch.device | str = "cpu") -> Partials:
        width = max(PAGE, next_power_of_2(dim_v))
        return Partials(
            torch.empty((n, n_head, n_splits, width), dtype=torch.float32, device=device),
            torch.empty((n, n_head, n_splits, 2), dtype=torch.float32, device=device),
            torch.zeros((n, n_head), dtype=torch.int32, device=device),
        )


def max_splits(n_positions: int, window: int = 0) -> int:
    """Splits that a token may have in a context of so many positions."""
    n = -(-n_positions // PAGE)
    return min(n, (window + PAGE - 2) // PAGE + 1) if window else n


def heads_per_program(n: int, n_head: int, n_kv: int, n_splits: int, n_processors: int) -> int:
    """Query heads that one program takes: two share keys and values if enough programs are left; more did not pay."""
    return 2 if (n_head // n_kv) % 2 == 0 and n * n_head * n_splits >= 2 * n_processors else 1


def merged_heads(n_head: int, heads: int, dim_v: int, cls: int) -> int:
    """Heads whose splits one program can merge, so that their values are whole blocks; 0 where there is no number."""
    merged = max(heads, cls // dim_v)
    fits = next_power_of_2(dim_v) == dim_v and n_head % merged == 0 and merged * dim_v >= cls
    return merged if fits else 0


@triton.jit
def first_position(position, WINDOW: tl.constexpr):
    """The first position that a token attends to."""
    if WINDOW > 0:
        return tl.maximum(position - (WINDOW - 1), 0)
    else:
        return position * 0


@triton.jit
def split_scores(q, k, begin, end, DIM: tl.constexpr, MEMBERS: tl.constexpr):
    """Dot products [MEMBERS, 256] of query heads with keys begin <= j < end of a page; +0 elsewhere."""
    j = tl.arange(0, 256)[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    is_there = (j >= begin) & (j < end)
    member = tl.arange(0, MEMBERS)[:, None, None] * DIM
    lanes = tl.zeros([MEMBERS, 256, 32], tl.float32)
    for start in tl.static_range(0, DIM, 32):
        at = start + lane
        key = tl.load(k + j * DIM + at, mask=is_there & (at < DIM), other=0.0).to(tl.float32)
        query = tl.load(q + member + at, mask=at < DIM, other=0.0)
        lanes = lanes + key * query
    return tl.reshape(fold32(tl.reshape(lanes, [MEMBERS * 256, 32])), [MEMBERS, 256])


@triton.jit
def add_rows(
    out, weights, values, is_column, begin, end, DIM_V: tl.constexpr, UNROLL: tl.constexpr, IS_EDGE: tl.constexpr
):  # fmt: skip
    """out + weights[i] * values[i] in ascending i; at an edge of the split only begin <= i < end has values.

    Weights come in pairs, since the number of loads is what bounds the speed.
    """
    pairs = weights.to(tl.pointer_type(tl.int64))
    for i in tl.static_range(UNROLL):
        if i % 2 == 0:
            pair = tl.load(pairs + i // 2)
        weight = (pair >> (i % 2 * 32)).to(tl.int32).to(tl.float32, bitcast=True)[:, None]
        if IS_EDGE:
            value = tl.load(values + i * DIM_V, mask=is_column & (i >= begin) & (i < end), other=0.0)
        elif values.shape[1] > DIM_V:
            value = tl.load(values + i * DIM_V, mask=is_column, other=0.0)
        else:
            value = tl.load(values + i * DIM_V)
        out = out + weight * value.to(tl.float32)
    return out


@triton.jit
def merge_few(
    o, ml, sink, record, column, mask, n_splits,
    DIM_V: tl.constexpr, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """`merge_many` of up to 16 splits, which are loaded at once."""
    S: tl.constexpr = 16 if MAX_SPLITS > 8 else (8 if MAX_SPLITS > 4 else 4)
    i = tl.arange(0, S)[None, :]
    is_there = mask[:, None] & (i < n_splits)
    at = record[:, None] + i
    m = tl.load(ml + at * 2, mask=is_there, other=float("-inf"))
    l_sum = tl.load(ml + at * 2 + 1, mask=is_there, other=0.0)
    part = tl.load(o + at * WIDTH + (column % DIM_V)[:, None], mask=is_there, other=0.0)
    top = tl.max(m, axis=1)
    if HAS_SINKS:
        top = tl.maximum(top, sink)
    w = exp(tl.where(is_there, m, 0.0) - tl.where(mask, top, 0.0)[:, None])
    l_sum = tl.where(is_there, w * l_sum, 0.0).to(tl.int32, bitcast=True)
    part = tl.where(is_there, w * part, 0.0).to(tl.int32, bitcast=True)
    total = tl.zeros([column.shape[0]], tl.float32)
    out = total
    for n in tl.static_range(S):  # sums of one number and zeros
        total = total + tl.sum(tl.where(i == n, l_sum, 0), axis=1).to(tl.float32, bitcast=True)
        out = out + tl.sum(tl.where(i == n, part, 0), axis=1).to(tl.float32, bitcast=True)
    return top, total, out


@triton.jit
def merge_many(
    o, ml, sink, record, column, mask, n_splits,
    DIM_V: tl.constexpr, WIDTH: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The largest score, L and O of section 6, step 3, for columns of all heads' values."""
    AT_ONCE: tl.constexpr = 16
    top = tl.full([column.shape[0]], float("-inf"), tl.float32)
    start = 0
    while start < n_splits:
        for i in tl.static_range(AT_ONCE):
            is_there = mask & (start + i < n_splits)
            top = tl.maximum(top, tl.load(ml + (record + start + i) * 2, mask=is_there, other=float("-inf")))
        start += AT_ONCE
    if HAS_SINKS:
        top = tl.maximum(top, sink)
    total = tl.zeros([column.shape[0]], tl.float32)
    out = total
    start = 0
    while start < n_splits:
        for i in tl.static_range(AT_ONCE):
            at = record + start + i
            is_there = mask & (start + i < n_splits)
            m = tl.load(ml + at * 2, mask=is_there, other=0.0)
            l_sum = tl.load(ml + at * 2 + 1, mask=is_there, other=0.0)
            part = tl.load(o + at * WIDTH + column % DIM_V, mask=is_there, other=0.0)
            w = exp(m - top)
            total = total + tl.where(is_there, w * l_sum, 0.0)
            out = out + tl.where(is_there, w * part, 0.0)
        start += AT_ONCE
    return top, total, out


@triton.jit
def merge_splits(
    o, ml, sinks, position, token, first_column, y, q, dx, sums,
    N_HEAD: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, CLS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Steps 3 and 4 of section 6 for BLOCK columns of all heads' values of a token, which are then quantised."""
    # the minimum hides from Triton that columns are contiguous: each thread then has all splits of its columns
    column = first_column + tl.minimum(tl.arange(0, BLOCK), BLOCK - 1)
    mask = column < N_HEAD * DIM_V
    head = column // DIM_V
    n_splits = position // 256 - first_position(position, WINDOW) // 256 + 1
    record = ((token * N_HEAD + head) * MAX_SPLITS).to(tl.int64)
    HAS_SINKS: tl.constexpr = sinks is not None
    sink = tl.zeros([BLOCK], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=mask, other=0.0)
    if MAX_SPLITS <= 16:
        top, total, out = merge_few(o, ml, sink, record, column, mask, n_splits, DIM_V, WIDTH, MAX_SPLITS, HAS_SINKS)
    else:
        top, total, out = merge_many(o, ml, sink, record, column, mask, n_splits, DIM_V, WIDTH, HAS_SINKS)
    if HAS_SINKS:
        total = total + exp(sink - top)
    out = out * tl.math.div_rn(1.0, tl.where(mask, total, 1.0))
    if y is not None:
        tl.store(y + token * (N_HEAD * DIM_V) + column, out, mask=mask)
    if CLS > 0:
        blocks = tl.reshape(tl.where(mask, out, 0.0), [BLOCK // CLS, CLS])
        put(blocks, q, dx, sums, token, first_column // CLS, N_HEAD * DIM_V, PLANES)


@triton.jit
def merge_splits_kernel(
    o, ml, sinks, positions, y, q, dx, sums,
    N_HEAD: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, CLS: tl.constexpr, PLANES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    wait(IS_CHAINED)
    token = tl.program_id(1)
    merge_splits(
        o, ml, sinks, tl.load(positions + token), token, tl.program_id(0) * BLOCK, y, q, dx, sums,
        N_HEAD, DIM_V, WIDTH, MAX_SPLITS, WINDOW, BLOCK, CLS, PLANES,
    )  # fmt: skip


@triton.jit
def attend_split(
    query, k_rows, v_rows, o, ml, begin, end, record, scale, cap,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, WIDTH: tl.constexpr,
    MAX_SPLITS: tl.constexpr, HAS_CAP: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Steps 1 and 2 of section 6 for HEADS heads and positions begin <= j < end of a page."""
    MEMBERS: tl.constexpr = 2 if HEADS > 1 and DIM <= 128 else 1
    j = tl.arange(0, 256)[None, :]
    is_there = (j >= begin) & (j < end)
    for first in range(0, HEADS, MEMBERS):
        member = first + tl.arange(0, MEMBERS)
        s = split_scores(query + first * DIM, k_rows, begin, end, DIM, MEMBERS) * scale
        if HAS_CAP:
            s = softcap(s, cap)
        m = tl.max(tl.where(is_there, s, float("-inf")), axis=1)
        p = tl.where(is_there, exp(s - m[:, None]), 0.0)
        tl.store(o + (record + member * MAX_SPLITS)[:, None] * WIDTH + j, p)
        tl.store(ml + (record + member * MAX_SPLITS) * 2, m)
    tl.debug_barrier()  # the weights p are read by all threads

    heads = tl.arange(0, HEADS) * (MAX_SPLITS * WIDTH)
    weights = o + record * WIDTH + heads
    column = tl.arange(0, BLOCK_V)[None, :]
    values = v_rows + column + heads[:, None] * 0
    is_column = column + heads[:, None] * 0 < DIM_V
    out = tl.zeros([HEADS, BLOCK_V], tl.float32)
    lanes = tl.zeros([HEADS, 8], tl.float32)
    at = begin // EDGE * EDGE
    while at < end:  # Triton's interpreter has no range over numbers of the device
        if (at >= begin) & (at + UNROLL <= end):
            out = add_rows(out, weights + at, values + at * DIM_V, is_column, 0, UNROLL, DIM_V, UNROLL, False)
            for i in tl.static_range(0, UNROLL, 8):
                lanes = lanes + tl.load(weights[:, None] + at + i + tl.arange(0, 8)[None, :])
            at += UNROLL
        else:
            out = add_rows(out, weights + at, values + at * DIM_V, is_column, begin - at, end - at, DIM_V, EDGE, True)
            for i in tl.static_range(0, EDGE, 8):
                lanes = lanes + tl.load(weights[:, None] + at + i + tl.arange(0, 8)[None, :])
            at += EDGE
    tl.debug_barrier()  # what is written now lies where the weights lay
    tl.store(weights[:, None] + column, out, mask=is_column)
    tl.store(ml + (record + tl.arange(0, HEADS) * MAX_SPLITS) * 2 + 1, fold8(lanes))


@triton.jit
def fetch(rows, end, DIM: tl.constexpr):
    """Bring the first `end` rows of a page into the second-level cache: one word of every 32 bytes is loaded, as
    volatile, so that it is loaded although nothing uses it."""
    BITS: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth
    sector = tl.arange(0, triton.next_power_of_2(DIM * BITS))  # 256 rows of DIM * BITS / 8 bytes
    tl.load(
        rows.to(tl.pointer_type(tl.int32)) + sector * 8,
        mask=sector * 256 < tl.minimum(end, 256) * (DIM * BITS),
        volatile=True,
    )


@triton.jit
def attend_split_kernel(
    query, k_pages, v_pages, o, ml, positions, table, scale, cap, arrived, sinks, y, q, dx, sums,
    N_HEAD: tl.constexpr, N_KV: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr, WIDTH: tl.constexpr, MAX_PAGES: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, UNROLL: tl.constexpr,
    MERGED: tl.constexpr, CLS: tl.constexpr, PLANES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Splits of a token's heads; positions and tables are read before `wait`. Where `arrived` is given, the program
    that comes last of those that share MERGED heads does steps 3 and 4 for them; it leaves the counter at 0.
    """
    head = tl.program_id(1) * HEADS
    token = tl.program_id(2)
    position = tl.load(positions + token)
    first = first_position(position, WINDOW)
    n_splits = position // 256 - first // 256 + 1
    n_done = 0
    split = tl.program_id(0)
    if IS_CHAINED:  # noqa: SIM102
        if split < n_splits:
            page = first // 256 + split
            rows = page_rows(table, token, page, head // (N_HEAD // N_KV), N_KV, MAX_PAGES)
            fetch(k_pages + rows * DIM, position - page * 256 + 1, DIM)
            fetch(v_pages + rows * DIM_V, position - page * 256 + 1, DIM_V)
    wait(IS_CHAINED)
    while split < n_splits:
        page = first // 256 + split
        begin = tl.maximum(first - page * 256, 0)
        end = tl.minimum(position - page * 256 + 1, 256)
        rows = page_rows(table, token, page, head // (N_HEAD // N_KV), N_KV, MAX_PAGES)
        record = ((token * N_HEAD + head) * MAX_SPLITS + split).to(tl.int64)
        attend_split(
            query + (token * N_HEAD + head) * DIM, k_pages + rows * DIM, v_pages + rows * DIM_V, o, ml, begin, end,
            record, scale, cap, HEADS, DIM, DIM_V, BLOCK_V, WIDTH, MAX_SPLITS, HAS_CAP, UNROLL,
        )  # fmt: skip
        n_done += 1
        split += tl.num_programs(0)

    if arrived is not None:
        tl.debug_barrier()
        group = token * (N_HEAD // MERGED) + head // MERGED
        if n_done > 0:
            before = tl.atomic_add(arrived + group, n_done, sem="acq_rel")
            if before + n_done == n_splits * (MERGED // HEADS):
                tl.store(arrived + group, 0)
                merge_splits(
                    o, ml, sinks, position, token, head // MERGED * (MERGED * DIM_V), y, q, dx, sums,
                    N_HEAD, DIM_V, WIDTH, MAX_SPLITS, WINDOW, MERGED * DIM_V, CLS, PLANES,
                )  # fmt: skip


def attend(
    q: torch.Tensor,
    pages: Pages,
    mask: Mask,
    partials: Partials,
    y: torch.Tensor | None,
    quantised: Activation | None = None,
    *,
    planes: int = 2,
    heads: int = 1,
    n_programs: int = 64,
) -> None:
    """Attention of queries fp32 [n, n_head * head_dim_k]: y fp32 [n, n_head * head_dim_v] and the same quantised.

    The context must fit `partials`: no position may need more splits. `heads` is a power of 2 that divides the query
    heads of a KV head (`heads_per_program`); at most `n_programs` share the splits of a head. One launch, or two
    where the heads' widths do not fit blocks of values. Positions and tables must not be written by the launch ahead.
    """
    n, n_kv, dim, dim_v = q.shape[0], pages.n_kv, pages.k.shape[-1], pages.v.shape[-1]
    n_head = q.shape[1] // dim
    n_splits, width = partials.o.shape[2], partials.o.shape[3]
    _check(q, pages, mask, partials, y, n_head)
    if n_head % n_kv or (n_head // n_kv) % heads or width < max(PAGE, dim_v):
        raise ValueError(f"{heads} of {n_head} query heads of {n_kv} KV heads, or records of {width} values")
    activation, cls = arguments(quantised, n, n_head * dim_v)
    merged = merged_heads(n_head, heads, dim_v, cls)
    shape = {"N_HEAD": n_head, "DIM_V": dim_v, "WIDTH": width, "MAX_SPLITS": n_splits, "WINDOW": mask.window}
    attend_split_kernel[(min(n_splits, n_programs), n_head // heads, n)](
        q,
        pages.k,
        pages.v,
        partials.o,
        partials.ml,
        pages.positions,
        pages.table,
        mask.scale,
        mask.softcap,
        partials.arrived if merged else None,
        mask.sinks if merged else None,
        y if merged else None,
        *(activation if merged else (None, None, None)),
        **shape,
        N_KV=n_kv,
        HEADS=heads,
        DIM=dim,
        BLOCK_V=next_power_of_2(dim_v),
        MAX_PAGES=pages.table.shape[1],
        HAS_CAP=mask.softcap != 0.0,
        UNROLL=UNROLL,
        MERGED=merged,
        CLS=cls,
        PLANES=planes,
        num_warps=4,
        **options(q),
    )
    if merged:
        return
    merge_splits_kernel[(-(-n_head * dim_v // PAGE), n)](
        partials.o,
        partials.ml,
        mask.sinks,
        pages.positions,
        y,
        *activation,
        **shape,
        BLOCK=PAGE,
        CLS=cls,
        PLANES=planes,
        num_warps=4,
        **options(q),
    )


def _check(q: torch.Tensor, pages: Pages, mask: Mask, partials: Partials, y: torch.Tensor | None, n_head: int) -> None:
    n, n_splits, width = q.shape[0], partials.o.shape[2], partials.o.shape[3]
    pages.check(n)
    check("q", q, torch.float32, n, n_head * pages.k.shape[-1])
    check("o", partials.o, torch.float32, n, n_head, n_splits, width)
    check("ml", partials.ml, torch.float32, n, n_head, n_splits, 2)
    check("arrived", partials.arrived, torch.int32, n, n_head)
    if y is not None:
        check("y", y, torch.float32, n, n_head * pages.v.shape[-1])
    if mask.sinks is not None:
        check("sinks", mask.sinks, torch.float32, n_head)
    if n * n_head * n_splits >= 2**31:
        raise ValueError(f"{n} tokens, {n_head} heads and {n_splits} splits are too many")
