"""Fills: the experts that a slot step chose, gathered into their slots in one launch for all banks of a layer.

The source is the pinned mapping of the file (or a staging buffer on the device), read by the kernel at its address; the
list and its length stand on the device, written by `kernels.slots`, so the grid is fixed: each program takes every n-th
chunk of the work there is, and leaves at once where there is none. Bytes are moved into the form of `kernels.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken import quants
from freetoken.kernels import layout
from freetoken.kernels.launch import options as launch_options
from freetoken.kernels.launch import wait

__all__ = ["SLOW_UNIT", "FillBank", "Slow", "fill", "fill_bank"]

CHUNK_BYTES = 8192
N_PROGRAMS = 64
"""64 programs with 8 KB each keep 512 KB on the way; a PCIe 5 link needs some 100. More would only take processors from
the products that run beside."""
MAX_BANKS = 3
_WORD = 16
SLOW_UNIT = 64
"""Of `Slow.factor`."""


@dataclass(frozen=True)
class FillBank:
    """One bank as the kernel reads it.

    `address` of expert 0; from one expert to the next are `stride` bytes. `slot_offset` is the matrix's place in a
    slot. Elements of `unit` bytes are moved; whatever an expert's number, its address and size are multiples of
    `align`. `moves` int32 [units of a block, 2]: place of a unit of block 0, and the step from block to block, both in
    units from the matrix's start; None where bytes keep their order.
    """

    address: int
    expert_bytes: int
    stride: int
    slot_offset: int
    slot_bytes: int
    unit: int
    align: int
    moves: torch.Tensor | None


@dataclass(frozen=True)
class Slow:
    """A slower link, for tests: `factor` int32 [1] times in all, in 1/SLOW_UNIT, each chunk is moved before it counts,
    from the experts that follow (of `n_expert`), since the device may remember what it has just read."""

    factor: torch.Tensor
    n_expert: int


def fill_bank(
    type_id: int, rows: int, cols: int, address: int, slot_offset: int, device: torch.device | str, stride: int = 0
) -> FillBank:
    """A bank of matrices [rows, cols] whose expert 0 lies at `address`, each to stand at `slot_offset` of its slot.

    With a `stride` the next expert begins so many bytes later, else where one ends."""
    if slot_offset % layout.ALIGNMENT:
        raise ValueError(f"a matrix at byte {slot_offset} of a slot, expected a multiple of {layout.ALIGNMENT}")
    n_bytes = rows * quants.row_bytes(type_id, cols)
    stride = stride or n_bytes
    align = math.gcd(_WORD, address, n_bytes, stride)
    size = layout.slot_bytes(type_id, rows, cols)
    if layout.is_identity(type_id):
        return FillBank(address, n_bytes, stride, slot_offset, size, min(4, align), align, None)
    fields = layout.fields(type_id)
    block_bytes = quants.TYPES[type_id].block_bytes
    unit = math.gcd(4, align, block_bytes, *(n for field in fields for n in (field.offset, field.size)))
    moves = torch.zeros((block_bytes // unit, 2), dtype=torch.int32)
    for field, start in zip(fields, layout.plane_offsets(type_id, n_bytes // block_bytes), strict=False):
        for at in range(0, field.size, unit):
            moves[(field.offset + at) // unit] = torch.tensor([(start + at) // unit, field.size // unit])
    return FillBank(address, n_bytes, stride, slot_offset, size, unit, align, moves.to(device))


def fill(
    banks: Sequence[FillBank],
    slots: torch.Tensor,
    fill_expert: torch.Tensor,
    fill_slot: torch.Tensor,
    counts: torch.Tensor,
    *,
    n_programs: int = N_PROGRAMS,
    slow: Slow | None = None,
) -> None:
    """Copy expert fill_expert[i] of every bank into slot fill_slot[i], for i below counts[3].

    `slots` uint8 [n_slots, slot_bytes] is a pool; lists and counts (int32) are those of `kernels.slots.StepOutputs`.
    """
    if not 0 < len(banks) <= MAX_BANKS:
        raise ValueError(f"{len(banks)} banks, expected 1 to {MAX_BANKS}")
    if slots.dtype != torch.uint8 or slots.dim() != 2 or not slots.is_contiguous() or slots.shape[1] % _WORD:
        raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)}, expected contiguous uint8 [n, multiple of 16]")
    for name, tensor in (("fill_expert", fill_expert), ("fill_slot", fill_slot), ("counts", counts)):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected contiguous int32 [n]")
    end = max(bank.slot_offset + bank.slot_bytes for bank in banks)
    if end > slots.shape[1]:
        raise ValueError(f"the banks take {end} bytes of a slot, which has {slots.shape[1]}")
    numbers: list[object] = []
    options: dict[str, object] = {}
    for i in range(MAX_BANKS):
        bank = banks[i] if i < len(banks) else FillBank(0, 0, 0, 0, 0, 1, 1, None)
        moves = counts if bank.moves is None else bank.moves
        block_units = 1 if bank.moves is None else len(bank.moves)
        numbers += [bank.address, bank.expert_bytes, bank.stride, bank.slot_offset, moves, block_units]
        options |= {f"UNIT{i}": bank.unit, f"ALIGN{i}": bank.align, f"IS_PLAIN{i}": bank.moves is None}
    _fill[(n_programs,)](
        slots, slots.shape[1], fill_expert, fill_slot, counts,
        None if slow is None else slow.factor, 1 if slow is None else slow.n_expert, *numbers, **options,
        CHUNK=CHUNK_BYTES, num_warps=4, num_stages=1, **launch_options(slots),
    )  # fmt: skip


_NUMBERS = [f"{name}{i}" for i in range(MAX_BANKS) for name in ("address", "bytes", "stride", "offset", "block_units")]


@triton.jit(do_not_specialize=["slot_bytes", "n_expert", *_NUMBERS])  # one binary for all layers of the same types
def _fill(
    slots_ptr, slot_bytes, expert_ptr, slot_ptr, counts_ptr, slow_ptr, n_expert,
    address0, bytes0, stride0, offset0, moves0_ptr, block_units0,
    address1, bytes1, stride1, offset1, moves1_ptr, block_units1,
    address2, bytes2, stride2, offset2, moves2_ptr, block_units2,
    UNIT0: tl.constexpr, ALIGN0: tl.constexpr, IS_PLAIN0: tl.constexpr,
    UNIT1: tl.constexpr, ALIGN1: tl.constexpr, IS_PLAIN1: tl.constexpr,
    UNIT2: tl.constexpr, ALIGN2: tl.constexpr, IS_PLAIN2: tl.constexpr,
    CHUNK: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    wait(IS_CHAINED)
    chunks0 = tl.cdiv(bytes0, CHUNK)
    chunks1 = chunks0 + tl.cdiv(bytes1, CHUNK)
    chunks = chunks1 + tl.cdiv(bytes2, CHUNK)
    n_work = tl.load(counts_ptr + 3) * chunks
    work = tl.program_id(0)
    again = 0
    if slow_ptr is not None:
        again = _times(slow_ptr, work) - 1
    while work < n_work:
        i = work // chunks
        c = work - i * chunks
        expert = tl.load(expert_ptr + i).to(tl.int64)
        if slow_ptr is not None:
            expert = (expert + again) % n_expert
        out_ptr = slots_ptr + tl.load(slot_ptr + i).to(tl.int64) * slot_bytes
        if c < chunks0:
            source = address0 + expert * stride0
            _move(source, out_ptr + offset0, bytes0, c, moves0_ptr, block_units0, UNIT0, ALIGN0, IS_PLAIN0, CHUNK)
        elif c < chunks1:
            source = address1 + expert * stride1
            c -= chunks0
            _move(source, out_ptr + offset1, bytes1, c, moves1_ptr, block_units1, UNIT1, ALIGN1, IS_PLAIN1, CHUNK)
        else:
            source = address2 + expert * stride2
            c -= chunks1
            _move(source, out_ptr + offset2, bytes2, c, moves2_ptr, block_units2, UNIT2, ALIGN2, IS_PLAIN2, CHUNK)
        if slow_ptr is None:
            work += tl.num_programs(0)
        else:  # a lane writes the same bytes each time, the right ones last
            if again == 0:
                work += tl.num_programs(0)
                again = _times(slow_ptr, work)
            again -= 1


@triton.jit
def _times(slow_ptr, work):
    """How often a chunk is moved: fractions by its number, which the multiplication spreads."""
    return (tl.load(slow_ptr) + (work * 37) % 64) // 64


@triton.jit
def _move(
    source, out_ptr, n_bytes, chunk, moves_ptr, block_units,
    UNIT: tl.constexpr, ALIGN: tl.constexpr, IS_PLAIN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of a matrix at address `source`. Each lane loads ALIGN bytes at once, whatever the unit."""
    kind: tl.constexpr = tl.int32 if UNIT == 4 else (tl.int16 if UNIT == 2 else tl.int8)
    n = n_bytes // ALIGN * (ALIGN // UNIT)  # so that the compiler sees what it is a multiple of
    i = chunk * (CHUNK // UNIT) + tl.arange(0, CHUNK // UNIT)
    source_ptr = tl.multiple_of(source.to(tl.pointer_type(kind)), ALIGN)
    values = tl.load(source_ptr + i, mask=i < n)
    to_ptr = tl.multiple_of(out_ptr.to(tl.pointer_type(kind)), 16)
    if IS_PLAIN:
        tl.store(to_ptr + i, values, mask=i < n)
    else:
        block = i // block_units
        unit = i - block * block_units
        start = tl.load(moves_ptr + 2 * unit)
        step = tl.load(moves_ptr + 2 * unit + 1)
        tl.store(to_ptr + start + block * step, values, mask=i < n)
