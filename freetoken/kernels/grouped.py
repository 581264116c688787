"""Products of many tokens: fp16 rows with fp16 matrices, fp32 sums; one matrix for all rows, or one for each expert.

Rows of experts are sorted by expert; a list of tiles on the device says which rows each program takes and by which
matrix (`tiles`). The gate and up products of an expert are one launch, which also applies the activation. A row's
result does not depend on the rows beside it: the order of its sum is that of the tile's shape alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.functions import activate

__all__ = ["Rows", "Tile", "expert_glu_rows", "expert_products", "glu_product", "product", "tile_for", "tiles"]


@dataclass(frozen=True)
class Tile:
    """A program's part of a product."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Rows:
    """fp16 rows [n, cols] with a scale fp32 [n] for each (prompt_rows.halve_rows)."""

    x: torch.Tensor
    scale: torch.Tensor


def tile_for(n_rows: float, capability: int, *, is_double: bool = False) -> Tile:
    """A tile for some n_rows rows a matrix on a card of a compute capability (major * 10 + minor; 0: interpreter).

    `is_double`: two products at once, with two sets of sums.
    """
    if capability == 0:
        return Tile(32, 128, 256, 4, 1)  # the interpreter's time is that of its steps
    if n_rows <= 24:
        return Tile(16, 64, 64, 4, 3 if capability >= 80 else 1)
    if n_rows <= 48:
        return Tile(32, 64, 64, 4, 3 if capability >= 80 else 1)
    if capability < 80:
        return Tile(64, 64, 32, 4, 1)
    if capability in (90, 100):
        if n_rows <= 96:
            return Tile(64, 128, 64, 4, 3)
        return Tile(128, 128, 64, 8, 3) if is_double else Tile(128, 256, 64, 8, 3)
    return Tile(64, 64, 64, 4, 3) if is_double else Tile(128, 128, 32, 8, 3)


