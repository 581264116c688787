"""Terms of Q2_K to Q6_K and IQ4_XS (docs/numerics.md, section 3) for a tile of blocks: fp32 [P, L, G, R, T, C].

A term is there once for each of the P parts of its block. Every function takes the matrix's bytes `w`, the number
`first` of the program's first block, the matrix's `n_blocks`, the tile's `block` [1, L, G, R, 1, C], `piece` [1, L, G,
1, T, C] and `live` [1, L, 1, 1, 1, C], and the activation. A part takes its bytes 16 at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.launch import wait
from freetoken.kernels.matvec_tiles import (
    all_parts,
    element,
    four,
    half,
    high_half,
    join_planes,
    low_half,
    part,
    plane,
    plane_dots,
    words,
)
from freetoken.kernels.packed import look_up, minus
from freetoken.kernels.tables import IQ4

__all__ = ["terms_iq4_xs", "terms_q2_k", "terms_q3_k", "terms_q4_k", "terms_q5_k", "terms_q6_k"]


@triton.jit
def signed_byte(word, B: tl.constexpr):
    return (word << (24 - 8 * B)) >> 24


@triton.jit
def byte(word, B: tl.constexpr):
    return (word >> (8 * B)) & 255


@triton.jit
def sum_words(x):
    return tl.sum(x, axis=6)


@triton.jit
def term_k4(head, g, live, low_hi, low_lo, high_hi, high_lo, dx, sums, piece):
    """Terms of Q4_K and Q5_K from the sums of sub-blocks 2g and 2g + 1, and the four words of the block's head."""
    factors = tl.where(live, element(head, 0), 0)
    a = element(head, 1)
    b = element(head, 2)
    c = element(head, 3)
    shift = 16 * (g & 1)
    sc = tl.where(g < 2, a & 0x3F3F3F3F, (c & 0x0F0F0F0F) | ((a >> 2) & 0x30303030)) >> shift
    mn = tl.where(g < 2, b & 0x3F3F3F3F, ((c >> 4) & 0x0F0F0F0F) | ((b >> 2) & 0x30303030)) >> shift
    sixteen = tl.load(four(sums + piece * 16 + 4 * g))
    m = (mn & 255) * (element(sixteen, 0) + element(sixteen, 1))
    m = all_parts(m + ((mn >> 8) & 255) * (element(sixteen, 2) + element(sixteen, 3)))
    hi = all_parts((sc & 255) * sum_words(low_hi) + ((sc >> 8) & 255) * sum_words(high_hi))
    lo = all_parts((sc & 255) * sum_words(low_lo) + ((sc >> 8) & 255) * sum_words(high_lo))
    return term_with_minimum(factors, tl.load(dx + piece + 0 * g, mask=live, other=0.0), hi, lo, m)


@triton.jit
def term_with_minimum(factors, scale, hi, lo, m):
    """(d*dx)*F - (dmin*dx)*f(M), the factors d and dmin in one word."""
    return (low_half(factors) * scale) * join_planes(hi, lo) - (high_half(factors) * scale) * m.to(tl.float32)


