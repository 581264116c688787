"""Values of eight neighbours in a block, for every type that has a kernel: fp32 [B, C, 8], as ggml decodes them.

A function takes, for each field of its type (kernels.layout), pointers `f0`... to it in each block [B, 1, 1];
`c` [1, C, 1], the number of the eight within the block, and `i` [1, 1, 8], 0 to 7 (or some of them); and the type's
table. What a block or a run of eight has in common is worked out on the narrow shapes, once for all eight. Bytes are
loaded one by one in the text; neighbours become wide loads where Triton knows how they are aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["eight_values"]


@triton.jit
def u8(pointer):
    return tl.load(pointer).to(tl.int32)


@triton.jit
def s8(pointer):
    return tl.load(pointer.to(tl.pointer_type(tl.int8))).to(tl.int32)


@triton.jit
def f16(pointer):
    return tl.load(pointer.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def u16(pointer):
    return tl.load(pointer.to(tl.pointer_type(tl.int16))).to(tl.int32) & 0xFFFF


@triton.jit
def u32(pointer, HALVES: tl.constexpr):
    """A word, from two halves where it may start at any even byte."""
    if HALVES:
        return u16(pointer) | (u16(pointer + 2) << 16)
    else:
        return tl.load(pointer.to(tl.pointer_type(tl.int32)))


# --- blocks of 32 ----------------------------------------------------------------------------------------------------


@triton.jit
def nibbles_32(f0, c, i):
    """Eight nibbles of a block whose byte b holds values b and b + 16."""
    return (u8(f0 + 8 * (c & 1) + i) >> (4 * (c >> 1))) & 15


@triton.jit
def fifth_32(f1, c, i):
    return ((u8(f1 + c) >> i) & 1) << 4


@triton.jit
def fp4(n):
    """Twice the FP4 value. Its bits are those of a float whose exponent is too small by 127; a zero has no sign."""
    bits = ((n & 7) << 22) | ((n & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 + 0.0


@triton.jit
def mxfp4(f0, f1, c, i):
    e = u8(f1)
    bits = tl.where(e < 2, 0x00200000 << e, (e - 1) << 23)  # 2^(e - 128); subnormal below e = 2
    return bits.to(tl.float32, bitcast=True) * fp4(nibbles_32(f0, c, i))


# --- blocks of 256: K ------------------------------------------------------------------------------------------------


@triton.jit
def scales_k4(head, c):
    """Scale and minimum, times their factors, of the 32 values around eight of Q4_K and Q5_K."""
    j = c >> 2
    at = head + 4 + (j & 3)
    a = u8(at)
    b = u8(at + 4)
    top = u8(at + 8)
    sc = tl.where(j < 4, a & 63, (top & 15) | ((a >> 6) << 4))
    mn = tl.where(j < 4, b & 63, (top >> 4) | ((b >> 6) << 4))
    return f16(head) * sc.to(tl.float32), f16(head + 2) * mn.to(tl.float32)


@triton.jit
def q2_k(f0, f1, f2, c, i):
    n = (u8(f0 + 32 * (c >> 4) + 8 * (c & 3) + i) >> (2 * ((c >> 2) & 3))) & 3
    s = u8(f1 + (c >> 1))
    d = f16(f2) * (s & 15).to(tl.float32)
    return d * n.to(tl.float32) - f16(f2 + 2) * (s >> 4).to(tl.float32)


@triton.jit
def q3_k(f0, f1, f2, f3, c, i):
    low = (u8(f0 + 32 * (c >> 4) + 8 * (c & 3) + i) >> (2 * ((c >> 2) & 3))) & 3
    n = low + (((u8(f1 + 8 * (c & 3) + i) >> (c >> 2)) & 1) << 2) - 4
    j = c >> 1
    s = ((u8(f2 + (j & 7)) >> (4 * (j >> 3))) & 15) | (((u8(f2 + 8 + (j & 3)) >> (2 * (j >> 2))) & 3) << 4)
    return (f16(f3) * (s - 32).to(tl.float32)) * n.to(tl.float32)


@triton.jit
def q4_k(f0, c, i):
    d, m = scales_k4(f0, c)
    n = (u8(f0 + 16 + 32 * (c >> 3) + 8 * (c & 3) + i) >> (4 * ((c >> 2) & 1))) & 15
    return d * n.to(tl.float32) - m


@triton.jit
def q5_k(f0, c, i):
    d, m = scales_k4(f0, c)
    n = (u8(f0 + 48 + 32 * (c >> 3) + 8 * (c & 3) + i) >> (4 * ((c >> 2) & 1))) & 15
    n += ((u8(f0 + 16 + 8 * (c & 3) + i) >> (c >> 2)) & 1) << 4
    return d * n.to(tl.float32) - m


@triton.jit
def q6_k(f0, f1, f2, f3, c, i):
    h = c >> 4
    low = (u8(f0 + 64 * h + 8 * (c & 7) + i) >> (4 * ((c >> 3) & 1))) & 15
    high = (u8(f1 + 32 * h + 8 * (c & 3) + i) >> (2 * ((c >> 2) & 3))) & 3
    return (f16(f3) * s8(f2 + (c >> 1)).to(tl.float32)) * (low + (high << 4) - 32).to(tl.float32)


@triton.jit
def iq4_xs(f0, f1, c, i, table):
    j = c >> 2
    n = (u8(f0 + 16 * j + 8 * (c & 1) + i) >> (4 * ((c >> 1) & 1))) & 15
    s = ((u8(f1 + 4 + (j >> 1)) >> (4 * (j & 1))) & 15) | (((u16(f1 + 2) >> (2 * j)) & 3) << 4)
    return (f16(f1) * (s - 32).to(tl.float32)) * tl.load(table + n).to(tl.float32)


# --- blocks of 256: IQ2, IQ3 -----------------------------------------------------------------------------------------


@triton.jit
def eight_signs(seven):
    """The eighth bit makes the number of set bits even."""
    x = seven ^ (seven >> 4)
    x = x ^ (x >> 2)
    x = (x ^ (x >> 1)) & 1
    return seven | (x << 7)


@triton.jit
def signed(table, at, signs, d, i):
    """d times the magnitudes in the bytes of two words of the table, the one for i and so on at `at` [.., 8]."""
    magnitude = (tl.load(table + at) >> (8 * (i & 3))) & 255
    return d * tl.where(((signs >> i) & 1) != 0, -magnitude, magnitude).to(tl.float32)


@triton.jit
def odd(s):
    return (2 * s + 1).to(tl.float32)


@triton.jit
def iq2_xxs(f0, f1, c, i, table, HALVES: tl.constexpr):
    code = u8(f0 + 8 * (c >> 2) + (c & 3))
    tail = u32(f0 + 8 * (c >> 2) + 4, HALVES)
    signs = eight_signs((tail >> (7 * (c & 3))) & 127)
    d = (f16(f1) * 0.125) * odd((tail >> 28) & 15)
    return signed(table, 2 * code + (i >> 2), signs, d, i)


@triton.jit
def iq2_xs(f0, f1, f2, c, i, table):
    short = u16(f0 + 2 * c)
    d = (f16(f2) * 0.125) * odd((u8(f1 + (c >> 2)) >> (4 * ((c >> 1) & 1))) & 15)
    return signed(table, 2 * (short & 511) + (i >> 2), eight_signs(short >> 9), d, i)


@triton.jit
def iq2_s(f0, f1, f2, f3, f4, c, i, table):
    code = u8(f0 + c) | (((u8(f2 + (c >> 2)) >> (2 * (c & 3))) & 3) << 8)
    d = (f16(f4) * 0.125) * odd((u8(f3 + (c >> 2)) >> (4 * ((c >> 1) & 1))) & 15)
    return signed(table, 2 * code + (i >> 2), u8(f1 + c), d, i)


@triton.jit
def iq3_xxs(f0, f1, f2, c, i, table, HALVES: tl.constexpr):
    code = u8(f0 + 2 * c + (i >> 2))
    tail = u32(f1 + 4 * (c >> 2), HALVES)
    signs = eight_signs((tail >> (7 * (c & 3))) & 127)
    d = (f16(f2) * 0.25) * odd((tail >> 28) & 15)
    return signed(table, code, signs, d, i)


@triton.jit
def iq3_s(f0, f1, f2, f3, f4, c, i, table):
    high = u8(f2 + (c >> 2)) >> (2 * (c & 3))
    code = u8(f0 + 2 * c + (i >> 2)) | (((high >> (i >> 2)) & 1) << 8)
    d = f16(f4) * odd((u8(f3 + (c >> 3)) >> (4 * ((c >> 2) & 1))) & 15)
    return signed(table, code, u8(f1 + c), d, i)


# --- types without an integer form -----------------------------------------------------------------------------------


@triton.jit
def iq1(code, is_low, d, s, i, table):
    """Eight of -1, 0, 1, all an eighth higher or lower, times d times an odd integer."""
    n = (tl.load(table + code) >> (2 * i)) & 3
    return (d * odd(s & 7)) * (n.to(tl.float32) + tl.where(is_low, -1.125, -0.875))


@triton.jit
def iq1_s(f0, f1, f2, c, i, table):
    high = u16(f1 + 2 * (c >> 2))
    code = u8(f0 + c) | (((high >> (3 * (c & 3))) & 7) << 8)
    return iq1(code, (high & 0x8000) != 0, f16(f2), high >> 12, i, table)


@triton.jit
def iq1_m(f0, c, i, table):
    """The factor's 16 bits are the top nibbles of the four words of scales."""
    bits = u16(f0 + 48) >> 12
    for k in tl.static_range(1, 4):
        bits |= (u16(f0 + 48 + 2 * k) >> 12) << (4 * k)
    d = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = u8(f0 + 32 + (c >> 1)) >> (4 * (c & 1))
    s = u16(f0 + 48 + 2 * (c >> 3)) >> (3 * ((c >> 1) & 3))
    return iq1(u8(f0 + c) | ((high & 7) << 8), (high & 8) != 0, d, s, i, table)


