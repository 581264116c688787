"""The fields of each type's blocks (kernels.layout) where kernels can see them, up to five."""

from __future__ import annotations

import triton

from freetoken import quants
from freetoken.kernels import layout

__all__ = ["MAX_FIELDS", "block_bytes", "block_size", "field_size", "field_start"]

MAX_FIELDS = 5
FIELDS: dict[int, tuple[tuple[int, int], ...]] = {
    t: (*((f.offset, f.size) for f in layout.fields(t)), *[(0, 0)] * MAX_FIELDS)[:MAX_FIELDS] for t in quants.TYPES
}
"""Offset in a block and size of each."""


@triton.constexpr_function
def field_start(type_id, f):
    return FIELDS[type_id][f][0]


@triton.constexpr_function
def field_size(type_id, f):
    return FIELDS[type_id][f][1]


@triton.constexpr_function
def block_size(type_id):
    """Values of a block."""
    return quants.TYPES[type_id].block_size


@triton.constexpr_function
def block_bytes(type_id):
    return quants.TYPES[type_id].block_bytes