@triton.jit
def terms_q4_k(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    g = part(4)
    start = words(w + first * 144) + block * 36 + 0 * g
    at = four(words(q) + piece * 128 + 16 * g)
    word0 = tl.load(four(start + 4 + 8 * g))
    word1 = tl.load(four(start + 8 + 8 * g))
    head = tl.load(four(start))
    wait(WAITS)
    low_hi, low_lo, high_hi, high_lo = 0, 0, 0, 0
    for t in tl.static_range(2):
        word = word0 if t == 0 else word1
        low_hi, low_lo = plane_dots(word & 0x0F0F0F0F, at + 4 * t, low_hi, low_lo)
        high_hi, high_lo = plane_dots((word >> 4) & 0x0F0F0F0F, at + 8 + 4 * t, high_hi, high_lo)
    return term_k4(head, g, live, low_hi, low_lo, high_hi, high_lo, dx, sums, piece)


@triton.jit
def terms_q5_k(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    g = part(4)
    start = words(w + first * 176) + block * 44 + 0 * g
    at = four(words(q) + piece * 128 + 16 * g)
    word0 = tl.load(four(start + 12 + 8 * g))
    word1 = tl.load(four(start + 16 + 8 * g))
    fifth0 = tl.load(four(start + 4))
    fifth1 = tl.load(four(start + 8))
    head = tl.load(four(start))
    wait(WAITS)
    low_hi, low_lo, high_hi, high_lo = 0, 0, 0, 0
    for t in tl.static_range(2):
        word = word0 if t == 0 else word1
        fifth = (fifth0 if t == 0 else fifth1) >> tl.expand_dims(2 * g, 6)
        low = (word & 0x0F0F0F0F) | ((fifth << 4) & 0x10101010)
        high = ((word >> 4) & 0x0F0F0F0F) | ((fifth << 3) & 0x10101010)
        low_hi, low_lo = plane_dots(low, at + 4 * t, low_hi, low_lo)
        high_hi, high_lo = plane_dots(high, at + 8 + 4 * t, high_hi, high_lo)
    return term_k4(head, g, live, low_hi, low_lo, high_hi, high_lo, dx, sums, piece)


@triton.jit
def terms_q6_k(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 128)
    p2 = plane(p1, n_blocks, 64)
    p3 = plane(p2, n_blocks, 16)
    g = part(4)
    at = four(words(q) + piece * 128 + 32 * (g >> 1) + 8 * (g & 1))
    scales = (w + p2 + first * 16).to(tl.pointer_type(tl.int16)) + block * 8 + 4 * (g >> 1) + (g & 1)
    sc0 = tl.load(scales).to(tl.int32)
    sc1 = tl.load(scales + 2).to(tl.int32)
    at_words = four(words(w + first * 128) + block * 32 + 8 * g)
    at_pairs = four(words(w + p1 + first * 64) + block * 16 + 8 * (g >> 1))
    word0 = tl.load(at_words)
    word1 = tl.load(at_words + 4)
    pairs0 = tl.load(at_pairs)
    pairs1 = tl.load(at_pairs + 4)
    d = half(w + p3 + first * 2 + (block + 0 * g) * 2, live)
    wait(WAITS)
    hi, lo = 0, 0
    for t in tl.static_range(2):
        word = word0 if t == 0 else word1
        pairs = (pairs0 if t == 0 else pairs1) >> tl.expand_dims(2 * (g & 1), 6)
        low = minus((word & 0x0F0F0F0F) | ((pairs << 4) & 0x30303030), 32)
        high = minus(((word >> 4) & 0x0F0F0F0F) | (pairs & 0x30303030), 32)
        low_hi, low_lo = plane_dots(low, at + 4 * t, 0, 0)
        high_hi, high_lo = plane_dots(high, at + 16 + 4 * t, 0, 0)
        hi += signed_byte(sc0, t) * sum_words(low_hi) + signed_byte(sc1, t) * sum_words(high_hi)
        lo += signed_byte(sc0, t) * sum_words(low_lo) + signed_byte(sc1, t) * sum_words(high_lo)
    scale = tl.load(dx + piece + 0 * g, mask=live, other=0.0)
    return (d * scale) * join_planes(all_parts(hi), all_parts(lo))


@triton.jit
def terms_q2_k(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 16)
    h = part(2)
    at = four(words(q) + piece * 128 + 32 * h)
    scales = words(w + p1 + first * 16) + block * 4 + 2 * h
    wait(WAITS)
    hi, lo, m = 0, 0, 0
    for t in tl.static_range(2):
        word = tl.load(four(words(w + first * 64) + block * 16 + 8 * h + 4 * t))
        for s in tl.static_range(4):
            dot_hi, dot_lo = plane_dots((word >> (2 * s)) & 0x03030303, at + 8 * s + 4 * t, 0, 0)
            scale = byte(tl.load(scales + s // 2), t + 2 * s % 4)
            hi += (scale & 15) * sum_words(dot_hi)
            lo += (scale & 15) * sum_words(dot_lo)
            m += (scale >> 4) * tl.load(sums + piece * 16 + 8 * h + t + 2 * s)
    factors = tl.load(words(w + p2 + first * 4) + block + 0 * h, mask=live, other=0)
    scale = tl.load(dx + piece + 0 * h, mask=live, other=0.0)
    return term_with_minimum(factors, scale, all_parts(hi), all_parts(lo), all_parts(m))


@triton.jit
def terms_q3_k(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 12)
    h = part(2)
    at = four(words(q) + piece * 128 + 32 * h)
    scales = words(w + p2 + first * 12) + block * 3 + 0 * h
    high_bits = tl.load(scales + 2)
    wait(WAITS)
    hi, lo = 0, 0
    for t in tl.static_range(2):
        word = tl.load(four(words(w + first * 64) + block * 16 + 8 * h + 4 * t))
        third = tl.load(four(words(w + p1 + first * 32) + block * 8 + 4 * t + 0 * h)) >> tl.expand_dims(4 * h, 6)
        for s in tl.static_range(4):
            n = ((word >> (2 * s)) & 0x03030303) | (((third >> s) << 2) & 0x04040404)
            dot_hi, dot_lo = plane_dots(minus(n, 4), at + 8 * s + 4 * t, 0, 0)
            low = byte(tl.load(scales + s // 2), t + 2 * s % 4) >> (4 * h)
            high = byte(high_bits, t + 2 * s % 4) >> (4 * h + s // 2 * 2)
            scale = ((low & 15) | ((high & 3) << 4)) - 32
            hi += scale * sum_words(dot_hi)
            lo += scale * sum_words(dot_lo)
    d = half(w + p3 + first * 2 + (block + 0 * h) * 2, live)
    scale = tl.load(dx + piece + 0 * h, mask=live, other=0.0)
    return (d * scale) * join_planes(all_parts(hi), all_parts(lo))


@triton.jit
def terms_iq4_xs(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    """Two sub-blocks a part."""
    p1 = plane(0, n_blocks, 128)
    g = part(4)
    at = four(words(q) + piece * 128 + 16 * g)
    head = words(w + p1 + first * 8) + block * 2 + 0 * g
    top = tl.load(head, mask=live, other=0)
    low_bits = tl.load(head + 1) >> (8 * g)
    high_bits = top >> (16 + 4 * g)
    at_words = four(words(w + first * 128) + block * 32 + 8 * g)
    word0 = tl.load(at_words)
    word1 = tl.load(at_words + 4)
    wait(WAITS)
    hi, lo = 0, 0
    for i in tl.static_range(2):
        low, high = look_up(word0 if i == 0 else word1, IQ4[0], IQ4[1], IQ4[2], IQ4[3])
        dot_hi, dot_lo = plane_dots(low, at + 8 * i, 0, 0)
        dot_hi, dot_lo = plane_dots(high, at + 8 * i + 4, dot_hi, dot_lo)
        scale = (((low_bits >> (4 * i)) & 15) | (((high_bits >> (2 * i)) & 3) << 4)) - 32
        hi += scale * sum_words(dot_hi)
        lo += scale * sum_words(dot_lo)
    scale = tl.load(dx + piece + 0 * g, mask=live, other=0.0)
    return (low_half(top) * scale) * join_planes(all_parts(hi), all_parts(lo))