@triton.jit
def less_one(n, d):
    return (n - 1).to(tl.float32) * d


@triton.jit
def tq1_0(f0, f1, c, i):
    """Five values in a byte, as the digits of a fraction to the base 3 (32 bytes, then 16), or four (the last 4)."""
    late = c - 20
    last = 2 * (c - 30) + (i >> 2)
    at = tl.where(c < 20, 8 * (c & 3) + i, tl.where(c < 30, 32 + 8 * (late & 1) + i, 48 + (i & 3)))
    digit = tl.where(c < 20, c >> 2, tl.where(c < 30, late >> 1, last))
    powers = tl.full([1, 1, 1], 0x1B090301, tl.int32)
    power = tl.where(digit == 4, 81, (powers >> (8 * (digit & 3))) & 255)
    return less_one((((u8(f0 + at) * power) & 255) * 3) >> 8, f16(f1))


@triton.jit
def tq2_0(f0, f1, c, i):
    return less_one((u8(f0 + 32 * (c >> 4) + 8 * (c & 3) + i) >> (2 * ((c >> 2) & 3))) & 3, f16(f1))


@triton.jit
def nvfp4(f0, c, i):
    """A scale for 16 values: four bits of exponent, three of fraction, halved; of 0x7F it is 0."""
    e = u8(f0 + (c >> 1))
    fraction = (e & 7).to(tl.float32) * 0.0009765625  # 2^-10
    normal = (((e & 0x7F) << 20) + (119 << 23)).to(tl.float32, bitcast=True)
    d = tl.where((e & 0x78) == 0, fraction, tl.where(e == 0x7F, 0.0, normal))
    return fp4((u8(f0 + 4 + 8 * (c >> 1) + i) >> (4 * (c & 1))) & 15) * d


