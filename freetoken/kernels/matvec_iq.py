"""Terms of the IQ2 and IQ3 types (docs/numerics.md, section 3) for a tile of blocks: fp32 [16, 1, NB, R, T].

Arguments as in matvec_k; `table` holds the type's code words, four magnitudes a word (tables.py). Tiles have the axes
j, a sub-block of 16 values, and i, its four runs of four values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.matvec_tiles import half, join_planes, plane, plane_dots, words
from freetoken.kernels.packed import negated

__all__ = ["terms_iq2_s", "terms_iq2_xs", "terms_iq2_xxs", "terms_iq3_s", "terms_iq3_xxs"]


@triton.jit
def runs():
    """Numbers [16, 1, 1, 1, 1, 4] of a block's runs of four values."""
    j = tl.arange(0, 16)[:, None, None, None, None, None]
    return 4 * j + tl.arange(0, 4)[None, None, None, None, None, :]


@triton.jit
def sub_blocks():
    """Numbers [16, 1, 1, 1, 1] of a block's sub-blocks."""
    return tl.arange(0, 16)[:, None, None, None, None]


@triton.jit
def spread(block):
    """A tile [1, 1, NB, R, T] for each sub-block: [16, 1, NB, R, T]."""
    return block + 0 * sub_blocks()


@triton.jit
def eight_signs(seven):
    """The eighth bit makes the number of set bits even."""
    x = seven ^ (seven >> 4)
    x = x ^ (x >> 2)
    x = (x ^ (x >> 1)) & 1
    return seven | (x << 7)


@triton.jit
def nibble(word, odd):
    """The upper four of eight bits where `odd`, else the lower."""
    return (word >> (4 * odd)) & 15


@triton.jit
def grid_term(word, signs, s, d, live, q, dx, piece, c):
    """Magnitudes in the bytes of `word`, signs in four bits, a scale s of 4 bits for each sub-block, the factor d."""
    at = words(q) + tl.expand_dims(piece * 128, 5) + c
    hi, lo = plane_dots(negated(word, signs), at, 5)
    scale = 2 * s + 1
    hi = tl.sum(scale * hi, axis=0, keep_dims=True)
    lo = tl.sum(scale * lo, axis=0, keep_dims=True)
    return (d * tl.load(dx + spread(piece), mask=live, other=0.0)) * join_planes(hi, lo)


@triton.jit
def terms_iq2_xxs(
    w, first, n_blocks, block, piece, live, q, dx, table, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 64)
    c = runs()
    wide = tl.expand_dims(block, 5)
    start = w + first * 64
    code = tl.load(start + wide * 64 + 8 * (c >> 3) + ((c >> 1) & 3)).to(tl.int32)
    tail = tl.load(words(start) + wide * 16 + 2 * (c >> 3) + 1)
    signs = nibble(eight_signs((tail >> (7 * ((c >> 1) & 3))) & 127), c & 1)
    word = tl.load(table + 2 * code + (c & 1))
    s = (tl.load(words(start) + block * 16 + 2 * (sub_blocks() >> 1) + 1) >> 28) & 15
    d = half(w + p1 + first * 2 + spread(block) * 2, live) * 0.125
    return grid_term(word, signs, s, d, live, q, dx, piece, c)


@triton.jit
def terms_iq2_xs(
    w, first, n_blocks, block, piece, live, q, dx, table, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 8)
    c = runs()
    wide = tl.expand_dims(block, 5)
    short = tl.load((w + first * 64).to(tl.pointer_type(tl.int16)) + wide * 32 + (c >> 1)).to(tl.int32)
    signs = nibble(eight_signs((short >> 9) & 127), c & 1)
    word = tl.load(table + 2 * (short & 511) + (c & 1))
    j = sub_blocks()
    s = nibble(tl.load(w + p1 + first * 8 + block * 8 + (j >> 1)).to(tl.int32), j & 1)
    d = half(w + p2 + first * 2 + spread(block) * 2, live) * 0.125
    return grid_term(word, signs, s, d, live, q, dx, piece, c)


@triton.jit
def terms_iq2_s(
    w, first, n_blocks, block, piece, live, q, dx, table, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 32)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 8)
    p4 = plane(p3, n_blocks, 8)
    c = runs()
    wide = tl.expand_dims(block, 5)
    code = tl.load(w + first * 32 + wide * 32 + (c >> 1)).to(tl.int32)
    high = tl.load(w + p2 + first * 8 + wide * 8 + (c >> 3)).to(tl.int32) >> (2 * ((c >> 1) & 3))
    word = tl.load(table + 2 * (code | ((high & 3) << 8)) + (c & 1))
    signs = nibble(tl.load(w + p1 + first * 32 + wide * 32 + (c >> 1)).to(tl.int32), c & 1)
    j = sub_blocks()
    s = nibble(tl.load(w + p3 + first * 8 + block * 8 + (j >> 1)).to(tl.int32), j & 1)
    d = half(w + p4 + first * 2 + spread(block) * 2, live) * 0.125
    return grid_term(word, signs, s, d, live, q, dx, piece, c)


@triton.jit
def terms_iq3_xxs(
    w, first, n_blocks, block, piece, live, q, dx, table, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    c = runs()
    wide = tl.expand_dims(block, 5)
    word = tl.load(table + tl.load(w + first * 64 + wide * 64 + c).to(tl.int32))
    tail = tl.load(words(w + p1 + first * 32) + wide * 8 + (c >> 3))
    signs = nibble(eight_signs((tail >> (7 * ((c >> 1) & 3))) & 127), c & 1)
    s = (tl.load(words(w + p1 + first * 32) + block * 8 + (sub_blocks() >> 1)) >> 28) & 15
    d = half(w + p2 + first * 2 + spread(block) * 2, live) * 0.25
    return grid_term(word, signs, s, d, live, q, dx, piece, c)


@triton.jit
def terms_iq3_s(
    w, first, n_blocks, block, piece, live, q, dx, table, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 8)
    p4 = plane(p3, n_blocks, 4)
    c = runs()
    wide = tl.expand_dims(block, 5)
    code = tl.load(w + first * 64 + wide * 64 + c).to(tl.int32)
    high = tl.load(w + p2 + first * 8 + wide * 8 + (c >> 3)).to(tl.int32) >> (c & 7)
    word = tl.load(table + (code | ((high & 1) << 8)))
    signs = nibble(tl.load(w + p1 + first * 32 + wide * 32 + (c >> 1)).to(tl.int32), c & 1)
    j = sub_blocks()
    s = nibble(tl.load(w + p3 + first * 4 + block * 4 + (j >> 2)).to(tl.int32), (j >> 1) & 1)
    d = half(w + p4 + first * 2 + spread(block) * 2, live)
    return grid_term(word, signs, s, d, live, q, dx, piece, c)
