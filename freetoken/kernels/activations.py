"""Activations of quantised products (docs/numerics.md, section 2) as the matrix-vector kernels read them.

A row is cut into pieces of 256 values, the last one padded with zeros, in both classes. A piece has its values' high
plane, then the low one, as bytes in the row's order: a word of four weights meets a word of each plane. A single plane
stands as the low one, beside zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.functions import rint
from freetoken.kernels.launch import options, wait

__all__ = ["PIECE", "Activation", "arguments", "empty_activation", "put", "quantize"]

PIECE = 256
MAX_TOKENS = 8


@dataclass(frozen=True)
class Activation:
    """Quantised rows of `width` (the class: 32 or 256), for up to `q.shape[0]` tokens or routed pairs.

    `q` int8 [n, pieces, 2, 256]; `dx` fp32 [n, pieces * 256 / width]; `sums` int32: class 32 the sum A of each block
    [n, pieces, 8]; class 256 the sums A16 [n, pieces, 16].
    """

    width: int
    q: torch.Tensor
    dx: torch.Tensor
    sums: torch.Tensor

    @property
    def pieces(self) -> int:
        """Pieces of 256 values in a row."""
        return self.q.shape[1]


def empty_activation(width: int, n: int, cols: int, device: torch.device | str = "cpu") -> Activation:
    """Room for n rows of `cols` values; made once, before any step."""
    if width not in (32, 256) or cols % width:
        raise ValueError(f"no activation of {cols} values in blocks of {width}")
    pieces = -(-cols // PIECE)
    blocks = pieces * PIECE // width
    return Activation(
        width,
        torch.zeros((n, pieces, 2, PIECE), dtype=torch.int8, device=device),
        torch.zeros((n, blocks), dtype=torch.float32, device=device),
        torch.zeros((n, pieces, 16 if width == PIECE else 8), dtype=torch.int32, device=device),
    )


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
    """The end of a kernel whose row goes into a quantised product: quantise blocks x [r, class] and write them as
    blocks `first`... of row `row`, which has N values; blocks past its end are dropped."""
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
    number = first + tl.arange(0, R)
    mask = number < N // W
    value = number[:, None] * W + tl.arange(0, W)[None, :]  # its number within the row
    at = q + row.to(tl.int64) * (PER_ROW * W * 2) + value // 256 * 512 + value % 256
    if PLANES == 2:
        hi = (integers + 128) >> 8
        lo = tl.maximum(integers - 256 * hi, -127)
        integers = 256 * hi + lo
        tl.store(at, hi.to(tl.int8), mask=mask[:, None])
        tl.store(at + 256, lo.to(tl.int8), mask=mask[:, None])
    else:
        tl.store(at, tl.zeros([R, W], tl.int8), mask=mask[:, None])
        tl.store(at + 256, integers.to(tl.int8), mask=mask[:, None])
    block = row * PER_ROW + number
    tl.store(dx + block, factor, mask=mask)
    parts = tl.sum(tl.reshape(integers, [R, S, W // S]), axis=2)
    part = tl.arange(0, S)[None, :]
    tl.store(sums + block[:, None] * S + part, parts, mask=mask[:, None] & (part < S))


@triton.jit
def quantize_kernel(x, q, dx, sums, x_stride, N: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr,
                    IS_CHAINED: tl.constexpr):  # fmt: skip
    """One piece of one row."""
    wait(IS_CHAINED)
    piece = tl.program_id(0)
    row = tl.program_id(1)
    at = piece * 256 + tl.arange(0, 256)
    values = tl.load(x + row.to(tl.int64) * x_stride + at, mask=at < N, other=0.0)
    put(tl.reshape(values, [256 // WIDTH, WIDTH]), q, dx, sums, row, piece * (256 // WIDTH), N, PLANES)


def quantize(x: torch.Tensor, out: Activation, planes: int = 2) -> None:
    """Quantise fp32 rows [n, cols] into the first n rows of `out`; values of a row are contiguous."""
    n, cols = x.shape
    if x.dtype != torch.float32 or x.stride(1) != 1 or planes not in (1, 2):
        raise ValueError(f"need contiguous fp32 rows and 1 or 2 planes, got {x.dtype}, {x.stride()}, {planes}")
    given, width = arguments(out, n, cols)
    quantize_kernel[(out.pieces, n)](
        x, *given, x.stride(0), N=cols, WIDTH=width, PLANES=planes, num_warps=1, **options(x)
    )
