"""Quantised matrices written out as fp16 (or fp32) values, for the products of a prompt.

One launch decodes a list of matrices of one type and shape, each named by its address on the device, in either form:
the file's blocks (an expert that has just been copied) or the planes of `layout` (an expert in its slot, a dense
matrix). In both, field f of block b stands at start_f + b * step_f, and that is all the kernel knows of a form. A value
is the binary32 of ggml's formula, rounded; what fp16 cannot hold becomes its largest number.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton
import triton.language as tl

from freetoken import quants
from freetoken.kernels import layout
from freetoken.kernels.checks import ceil_div
from freetoken.kernels.dequant_types import eight_values
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.fields import MAX_FIELDS, field_size, field_start
from freetoken.kernels.matvec import TYPE_CLASS
from freetoken.kernels.tables import IQ4, table
from freetoken.quants import GgmlType

__all__ = ["PLANES", "RAW", "dequantise", "is_float"]

RAW, PLANES = 0, 1
"""Forms of a matrix: as in the file, or as `kernels.layout` lays it."""
VALUES = 4096
"""Values of one program."""
HOST_VALUES = 1 << 17
"""The most under Triton's interpreter, whose time is that of its steps."""


@functools.lru_cache(maxsize=64)
def table_of(type_id: int, device: torch.device) -> torch.Tensor | None:
    """What the type's values are looked up in, int32; None for types that need nothing."""
    if type_id in (GgmlType.IQ4_NL, GgmlType.IQ4_XS):
        values = np.array(IQ4.value, "<i4").view(np.int8)
        return torch.from_numpy(values.astype(np.int32)).to(device)
    return table(type_id, device)


def is_float(type_id: int) -> bool:
    """Whether a matrix holds plain numbers."""
    return type_id in (GgmlType.F32, GgmlType.F16, GgmlType.BF16)


@triton.constexpr_function
def common_power(a, b):
    """The largest power of 2, at most 16, that divides both."""
    return min((a | b) & -(a | b), 16)


