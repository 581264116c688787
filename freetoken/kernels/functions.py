"""Section 5 of docs/numerics.md and the named sums of section 1 inside kernels. No library's functions are used."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate", "exp", "gelu", "rint", "silu", "tree8"]


@triton.jit
def rint(x):
    """The nearest integer, ties to even, as int32: for |x| below 2^22. The sum's last bit is a unit."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def exp(x):
    top = tl.where(x > 88.0, 88.0, x)
    number = rint(top * 1.44269504088896341)
    k = number.to(tl.float32)
    r = (top - k * 0.693359375) - k * -2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = ((p * (r * r)) + r) + 1.0
    power = ((number + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, y * power)


@triton.jit
def silu(x):
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def gelu(x):
    u = x * (1.5957691216057308 + 0.07135481627159992 * (x * x))
    return tl.div_rn(x, 1.0 + exp(-u))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """0 is silu, 1 is gelu."""
    return silu(x) if ACTIVATION == 0 else gelu(x)


@triton.jit
def tree8(lanes):
    """tree8 of lanes [P, L, G, R, T]: [P, G, R, T]. L is up to 8: other lanes are +0, and no lane is ever -0."""
    P: tl.constexpr = lanes.shape[0]
    L: tl.constexpr = lanes.shape[1]
    G: tl.constexpr = lanes.shape[2]
    R: tl.constexpr = lanes.shape[3]
    T: tl.constexpr = lanes.shape[4]
    if L == 8:
        lanes = tl.sum(tl.reshape(lanes, [P, 2, 4, G, R, T]), axis=1)
    if L >= 4:
        lanes = tl.sum(tl.reshape(lanes, [P, 2, 2, G, R, T]), axis=1)
    if L >= 2:
        return tl.sum(lanes, axis=1)
    else:
        return tl.reshape(lanes, [P, G, R, T])
