"""Terms of the types with blocks of 32 values (docs/numerics.md, section 3) for a tile of C times eight blocks:
fp32 [P0, 1, 8, C, R, T], equal over the parts P0 of a block (Q8_0 has two).

Arguments as in matvec_k, with the axes 8 and C in place of NB: a lane of the law is one of the eight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.matvec_tiles import half, high_half, low_half, plane, plane_dots, words
from freetoken.kernels.packed import look_up, spread
from freetoken.kernels.tables import IQ4, MXFP4

__all__ = ["terms_iq4_nl", "terms_mxfp4", "terms_q4_0", "terms_q4_1", "terms_q5_0", "terms_q5_1", "terms_q8_0"]


@triton.jit
def integers_at(q, piece):
    """Where a block's words of the high plane start; `piece` counts blocks of 32."""
    return words(q) + (piece >> 3) * 128 + (piece & 7) * 8


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
def nibble_sum(low, high, q, piece):
    """sum n * a: words low and high [1, 1, 8, C, R, 1, 4] are the integers of a block's first and second half."""
    at = four(integers_at(q, piece))
    low_hi, low_lo = plane_dots(low, at, 6)
    high_hi, high_lo = plane_dots(high, at + 4, 6)
    return 256 * (low_hi + high_hi) + (low_lo + high_lo)


@triton.jit
def with_fifth(word, fifth):
    """The integers of both halves from nibbles and fifth bits."""
    low = (word & 0x0F0F0F0F) | (spread(fifth) << 4)
    return low, ((word >> 4) & 0x0F0F0F0F) | (spread(fifth >> 16) << 4)


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
    hi, lo = plane_dots(
        tl.load(four(words(w + first * 32) + block * 8 + 4 * t)), four(integers_at(q, piece) + 4 * t), 6
    )
    total = tl.sum(256 * hi + lo, axis=0, keep_dims=True)
    d = half(w + p1 + first * 2 + (block + 0 * t) * 2, live)
    return (d * tl.load(dx + piece + 0 * t, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_q4_0(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    total = nibble_sum(word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F, q, piece) - 8 * tl.load(sums + piece)
    d = half(w + p1 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_q4_1(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    total = nibble_sum(word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F, q, piece)
    return term_with_m(words(w + p1 + first * 4) + block, live, dx, sums, piece, total)


@triton.jit
def terms_q5_0(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    low, high = with_fifth(nibble_words(w, first, block), fifth_bits(w + p1, first, block))
    total = nibble_sum(low, high, q, piece) - 16 * tl.load(sums + piece)
    d = half(w + p2 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_q5_1(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    low, high = with_fifth(nibble_words(w, first, block), fifth_bits(w + p1, first, block))
    return term_with_m(words(w + p2 + first * 4) + block, live, dx, sums, piece, nibble_sum(low, high, q, piece))


@triton.jit
def terms_mxfp4(w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    low, high = look_up(nibble_words(w, first, block), MXFP4[0], MXFP4[1], MXFP4[2], MXFP4[3])
    total = nibble_sum(low, high, q, piece)
    e = tl.load(w + p1 + first + block).to(tl.int32)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^(e - 128); subnormal below e = 2
    d = tl.where(live, bits, 0).to(tl.float32, bitcast=True)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def terms_iq4_nl(
    w, first, n_blocks, block, piece, live, q, dx, sums, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr
):
    p1 = plane(0, n_blocks, 16)
    low, high = look_up(nibble_words(w, first, block), IQ4[0], IQ4[1], IQ4[2], IQ4[3])
    total = nibble_sum(low, high, q, piece)
    d = half(w + p1 + first * 2 + block * 2, live)
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)