@triton.jit
def to_kind(x, KIND: tl.constexpr):
    if KIND == tl.float16:  # noqa: SIM300
        x = tl.minimum(x, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, -65504.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(KIND)


@triton.jit
def bytes_at(address, ALIGN: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN)


@triton.jit
def plane(base, start, first, local, SIZE: tl.constexpr):
    """Where a plane's fields of the program's blocks lie."""
    return bytes_at(base + start + first * SIZE, common_power(SIZE, 16)) + local * SIZE


@triton.jit(do_not_specialize=["first_block", "n_blocks", "start1", "start2", "start3", "start4"])
def dequantise_kernel(
    addresses, forms, firsts, out, values, first_block, n_blocks, start1, start2, start3, start4,
    TYPE: tl.constexpr, BLOCK_BYTES: tl.constexpr, W: tl.constexpr, B: tl.constexpr, ALIGN: tl.constexpr,
    IS_SAME: tl.constexpr,
):  # fmt: skip
    """B of the n_blocks blocks of matrix program_id(1). `IS_SAME`: both forms are one."""
    base = tl.load(addresses + tl.program_id(1))
    if base != 0:
        done = tl.program_id(0) * B
        first = first_block.to(tl.int64) + done
        if firsts is not None:
            first += tl.load(firsts + tl.program_id(1))
        number = tl.arange(0, B)[:, None, None]
        local = tl.minimum(number, n_blocks - 1 - done)
        c = tl.arange(0, W // 8)[None, :, None]
        i = tl.arange(0, 8)[None, None, :]
        to = out + (tl.program_id(1).to(tl.int64) * n_blocks + done) * W + number * W + 8 * c + i
        mask = (number + 0 * c + 0 * i) < n_blocks - done
        is_raw = True if IS_SAME else tl.load(forms + tl.program_id(1)) == 0
        if is_raw:
            raw = bytes_at(base + first * BLOCK_BYTES, common_power(ALIGN, BLOCK_BYTES)) + local * BLOCK_BYTES
            x = eight_values(TYPE, raw + field_start(TYPE, 0), raw + field_start(TYPE, 1), raw + field_start(TYPE, 2),
                             raw + field_start(TYPE, 3), raw + field_start(TYPE, 4), c, i, values,
                             BLOCK_BYTES % 4 != 0)  # fmt: skip
            tl.store(to, to_kind(x, out.dtype.element_ty), mask=mask)
        else:
            f0 = plane(base, 0, first, local, field_size(TYPE, 0))
            f1 = plane(base, start1, first, local, field_size(TYPE, 1))
            f2 = plane(base, start2, first, local, field_size(TYPE, 2))
            f3 = plane(base, start3, first, local, field_size(TYPE, 3))
            f4 = plane(base, start4, first, local, field_size(TYPE, 4))
            x = eight_values(TYPE, f0, f1, f2, f3, f4, c, i, values, False)
            tl.store(to, to_kind(x, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_value"])
def convert_kernel(addresses, firsts, out, first_value, n_values, TYPE: tl.constexpr, N: tl.constexpr,
                   ALIGN: tl.constexpr):  # fmt: skip
    """N of the n_values values of matrix program_id(1), which holds plain numbers."""
    base = tl.load(addresses + tl.program_id(1))
    if base != 0:
        first = first_value.to(tl.int64)
        if firsts is not None:
            first += tl.load(firsts + tl.program_id(1))
        at = tl.program_id(0) * N + tl.arange(0, N)
        mask = at < n_values
        if TYPE == 0:
            start = bytes_at(base + first * 4, common_power(ALIGN, 4)).to(tl.pointer_type(tl.float32))
            x = tl.load(start + at, mask=mask, other=0.0)
        elif TYPE == 1:
            start = bytes_at(base + first * 2, common_power(ALIGN, 2)).to(tl.pointer_type(tl.float16))
            x = tl.load(start + at, mask=mask, other=0.0).to(tl.float32)
        else:
            start = bytes_at(base + first * 2, common_power(ALIGN, 2)).to(tl.pointer_type(tl.int16))
            bits = tl.load(start + at, mask=mask, other=0).to(tl.int32) << 16
            x = bits.to(tl.float32, bitcast=True)
        to = out + tl.program_id(1).to(tl.int64) * n_values
        tl.store(to + at, to_kind(x, out.dtype.element_ty), mask=mask)


def dequantise(
    type_id: int,
    addresses: torch.Tensor,
    forms: torch.Tensor,
    out: torch.Tensor,
    *,
    matrix_rows: int,
    first_row: int = 0,
    first_units: torch.Tensor | None = None,
) -> None:
    """out [n, rows, cols], fp16 or fp32 = rows first_row... of n matrices [matrix_rows, cols] of a type.

    `addresses` int64 [n]: where each starts on the device (at a multiple of 16, or of
    what divides a matrix's bytes); one of 0 is left out. `forms` int32 [n] of
    RAW or PLANES. `first_units` int64 [n]: blocks (float types: values) to begin later, for each.
    """
    n, rows, cols = out.shape
    if out.dtype not in (torch.float16, torch.float32) or not out.is_contiguous():
        raise ValueError(f"need contiguous fp16 or fp32 [n, rows, cols], got {out.dtype} {tuple(out.shape)}")
    if addresses.dtype != torch.int64 or forms.dtype != torch.int32 or len(addresses) != n or len(forms) != n:
        raise ValueError(f"need int64 addresses and int32 forms of {n} matrices, got {addresses.shape} {forms.shape}")
    if first_units is not None and (first_units.dtype != torch.int64 or len(first_units) != n):
        raise ValueError(f"need int64 [{n}] as first units, got {first_units.dtype} {tuple(first_units.shape)}")
    if type_id not in TYPE_CLASS:
        raise ValueError(f"{quants.type_name(type_id)} has no kernel")
    if not n or not rows:
        return
    values = VALUES if out.is_cuda else max(min(HOST_VALUES, triton.next_power_of_2(rows * cols)), 256)
    if is_float(type_id):
        size = 4 if type_id == GgmlType.F32 else 2
        launch(
            convert_kernel,
            (ceil_div(rows * cols, values), n, 1),
            (addresses, first_units, out, first_row * cols, rows * cols),
            (int(type_id), values, math.gcd(16, matrix_rows * cols * size)),
            warps=4,
        )
        return
    width, block_bytes = quants.TYPES[type_id].block_size, quants.TYPES[type_id].block_bytes
    a_row = cols // width
    starts = [*layout.plane_offsets(type_id, matrix_rows * a_row)[1:-1], *[0] * MAX_FIELDS][: MAX_FIELDS - 1]
    align = math.gcd(16, matrix_rows * a_row * block_bytes)
    launch(
        dequantise_kernel,
        (ceil_div(rows * a_row, values // width), n, 1),
        (addresses, forms, first_units, out, table_of(type_id, out.device), first_row * a_row, rows * a_row, *starts),
        (int(type_id), block_bytes, width, values // width, align, layout.is_identity(type_id)),
        warps=4,
    )
