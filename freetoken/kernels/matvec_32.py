"""Terms of the types with blocks of 32 values (docs/numerics.md, section 3) for a tile of C times eight blocks:
fp32 [P0, 1, 8, C, R, T], equal over the parts P0 of a block (Q8_0 has two).

Arguments as in matvec_k, with the axes 8 and C in place of NB: a lane of the law is one of the eight. Sums are of the
carried integers a, which int32 holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.matvec_tiles import byte, half, high_half, low_half, plane, signed_byte, words

__all__ = ["terms_iq4_nl", "terms_mxfp4", "terms_q4_0", "terms_q4_1", "terms_q5_0", "terms_q5_1", "terms_q8_0"]


@triton.jit
def integers_at(q, piece):
    """Where a block's integers of run 0 start; the block's number counts blocks of 32."""
    return q + (piece >> 3) * 256 + (piece & 7) * 8


@triton.jit
def four(x):
    """Places of four words from x [..] on: [.., 4]."""
    return tl.expand_dims(x, 6) + tl.arange(0, 4)[None, None, None, None, None, None, :]


@triton.jit
def nibble_words(w, first, block):
    """The four words [1, 1, 8, C, R, 1, 4] of a block's nibbles."""
    return tl.load(four(words(w + first * 16) + block * 4))


@triton.jit
def fifth_bits(w, first, block):
    """Bits 4i and on of a block's fifth bits: [1, 1, 8, C, R, 1, 4]."""
    i = tl.arange(0, 4)[None, None, None, None, None, None, :]
    return tl.load(words(w + first * 4) + tl.expand_dims(block, 6) + 0 * i) >> (4 * i)


@triton.jit
def nibble_sum(
    word,
    fifth,
    q,
    piece,
    BIAS: tl.constexpr,
    HAS_FIFTH: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
):
    """sum (n - BIAS) * a, n of nibbles and fifth bits: int32 [1, 1, 8, C, R, T]."""
    at = four(integers_at(q, piece))
    total = tl.zeros([1, 1, 8, C, R, T, 4], tl.int32)
    n0 = word & 0x0F0F0F0F
    n1 = (word >> 4) & 0x0F0F0F0F
    for b in tl.static_range(4):
        low = byte(n0, b)
        high = byte(n1, b)
        if HAS_FIFTH:
            low |= ((fifth >> b) & 1) << 4
            high |= ((fifth >> (16 + b)) & 1) << 4
        total += (low - BIAS) * tl.load(at + 64 * b)
        total += (high - BIAS) * tl.load(at + 64 * b + 4)
    return tl.sum(total, axis=6)


@triton.jit
def term_with_m(factors, live, dx, sums, piece, total):
    """(d*dx)*F + m*sx, the factors d and m in one word."""
    pair = tl.load(factors, mask=live, other=0)
    scale = tl.load(dx + piece, mask=live, other=0.0)
    sx = scale * tl.load(sums + piece).to(tl.float32)
    return (low_half(pair) * scale) * total.to(tl.float32) + high_half(pair) * sx


@triton.jit
def terms_q8_0(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 32)
    t = tl.arange(0, 2)[:, None, None, None, None, None]
    word = tl.load(four(words(w + first * 32) + block * 8 + 4 * t))
    at = four(integers_at(q, piece) + 4 * t)
    total = tl.zeros([2, 1, 8, C, R, T, 4], tl.int32)
    for b in tl.static_range(4):
        total += signed_byte(word, b) * tl.load(at + 64 * b)
    d = half(w + p1 + first * 2 + (block + 0 * t) * 2, live)
    return (d * tl.load(dx + piece + 0 * t, mask=live, other=0.0)) * tl.sum(
        tl.sum(total, axis=6), axis=0, keep_dims=True
    ).to(tl.float32)


@triton.jit
def terms_q4_0(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    total = nibble_sum(word, word, q, piece, 8, False, C, R, T)
    d = half(w + p1 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_q4_1(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    total = nibble_sum(word, word, q, piece, 0, False, C, R, T)
    return term_with_m(words(w + p1 + first * 4) + block, live, dx, sums, piece, total)


@triton.jit
def terms_q5_0(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    total = nibble_sum(nibble_words(w, first, block), fifth_bits(w + p1, first, block), q, piece, 16, True, C, R, T)
    d = half(w + p2 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_q5_1(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    total = nibble_sum(nibble_words(w, first, block), fifth_bits(w + p1, first, block), q, piece, 0, True, C, R, T)
    return term_with_m(words(w + p2 + first * 4) + block, live, dx, sums, piece, total)


@triton.jit
def terms_mxfp4(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    """The eight magnitudes stand in the nibbles of one constant; bit 3 is the sign."""
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    at = four(integers_at(q, piece))
    magnitudes = tl.full([1], -0x379BCDF0, tl.int32)  # 0xC8643210
    total = tl.zeros([1, 1, 8, C, R, T, 4], tl.int32)
    for b in tl.static_range(4):
        for side in tl.static_range(2):
            nibble = word >> (8 * b + 4 * side)
            magnitude = (magnitudes >> ((nibble & 7) << 2)) & 15
            sign = (nibble << 28) >> 31
            total += ((magnitude ^ sign) - sign) * tl.load(at + 64 * b + 4 * side)
    e = tl.load(w + p1 + first + block).to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^(e - 128); subnormal below e = 2
    d = tl.where(live, bits, 0).to(tl.float32, bitcast=True)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * tl.sum(total, axis=6).to(tl.float32)


@triton.jit
def terms_iq4_nl(
    w, first, n_blocks, block, piece, live, q, dx, table, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    at = four(integers_at(q, piece))
    total = tl.zeros([1, 1, 8, C, R, T, 4], tl.int32)
    for b in tl.static_range(4):
        for side in tl.static_range(2):
            n = tl.load(table + ((word >> (8 * b + 4 * side)) & 15))
            total += n * tl.load(at + 64 * b + 4 * side)
    d = half(w + p1 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * tl.sum(total, axis=6).to(tl.float32)
