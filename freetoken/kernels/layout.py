"""How quantised matrices lie in GPU memory: planes of block fields, so that kernels read whole 32-bit words.

A block of a file starts anywhere (210, 34 or 17 bytes are no multiples of 4). On the GPU a matrix of `rows` by `cols`
is a series of planes instead, one for each field of its type: field `f` of block `b` (counted through all rows of the
matrix) stands at `plane_offsets[f] + b * size`. Planes start at multiples of 128 bytes. Bytes are only moved, never
changed, and a field's bytes keep their order. Types whose blocks are whole words (Q4_K, Q5_K, IQ1_M, NVFP4), float
types and types without a kernel have one plane: the file's bytes as they are.

A fill may read the source in any unit and write byte by byte: `destination` is the closed form. Called by the upload
of dense weights, the fills of expert slots and the kernels; knows nothing of slots' numbers or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetoken import quants
from freetoken.quants import GgmlType

__all__ = [
    "ALIGNMENT",
    "Field",
    "destination",
    "fields",
    "is_identity",
    "plane_offsets",
    "relay",
    "restore",
    "slot_bytes",
]

ALIGNMENT = 128
"""Where planes, and so matrices, start."""


@dataclass(frozen=True)
class Field:
    """Part of a block: `size` bytes from `offset`."""

    offset: int
    size: int


def _fields(*pairs: tuple[int, int]) -> tuple[Field, ...]:
    return tuple(Field(*pair) for pair in pairs)


_FIELDS: dict[int, tuple[Field, ...]] = {
    GgmlType.Q4_0: _fields((2, 16), (0, 2)),  # quants, d
    GgmlType.Q4_1: _fields((4, 16), (0, 4)),  # quants, d and m
    GgmlType.Q5_0: _fields((6, 16), (2, 4), (0, 2)),  # quants, fifth bits, d
    GgmlType.Q5_1: _fields((8, 16), (4, 4), (0, 4)),  # quants, fifth bits, d and m
    GgmlType.Q8_0: _fields((2, 32), (0, 2)),  # quants, d
    GgmlType.IQ4_NL: _fields((2, 16), (0, 2)),  # quants, d
    GgmlType.MXFP4: _fields((1, 16), (0, 1)),  # quants, exponent
    GgmlType.Q2_K: _fields((16, 64), (0, 16), (80, 4)),  # quants, scales and minimums, d and dmin
    GgmlType.Q3_K: _fields((32, 64), (0, 32), (96, 12), (108, 2)),  # quants, third bits, scales, d
    GgmlType.Q6_K: _fields((0, 128), (128, 64), (192, 16), (208, 2)),  # low nibbles, high pairs, scales, d
    GgmlType.IQ4_XS: _fields((8, 128), (0, 8)),  # quants, d and scales
    GgmlType.IQ2_XXS: _fields((2, 64), (0, 2)),  # codes with signs and scales, d
    GgmlType.IQ2_XS: _fields((2, 64), (66, 8), (0, 2)),  # codes with signs, scales, d
    GgmlType.IQ2_S: _fields((2, 32), (34, 32), (66, 8), (74, 8), (0, 2)),  # codes, signs, high bits, scales, d
    GgmlType.IQ3_XXS: _fields((2, 64), (66, 32), (0, 2)),  # codes, signs with scales, d
    GgmlType.IQ3_S: _fields((2, 64), (74, 32), (66, 8), (106, 4), (0, 2)),  # codes, signs, high bits, scales, d
    GgmlType.IQ1_S: _fields((2, 32), (34, 16), (0, 2)),  # codes, high bits with scales, d
    GgmlType.TQ1_0: _fields((0, 52), (52, 2)),  # quants, d
    GgmlType.TQ2_0: _fields((0, 64), (64, 2)),  # quants, d
    GgmlType.Q1_0: _fields((2, 16), (0, 2)),  # quants, d
    GgmlType.Q2_0: _fields((2, 16), (0, 2)),  # quants, d
}


def fields(type_id: int) -> tuple[Field, ...]:
    """The planes of a type, in the order in which they lie."""
    return _FIELDS.get(type_id) or (Field(0, quants.TYPES[type_id].block_bytes),)


def is_identity(type_id: int) -> bool:
    """Whether a matrix lies as in the file, so that a plain copy fills it."""
    return len(fields(type_id)) == 1


def plane_offsets(type_id: int, n_blocks: int) -> tuple[int, ...]:
    """Where each plane of a matrix of so many blocks starts, and last the size of the whole."""
    offsets = [0]
    for field in fields(type_id):
        offsets.append(-(-(offsets[-1] + n_blocks * field.size) // ALIGNMENT) * ALIGNMENT)
    return tuple(offsets)


def slot_bytes(type_id: int, rows: int, cols: int) -> int:
    """Bytes of a matrix on the GPU, a multiple of ALIGNMENT: those of the file and at most 127 for each plane."""
    return plane_offsets(type_id, _n_blocks(type_id, rows, cols))[-1]


def destination(type_id: int, n_blocks: int, source: int) -> int:
    """Where byte `source` of a matrix in the file's form comes to stand; the form that a fill kernel computes."""
    block, at = divmod(source, quants.TYPES[type_id].block_bytes)
    for field, start in zip(fields(type_id), plane_offsets(type_id, n_blocks), strict=False):
        if field.offset <= at < field.offset + field.size:
            return start + block * field.size + at - field.offset
    raise AssertionError(f"fields of {quants.type_name(type_id)} leave byte {at} out")


def relay(type_id: int, raw: torch.Tensor, out: torch.Tensor, *, first: int = 0, n_blocks: int | None = None) -> None:
    """Lay the bytes of whole blocks (uint8, the file's order) into `out` (uint8 [slot_bytes]), on any device.

    They are all of the matrix, or its blocks from number `first` on where it has `n_blocks`.
    """
    blocks = raw.reshape(-1, quants.TYPES[type_id].block_bytes)
    for field, plane in _planes(type_id, out, len(blocks) if n_blocks is None else n_blocks):
        plane[first : first + len(blocks)].copy_(blocks[:, field.offset : field.offset + field.size])


def restore(type_id: int, laid: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `relay`: uint8 [rows, row_bytes] in the file's order."""
    n_blocks = _n_blocks(type_id, rows, cols)
    blocks = torch.empty((n_blocks, quants.TYPES[type_id].block_bytes), dtype=torch.uint8, device=laid.device)
    for field, plane in _planes(type_id, laid, n_blocks):
        blocks[:, field.offset : field.offset + field.size] = plane
    return blocks.reshape(rows, -1)


def _n_blocks(type_id: int, rows: int, cols: int) -> int:
    return rows * quants.row_bytes(type_id, cols) // quants.TYPES[type_id].block_bytes


def _planes(type_id: int, laid: torch.Tensor, n_blocks: int) -> list[tuple[Field, torch.Tensor]]:
    """Each field with its plane, a view [n_blocks, size]."""
    offsets = plane_offsets(type_id, n_blocks)
    if laid.dtype != torch.uint8 or laid.dim() != 1 or len(laid) < offsets[-1]:
        raise ValueError(f"need uint8 [{offsets[-1]}] for {n_blocks} blocks, got {laid.dtype} {tuple(laid.shape)}")
    return [
        (field, laid[start : start + n_blocks * field.size].view(n_blocks, field.size))
        for field, start in zip(fields(type_id), offsets, strict=False)
    ]
