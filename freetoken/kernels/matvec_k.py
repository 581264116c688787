"""Terms of Q2_K to Q6_K and IQ4_XS (docs/numerics.md, section 3) for a tile of blocks: fp32 [P0, P1, NB, R, T].

A term is there once for each of the parts P0 times P1 of its block. Every function takes the matrix's bytes `w`, the
number `first` of the program's first block, the matrix's `n_blocks`, the tile's `block` [1, 1, NB, R, 1], `piece`
[1, 1, NB, 1, T] and `live` [1, 1, NB, 1, 1], and the activation. A part is the 16 bytes that hold 16 consecutive values
(or 16 of each field).
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.matvec_tiles import half, high_half, inside, join_planes, low_half, plane, plane_dots, words
from freetoken.kernels.packed import look_up, minus
from freetoken.kernels.tables import IQ4

__all__ = ["terms_iq4_xs", "terms_q2_k", "terms_q3_k", "terms_q4_k", "terms_q5_k", "terms_q6_k"]


@triton.jit
def part(N: tl.constexpr, AXIS: tl.constexpr):
    """Numbers of a block's parts along axis 0 or 1 of a tile [2, G, NB, R, T]."""
    n = tl.arange(0, N)
    return n[:, None, None, None, None] if AXIS == 0 else n[None, :, None, None, None]


@triton.jit
def four(x):
    """Places of the four words of a thread's part that starts at x [..]: [.., 4]."""
    return tl.expand_dims(x, 5) + tl.arange(0, 4)[None, None, None, None, None, :]


@triton.jit
def all_parts(x):
    """The sum over the parts, [1, 1, ..]."""
    return tl.sum(tl.sum(x, axis=0, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def scales_k4(head):
    """Scales, then minimums, of sub-blocks 2g and 2g + 1 of Q4_K and Q5_K: each like `head`, pointers [2, 4, ..]."""
    g = part(4, 1)
    a = tl.load(head + 1)
    b = tl.load(head + 2)
    c = tl.load(head + 3)
    shift = 16 * (g & 1)
    sc = tl.where(g < 2, a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)) >> shift
    mn = tl.where(g < 2, b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)) >> shift
    return sc & 255, (sc >> 8) & 255, mn & 255, (mn >> 8) & 255


@triton.jit
def term_with_minimum(factors, live, dx, piece, hi, lo, m):
    """(d*dx)*F - (dmin*dx)*f(M), the factors d and dmin in one word; pointers have the parts' axes."""
    pair = tl.load(factors, mask=live, other=0)
    scale = tl.load(dx + piece, mask=live, other=0.0)
    return (low_half(pair) * scale) * join_planes(hi, lo) - (high_half(pair) * scale) * m.to(tl.float32)


@triton.jit
def sums_k4(head, low_hi, low_lo, high_hi, high_lo, sums, piece):
    """S_hi, S_lo and M of Q4_K and Q5_K from the sums of each part."""
    t = part(2, 0)
    g = part(4, 1)
    sc0, sc1, mn0, mn1 = scales_k4(head + 0 * (t + g))
    sixteen = sums + piece * 16 + inside(4 * g + t, 16)
    m = mn0 * tl.load(sixteen) + mn1 * tl.load(sixteen + 2)
    return all_parts(sc0 * low_hi + sc1 * high_hi), all_parts(sc0 * low_lo + sc1 * high_lo), all_parts(m)


