"""Terms of Q2_K to Q6_K and IQ4_XS (docs/numerics.md, section 3) for a tile of blocks: fp32 [T, R, NB].

Every function takes the matrix's bytes `w`, the number `first` of the program's first block, the matrix's `n_blocks`,
the tile's `block`, `piece` and `live` of matvec_tiles, and the activation. A thread's part of a tile is the 16 bytes
that hold 16 consecutive values (or 16 of each field), so that one sub-block's sums stay packed in one int32 as long as
the low plane's sum fits 16 bits: 16 values of up to 15, 8 of up to 32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.matvec_tiles import half, high_half, join_planes, low_half, plane, planes_of, words

__all__ = ["terms_iq4_xs", "terms_q2_k", "terms_q3_k", "terms_q4_k", "terms_q5_k", "terms_q6_k"]


@triton.jit
def axes(g, t):
    """Places of the four words of part (g, t) in a tile [.., G, 2, 4]: the axes g, t and i."""
    return (
        tl.arange(0, g)[None, None, None, :, None, None],
        tl.arange(0, t)[None, None, None, None, :, None],
        tl.arange(0, 4)[None, None, None, None, None, :],
    )


@triton.jit
def pair_planes(packed, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    """Both planes' sums over a part's four words [T, R, NB, 4, 2, 4], where only two words may stay packed."""
    hi, lo = planes_of(tl.sum(tl.reshape(packed, [T, R, NB, 4, 2, 2, 2]), axis=6))
    return tl.sum(hi, axis=5), tl.sum(lo, axis=5)


@triton.jit
def both(x):
    """Sum over the axes g and t."""
    return tl.sum(tl.sum(x, axis=4), axis=3)


@triton.jit
def scales_k4(head, block, WORDS: tl.constexpr):
    """Scales and minimums of sub-blocks 2g and 2g + 1, each [1, R, NB, 4], and the word with d and dmin."""
    g = tl.arange(0, 4)[None, None, None, :]
    at = head + (block * WORDS)[:, :, :, None]
    a = tl.load(at + 1)
    b = tl.load(at + 2)
    c = tl.load(at + 3)
    shift = 16 * (g & 1)
    sc = tl.where(g < 2, a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)) >> shift
    mn = tl.where(g < 2, b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)) >> shift
    return sc & 255, (sc >> 8) & 255, mn & 255, (mn >> 8) & 255


@triton.jit
def minimum_sums(sums, piece, low, high):
    """M of Q4_K and Q5_K."""
    at = sums + (piece * 16)[:, :, :, None] + 4 * tl.arange(0, 4)[None, None, None, :]
    first = tl.load(at) + tl.load(at + 1)
    second = tl.load(at + 2) + tl.load(at + 3)
    return tl.sum(low * first + high * second, axis=3)


@triton.jit
def term_with_minimum(factors, live, dx, piece, hi, lo, m):
    """(d*dx)*F - (dmin*dx)*f(M), the factors d and dmin in one word."""
    pair = tl.load(factors, mask=live, other=0)
    scale = tl.load(dx + piece, mask=live, other=0.0)
    return (low_half(pair) * scale) * join_planes(hi, lo) - (high_half(pair) * scale) * m.to(tl.float32)


@triton.jit
def terms_q4_k(w, first, n_blocks, block, piece, live, q, dx, sums, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    head = words(w + first * 144)
    g, t, i = axes(4, 2)
    word = tl.load(head + (block * 36)[:, :, :, None, None, None] + 4 + 8 * g + 4 * t + i)
    at = q + (piece * 256)[:, :, :, None, None, None] + 16 * g + 4 * t + i
    low = tl.zeros([T, R, NB, 4, 2, 4], tl.int32)
    high = low
    for b in tl.static_range(4):
        low += ((word >> (8 * b)) & 15) * tl.load(at + 64 * b)
        high += ((word >> (8 * b + 4)) & 15) * tl.load(at + 64 * b + 8)
    low_hi, low_lo = planes_of(tl.sum(low, axis=5))
    high_hi, high_lo = planes_of(tl.sum(high, axis=5))
    sc0, sc1, mn0, mn1 = scales_k4(head, block, 36)
    hi = both(sc0[:, :, :, :, None] * low_hi + sc1[:, :, :, :, None] * high_hi)
    lo = both(sc0[:, :, :, :, None] * low_lo + sc1[:, :, :, :, None] * high_lo)
    return term_with_minimum(head + block * 36, live, dx, piece, hi, lo, minimum_sums(sums, piece, mn0, mn1))


@triton.jit
def terms_q5_k(w, first, n_blocks, block, piece, live, q, dx, sums, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    head = words(w + first * 176)
    g, t, i = axes(4, 2)
    start = head + (block * 44)[:, :, :, None, None, None] + 4 * t + i
    word = tl.load(start + 12 + 8 * g)
    fifth = tl.load(start + 4 + 0 * g) >> (2 * g)
    at = q + (piece * 256)[:, :, :, None, None, None] + 16 * g + 4 * t + i
    low = tl.zeros([T, R, NB, 4, 2, 4], tl.int32)
    high = low
    for b in tl.static_range(4):
        n = ((word >> (8 * b)) & 15) | (((fifth >> (8 * b)) & 1) << 4)
        low += n * tl.load(at + 64 * b)
        n = ((word >> (8 * b + 4)) & 15) | (((fifth >> (8 * b + 1)) & 1) << 4)
        high += n * tl.load(at + 64 * b + 8)
    low_hi, low_lo = pair_planes(low, T, R, NB)
    high_hi, high_lo = pair_planes(high, T, R, NB)
    sc0, sc1, mn0, mn1 = scales_k4(head, block, 44)
    hi = both(sc0[:, :, :, :, None] * low_hi + sc1[:, :, :, :, None] * high_hi)
    lo = both(sc0[:, :, :, :, None] * low_lo + sc1[:, :, :, :, None] * high_lo)
    return term_with_minimum(head + block * 44, live, dx, piece, hi, lo, minimum_sums(sums, piece, mn0, mn1))


@triton.jit
def terms_q6_k(w, first, n_blocks, block, piece, live, q, dx, sums, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    p1 = plane(0, n_blocks, 128)
    p2 = plane(p1, n_blocks, 64)
    p3 = plane(p2, n_blocks, 16)
    g, t, i = axes(4, 2)
    wide = block[:, :, :, None, None, None]
    word = tl.load(words(w + first * 128) + wide * 32 + 8 * g + 4 * t + i)
    pairs = tl.load(words(w + p1 + first * 64) + wide * 16 + 8 * (g >> 1) + 4 * t + i) >> (2 * (g & 1))
    at = q + (piece * 256)[:, :, :, None, None, None] + 32 * (g >> 1) + 8 * (g & 1) + 4 * t + i
    low = tl.zeros([T, R, NB, 4, 2, 4], tl.int32)
    high = low
    for b in tl.static_range(4):
        n = ((word >> (8 * b)) & 15) | (((pairs >> (8 * b)) & 3) << 4)
        low += (n - 32) * tl.load(at + 64 * b)
        n = ((word >> (8 * b + 4)) & 15) | (((pairs >> (8 * b + 4)) & 3) << 4)
        high += (n - 32) * tl.load(at + 64 * b + 16)
    low_hi, low_lo = pair_planes(low, T, R, NB)
    high_hi, high_lo = pair_planes(high, T, R, NB)
    scales = (w + p2 + first * 16).to(tl.pointer_type(tl.int8)) + (block * 16)[:, :, :, None, None]
    g = tl.arange(0, 4)[None, None, None, :, None]
    t = tl.arange(0, 2)[None, None, None, None, :]
    j = 8 * (g >> 1) + 2 * (g & 1) + t
    sc0 = tl.load(scales + j).to(tl.int32)
    sc1 = tl.load(scales + j + 4).to(tl.int32)
    d = half(w + p3 + first * 2 + block * 2, live)
    hi = both(sc0 * low_hi + sc1 * high_hi)
    lo = both(sc0 * low_lo + sc1 * high_lo)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * join_planes(hi, lo)


@triton.jit
def terms_q2_k(w, first, n_blocks, block, piece, live, q, dx, sums, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 16)
    h, t, i = axes(2, 2)
    word = tl.load(words(w + first * 64) + (block * 16)[:, :, :, None, None, None] + 8 * h + 4 * t + i)
    at = q + (piece * 256)[:, :, :, None, None, None] + 32 * h + 4 * t + i
    h = tl.arange(0, 2)[None, None, None, :, None]
    t = tl.arange(0, 2)[None, None, None, None, :]
    scales = w + p1 + first * 16 + (block * 16)[:, :, :, None, None] + 8 * h + t
    minimum_at = sums + (piece * 16)[:, :, :, None, None] + 8 * h + t
    hi = tl.zeros([T, R, NB, 2, 2], tl.int32)
    lo = hi
    m = hi
    for s in tl.static_range(4):
        packed = tl.zeros([T, R, NB, 2, 2, 4], tl.int32)
        for b in tl.static_range(4):
            packed += ((word >> (8 * b + 2 * s)) & 3) * tl.load(at + 64 * b + 8 * s)
        part_hi, part_lo = planes_of(tl.sum(packed, axis=5))
        scale = tl.load(scales + 2 * s).to(tl.int32)
        hi += (scale & 15) * part_hi
        lo += (scale & 15) * part_lo
        m += (scale >> 4) * tl.load(minimum_at + 2 * s)
    factors = words(w + p2 + first * 4) + block
    return term_with_minimum(factors, live, dx, piece, both(hi), both(lo), both(m))


@triton.jit
def terms_q3_k(w, first, n_blocks, block, piece, live, q, dx, sums, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 12)
    h, t, i = axes(2, 2)
    wide = block[:, :, :, None, None, None]
    word = tl.load(words(w + first * 64) + wide * 16 + 8 * h + 4 * t + i)
    third = tl.load(words(w + p1 + first * 32) + wide * 8 + 0 * h + 4 * t + i) >> (4 * h)
    at = q + (piece * 256)[:, :, :, None, None, None] + 32 * h + 4 * t + i
    h = tl.arange(0, 2)[None, None, None, :, None]
    t = tl.arange(0, 2)[None, None, None, None, :]
    scales = w + p2 + first * 12 + (block * 12)[:, :, :, None, None] + t
    hi = tl.zeros([T, R, NB, 2, 2], tl.int32)
    lo = hi
    for s in tl.static_range(4):
        packed = tl.zeros([T, R, NB, 2, 2, 4], tl.int32)
        for b in tl.static_range(4):
            n = ((word >> (8 * b + 2 * s)) & 3) | (((third >> (8 * b + s)) & 1) << 2)
            packed += (n - 4) * tl.load(at + 64 * b + 8 * s)
        part_hi, part_lo = planes_of(tl.sum(packed, axis=5))
        low = tl.load(scales + 2 * s + 0 * h).to(tl.int32) >> (4 * h)
        high = tl.load(scales + 8 + 2 * (s % 2) + 0 * h).to(tl.int32) >> (2 * (2 * h + s // 2))
        scale = ((low & 15) | ((high & 3) << 4)) - 32
        hi += scale * part_hi
        lo += scale * part_lo
    d = half(w + p3 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * join_planes(both(hi), both(lo))


@triton.jit
def terms_iq4_xs(
    w, first, n_blocks, block, piece, live, q, dx, table, T: tl.constexpr, R: tl.constexpr, NB: tl.constexpr
):
    """The planes are summed apart: a product of 127 and 127 leaves no room to pack more than two."""
    p1 = plane(0, n_blocks, 128)
    j = tl.arange(0, 8)[None, None, None, :, None]
    i = tl.arange(0, 4)[None, None, None, None, :]
    word = tl.load(words(w + first * 128) + (block * 32)[:, :, :, None, None] + 4 * j + i)
    at = q + (piece * 256)[:, :, :, None, None] + 8 * j + i
    hi = tl.zeros([T, R, NB, 8, 4], tl.int32)
    lo = hi
    for b in tl.static_range(4):
        for side in tl.static_range(2):
            n = tl.load(table + ((word >> (8 * b + 4 * side)) & 15))
            a_hi, a_lo = planes_of(tl.load(at + 64 * b + 4 * side))
            hi += n * a_hi
            lo += n * a_lo
    head = words(w + p1 + first * 8) + block * 2
    top = tl.load(head, mask=live, other=0)
    j = tl.arange(0, 8)[None, None, None, :]
    scale = (tl.load(head + 1)[:, :, :, None] >> (4 * j)) & 15
    scale = (scale | (((top[:, :, :, None] >> (16 + 2 * j)) & 3) << 4)) - 32
    hi = tl.sum(scale * tl.sum(hi, axis=4), axis=3)
    lo = tl.sum(scale * tl.sum(lo, axis=4), axis=3)
    return (low_half(top) * tl.load(dx + piece, mask=live, other=0.0)) * join_planes(hi, lo)
