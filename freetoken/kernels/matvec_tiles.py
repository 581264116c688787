"""What all products of quantised rows share: where a tile's blocks lie, and sums of both planes.

A program has G times R rows and T tokens and takes C times L blocks of each row at once. Tiles have the axes [P, L, G,
R, T, C]: P parts of a block, L lanes of the law (8, or fewer in short rows), C blocks of each lane in their order.
Lanes of a warp, then warps, are given to the first three axes, and the last ones stay within a thread: so a sum over C
or words costs no exchange, and the R rows share what is loaded of the activation. Weights have 1 in place of T and
activations 1 in place of R. Rows, blocks and tokens past the end repeat the last one: the launcher's masks drop rows
and tokens, and a block past the end has a factor of 0, and so has its activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.packed import dot4

__all__ = [
    "all_parts",
    "element",
    "four",
    "half",
    "high_half",
    "inside",
    "join_planes",
    "low_half",
    "part",
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
    """Numbers of a row's blocks, the last one in place of those past the end.

    Also where nothing is past it: a minimum hides from Triton that neighbours are contiguous. It would give runs of
    them to one lane each, and the values would then have to change lanes.
    """
    return tl.minimum(number, N - 1)


@triton.jit
def part(N: tl.constexpr):
    """Numbers of a block's parts."""
    return tl.arange(0, N)[:, None, None, None, None, None]


@triton.jit
def all_parts(x):
    """The sum over the parts, [1, ..]."""
    return tl.sum(x, axis=0, keep_dims=True)


@triton.jit
def four(x):
    """Places of four words from x [..] on: [.., 4]."""
    return tl.expand_dims(x, 6) + tl.arange(0, 4)[None, None, None, None, None, None, :]


@triton.jit
def element(x, NUMBER: tl.constexpr):
    """x[.., NUMBER] of a tile whose last axis lies within a thread."""
    at = tl.arange(0, x.shape[6])[None, None, None, None, None, None, :]
    return tl.sum(tl.where(at == NUMBER, x, 0), axis=6)


@triton.jit
def plane_dots(n, at, hi, lo):
    """Both planes' products with the signed bytes of words n, added to hi and lo; `at`: places of the high plane's
    words."""
    return dot4(n, tl.load(at), hi), dot4(n, tl.load(at + 64), lo)


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
def join_planes(hi, lo):
    """F of class 256."""
    return hi.to(tl.float32) * 256.0 + lo.to(tl.float32)
