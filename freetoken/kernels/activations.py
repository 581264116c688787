"""Activations of quantised products (docs/numerics.md, section 2) as the matrix-vector kernels read them.

A row is cut into pieces of 256 values, the last one padded with zeros, in both classes. A piece of `q` holds the
integers as four runs of 64: run `b` has values b, b + 4, b + 8, ... A word of four weight bytes then meets four runs at
one place, and neighbouring words meet neighbouring integers. Class 32 stores a = 256*hi + lo, class 256 stores
65536*hi + lo: multiplied with a small weight and summed over few values, both planes' sums are in one int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.functions import rint

__all__ = ["PIECE", "Activation", "empty_activation", "quantize"]

PIECE = 256
MAX_TOKENS = 8


@dataclass(frozen=True)
class Activation:
    """Quantised rows of `width` (the class: 32 or 256), for up to `q.shape[0]` tokens or routed pairs.

    `q` int32 [n, pieces, 256]; `dx` fp32 [n, pieces * 256 / width]; `sums` int32: class 32 the sum A of each block,
    shaped as `dx`; class 256 the sums A16 [n, pieces, 16].
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
        torch.zeros((n, pieces, PIECE), dtype=torch.int32, device=device),
        torch.zeros((n, blocks), dtype=torch.float32, device=device),
        torch.zeros((n, pieces, 16 if width == PIECE else 8), dtype=torch.int32, device=device),
    )


@triton.jit
def quantize_kernel(x, q, dx, sums, cols, x_stride, pieces, WIDTH: tl.constexpr, PLANES: tl.constexpr):
    """One piece of one row."""
    piece = tl.program_id(0)
    row = tl.program_id(1)
    B: tl.constexpr = 256 // WIDTH
    S: tl.constexpr = 16 if WIDTH == 256 else 1  # sums of a block
    quad = tl.arange(0, 64)[:, None]
    byte = tl.arange(0, 4)[None, :]
    at = piece * 256 + 4 * quad + byte
    values = tl.load(x + row.to(tl.int64) * x_stride + at, mask=at < cols, other=0.0)
    values = tl.reshape(values, [B, WIDTH])
    top = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    special = top >= 0x7F800000
    plain = (top >= 0x0D800000) & (top < 0x7F800000)  # from 2^-100 on
    amax = tl.where(plain, top, 0x3F800000).to(tl.float32, bitcast=True)
    limit = 32512.0 if PLANES == 2 else 127.0
    factor = tl.div_rn(amax, tl.full([B], limit, tl.float32))
    inverse = tl.div_rn(tl.full([B], limit, tl.float32), amax)
    factor = tl.where(special, 0x7FC00000, tl.where(plain, factor.to(tl.int32, bitcast=True), 0))
    integers = rint(tl.where(plain[:, None], values, 0.0) * inverse[:, None])
    stored = integers
    if PLANES == 2:
        hi = (integers + 128) >> 8
        lo = tl.maximum(integers - 256 * hi, -127)
        integers = 256 * hi + lo
        stored = 65536 * hi + lo if WIDTH == 256 else integers
    out = row * pieces + piece
    tl.store(q + out.to(tl.int64) * 256 + byte * 64 + quad, tl.reshape(stored, [64, 4]))
    tl.store(dx + out * B + tl.arange(0, B), factor.to(tl.float32, bitcast=True))
    sub = tl.sum(tl.reshape(integers, [B * S, WIDTH // S]), axis=1)
    tl.store(sums + out * B * S + tl.arange(0, B * S), sub)


def quantize(x: torch.Tensor, out: Activation, planes: int = 2) -> None:
    """Quantise fp32 rows [n, cols] into the first n rows of `out`; values of a row are contiguous."""
    n, cols = x.shape
    if x.dtype != torch.float32 or x.stride(1) != 1 or planes not in (1, 2):
        raise ValueError(f"need contiguous fp32 rows and 1 or 2 planes, got {x.dtype}, {x.stride()}, {planes}")
    if n > out.q.shape[0] or cols % out.width or -(-cols // PIECE) != out.pieces:
        raise ValueError(f"{n} rows of {cols} values do not fit an activation of {tuple(out.q.shape)}")
    quantize_kernel[(out.pieces, n)](
        x,
        out.q,
        out.dx,
        out.sums,
        cols,
        x.stride(0),
        out.pieces,
        out.width,
        planes,
        num_warps=1,
        enable_fp_fusion=False,
    )
