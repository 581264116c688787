"""The end of a kernel whose row goes into a quantised product: section 2 of docs/numerics.md within a program.

Writes what `activations.quantize` writes for the same row, without a launch of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.activations import PIECE, Activation
from freetoken.kernels.functions import rint

__all__ = ["arguments", "put"]


def arguments(
    out: Activation | None, n: int, width: int
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], int]:
    """Kernel arguments (q, dx, sums) and the class for n rows of `width` values; class 0 where there is no output."""
    if out is None:
        return (None, None, None), 0
    if width % out.width or -(-width // PIECE) != out.pieces or n > out.q.shape[0]:
        raise ValueError(f"{n} rows of {width} values do not fit an activation of {list(out.q.shape)}")
    return (out.q, out.dx, out.sums), out.width


@triton.jit
def put(x, q, dx, sums, row, first, N: tl.constexpr, PLANES: tl.constexpr):
    """Quantise blocks x [r, class] and write them as blocks `first`... of row `row`, which has N values; blocks past
    its end are dropped."""
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    S: tl.constexpr = W // 16 if W == 256 else 1  # sums of a block
    PER_ROW: tl.constexpr = (N + 255) // 256 * 256 // W
    LIMIT: tl.constexpr = 32512.0 if PLANES == 2 else 127.0
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_plain = (bits >= 0x0D800000) & (bits < 0x7F800000)  # from 2^-100
    amax = tl.where(is_plain, bits, 0x3F800000).to(tl.float32, bitcast=True)
    factor = tl.math.div_rn(amax, LIMIT)
    factor = tl.where(is_plain, factor, tl.where(bits >= 0x7F800000, float("nan"), 0.0))
    integers = rint(tl.where(is_plain[:, None], x, 0.0) * tl.math.div_rn(LIMIT, amax)[:, None])
    stored = integers
    if PLANES == 2:
        hi = (integers + 128) >> 8
        lo = tl.maximum(integers - 256 * hi, -127)
        integers = 256 * hi + lo
        stored = 65536 * hi + lo if W == 256 else integers
    number = first + tl.arange(0, R)
    mask = number < N // W
    block = row * PER_ROW + number
    value = number[:, None] * W + tl.arange(0, W)[None, :]  # its number within the row
    at = row.to(tl.int64) * (PER_ROW * W) + value // 256 * 256 + value % 4 * 64 + value % 256 // 4
    tl.store(q + at, stored, mask=mask[:, None] & (value < N))
    tl.store(dx + block, factor, mask=mask)
    parts = tl.sum(tl.reshape(integers, [R, S, W // S]), axis=2)
    part = tl.arange(0, S)[None, :]
    tl.store(sums + block[:, None] * S + part, parts, mask=mask[:, None] & (part < S))
