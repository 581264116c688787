"""Between the products of queries, keys and values of a prompt and its attention: norms of heads, rotation, and the
store of keys and values into pages, in one launch. Not under the law of decode steps (docs/numerics.md, section 8).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check, next_power_of_2
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.pages import PAGE
from freetoken.kernels.prompt_rows import check_rows

__all__ = ["HeadNorm", "turn_heads"]

TILE = 2048
"""Values that a program holds at once."""

HeadNorm = tuple[torch.Tensor, float]
"""Weight fp32 [head_dim] of an RMS norm over each head, and its epsilon."""


@triton.jit
def turn(
    x, norm, eps, angles, out, head, out_step,
    N_HEAD: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Heads [h, 1] of the row at x, normalised and rotated, to `out`, out_step values apart."""
    pair = tl.arange(0, BLOCK)[None, :]
    mask = (head < N_HEAD) & (pair < HALF)
    at0 = pair if IS_NEOX else 2 * pair
    at1 = at0 + (HALF if IS_NEOX else 1)
    a = tl.load(x + head * DIM + at0, mask=mask, other=0.0)
    b = tl.load(x + head * DIM + at1, mask=mask, other=0.0)
    if DIM > 2 * HALF:
        at2 = 2 * HALF + tl.arange(0, TAIL)[None, :]
        mask2 = (head < N_HEAD) & (at2 < DIM)
        rest = tl.load(x + head * DIM + at2, mask=mask2, other=0.0)
    if norm is not None:
        squares = tl.sum(a * a + b * b, axis=1)
        if DIM > 2 * HALF:
            squares += tl.sum(rest * rest, axis=1)
        factor = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
        a = a * factor * tl.load(norm + at0, mask=pair < HALF, other=0.0)
        b = b * factor * tl.load(norm + at1, mask=pair < HALF, other=0.0)
        if DIM > 2 * HALF:
            rest = rest * factor * tl.load(norm + at2, mask=at2 < DIM, other=0.0)
    cos = tl.load(angles + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=pair < HALF, other=0.0)
    to = out + head * out_step
    kind: tl.constexpr = out.dtype.element_ty
    tl.store(to + at0, (a * cos - b * sin).to(kind), mask=mask)
    tl.store(to + at1, (a * sin + b * cos).to(kind), mask=mask)
    if DIM > 2 * HALF:
        tl.store(to + at2, rest.to(kind), mask=mask2)


@triton.jit(do_not_specialize=["start"])
def turn_heads_kernel(
    q, k, v, q_norm, k_norm, angles, k_pages, v_pages, table, start, q_eps, k_eps, q_stride, k_stride, v_stride,
    N_HEAD: tl.constexpr, N_KV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr, H: tl.constexpr, H_KV: tl.constexpr,
    IS_NEOX: tl.constexpr,
):  # fmt: skip
    """Programs of a row: first its query heads, H each, then its key and value heads, H_KV each."""
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1)
    N_Q: tl.constexpr = (N_HEAD + H - 1) // H
    mine = angles + row * (2 * HALF)
    if item < N_Q:
        head = item * H + tl.arange(0, H)[:, None]
        x = q + row * q_stride
        turn(x, q_norm, q_eps, mine, x, head, DIM, N_HEAD, DIM, HALF, BLOCK, TAIL, IS_NEOX)
    else:
        kv_head = (item - N_Q) * H_KV + tl.arange(0, H_KV)[:, None]
        position = start + tl.program_id(0)
        first = tl.load(table + position // 256).to(tl.int64) * (N_KV * 256) + position % 256
        turn(k + row * k_stride, k_norm, k_eps, mine, k_pages + first * DIM, kv_head, 256 * DIM,
             N_KV, DIM, HALF, BLOCK, TAIL, IS_NEOX)  # fmt: skip
        at = tl.arange(0, BLOCK_V)[None, :]
        mask = (kv_head < N_KV) & (at < DIM_V)
        value = tl.load(v + row * v_stride + kv_head * DIM_V + at, mask=mask, other=0.0)
        tl.store(v_pages + first * DIM_V + kv_head * (256 * DIM_V) + at, value.to(v_pages.dtype.element_ty), mask=mask)


def turn_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
    angles: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    table: torch.Tensor,
    *,
    start: int,
    is_neox: bool,
) -> None:
    """Normalise and rotate rows q fp32 [n, n_head * head_dim] in place; k, v likewise go to positions start... of the
    sequence whose pages `table` int32 names. `angles` fp32 [n, 2, n_rot / 2]: cosines and sines."""
    n, half = q.shape[0], angles.shape[2]
    n_kv, dim, dim_v = k_pages.shape[1], k_pages.shape[3], v_pages.shape[3]
    n_head = q.shape[1] // dim
    check_rows("q", q, n, n_head * dim)
    check_rows("k", k, n, n_kv * dim)
    check_rows("v", v, n, n_kv * dim_v)
    check("angles", angles, torch.float32, n, 2, half)
    check("k_pages", k_pages, k_pages.dtype, k_pages.shape[0], n_kv, PAGE, dim)
    check("v_pages", v_pages, k_pages.dtype, k_pages.shape[0], n_kv, PAGE, dim_v)
    check("table", table, torch.int32, len(table))
    for norm in (q_norm, k_norm):
        if norm is not None:
            check("norm", norm[0], torch.float32, dim)
    if 2 * half > dim:
        raise ValueError(f"{2 * half} values of a head of {dim} cannot be rotated")
    block, block_v = next_power_of_2(half), next_power_of_2(dim_v)
    tail = next_power_of_2(dim - 2 * half)
    fits = max(TILE // next_power_of_2(2 * block + tail), 1)
    h, h_kv = min(next_power_of_2(n_head), fits), min(next_power_of_2(n_kv), fits)
    arguments = (
        q,
        k,
        v,
        None if q_norm is None else q_norm[0],
        None if k_norm is None else k_norm[0],
        angles,
        k_pages,
        v_pages,
        table,
        start,
        0.0 if q_norm is None else q_norm[1],
        0.0 if k_norm is None else k_norm[1],
        q.stride(0),
        k.stride(0),
        v.stride(0),
    )
    constants = (n_head, n_kv, dim, dim_v, half, block, tail, block_v, h, h_kv, is_neox)
    if n:
        launch(turn_heads_kernel, (n, ceil_div(n_head, h) + ceil_div(n_kv, h_kv), 1), arguments, constants, 4)
