"""Terms of the types with blocks of 32 values (docs/numerics.md, section 3) for a tile of blocks:
fp32 [1, L, G, R, T, C].

Arguments as in matvec_k; a block has no parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.launch import wait
from freetoken.kernels.matvec_tiles import four, half, high_half, low_half, plane, plane_dots, words
from freetoken.kernels.packed import look_up, spread
from freetoken.kernels.tables import IQ4, MXFP4

__all__ = ["terms_iq4_nl", "terms_mxfp4", "terms_q4_0", "terms_q4_1", "terms_q5_0", "terms_q5_1", "terms_q8_0"]


@triton.jit
def integers_at(q, piece):
    """Where a block's words of the high plane start; `piece` counts blocks of 32."""
    return four(words(q) + (piece >> 3) * 128 + (piece & 7) * 8)


@triton.jit
def nibble_words(w, first, block):
    """The four words [1, L, G, R, 1, C, 4] of a block's nibbles."""
    return tl.load(four(words(w + first * 16) + block * 4))


@triton.jit
def block_sum(low, high, q, piece):
    """sum n * a: words low and high are the integers of a block's first and second half."""
    at = integers_at(q, piece)
    hi, lo = plane_dots(low, at, 0, 0)
    hi, lo = plane_dots(high, at + 4, hi, lo)
    return tl.sum(256 * hi + lo, axis=6)


@triton.jit
def with_fifth(word, fifth):
    """The integers of both halves from nibbles and a block's word of fifth bits."""
    fifth = tl.expand_dims(fifth, 6) >> (4 * tl.arange(0, 4)[None, None, None, None, None, None, :])
    low = (word & 0x0F0F0F0F) | (spread(fifth) << 4)
    return low, ((word >> 4) & 0x0F0F0F0F) | (spread(fifth >> 16) << 4)


@triton.jit
def term(d, dx, piece, live, total):
    return (d * tl.load(dx + piece, mask=live, other=0.0)) * total.to(tl.float32)


@triton.jit
def term_with_m(factors, live, dx, sums, piece, total):
    """(d*dx)*F + m*sx, the factors d and m in one word."""
    pair = tl.load(factors, mask=live, other=0)
    scale = tl.load(dx + piece, mask=live, other=0.0)
    sx = scale * tl.load(sums + piece).to(tl.float32)
    return (low_half(pair) * scale) * total.to(tl.float32) + high_half(pair) * sx


@triton.jit
def terms_q8_0(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 32)
    at = four(words(w + first * 32) + block * 8)
    low, high = tl.load(at), tl.load(at + 4)
    d = half(w + p1 + first * 2 + block * 2, live)
    wait(WAITS)
    total = block_sum(low, high, q, piece)
    return term(d, dx, piece, live, total)


@triton.jit
def terms_q4_0(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    d = half(w + p1 + first * 2 + block * 2, live)
    wait(WAITS)
    total = block_sum(word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F, q, piece) - 8 * tl.load(sums + piece)
    return term(d, dx, piece, live, total)


@triton.jit
def terms_q4_1(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    wait(WAITS)
    total = block_sum(word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F, q, piece)
    return term_with_m(words(w + p1 + first * 4) + block, live, dx, sums, piece, total)


@triton.jit
def terms_q5_0(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    low, high = with_fifth(nibble_words(w, first, block), tl.load(words(w + p1 + first * 4) + block))
    d = half(w + p2 + first * 2 + block * 2, live)
    wait(WAITS)
    total = block_sum(low, high, q, piece) - 16 * tl.load(sums + piece)
    return term(d, dx, piece, live, total)


@triton.jit
def terms_q5_1(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    p2 = plane(p1, n_blocks, 4)
    low, high = with_fifth(nibble_words(w, first, block), tl.load(words(w + p1 + first * 4) + block))
    wait(WAITS)
    total = block_sum(low, high, q, piece)
    return term_with_m(words(w + p2 + first * 4) + block, live, dx, sums, piece, total)


@triton.jit
def terms_mxfp4(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    e = tl.load(w + p1 + first + block).to(tl.int32)
    wait(WAITS)
    low, high = look_up(word, MXFP4[0], MXFP4[1], MXFP4[2], MXFP4[3])
    total = block_sum(low, high, q, piece)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^(e - 128); subnormal below e = 2
    return term(tl.where(live, bits, 0).to(tl.float32, bitcast=True), dx, piece, live, total)


@triton.jit
def terms_iq4_nl(w, first, n_blocks, block, piece, live, q, dx, sums, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 16)
    word = nibble_words(w, first, block)
    d = half(w + p1 + first * 2 + block * 2, live)
    wait(WAITS)
    low, high = look_up(word, IQ4[0], IQ4[1], IQ4[2], IQ4[3])
    total = block_sum(low, high, q, piece)
    return term(d, dx, piece, live, total)