def tiles(begins: np.ndarray, ends: np.ndarray, m: int) -> np.ndarray:
    """int32 [n, 3] of (matrix, first row, end row) for matrices with rows begins[i] to ends[i] each."""
    n_tiles = -(-(ends - begins) // m)
    matrix = np.repeat(np.arange(len(begins)), n_tiles)
    begin = begins[matrix] + m * (np.arange(len(matrix)) - (n_tiles.cumsum() - n_tiles)[matrix])
    found = np.empty((len(matrix), 3), np.int32)
    found[:, 0], found[:, 1], found[:, 2] = matrix, begin, np.minimum(begin + m, ends[matrix])
    return found


@triton.jit(do_not_specialize=["n_rows", "first", "x_first"])
def product_kernel(
    x, scale, index, tile_list, b, out, bias, n_rows, first, x_first, second, out_stride,
    N: tl.constexpr, K: tl.constexpr, M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A tile of rows times a matrix [N, K], the n-th of those that lie one after another at `b`.

    Without a list, all n_rows rows and the one matrix. With it, positions: position p is row index[p] of x, or row
    p - x_first without an index, and row p - first of `out`. ACTIVATION -1: a product; else the gate's, activated,
    times that of the matrix `second` values on.
    """
    n_n: tl.constexpr = (N + N_BLOCK - 1) // N_BLOCK
    pid = tl.program_id(0)
    if tile_list is None:
        # programs that run together share rows and columns, so that both stay in L2
        n_m = tl.cdiv(n_rows, M_BLOCK)
        band = pid // (8 * n_n)
        height = tl.minimum(n_m - band * 8, 8)
        inside = pid % (8 * n_n)
        begin = (band * 8 + inside % height) * M_BLOCK
        end = n_rows
        column0 = inside // height * N_BLOCK
        mine = b
    else:
        entry = tile_list + pid // n_n * 3
        column0 = pid % n_n * N_BLOCK
        mine = b + tl.load(entry).to(tl.int64) * (N * K)
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
    position = begin + tl.arange(0, M_BLOCK)
    live = position < end
    position = tl.minimum(position, end - 1)
    row = position - x_first if index is None else tl.load(index + position)
    column = column0 + tl.arange(0, N_BLOCK)
    in_n = tl.minimum(column, N - 1)
    k = tl.arange(0, K_BLOCK)
    x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
    b_at = mine + in_n.to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
    if ACTIVATION >= 0:
        other = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
    for k0 in range(0, K, K_BLOCK):
        if K % K_BLOCK == 0:
            left = tl.load(x_at)
            right = tl.load(b_at)
        else:
            left = tl.load(x_at, mask=k[None, :] < K - k0, other=0.0)
            right = tl.load(b_at, mask=k[:, None] < K - k0, other=0.0)
        total = tl.dot(left, right, total)
        if ACTIVATION >= 0:
            if K % K_BLOCK == 0:
                right = tl.load(b_at + second)
            else:
                right = tl.load(b_at + second, mask=k[:, None] < K - k0, other=0.0)
            other = tl.dot(left, right, other)
        x_at += K_BLOCK
        b_at += K_BLOCK
    factor = tl.load(scale + row)[:, None]
    total *= factor
    if bias is not None:
        total += tl.load(bias + in_n)[None, :]
    if ACTIVATION >= 0:
        total = activate(total, ACTIVATION) * (other * factor)
    to = out + (position - first).to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(to, total, mask=live[:, None] & (column[None, :] < N))


def _launch(grid: int, tile: Tile, arguments: tuple[object, ...], n: int, k: int, activation: int) -> None:
    constants = (n, k, tile.m, tile.n, tile.k, activation)
    launch(product_kernel, (grid, 1, 1), arguments, constants, tile.warps, tile.stages)


def _check_out(out: torch.Tensor, n: int, rows: int) -> None:
    if out.dtype != torch.float32 or tuple(out.shape) != (n, rows) or out.stride(1) != 1:
        raise ValueError(f"need fp32 rows [{n}, {rows}] for the result, got {out.dtype} {tuple(out.shape)}")


def product(x: Rows, w: torch.Tensor, out: torch.Tensor, tile: Tile, bias: torch.Tensor | None = None) -> None:
    """out fp32 [n, rows] (rows may lie apart) = x times w fp16 [rows, cols], transposed, plus bias fp32 [rows]."""
    n, cols = x.x.shape
    rows = w.shape[0]
    check("w", w, torch.float16, rows, cols)
    check("x", x.x, torch.float16, n, cols)
    check("scale", x.scale, torch.float32, n)
    _check_out(out, n, rows)
    if n:
        grid = ceil_div(n, tile.m) * ceil_div(rows, tile.n)
        _launch(grid, tile, (x.x, x.scale, None, None, w, out, bias, n, 0, 0, 0, out.stride(0)), rows, cols, -1)


def glu_product(x: Rows, w: torch.Tensor, out: torch.Tensor, tile: Tile, activation: int) -> None:
    """out fp32 [n, rows] (rows may lie apart) = act(gate x) * (up x), w fp16 [2, rows, cols] gate and up."""
    n, cols = x.x.shape
    rows = w.shape[1]
    check("w", w, torch.float16, 2, rows, cols)
    check("x", x.x, torch.float16, n, cols)
    _check_out(out, n, rows)
    if n:
        grid = ceil_div(n, tile.m) * ceil_div(rows, tile.n)
        arguments = (x.x, x.scale, None, None, w, out, None, n, 0, 0, rows * cols, out.stride(0))
        _launch(grid, tile, arguments, rows, cols, activation)


def expert_glu_rows(
    x: Rows, index: torch.Tensor, tile_list: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: Tile, *,
    first: int, activation: int,
) -> None:  # fmt: skip
    """out fp32 [positions, rows] = act(gate x) * (up x) for positions from `first` on, those of the tiles.

    `index` int32: the row of x at each position, counted from 0; `tile_list` int32 [n, 3]; w fp16 [2, matrices, rows,
    cols], gate and up; `out` may be a part of wider rows. `activation` 0 is silu, 1 is gelu.
    """
    _, n_matrices, rows, cols = w.shape
    check("w", w, torch.float16, 2, n_matrices, rows, cols)
    check("x", x.x, torch.float16, x.x.shape[0], cols)
    check("index", index, torch.int32, len(index))
    check("tiles", tile_list, torch.int32, len(tile_list), 3)
    _check_out(out, out.shape[0], rows)
    if len(tile_list):
        second = n_matrices * rows * cols
        arguments = (x.x, x.scale, index, tile_list, w, out, None, 0, first, 0, second, out.stride(0))
        _launch(len(tile_list) * ceil_div(rows, tile.n), tile, arguments, rows, cols, activation)


def expert_products(
    x: Rows, tile_list: torch.Tensor, w: torch.Tensor, out: torch.Tensor, tile: Tile, *, first: int
) -> None:
    """out fp32 [positions, rows] = x times each position's matrix of w fp16 [matrices, rows, cols]; row 0 of x and of
    `out` is position `first`."""
    n_matrices, rows, cols = w.shape
    check("w", w, torch.float16, n_matrices, rows, cols)
    check("x", x.x, torch.float16, out.shape[0], cols)
    check("tiles", tile_list, torch.int32, len(tile_list), 3)
    _check_out(out, out.shape[0], rows)
    if len(tile_list):
        arguments = (x.x, x.scale, None, tile_list, w, out, None, 0, first, first, 0, out.stride(0))
        _launch(len(tile_list) * ceil_div(rows, tile.n), tile, arguments, rows, cols, -1)
