"""Terms of the IQ2 and IQ3 types (docs/numerics.md, section 3) for a tile of blocks: fp32 [4, L, G, R, T, C].

Arguments as in matvec_k; `table` holds the type's code words, four magnitudes a word (tables.py). A part takes two
groups of 32 values, each in halves: the last axis has a half's four runs of four values (a longer one would not stay
within a thread).
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.launch import wait
from freetoken.kernels.matvec_tiles import all_parts, half, join_planes, part, plane, plane_dots, words
from freetoken.kernels.packed import negated

__all__ = ["terms_iq2_s", "terms_iq2_xs", "terms_iq2_xxs", "terms_iq3_s", "terms_iq3_xxs"]


@triton.jit
def runs():
    """Numbers of a half's runs along the last axis."""
    return tl.arange(0, 4)[None, None, None, None, None, None, :]


@triton.jit
def wide(x):
    return tl.expand_dims(x, 6)


@triton.jit
def eight_signs(seven):
    """The eighth bit makes the number of set bits even."""
    x = seven ^ (seven >> 4)
    x = x ^ (x >> 2)
    x = (x ^ (x >> 1)) & 1
    return seven | (x << 7)


@triton.jit
def run_sums(word, signs, q, piece, first_run, r, s):
    """Planes' sums of the runs r from `first_run` on, times the scale of s: magnitudes in the bytes of `word`, signs in
    its four bits."""
    at = wide(words(q) + piece * 128 + first_run) + r
    hi, lo = plane_dots(negated(word, signs), at, 0, 0)
    scale = 2 * s + 1
    return scale * tl.sum(hi, axis=6), scale * tl.sum(lo, axis=6)


@triton.jit
def term(d, live, dx, piece, hi, lo):
    scale = tl.load(dx + piece + 0 * part(4), mask=live, other=0.0)
    return (d * scale) * join_planes(all_parts(hi), all_parts(lo))


@triton.jit
def terms_iq2_xxs(w, first, n_blocks, block, piece, live, q, dx, table, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    wait(WAITS)
    r = runs()
    hi, lo = 0, 0
    for i in tl.static_range(2):
        group = 2 * part(4) + i
        start = words(w + first * 64) + block * 16 + 2 * group
        codes = tl.load(start)
        tail = tl.load(start + 1)
        for h in tl.static_range(2):
            word = tl.load(table + 2 * ((wide(codes) >> (16 * h + 8 * (r >> 1))) & 255) + (r & 1))
            signs = eight_signs((wide(tail) >> (14 * h + 7 * (r >> 1))) & 127) >> (4 * (r & 1))
            part_hi, part_lo = run_sums(word, signs, q, piece, 8 * group + 4 * h, r, (tail >> 28) & 15)
            hi += part_hi
            lo += part_lo
    d = half(w + p1 + first * 2 + (block + 0 * part(4)) * 2, live) * 0.125
    return term(d, live, dx, piece, hi, lo)


@triton.jit
def terms_iq2_xs(w, first, n_blocks, block, piece, live, q, dx, table, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 8)
    wait(WAITS)
    r = runs()
    hi, lo = 0, 0
    for i in tl.static_range(2):
        group = 2 * part(4) + i
        s = tl.load(w + p1 + first * 8 + block * 8 + group).to(tl.int32)
        for h in tl.static_range(2):
            short = wide(tl.load(words(w + first * 64) + block * 16 + 2 * group + h)) >> (16 * (r >> 1))
            word = tl.load(table + 2 * (short & 511) + (r & 1))
            signs = eight_signs((short >> 9) & 127) >> (4 * (r & 1))
            part_hi, part_lo = run_sums(word, signs, q, piece, 8 * group + 4 * h, r, (s >> (4 * h)) & 15)
            hi += part_hi
            lo += part_lo
    d = half(w + p2 + first * 2 + (block + 0 * part(4)) * 2, live) * 0.125
    return term(d, live, dx, piece, hi, lo)


@triton.jit
def terms_iq2_s(w, first, n_blocks, block, piece, live, q, dx, table, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 32)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 8)
    p4 = plane(p3, n_blocks, 8)
    wait(WAITS)
    r = runs()
    hi, lo = 0, 0
    for i in tl.static_range(2):
        group = 2 * part(4) + i
        codes = wide(tl.load(words(w + first * 32) + block * 8 + group))
        signs = wide(tl.load(words(w + p1 + first * 32) + block * 8 + group))
        high = wide(tl.load(w + p2 + first * 8 + block * 8 + group).to(tl.int32))
        s = tl.load(w + p3 + first * 8 + block * 8 + group).to(tl.int32)
        for h in tl.static_range(2):
            code = ((codes >> (16 * h + 8 * (r >> 1))) & 255) | (((high >> (4 * h + 2 * (r >> 1))) & 3) << 8)
            word = tl.load(table + 2 * code + (r & 1))
            part_hi, part_lo = run_sums(
                word, signs >> (16 * h + 4 * r), q, piece, 8 * group + 4 * h, r, (s >> (4 * h)) & 15
            )
            hi += part_hi
            lo += part_lo
    d = half(w + p4 + first * 2 + (block + 0 * part(4)) * 2, live) * 0.125
    return term(d, live, dx, piece, hi, lo)


@triton.jit
def terms_iq3_xxs(w, first, n_blocks, block, piece, live, q, dx, table, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    wait(WAITS)
    r = runs()
    hi, lo = 0, 0
    for i in tl.static_range(2):
        group = 2 * part(4) + i
        start = words(w + first * 64) + block * 16 + 2 * group
        tail = tl.load(words(w + p1 + first * 32) + block * 8 + group)
        for h in tl.static_range(2):
            word = tl.load(table + ((wide(tl.load(start + h)) >> (8 * r)) & 255))
            signs = eight_signs((wide(tail) >> (14 * h + 7 * (r >> 1))) & 127) >> (4 * (r & 1))
            part_hi, part_lo = run_sums(word, signs, q, piece, 8 * group + 4 * h, r, (tail >> 28) & 15)
            hi += part_hi
            lo += part_lo
    d = half(w + p2 + first * 2 + (block + 0 * part(4)) * 2, live) * 0.25
    return term(d, live, dx, piece, hi, lo)


@triton.jit
def terms_iq3_s(w, first, n_blocks, block, piece, live, q, dx, table, WAITS: tl.constexpr):
    p1 = plane(0, n_blocks, 64)
    p2 = plane(p1, n_blocks, 32)
    p3 = plane(p2, n_blocks, 8)
    p4 = plane(p3, n_blocks, 4)
    wait(WAITS)
    r = runs()
    s = tl.load(w + p3 + first * 4 + block * 4 + part(4)).to(tl.int32)
    hi, lo = 0, 0
    for i in tl.static_range(2):
        group = 2 * part(4) + i
        start = words(w + first * 64) + block * 16 + 2 * group
        high = wide(tl.load(w + p2 + first * 8 + block * 8 + group).to(tl.int32)) >> r
        signs = wide(tl.load(words(w + p1 + first * 32) + block * 8 + group)) >> (4 * r)
        for h in tl.static_range(2):
            code = (wide(tl.load(start + h)) >> (8 * r)) & 255
            word = tl.load(table + (code | (((high >> (4 * h)) & 1) << 8)))
            part_hi, part_lo = run_sums(word, signs >> (16 * h), q, piece, 8 * group + 4 * h, r, (s >> (4 * i)) & 15)
            hi += part_hi
            lo += part_lo
    d = half(w + p4 + first * 2 + (block + 0 * part(4)) * 2, live)
    return term(d, live, dx, piece, hi, lo)
