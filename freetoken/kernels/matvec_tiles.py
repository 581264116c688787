"""What all products of quantised rows share: where a tile's blocks lie, and sums of both planes.

A program has R rows and T tokens and takes NB blocks of each row at once. Tiles have the axes [T, R, NB, ...]; weights
have 1 in place of T and activations 1 in place of R. Rows, blocks and tokens past the end repeat the last one: the
launcher's masks drop rows and tokens, and a block past the end has a factor of 0 , and so has its activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.packed import dot4

__all__ = [
    "first_part",
    "half",
    "high_half",
    "inside",
    "join_planes",
    "low_half",
    "plane",
    "plane_dots",
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
def inside(number, N: tl.constexpr):
    """Numbers of a row's blocks or of a block's parts, the last one in place of those past the end.

    Also where nothing is past it: a minimum hides from Triton that neighbours are contiguous. It would give runs of
    them to one lane each, and the values would then have to change lanes.
    """
    return tl.minimum(number, N - 1)


@triton.jit
def first_part(x, P0: tl.constexpr, P1: tl.constexpr):
    """A tile [P0, P1, NB, R, T] whose parts are all equal, without them; zeros are added to the one kept."""
    part = tl.arange(0, P0)[:, None, None, None, None] + tl.arange(0, P1)[None, :, None, None, None]
    return tl.sum(tl.sum(tl.where(part == 0, x, 0.0), axis=0), axis=0)


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
def plane_dots(n, at, AXIS: tl.constexpr):
    """Sums of both planes' products with the signed bytes of words n, over their last axis, number AXIS; `at`: places
    of the high plane's words."""
    hi = dot4(n, tl.load(at))
    lo = dot4(n, tl.load(at + 64))
    return tl.sum(hi, axis=AXIS), tl.sum(lo, axis=AXIS)


@triton.jit
def join_planes(hi, lo):
    """F of class 256."""
    return hi.to(tl.float32) * 256.0 + lo.to(tl.float32)
