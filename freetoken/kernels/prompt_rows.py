"""What a prompt does row by row: norms, rotation, halves with a scale, sums of experts' rows. Not under the law of
decode steps (docs/numerics.md, section 8): sums go in any order that stays the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.fast_launch import launch

__all__ = ["add_expert_rows", "halve_rows", "rms_norm", "rotate"]

TILE = 4096
"""Values that a program holds at once."""


@triton.jit(do_not_specialize=["rows"])
def halve_kernel(x, out, scale, rows, N: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)
    at = tl.arange(0, BLOCK)[None, :]
    place = row.to(tl.int64)[:, None] * N + at
    top = tl.zeros([R, BLOCK], tl.int32)
    for start in range(0, N, BLOCK):
        mask = (row[:, None] < rows) & (start + at < N)
        value = tl.load(x + place + start, mask=mask, other=0.0)
        top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    exponent = tl.max(top, axis=1) >> 23
    power = tl.minimum(268 - exponent, 253)  # makes the largest value 2^14 to 2^15
    factor = (power << 23).to(tl.float32, bitcast=True)
    for start in range(0, N, BLOCK):
        mask = (row[:, None] < rows) & (start + at < N)
        value = tl.load(x + place + start, mask=mask, other=0.0)
        tl.store(out + place + start, (value * factor[:, None]).to(tl.float16), mask=mask)
    tl.store(scale + row, ((254 - power) << 23).to(tl.float32, bitcast=True), mask=row < rows)


def halve_rows(x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor) -> None:
    """x fp32 [n, width] as fp16 `out` times a power of two for each row, `scale` fp32 [n]."""
    n, width = x.shape
    check("x", x, torch.float32, n, width)
    check("out", out, torch.float16, n, width)
    check("scale", scale, torch.float32, n)
    block = min(max(next_power_of_2(width), 32), TILE)
    r = max(TILE // 2 // block, 1)
    if n:
        launch(
            halve_kernel, (triton.cdiv(n, r), 1, 1), (x, out, scale, n), (width, r, block), 8 if block == TILE else 4
        )


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(x, weight, out, rows, eps, N: tl.constexpr, W: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    at = tl.arange(0, W)[None, :]
    mask = (row < rows) & (at < N)
    place = row.to(tl.int64) * N + at
    value = tl.load(x + place, mask=mask, other=0.0)
    mean = tl.sum(value * value, axis=1)[:, None] / N
    y = value * (1.0 / tl.sqrt(mean + eps)) * tl.load(weight + at, mask=at < N, other=0.0)
    tl.store(out + place, y, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """RMS norm of x fp32 [rows, width], over the whole width."""
    rows, width = x.shape
    check("x", x, torch.float32, rows, width)
    check("weight", weight, torch.float32, width)
    check("out", out, torch.float32, rows, width)
    w = next_power_of_2(width)
    r = max(TILE // 2 // w, 1)
    if rows:
        launch(rms_norm_kernel, (triton.cdiv(rows, r), 1, 1), (x, weight, out, rows, eps), (width, w, r), warps=4)


@triton.jit
def rotate_kernel(
    x, table, N_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
    HEADS: tl.constexpr, IS_NEOX: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (head < N_HEAD) & (pair < HALF)
    cos = tl.load(table + row * (2 * HALF) + pair, mask=pair < HALF, other=0.0)
    sin = tl.load(table + row * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0)
    first = x + row * (N_HEAD * HEAD_DIM) + head * HEAD_DIM + (pair if IS_NEOX else 2 * pair)
    second = first + (HALF if IS_NEOX else 1)
    a = tl.load(first, mask=mask, other=0.0)
    b = tl.load(second, mask=mask, other=0.0)
    tl.store(first, a * cos - b * sin, mask=mask)
    tl.store(second, a * sin + b * cos, mask=mask)


def rotate(x: torch.Tensor, table: torch.Tensor, n_head: int, *, is_neox: bool) -> None:
    """Rotate heads of x fp32 [n, n_head * head_dim] in place; `table` fp32 [n, 2, n_rot / 2], cosines and sines."""
    n, width = x.shape
    half = table.shape[2]
    check("x", x, torch.float32, n, width)
    check("table", table, torch.float32, n, 2, half)
    block = next_power_of_2(half)
    heads = min(next_power_of_2(n_head), max(TILE // 2 // block, 1))
    if n:
        grid = (n, triton.cdiv(n_head, heads), 1)
        launch(rotate_kernel, grid, (x, table), (n_head, width // n_head, half, block, heads, is_neox), warps=4)


@triton.jit(do_not_specialize=["first", "end"])
def add_expert_rows_kernel(rows, positions, weights, y, first, end, N: tl.constexpr, K: tl.constexpr,
                           BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = 0
    for i in range(K):
        position = tl.load(positions + token * K + i)
        n += ((position >= first) & (position < end)).to(tl.int32)
    if n > 0:
        place = y + token.to(tl.int64) * N + at
        total = tl.load(place, mask=at < N, other=0.0)
        for i in range(K):
            position = tl.load(positions + token * K + i)
            if (position >= first) & (position < end):
                row = rows + (position - first).to(tl.int64) * N + at
                total += tl.load(weights + token * K + i) * tl.load(row, mask=at < N, other=0.0)
        tl.store(place, total, mask=at < N)


def add_expert_rows(
    rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor, y: torch.Tensor, first: int, end: int
) -> None:
    """y fp32 [n, width] += weights * rows, for routed pairs whose position is in [first, end).

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
    if n and end > first:
        grid = (n, triton.cdiv(width, block), 1)
        launch(add_expert_rows_kernel, grid, (rows, positions, weights, y, first, end), (width, k, block), warps=4)
