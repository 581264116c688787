"""Products of many rows with a matrix of binary32 (routers), in binary32, without fused additions left to chance."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.prompt_rows import check_rows

__all__ = ["float_product"]

FEW_ROWS = 256
"""Up to so many rows the tiles are small, so that there are enough of them."""


@triton.jit(do_not_specialize=["n_rows"])
def float_product_kernel(
    x, w, bias, out, n_rows, x_stride, out_stride,
    N: tl.constexpr, K: tl.constexpr, M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * M_BLOCK + tl.arange(0, M_BLOCK)
    column = tl.program_id(1) * N_BLOCK + tl.arange(0, N_BLOCK)
    k = tl.arange(0, K_BLOCK)
    x_at = x + tl.minimum(row, n_rows - 1).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = w + tl.minimum(column, N - 1).to(tl.int64)[None, :] * K + k[:, None]
    total = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
    for k0 in range(0, K, K_BLOCK):
        if K % K_BLOCK == 0:
            left = tl.load(x_at)
            right = tl.load(w_at)
        else:
            left = tl.load(x_at, mask=k[None, :] < K - k0, other=0.0)
            right = tl.load(w_at, mask=k[:, None] < K - k0, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        x_at += K_BLOCK
        w_at += K_BLOCK
    if bias is not None:
        total += tl.load(bias + tl.minimum(column, N - 1))[None, :]
    mask = (row[:, None] < n_rows) & (column[None, :] < N)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + column[None, :], total, mask=mask)


def shape_for(n: int, is_device: bool) -> tuple[int, int, int, int]:
    """Rows, columns and depth of a tile, and stages."""
    if not is_device:
        return 64, 128, 256, 1
    return (16, 16, 128, 3) if n <= FEW_ROWS else (64, 64, 32, 3)


def float_product(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """out fp32 [n, rows] = x fp32 [n, cols] (rows of both may lie apart) times w fp32 [rows, cols], transposed, plus
    bias fp32 [rows]."""
    n, cols = x.shape
    rows = w.shape[0]
    check_rows("x", x, n, cols)
    check_rows("out", out, n, rows)
    check("w", w, torch.float32, rows, cols)
    m, n_block, k_block, stages = shape_for(n, x.is_cuda)
    if n:
        grid = (ceil_div(n, m), ceil_div(rows, n_block), 1)
        arguments = (x, w, bias, out, n, x.stride(0), out.stride(0))
        launch(float_product_kernel, grid, arguments, (rows, cols, m, n_block, k_block), 4, stages)
