"""Between the products of queries, keys and values and the attention: biases, norms, rotation, and the store of keys
and values into pages.

One kernel, one program for a head of a token: first the query heads, then the key heads, then the value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.launch import options, wait
from freetoken.kernels.norm import Norm
from freetoken.kernels.pages import Pages, page_rows
from freetoken.kernels.sums import sum_squares

__all__ = ["Angles", "Projection", "rotate_and_store"]


@dataclass(frozen=True)
class Projection:
    """Rows of a product, fp32 [n, heads * width] (a part of wider rows, where several products write side by side), its
    bias fp32 [heads * width], and its norm: of each head (weight [width]) or of all (weight [heads * width])."""

    x: torch.Tensor
    bias: torch.Tensor | None = None
    norm: Norm | None = None


@dataclass(frozen=True)
class Angles:
    """Cosines and sines, fp32 [rows, 2, n_rot / 2], and which row a token takes, int32 [n]: its position, where the
    table holds all of them. `is_neox`: pairs are halves of the rotated part, else neighbours."""

    table: torch.Tensor
    rows: torch.Tensor
    is_neox: bool


@triton.jit
def load_values(x, bias, norm, scale, first, at, mask, BY_HEAD: tl.constexpr):
    """Values at `first + at` of a row, with its bias and its norm."""
    value = tl.load(x + first + at, mask=mask, other=0.0)
    if bias is not None:
        value = value + tl.load(bias + first + at, mask=mask, other=0.0)
    if norm is not None:
        weight = tl.load(norm + at if BY_HEAD else norm + first + at, mask=mask, other=0.0)
        value = (value * scale) * weight
    return value


@triton.jit
def rotate_head(
    x, bias, norm, eps, head, angles, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    IS_NEOX: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Write head `head` of the row at x to `out`, DIM values, rotated by the cosines and sines at `angles`."""
    first = head * DIM
    scale = tl.full([1], 1.0, tl.float32)
    if norm is not None:
        N: tl.constexpr = DIM if BY_HEAD else HEADS * DIM
        start = first if BY_HEAD else 0
        squares = sum_squares(x + start, None if bias is None else bias + start, N)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(tl.math.div_rn(squares, N * 1.0) + eps))
    HALF: tl.constexpr = ROT // 2
    pair = tl.arange(0, BLOCK)
    mask = pair < HALF
    at0 = pair if IS_NEOX else 2 * pair
    at1 = pair + HALF if IS_NEOX else 2 * pair + 1
    x0 = load_values(x, bias, norm, scale, first, at0, mask, BY_HEAD)
    x1 = load_values(x, bias, norm, scale, first, at1, mask, BY_HEAD)
    cos = tl.load(angles + pair, mask=mask, other=0.0)
    sin = tl.load(angles + HALF + pair, mask=mask, other=0.0)
    tl.store(out + at0, ((x0 * cos) - (x1 * sin)).to(out.dtype.element_ty), mask=mask)
    tl.store(out + at1, ((x0 * sin) + (x1 * cos)).to(out.dtype.element_ty), mask=mask)
    if DIM > ROT:
        at = ROT + tl.arange(0, TAIL)
        rest = load_values(x, bias, norm, scale, first, at, at < DIM, BY_HEAD)
        tl.store(out + at, rest.to(out.dtype.element_ty), mask=at < DIM)


