"""Products of few rows with quantised matrices: weights are decoded to fp16 on the way into the product, not to memory.

What `dequant` and `grouped` do in two launches and through a scratch, in one. It pays while a matrix has few rows, for
each tile of rows decodes its weights again. A list of tiles on the device names each tile's matrix, as in `grouped`;
matrices are named by address and form, as in `dequant`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken import quants
from freetoken.kernels import layout
from freetoken.kernels.checks import ceil_div, check
from freetoken.kernels.dequant import bytes_at, common_power, is_float, plane, table_of, to_kind
from freetoken.kernels.dequant_types import eight_values
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.fields import MAX_FIELDS, field_size, field_start
from freetoken.kernels.functions import activate
from freetoken.kernels.grouped import Rows
from freetoken.kernels.matvec import TYPE_CLASS
from freetoken.kernels.prompt_rows import check_rows

__all__ = [
    "CodedMatrices",
    "CodedTile",
    "can_be_coded",
    "coded_product",
    "coded_tile",
    "expert_coded_glu",
    "expert_coded_products",
]


@dataclass(frozen=True)
class CodedTile:
    """Rows and columns of a program's part of a product."""

    m: int
    n: int


def coded_tile(n_rows: float, capability: int) -> CodedTile:
    """A tile for some n_rows rows a matrix."""
    m = 16 if n_rows <= 20 else 32 if n_rows <= 40 else 64
    return CodedTile(m, 128 if capability == 0 else 32)


def can_be_coded(type_id: int, capability: int) -> bool:
    """Whether there is a product for a type that pays on a card: without tensor cores it does not."""
    return type_id in TYPE_CLASS and not is_float(type_id) and (capability == 0 or capability >= 80)


