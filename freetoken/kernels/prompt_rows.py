"""What a prompt does row by row: sums, norms and halves with a scale in one launch; sums of experts' rows. Not under
the law of decode steps (docs/numerics.md, section 8): sums go in any order that stays the same.

Rows may lie apart (parts of wider rows), their values lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check, next_power_of_2
from freetoken.kernels.fast_launch import launch

__all__ = ["Normed", "Shared", "add_expert_rows", "combine", "halve_rows"]

TILE = 4096
"""Values that a program holds at once."""


def check_rows(name: str, x: torch.Tensor, n: int, width: int) -> None:
    """Raise ValueError unless x is fp32 [n, width] in rows that may lie apart."""
    if x.dtype != torch.float32 or tuple(x.shape) != (n, width) or x.stride(1) != 1:
        raise ValueError(f"{name} must be rows fp32 [{n}, {width}], got {x.dtype} {list(x.shape)} {x.stride()}")


@triton.jit
def power_of(top):
    """The exponent's bits of the power of two that makes a magnitude, given by its bits, 2^14 to 2^15."""
    return tl.minimum(268 - (top >> 23), 253)


@triton.jit(do_not_specialize=["rows"])
def halve_kernel(x, out, scale, rows, stride, N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = tl.arange(0, BLOCK)[None, :]
    source = row.to(tl.int64)[:, None] * stride + at
    place = row.to(tl.int64)[:, None] * N + at
    top = tl.zeros([R, BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        mask = (row[:, None] < rows) & (start + at < N)
        value = tl.load(x + source + start, mask=mask, other=0.0)
        top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    power = power_of(tl.max(top, axis=1))
    factor = (power << 23).to(tl.float32, bitcast=True)
    for start in range(0, N, BLOCK):
        mask = (row[:, None] < rows) & (start + at < N)
        value = tl.load(x + source + start, mask=mask, other=0.0)
        tl.store(out + place + start, (value * factor[:, None]).to(tl.float16), mask=mask)
    tl.store(scale + row, ((254 - power) << 23).to(tl.float32, bitcast=True), mask=row < rows)


def halve_rows(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """x fp32 [n, width] as fp16 `out` times a power of two for each row, `scale` fp32 [n]."""
    n, width = x.shape
    check_rows("x", x, n, width)
    check("out", out, torch.float16, n, width)
    check("scale", scale, torch.float32, n)
    block = min(max(next_power_of_2(width), 32), TILE)
    r = max(TILE // 2 // block, 1)
    if n:
        launch(
            halve_kernel,
            (ceil_div(n, r), 1, 1),
            (x, out, scale, n, x.stride(0)),
            (width, r, block),
            8 if block == TILE else 4,
        )


@dataclass(frozen=True)
class Normed:
    """An RMS norm over whole rows, weight fp32 [width], and where it goes: fp32 rows `y`, or `half` and its `scale`."""

    weight: torch.Tensor
    eps: float
    y: torch.Tensor | None = None
    half: torch.Tensor | None = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Shared:
    """Rows fp32 [n, width] that are added times the sigmoid of their gate, fp32 [n, 1]."""

    x: torch.Tensor
    gate: torch.Tensor


@triton.jit
def normalised(x, weight, at, eps, N: tl.constexpr):
    mean = tl.sum(x * x, axis=1)[:, None] / N
    return x * (1.0 / tl.sqrt(mean + eps)) * tl.load(weight + at, mask=at < N, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    x, post, shared, gate, residual, total, norm, y, half, scale, rows, post_eps, eps,
    x_stride, shared_stride, gate_stride, residual_stride, total_stride, y_stride,
    N: tl.constexpr, W: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * R + tl.arange(0, R)
    wide = row.to(tl.int64)[:, None]
    at = tl.arange(0, W)[None, :]
    mask = (row[:, None] < rows) & (at < N)
    value = tl.load(x + wide * x_stride + at, mask=mask, other=0.0)
    if shared is not None:
        weight = 1.0 / (1.0 + tl.exp(-tl.load(gate + wide * gate_stride, mask=row[:, None] < rows, other=0.0)))
        value += weight * tl.load(shared + wide * shared_stride + at, mask=mask, other=0.0)
    if post is not None:
        value = normalised(value, post, at, post_eps, N)
    if residual is not None:
        value += tl.load(residual + wide * residual_stride + at, mask=mask, other=0.0)
    if total is not None:
        tl.store(total + wide * total_stride + at, value, mask=mask)
    if norm is not None:
        value = normalised(value, norm, at, eps, N)
        if y is not None:
            tl.store(y + wide * y_stride + at, value, mask=mask)
        if half is not None:
            power = power_of(tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
            factor = (power << 23).to(tl.float32, bitcast=True)
            tl.store(half + wide * N + at, (value * factor[:, None]).to(tl.float16), mask=mask)
            tl.store(scale + row, ((254 - power) << 23).to(tl.float32, bitcast=True), mask=row < rows)


def combine(
    x: torch.Tensor,
    total: torch.Tensor | None = None,
    *,
    shared: Shared | None = None,
    post: Normed | None = None,
    residual: torch.Tensor | None = None,
    norm: Normed | None = None,
) -> None:
    """total = residual + post(x + shared), and its norm; all fp32 [n, width]. `total` may be `residual` or x itself."""
    n, width = x.shape
    y = None if norm is None else norm.y
    named = {"x": x, "total": total, "residual": residual, "y": y, "shared": None if shared is None else shared.x}
    for name, rows in named.items():
        if rows is not None:
            check_rows(name, rows, n, width)
    if norm is not None and norm.half is not None:
        check("half", norm.half, torch.float16, n, width)
    w = next_power_of_2(width)
    r = max(TILE // 2 // w, 1)
    arguments = (
        x,
        None if post is None else post.weight,
        None if shared is None else shared.x,
        None if shared is None else shared.gate,
        residual,
        total,
        None if norm is None else norm.weight,
        y,
        None if norm is None else norm.half,
        None if norm is None else norm.scale,
        n,
        0.0 if post is None else post.eps,
        0.0 if norm is None else norm.eps,
        x.stride(0),
        0 if shared is None else shared.x.stride(0),
        0 if shared is None else shared.gate.stride(0),
        *(0 if each is None else each.stride(0) for each in (residual, total, y)),
    )
    if n:
        launch(combine_kernel, (ceil_div(n, r), 1, 1), arguments, (width, w, r), 8 if w >= TILE else 4)


@triton.jit(do_not_specialize=["first", "end"])
def add_expert_rows_kernel(rows, positions, weights, y, first, end, N: tl.constexpr, K: tl.constexpr,
                           BLOCK: tl.constexpr, IS_FIRST: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = 0
    for i in range(K):
        position = tl.load(positions + token * K + i)
        n += ((position >= first) & (position < end)).to(tl.int32)
    if IS_FIRST or n > 0:
        place = y + token.to(tl.int64) * N + at
        if IS_FIRST:  # noqa: SIM108
            total = tl.zeros([BLOCK], tl.float32)
        else:
            total = tl.load(place, mask=at < N, other=0.0)
        for i in range(K):
            position = tl.load(positions + token * K + i)
            if (position >= first) & (position < end):
                row = rows + (position - first).to(tl.int64) * N + at
                total += tl.load(weights + token * K + i) * tl.load(row, mask=at < N, other=0.0)
        tl.store(place, total, mask=at < N)


def add_expert_rows(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, first: int, end: int,
    *, is_first: bool = False,
) -> None:  # fmt: skip
    """y fp32 [n, width] += weights * rows, for routed pairs whose position is in [first, end); `is_first`: y was 0.

    `rows` fp32 [end - first, width]; `positions` int32 and `weights` fp32 [n, k]: each token's pairs, in the order in
    which they are added. Since y goes on where it stood, it does not matter how positions are cut into calls.
    """
    n, k = positions.shape
    width = y.shape[1]
    check("rows", rows, torch.float32, end - first, width)
    check("positions", positions, torch.int32, n, k)
    check("weights", weights, torch.float32, n, k)
    check("y", y, torch.float32, n, width)
    block = min(next_power_of_2(width), 1024)
    if n and (end > first or is_first):
        grid = (n, ceil_div(width, block), 1)
        launch(add_expert_rows_kernel, grid, (rows, positions, weights, y, first, end), (width, k, block, is_first), 4)
