"""Products of float weights (docs/numerics.md, section 4): lanes32 in binary32."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.launch import wait

__all__ = ["float_products"]


@triton.jit
def float_products(
    w,
    row0,
    rows,
    x,
    stride,
    token0,
    tokens,
    COLS: tl.constexpr,
    BYTES: tl.constexpr,
    IS_HALF: tl.constexpr,
    T: tl.constexpr,
    R: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Products [R, T] of rows from row0 on with unquantised rows of x; 2 bytes are fp16 (IS_HALF) or bf16.

    x is loaded for every row again: so its tile has the weights' layout, and it lies in L1.
    """
    row = tl.minimum(row0 + tl.arange(0, R), rows - 1)[:, None, None]
    token = (token0 + tl.minimum(tl.arange(0, T), tokens - 1))[None, :, None]
    at = row.to(tl.int64) * COLS
    x_at = x + token * stride + 0 * tl.arange(0, R)[:, None, None]
    lanes = tl.zeros([R, T, 32], tl.float32)
    wait(WAITS)
    for start in tl.range(0, COLS, 32, loop_unroll_factor=16):
        i = start + tl.arange(0, 32)[None, None, :]
        if BYTES == 4:
            weight = tl.load(w.to(tl.pointer_type(tl.float32)) + at + i, mask=i < COLS, other=0.0)
        elif IS_HALF:
            weight = tl.load(w.to(tl.pointer_type(tl.float16)) + at + i, mask=i < COLS, other=0.0).to(tl.float32)
        else:
            bits = tl.load(w.to(tl.pointer_type(tl.int16)) + at + i, mask=i < COLS, other=0)
            weight = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        lanes += weight * tl.load(x_at + i, mask=i < COLS, other=0.0)
    pairs = tl.sum(tl.reshape(lanes, [R, T, 2, 16]), axis=2)
    pairs = tl.sum(tl.reshape(pairs, [R, T, 2, 8]), axis=2)
    pairs = tl.sum(tl.reshape(pairs, [R, T, 2, 4]), axis=2)
    pairs = tl.sum(tl.reshape(pairs, [R, T, 2, 2]), axis=2)
    return tl.sum(pairs, axis=2)