@triton.jit
def weights_at(
    base, is_raw, first, local, c, i, values, start1, start2, start3, start4,
    TYPE: tl.constexpr, BLOCK_BYTES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """fp16 [blocks, W / 8, 8]: blocks first + local of the matrix at `base`."""
    if is_raw:
        raw = bytes_at(base + first * BLOCK_BYTES, common_power(ALIGN, BLOCK_BYTES)) + local * BLOCK_BYTES
        x = eight_values(TYPE, raw + field_start(TYPE, 0), raw + field_start(TYPE, 1), raw + field_start(TYPE, 2),
                         raw + field_start(TYPE, 3), raw + field_start(TYPE, 4), c, i, values,
                         BLOCK_BYTES % 4 != 0)  # fmt: skip
        half = to_kind(x, tl.float16)
    else:
        f0 = plane(base, 0, first, local, field_size(TYPE, 0))
        f1 = plane(base, start1, first, local, field_size(TYPE, 1))
        f2 = plane(base, start2, first, local, field_size(TYPE, 2))
        f3 = plane(base, start3, first, local, field_size(TYPE, 3))
        f4 = plane(base, start4, first, local, field_size(TYPE, 4))
        half = to_kind(eight_values(TYPE, f0, f1, f2, f3, f4, c, i, values, False), tl.float16)
    return half


@triton.jit(do_not_specialize=["n_rows", "first", "x_first", "first_row", "start1", "start2", "start3", "start4"])
def coded_kernel(
    x, scale, index, tile_list, addresses, others, forms, out, bias, values,
    n_rows, first, x_first, first_row, out_stride, start1, start2, start3, start4,
    TYPE: tl.constexpr, BLOCK_BYTES: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr, IS_SAME: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, M_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, J: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """As grouped.product_kernel, J blocks of a matrix row at a time; `others`: the matrices of the unit's second half.
    Rows of a matrix count from `first_row` on."""
    n_n: tl.constexpr = (N + N_BLOCK - 1) // N_BLOCK
    pid = tl.program_id(0)
    column0 = pid % n_n * N_BLOCK
    if tile_list is None:
        matrix = 0
        begin = pid // n_n * M_BLOCK
        end = n_rows
    else:
        entry = tile_list + pid // n_n * 3
        matrix = tl.load(entry)
        begin = tl.load(entry + 1)
        end = tl.load(entry + 2)
    base = tl.load(addresses + matrix)
    if (begin < end) & (base != 0):
        position = begin + tl.arange(0, M_BLOCK)
        live = position < end
        position = tl.minimum(position, end - 1)
        row = position - x_first if index is None else tl.load(index + position)
        is_raw = True if IS_SAME else tl.load(forms + matrix) == 0
        column = column0 + tl.arange(0, N_BLOCK)
        k = tl.arange(0, J * W)
        x_at = x + row.to(tl.int64)[:, None] * K + k[None, :]
        number = tl.arange(0, N_BLOCK * J)[:, None, None]
        inside = tl.minimum(number // J, N - 1 - column0)
        local = inside * (K // W) + number % J
        c = tl.arange(0, W // 8)[None, :, None]
        i = tl.arange(0, 8)[None, None, :]
        start = (first_row + column0).to(tl.int64) * (K // W)
        total = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
        if ACTIVATION >= 0:
            second = tl.load(others + matrix)
            other = tl.zeros([M_BLOCK, N_BLOCK], tl.float32)
        for step in range(0, K // (J * W)):
            left = tl.load(x_at)
            w = weights_at(base, is_raw, start + step * J, local, c, i, values, start1, start2, start3, start4,
                           TYPE, BLOCK_BYTES, ALIGN)  # fmt: skip
            total = tl.dot(left, tl.trans(tl.reshape(w, [N_BLOCK, J * W])), total)
            if ACTIVATION >= 0:
                w = weights_at(second, is_raw, start + step * J, local, c, i, values, start1, start2, start3, start4,
                               TYPE, BLOCK_BYTES, ALIGN)  # fmt: skip
                other = tl.dot(left, tl.trans(tl.reshape(w, [N_BLOCK, J * W])), other)
            x_at += J * W
        factor = tl.load(scale + row)[:, None]
        total *= factor
        if bias is not None:
            total += tl.load(bias + tl.minimum(column, N - 1))[None, :]
        if ACTIVATION >= 0:
            total = activate(total, ACTIVATION) * (other * factor)
        to = out + (position - first).to(tl.int64)[:, None] * out_stride + column[None, :]
        tl.store(to, total, mask=live[:, None] & (column[None, :] < N))


@dataclass(frozen=True)
class CodedMatrices:
    """Matrices [matrix_rows, cols] of one type: `addresses` int64 and `forms` int32 [n] on the device (dequant)."""

    type_id: int
    matrix_rows: int
    cols: int
    addresses: torch.Tensor
    forms: torch.Tensor


def _launch(
    w: CodedMatrices, tile: CodedTile, x: Rows, out: torch.Tensor, rows: int, n_tiles: int, *,
    index: torch.Tensor | None, tile_list: torch.Tensor | None, others: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, n_rows: int = 0, first: int = 0, x_first: int = 0, first_row: int = 0,
    activation: int = -1,
) -> None:  # fmt: skip
    check("x", x.x, torch.float16, x.x.shape[0], w.cols)
    check_rows("out", out, out.shape[0], rows)
    width, block_bytes = quants.TYPES[w.type_id].block_size, quants.TYPES[w.type_id].block_bytes
    a_row = w.cols // width
    j = next(j for j in (8, 4, 2, 1) if a_row % j == 0 and j * width <= max(width, 128))
    starts = [*layout.plane_offsets(w.type_id, w.matrix_rows * a_row)[1:-1], *[0] * MAX_FIELDS][: MAX_FIELDS - 1]
    align = math.gcd(16, w.matrix_rows * a_row * block_bytes)
    arguments = (
        x.x, x.scale, index, tile_list, w.addresses, others, w.forms, out, bias, table_of(w.type_id, out.device),
        n_rows, first, x_first, first_row, out.stride(0), *starts,
    )  # fmt: skip
    constants = (
        int(w.type_id), block_bytes, width, align, layout.is_identity(w.type_id),
        rows, w.cols, tile.m, tile.n, j, activation,
    )  # fmt: skip
    launch(coded_kernel, (n_tiles * ceil_div(rows, tile.n), 1, 1), arguments, constants, 4, 2)


def coded_product(
    w: CodedMatrices, x: Rows, out: torch.Tensor, tile: CodedTile, *, first_row: int = 0,
    bias: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """out fp32 [n, rows] (rows may lie apart) = x times rows first_row... of the matrix w, transposed, plus bias."""
    n, rows = out.shape
    if n:
        _launch(w, tile, x, out, rows, ceil_div(n, tile.m), index=None, tile_list=None, bias=bias, n_rows=n,
                first_row=first_row)  # fmt: skip


def expert_coded_glu(
    x: Rows, index: torch.Tensor, tile_list: torch.Tensor, gate: CodedMatrices, up: CodedMatrices, out: torch.Tensor,
    tile: CodedTile, *, first: int, activation: int,
) -> None:  # fmt: skip
    """`grouped.expert_glu_rows` of coded matrices, those of gate and up of one type and with the same forms."""
    if gate.type_id != up.type_id:
        raise ValueError(f"gate and up have types {gate.type_id} and {up.type_id}")
    if len(tile_list):
        _launch(gate, tile, x, out, gate.matrix_rows, len(tile_list), index=index, tile_list=tile_list,
                others=up.addresses, first=first, activation=activation)  # fmt: skip


def expert_coded_products(
    x: Rows, tile_list: torch.Tensor, w: CodedMatrices, out: torch.Tensor, tile: CodedTile, *, first: int
) -> None:
    """`grouped.expert_products` of coded matrices."""
    if len(tile_list):
        _launch(w, tile, x, out, w.matrix_rows, len(tile_list), index=None, tile_list=tile_list, first=first,
                x_first=first)  # fmt: skip
