"""Sums in the named order of docs/numerics.md (section 1), and the functions of section 5 that only they need.

`halve` adds pairs, and a sum of two commutes; everything longer is a loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.functions import exp

__all__ = ["fold8", "fold32", "sigmoid", "softcap", "sum_exp", "sum_squares"]


@triton.jit
def sigmoid(x):
    return tl.math.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def softcap(x, cap):
    """cap * tanh(x / cap)."""
    tanh = 1.0 - tl.math.div_rn(2.0, exp(2.0 * tl.math.div_rn(x, cap)) + 1.0)
    return cap * tanh


@triton.jit
def halve(x):
    """[r, 2n] -> [r, n]: the upper half of each row added to the lower."""
    HALF: tl.constexpr = x.shape[1] // 2
    return tl.sum(tl.reshape(x, [x.shape[0], 2, HALF]), axis=1)


@triton.jit
def fold8(lanes):
    """tree8 of [r, 8] lanes: [r]."""
    return tl.reshape(halve(halve(halve(lanes))), [lanes.shape[0]])


@triton.jit
def fold32(lanes):
    """The fold of lanes32, [r, 32] -> [r]."""
    return fold8(halve(halve(lanes)))


@triton.jit
def sum_squares(x, bias, N: tl.constexpr):
    """lanes32 of the squares of N values at x, plus those at bias unless it is None, as a tensor [1]."""
    UNROLL: tl.constexpr = (N + 31) // 32 if N < 2048 else 64
    lane = tl.arange(0, 32)
    lanes = tl.zeros([32], tl.float32)
    for start in range(0, N, 32 * UNROLL):
        for i in tl.static_range(UNROLL):
            at = start + i * 32 + lane
            value = tl.load(x + at, mask=at < N, other=0.0)
            if bias is not None:
                value = value + tl.load(bias + at, mask=at < N, other=0.0)
            lanes = lanes + value * value
    return fold32(tl.reshape(lanes, [1, 32]))


@triton.jit
def sum_exp(x, top, N: tl.constexpr):
    """lanes8 of exp(x[i] - top) over N values at x, as a tensor [1]."""
    UNROLL: tl.constexpr = (N + 7) // 8 if N < 128 else 16
    lane = tl.arange(0, 8)
    lanes = tl.zeros([8], tl.float32)
    for start in range(0, N, 8 * UNROLL):
        for i in tl.static_range(UNROLL):
            at = start + i * 8 + lane
            value = tl.load(x + at, mask=at < N, other=0.0)
            lanes = lanes + tl.where(at < N, exp(value - top), 0.0)
    return fold8(tl.reshape(lanes, [1, 8]))
