"""Section 3 of docs/numerics.md for the IQ2 and IQ3 types, as plain numpy: code words, signs and scales of blocks.

A part of `reference`. The code words' magnitudes are those of the gguf package, whose tables are ggml's.
"""

from __future__ import annotations

import gguf.quants
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

__all__ = ["GRID_UNITS", "grid_integers"]

I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]

GRID_UNITS: dict[int, float] = {
    Type.IQ2_XXS: 0.125,
    Type.IQ2_XS: 0.125,
    Type.IQ2_S: 0.125,
    Type.IQ3_XXS: 0.25,
    Type.IQ3_S: 1.0,
}
"""The power of two that a block's factor is multiplied with, so that scales become odd integers."""


def grid_integers(type_: int, b: U8) -> tuple[I64, I64]:
    """Integers [blocks, 256] and scales [blocks, 16] of blocks [blocks, block_bytes]; the factor is bytes 0 and 1."""
    if type_ == Type.IQ2_XXS:
        words = _words(b[:, 2:], np.uint32).reshape(len(b), 8, 2)
        codes = (words[:, :, :1] >> np.arange(0, 32, 8)) & 255
        signs, sc = _sign_words(words[:, :, 1])
    elif type_ == Type.IQ2_XS:
        shorts = _words(b[:, 2:66], np.uint16)
        codes, signs, sc = shorts & 511, _even_signs(shorts >> 9), _nibble_scales(b[:, 66:])
    elif type_ == Type.IQ2_S:
        high = (b[:, 66:74, None].astype(np.int64) >> np.arange(0, 8, 2)) & 3
        codes, signs, sc = (
            b[:, 2:34] + 256 * high.reshape(-1, 32),
            1 - 2 * _bits(b[:, 34:66]),
            _nibble_scales(b[:, 74:]),
        )
    elif type_ == Type.IQ3_XXS:
        codes = b[:, 2:66].astype(np.int64)
        signs, sc = _sign_words(_words(b[:, 66:], np.uint32))
    else:
        codes, signs = b[:, 2:66] + 256 * _bits(b[:, 66:74]), 1 - 2 * _bits(b[:, 74:106])
        sc = _nibble_scales(b[:, 106:]).repeat(2, axis=1)
    return _magnitudes(type_, codes.reshape(len(b), -1)) * signs, sc


def _magnitudes(type_: int, codes: I64) -> I64:
    """[blocks, 256] of code words [blocks, 32 or 64]."""
    quant = getattr(gguf.quants, Type(type_).name)
    quant.init_grid()
    table: I64 = quant.grid.reshape(quant.grid_shape).astype(np.int64)
    return np.asarray(table[codes].reshape(len(codes), 256))


def _bits(raw: U8) -> I64:
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little").astype(np.int64)


def _words(raw: U8, kind: type[np.unsignedinteger]) -> I64:
    return np.ascontiguousarray(raw).view(kind).astype(np.int64)


def _even_signs(seven: I64) -> I64:
    """1 or -1 [blocks, 8 * n] of 7 bits [blocks, n]; the eighth makes the number of set bits even."""
    bits = (seven[..., None] >> np.arange(7)) & 1
    eight = np.concatenate([bits, bits.sum(axis=-1, keepdims=True) & 1], axis=-1)
    return np.asarray(1 - 2 * eight.reshape(len(seven), -1))


def _sign_words(words: I64) -> tuple[I64, I64]:
    """Signs [blocks, 256] and scales [blocks, 16] of 8 words: four times 7 bits, then 4 bits."""
    seven = (words[:, :, None] >> np.arange(0, 28, 7)) & 127
    return _even_signs(seven.reshape(len(words), 32)), (2 * (words >> 28) + 1).repeat(2, axis=1)


def _nibble_scales(raw: U8) -> I64:
    s = raw.astype(np.int64)
    return np.asarray(2 * np.stack([s & 15, s >> 4], axis=2).reshape(len(s), -1) + 1)