@triton.jit
def rotate_and_store_kernel(
    q, k, v, q_bias, k_bias, v_bias, q_norm, k_norm, q_out, k_pages, v_pages,
    positions, table, angles, angle_rows, q_eps, k_eps,
    N_HEAD: tl.constexpr, N_KV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, MAX_PAGES: tl.constexpr,
    ROT: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_NEOX: tl.constexpr, Q_BY_HEAD: tl.constexpr, K_BY_HEAD: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    token = tl.program_id(1)
    wait(IS_CHAINED)
    position = tl.load(positions + token)
    turn = angles + tl.load(angle_rows + token).to(tl.int64) * ROT
    if item < N_HEAD:
        out = q_out + (token * N_HEAD + item) * DIM
        rotate_head(
            q + token * Q_STRIDE, q_bias, q_norm, q_eps, item, turn, out,
            N_HEAD, DIM, ROT, BLOCK, TAIL, IS_NEOX, Q_BY_HEAD,
        )  # fmt: skip
    elif item < N_HEAD + N_KV:
        head = item - N_HEAD
        to = page_rows(table, token, position // 256, head, N_KV, MAX_PAGES) + position % 256
        rotate_head(
            k + token * K_STRIDE, k_bias, k_norm, k_eps, head, turn, k_pages + to * DIM,
            N_KV, DIM, ROT, BLOCK, TAIL, IS_NEOX, K_BY_HEAD,
        )  # fmt: skip
    else:
        head = item - N_HEAD - N_KV
        to = page_rows(table, token, position // 256, head, N_KV, MAX_PAGES) + position % 256
        at = tl.arange(0, BLOCK_V)
        value = load_values(v + token * V_STRIDE, v_bias, None, 1.0, head * DIM_V, at, at < DIM_V, True)
        tl.store(v_pages + to * DIM_V + at, value.to(v_pages.dtype.element_ty), mask=at < DIM_V)


def rotate_and_store(
    q: Projection, k: Projection, v: Projection, angles: Angles, pages: Pages, q_out: torch.Tensor
) -> None:
    """Add biases, normalise and rotate q and k, round k and v into their pages, and write q_out [n, heads * width]."""
    n, n_kv, dim, dim_v = q.x.shape[0], pages.n_kv, pages.k.shape[-1], pages.v.shape[-1]
    n_head = q.x.shape[1] // dim
    pages.check(n)
    check("q_out", q_out, torch.float32, n, n_head * dim)
    for name, part, width in (("q", q, n_head * dim), ("k", k, n_kv * dim), ("v", v, n_kv * dim_v)):
        _check_projection(name, part, n, width, dim)
    rot = 2 * angles.table.shape[-1]
    check("angles", angles.table, torch.float32, angles.table.shape[0], 2, rot // 2)
    check("angle rows", angles.rows, torch.int32, n)
    if rot > dim or v.norm is not None:
        raise ValueError(f"{rot} values of a head of {dim} cannot be rotated, and values have no norm")
    rotate_and_store_kernel[(n_head + 2 * n_kv, n)](
        q.x,
        k.x,
        v.x,
        q.bias,
        k.bias,
        v.bias,
        q.norm.weight if q.norm else None,
        k.norm.weight if k.norm else None,
        q_out,
        pages.k,
        pages.v,
        pages.positions,
        pages.table,
        angles.table,
        angles.rows,
        q.norm.eps if q.norm else 0.0,
        k.norm.eps if k.norm else 0.0,
        N_HEAD=n_head,
        N_KV=n_kv,
        DIM=dim,
        DIM_V=dim_v,
        Q_STRIDE=q.x.stride(0),
        K_STRIDE=k.x.stride(0),
        V_STRIDE=v.x.stride(0),
        MAX_PAGES=pages.table.shape[1],
        ROT=rot,
        BLOCK=next_power_of_2(rot // 2),
        TAIL=next_power_of_2(dim - rot),
        BLOCK_V=next_power_of_2(dim_v),
        IS_NEOX=angles.is_neox,
        Q_BY_HEAD=q.norm is None or len(q.norm.weight) == dim,
        K_BY_HEAD=k.norm is None or len(k.norm.weight) == dim,
        num_warps=1,
        **options(q.x),
    )


def _check_projection(name: str, part: Projection, n: int, width: int, dim: int) -> None:
    x = part.x
    if x.dtype != torch.float32 or tuple(x.shape) != (n, width) or x.stride(1) != 1:
        raise ValueError(f"{name} must be fp32 [{n}, {width}] in dense rows, got {x.dtype} {list(x.shape)}")
    if part.bias is not None:
        check(f"{name} bias", part.bias, torch.float32, width)
    if part.norm is not None and len(part.norm.weight) not in (dim, width):
        raise ValueError(f"the norm of {name} has {len(part.norm.weight)} weights, expected {dim} or {width}")
