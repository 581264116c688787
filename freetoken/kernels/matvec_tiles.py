"""What all products of quantised rows share: where a tile's blocks lie, and the sums of packed integers.

A program has R rows and T tokens and takes NB blocks of each row at once. Tiles have the axes [T, R, NB, ...]; weights
have 1 in place of T and activations 1 in place of R. Rows, blocks and tokens past the end repeat the last one: the
launcher's masks drop rows and tokens, and a block past the end has a factor of 0 , and so has its activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "block_numbers",
    "half",
    "high_half",
    "join_planes",
    "live",
    "low_half",
    "piece_numbers",
    "plane",
    "planes_of",
    "words",
]


@triton.jit
def plane(start, n_blocks, SIZE: tl.constexpr):
    """The offset of the plane after one at `start` with fields of SIZE bytes (layout.plane_offsets)."""
    return (start + n_blocks * SIZE + 127) // 128 * 128


@triton.jit
def words(pointer):
    return pointer.to(tl.pointer_type(tl.int32))


@triton.jit
def block_numbers(row0, rows, k0, N: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    """Numbers [1, R, NB] of a tile's blocks, counted from the first block of row0; N blocks in a row."""
    row = tl.minimum(row0 + tl.arange(0, R), rows - 1) - row0
    return (row[:, None] * N + inside(k0, N, NB)[None, :])[None, :, :]


@triton.jit
def piece_numbers(token0, tokens, stride, k0, N: tl.constexpr, T: tl.constexpr, NB: tl.constexpr):
    """Numbers [T, 1, NB] of the activation's blocks from row token0 on; `stride` blocks in a row of activations."""
    token = token0 + tl.minimum(tl.arange(0, T), tokens - 1)
    return (token[:, None] * stride + inside(k0, N, NB)[None, :])[:, None, :]


@triton.jit
def inside(k0, N: tl.constexpr, NB: tl.constexpr):
    block = k0 + tl.arange(0, NB)
    return block if N % NB == 0 else tl.minimum(block, N - 1)


@triton.jit
def live(k0, N: tl.constexpr, NB: tl.constexpr):
    """Which of a tile's blocks are in the row: [1, 1, NB]."""
    if N % NB == 0:
        return tl.full([1, 1, NB], True, tl.int1)
    else:
        return (k0 + tl.arange(0, NB) < N)[None, None, :]


@triton.jit
def half(pointer, mask):
    """fp16 factors, widened; 0 where there is no block."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def low_half(word):
    """The fp16 in the low half of a word, widened."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def planes_of(packed):
    """Sums of both planes from a sum of 65536*hi + lo, where that of lo fits 16 bits."""
    lo = (packed << 16) >> 16
    return (packed - lo) >> 16, lo


@triton.jit
def join_planes(hi, lo):
    """F of class 256."""
    return hi.to(tl.float32) * 256.0 + lo.to(tl.float32)
