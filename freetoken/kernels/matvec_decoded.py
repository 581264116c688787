"""Products of types without an integer form (docs/numerics.md, section 4): values in binary32, lanes32.

A thread takes the 8 neighbours of a code in each 32 values of its row, so that a code is unpacked once; four threads
have a row. The eight are handled in halves, which are what one load takes of the activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.dequant_types import eight_values
from freetoken.kernels.fields import block_size, field_size
from freetoken.kernels.launch import wait
from freetoken.kernels.matvec_tiles import plane

__all__ = ["ROWS", "decoded_products"]

ROWS = 8
"""Rows that fill a warp."""


@triton.constexpr_function
def unrolled(type_id):
    """Blocks in a turn of the loop: 256 values."""
    return 256 // block_size(type_id)


@triton.jit
def decoded_products(TYPE: tl.constexpr, w, n_blocks, row0, rows, x, table, stride, token0, tokens, N: tl.constexpr,
                     T: tl.constexpr, R: tl.constexpr, WAITS: tl.constexpr):  # fmt: skip
    """Products [R, T] of rows of N blocks from row0 on with unquantised rows of x. Tiles have the axes [R, 4, T, 4].

    `run` goes through a minimum for the reason that `matvec_tiles.inside` tells.
    """
    W: tl.constexpr = block_size(TYPE)
    first = tl.minimum(row0 + tl.arange(0, R), rows - 1)[:, None, None].to(tl.int64) * N
    start1 = plane(0, n_blocks, field_size(TYPE, 0))
    start2 = plane(start1, n_blocks, field_size(TYPE, 1))
    token = (token0 + tl.minimum(tl.arange(0, T), tokens - 1))[None, None, :, None]
    x_at = x + token * stride + 0 * tl.arange(0, R)[:, None, None, None]
    run = tl.minimum(tl.arange(0, 4), 3)[None, :, None]
    i = tl.arange(0, 4)[None, None, :]
    low = tl.zeros([R, 4, T, 4], tl.float32)
    high = tl.zeros([R, 4, T, 4], tl.float32)
    wait(WAITS)
    for b in tl.range(0, N, loop_unroll_factor=unrolled(TYPE)):
        f0 = w + (first + b) * field_size(TYPE, 0)
        f1 = w + start1 + (first + b) * field_size(TYPE, 1)
        f2 = w + start2 + (first + b) * field_size(TYPE, 2)
        for s in tl.static_range(W // 32):
            c = 4 * s + run
            at = x_at + b * W + (8 * c + i)[:, :, None, :]
            n = eight_values(TYPE, f0, f1, f2, f2, f2, c, i, table, False)
            low += n[:, :, None, :] * tl.load(at)
            n = eight_values(TYPE, f0, f1, f2, f2, f2, c, 4 + i, table, False)
            high += n[:, :, None, :] * tl.load(at + 4)
    fours = runs_sum(low, R, T) + runs_sum(high, R, T)
    return tl.sum(tl.sum(tl.reshape(fours, [R, T, 2, 2]), axis=2), axis=2)


@triton.jit
def runs_sum(lanes, R: tl.constexpr, T: tl.constexpr):
    """The sum over four runs, [R, T, 4]: that of the first and third, and of the second and fourth."""
    return tl.sum(tl.sum(tl.reshape(lanes, [R, 2, 2, T, 4]), axis=1), axis=1)
