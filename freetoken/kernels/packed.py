"""Four signed bytes in a word: their products and look-ups, each one instruction on every card since 2016 (sm_61).

Triton has no operation for them, so they are LLVM's intrinsics; under Triton's interpreter, which knows none, the same
integers come from plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

__all__ = ["dot4", "look_up", "minus", "negated", "permute", "spread"]

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@core.extern
def _dp4a(a, b, c, _semantic=None):
    i = core.dtype("int32")
    symbol = {(i, i, i): ("llvm.nvvm.idp4a.s.s", i)}
    return core.extern_elementwise("", "", [a, b, c], symbol, is_pure=True, _semantic=_semantic)


@core.extern
def _prmt(a, b, c, _semantic=None):
    i = core.dtype("int32")
    symbol = {(i, i, i): ("llvm.nvvm.prmt", i)}
    return core.extern_elementwise("", "", [a, b, c], symbol, is_pure=True, _semantic=_semantic)


@triton.jit
def dot4(a, b, c):
    """c plus the sum of products of the four signed bytes of a and b."""
    if IS_INTERPRETED:
        total = c + (a >> 24) * (b >> 24)
        for i in tl.static_range(3):
            total += ((a << (24 - 8 * i)) >> 24) * ((b << (24 - 8 * i)) >> 24)
        return total
    else:
        return _dp4a(a, b, c)


@triton.jit
def permute(a, b, selector):
    """Four bytes of the eight in a, b: byte i is that whose number stands in nibble i of the selector, 0 to 7."""
    if IS_INTERPRETED:
        out = 0 * selector
        for i in tl.static_range(4):
            number = (selector >> (4 * i)) & 7
            word = tl.where(number < 4, a, b)
            out |= ((word >> (8 * (number & 3))) & 255) << (8 * i)
        return out
    else:
        return _prmt(a, b, selector)


@triton.jit
def look_up(word, T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr):
    """Bytes of a table of 16, in four words, at the low nibbles of a word's bytes, and at the high ones."""
    seven = word & 0x77777777
    upper = ((word & -0x77777778) >> 1) & 0x44444444 | 0x32103210  # whether the nibble's place is in T2 and T3
    first = permute(permute(T0, T1, seven & 0x7777), permute(T2, T3, seven & 0x7777), upper & 0x7777)
    seven = seven >> 16
    second = permute(permute(T0, T1, seven), permute(T2, T3, seven), (upper >> 16) & 0x7777)
    return permute(first, second, 0x6420), permute(first, second, 0x7531)


@triton.jit
def spread(bits):
    """Bits 0 to 3 as the lowest bits of four bytes."""
    return ((bits & 15) * 0x00204081) & 0x01010101


@triton.jit
def negated(word, signs):
    """The bytes of a word, 1 to 127, negative where bits 0 to 3 of `signs` are set."""
    ones = spread(signs)
    return (word ^ (ones * 255)) + ones


@triton.jit
def minus(word, BIAS: tl.constexpr):
    """BIAS less in each of four bytes of 0 to 127."""
    return ((word | -0x7F7F7F80) - BIAS * 0x01010101) ^ -0x7F7F7F80