@triton.jit
def q1_0(f0, f1, c, i):
    d = f16(f1)
    return tl.where(((u8(f0 + c) >> i) & 1) != 0, d, -d)


@triton.jit
def q2_0(f0, f1, c, i):
    return less_one((u8(f0 + 2 * c + (i >> 2)) >> (2 * (i & 3))) & 3, f16(f1))


# --- all -------------------------------------------------------------------------------------------------------------


@triton.jit
def eight_values(TYPE: tl.constexpr, f0, f1, f2, f3, f4, c, i, table, HALVES: tl.constexpr):
    """Types by ggml's numbers. `HALVES`: 32-bit words may start at any even byte, as in the file's form."""
    if TYPE == 2:  # Q4_0
        return f16(f1) * (nibbles_32(f0, c, i) - 8).to(tl.float32)
    elif TYPE == 3:  # Q4_1
        return f16(f1) * nibbles_32(f0, c, i).to(tl.float32) + f16(f1 + 2)
    elif TYPE == 6:  # Q5_0
        return f16(f2) * (nibbles_32(f0, c, i) + fifth_32(f1, c, i) - 16).to(tl.float32)
    elif TYPE == 7:  # Q5_1
        return f16(f2) * (nibbles_32(f0, c, i) + fifth_32(f1, c, i)).to(tl.float32) + f16(f2 + 2)
    elif TYPE == 8:  # Q8_0
        return f16(f1) * s8(f0 + 8 * c + i).to(tl.float32)
    elif TYPE == 10:  # Q2_K
        return q2_k(f0, f1, f2, c, i)
    elif TYPE == 11:  # Q3_K
        return q3_k(f0, f1, f2, f3, c, i)
    elif TYPE == 12:  # Q4_K
        return q4_k(f0, c, i)
    elif TYPE == 13:  # Q5_K
        return q5_k(f0, c, i)
    elif TYPE == 14:  # Q6_K
        return q6_k(f0, f1, f2, f3, c, i)
    elif TYPE == 16:  # IQ2_XXS
        return iq2_xxs(f0, f1, c, i, table, HALVES)
    elif TYPE == 17:  # IQ2_XS
        return iq2_xs(f0, f1, f2, c, i, table)
    elif TYPE == 18:  # IQ3_XXS
        return iq3_xxs(f0, f1, f2, c, i, table, HALVES)
    elif TYPE == 19:  # IQ1_S
        return iq1_s(f0, f1, f2, c, i, table)
    elif TYPE == 20:  # IQ4_NL
        return f16(f1) * tl.load(table + nibbles_32(f0, c, i)).to(tl.float32)
    elif TYPE == 21:  # IQ3_S
        return iq3_s(f0, f1, f2, f3, f4, c, i, table)
    elif TYPE == 22:  # IQ2_S
        return iq2_s(f0, f1, f2, f3, f4, c, i, table)
    elif TYPE == 23:  # IQ4_XS
        return iq4_xs(f0, f1, c, i, table)
    elif TYPE == 29:  # IQ1_M
        return iq1_m(f0, c, i, table)
    elif TYPE == 34:  # TQ1_0
        return tq1_0(f0, f1, c, i)
    elif TYPE == 35:  # TQ2_0
        return tq2_0(f0, f1, c, i)
    elif TYPE == 39:  # MXFP4
        return mxfp4(f0, f1, c, i)
    elif TYPE == 40:  # NVFP4
        return nvfp4(f0, c, i)
    elif TYPE == 41:  # Q1_0
        return q1_0(f0, f1, c, i)
    else:
        tl.static_assert(TYPE == 42)  # Q2_0
        return q2_0(f0, f1, c, i)