@triton.jit
def terms_q4_k(w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    t = part(2, 0)
    g = part(4, 1)
    head = words(w + first * 144) + block * 36
    word = tl.load(four(head + 4 + 8 * g + 4 * t))
    at = four(words(q) + piece * 128 + 16 * g + 4 * t)
    low_hi, low_lo = plane_dots(word & 0x0F0F0F0F, at, 5)
    high_hi, high_lo = plane_dots((word >> 4) & 0x0F0F0F0F, at + 8, 5)
    hi, lo, m = sums_k4(head, low_hi, low_lo, high_hi, high_lo, sums, piece)
    return term_with_minimum(head + 0 * (t + g), live, dx, piece + 0 * (t + g), hi, lo, m)


@triton.jit
def terms_q5_k(w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    t = part(2, 0)
    g = part(4, 1)
    head = words(w + first * 176) + block * 44
    word = tl.load(four(head + 12 + 8 * g + 4 * t))
    fifth = tl.load(four(head + 4 + 4 * t + 0 * g)) >> tl.expand_dims(2 * g, 5)
    at = four(words(q) + piece * 128 + 16 * g + 4 * t)
    low_hi, low_lo = plane_dots((word & 0x0F0F0F0F) | ((fifth << 4) & 0x10101010), at, 5)
    high_hi, high_lo = plane_dots(((word >> 4) & 0x0F0F0F0F) | ((fifth << 3) & 0x10101010), at + 8, 5)
    hi, lo, m = sums_k4(head, low_hi, low_lo, high_hi, high_lo, sums, piece)
    return term_with_minimum(head + 0 * (t + g), live, dx, piece + 0 * (t + g), hi, lo, m)


@triton.jit
def terms_q6_k(w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 128)
    p2 = plane(p1, n_blocks, 64)
    p3 = plane(p2, n_blocks, 16)
    t = part(2, 0)
    g = part(4, 1)
    word = tl.load(four(words(w + first * 128) + block * 32 + 8 * g + 4 * t))
    pairs = tl.load(four(words(w + p1 + first * 64) + block * 16 + 8 * (g >> 1) + 4 * t))
    pairs = pairs >> tl.expand_dims(2 * (g & 1), 5)
    at = four(words(q) + piece * 128 + 32 * (g >> 1) + 8 * (g & 1) + 4 * t)
    low = (word & 0x0F0F0F0F) | ((pairs << 4) & 0x30303030)
    high = ((word >> 4) & 0x0F0F0F0F) | (pairs & 0x30303030)
    low_hi, low_lo = plane_dots(minus(low, 32), at, 5)
    high_hi, high_lo = plane_dots(minus(high, 32), at + 16, 5)
    scales = (w + p2 + first * 16).to(tl.pointer_type(tl.int8)) + block * 16
    scales += inside(8 * (g >> 1) + 2 * (g & 1) + t, 16)
    sc0 = tl.load(scales).to(tl.int32)
    sc1 = tl.load(scales + 4).to(tl.int32)
    d = half(w + p3 + first * 2 + (block + 0 * (t + g)) * 2, live)
    piece += 0 * (t + g)
    hi = all_parts(sc0 * low_hi + sc1 * high_hi)
    lo = all_parts(sc0 * low_lo + sc1 * high_lo)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * join_planes(hi, lo)


@triton.jit
def terms_q2_k(w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 16)
    t = part(2, 0)
    h = part(2, 1)
    word = tl.load(four(words(w + first * 64) + block * 16 + 8 * h + 4 * t))
    at = four(words(q) + piece * 128 + 32 * h + 4 * t)
    scales = w + p1 + first * 16 + block * 16 + inside(8 * h + t, 16)
    sixteen = sums + piece * 16 + inside(8 * h + t, 16)
    hi = tl.zeros([2, 2, NB, R, T], tl.int32)
    lo = hi
    m = hi
    for s in tl.static_range(4):
        part_hi, part_lo = plane_dots((word >> (2 * s)) & 0x03030303, at + 8 * s, 5)
        scale = tl.load(scales + 2 * s).to(tl.int32)
        hi += (scale & 15) * part_hi
        lo += (scale & 15) * part_lo
        m += (scale >> 4) * tl.load(sixteen + 2 * s)
    factors = words(w + p2 + first * 4) + block + 0 * (t + h)
    piece += 0 * (t + h)
    return term_with_minimum(factors, live, dx, piece, all_parts(hi), all_parts(lo), all_parts(m))


@triton.jit
def terms_q3_k(w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 12)
    t = part(2, 0)
    h = part(2, 1)
    word = tl.load(four(words(w + first * 64) + block * 16 + 8 * h + 4 * t))
    third = tl.load(four(words(w + p1 + first * 32) + block * 8 + 4 * t + 0 * h)) >> tl.expand_dims(4 * h, 5)
    at = four(words(q) + piece * 128 + 32 * h + 4 * t)
    scales = w + p2 + first * 12 + block * 12 + inside(t + 0 * h, 16)
    hi = tl.zeros([2, 2, NB, R, T], tl.int32)
    lo = hi
    for s in tl.static_range(4):
        n = ((word >> (2 * s)) & 0x03030303) | (((third >> s) << 2) & 0x04040404)
        part_hi, part_lo = plane_dots(minus(n, 4), at + 8 * s, 5)
        low = tl.load(scales + 2 * s).to(tl.int32) >> (4 * h)
        high = tl.load(scales + 8 + 2 * (s % 2)).to(tl.int32) >> (2 * (2 * h + s // 2))
        scale = ((low & 15) | ((high & 3) << 4)) - 32
        hi += scale * part_hi
        lo += scale * part_lo
    d = half(w + p3 + first * 2 + (block + 0 * (t + h)) * 2, live)
    piece += 0 * (t + h)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * join_planes(all_parts(hi), all_parts(lo))


@triton.jit
def terms_iq4_xs(
    w, first, n_blocks, block, piece, live, q, dx, sums, NB: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    """A part is a sub-block j."""
    p1 = plane(0, n_blocks, 128)
    j = part(8, 0)
    word = tl.load(four(words(w + first * 128) + block * 32 + 4 * j))
    at = four(words(q) + piece * 128 + 8 * j)
    low, high = look_up(word, IQ4[0], IQ4[1], IQ4[2], IQ4[3])
    low_hi, low_lo = plane_dots(low, at, 5)
    high_hi, high_lo = plane_dots(high, at + 4, 5)
    head = words(w + p1 + first * 8) + block * 2
    top = tl.load(head + 0 * j, mask=live, other=0)
    scale = ((tl.load(head + 1 + 0 * j) >> (4 * j)) & 15) | (((top >> (16 + 2 * j)) & 3) << 4)
    hi = all_parts((scale - 32) * (low_hi + high_hi))
    lo = all_parts((scale - 32) * (low_lo + high_lo))
    return (low_half(top) * tl.load(dx + piece + 0 * j, mask=live, other=0.0)) * join_planes(hi, lo)
