"""ggml's own quantisers and decoders, called in the libraries that llama-cpp-python ships.

Called by the generators and by the parity tool. Arrays are numpy, C order; the last axis is a row.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

__all__ = ["dequantise", "ggml_library", "is_float_type", "quantise", "row_bytes", "type_by_name"]

FLOAT_TYPES = (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16)


class TypeTraits(ctypes.Structure):
    """The head of ggml's `struct ggml_type_traits` (ggml.h): enough to reach `to_float`."""

    _fields_ = [
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


@functools.cache
def ggml_library() -> ctypes.CDLL:
    """libggml-base with the prototypes used here; the CPU part is initialised first (fp16 tables)."""
    folder = Path(llama_cpp.__file__).parent / "lib"
    base = ctypes.CDLL(str(folder / "libggml-base.so"))
    ctypes.CDLL(str(folder / "libggml-cpu.so")).ggml_cpu_init()
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    base.ggml_quantize_chunk.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    base.ggml_get_type_traits.restype = ctypes.POINTER(TypeTraits)
    base.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return base


def type_by_name(name: str) -> gguf.GGMLQuantizationType:
    """ggml's type called `name` ("Q4_K"); ValueError lists the known ones."""
    try:
        return gguf.GGMLQuantizationType[name.upper()]
    except KeyError:
        known = ", ".join(t.name for t in gguf.GGMLQuantizationType)
        raise ValueError(f"unknown tensor type {name!r}; known: {known}") from None


def is_float_type(kind: gguf.GGMLQuantizationType) -> bool:
    """F32, F16 and BF16: rows of any length."""
    return kind in FLOAT_TYPES


def row_bytes(kind: gguf.GGMLQuantizationType, n: int) -> int:
    """Bytes of a row of `n` values; ValueError when `n` is no multiple of the type's block."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if n % block:
        raise ValueError(f"a row of {n} values cannot be {kind.name}: its blocks hold {block}")
    return int(n // block * size)


def quantise(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """fp32 [..., n] to uint8 [..., row_bytes] by ggml's reference quantiser (importance matrix of ones)."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    n = values.shape[-1]
    n_rows = values.size // n
    out = np.zeros((*values.shape[:-1], row_bytes(kind, n)), dtype=np.uint8)
    if kind == gguf.GGMLQuantizationType.F32:
        out[...] = values.view(np.uint8)
    elif is_float_type(kind):
        out[...] = gguf.quants.quantize(values, kind).view(np.uint8).reshape(out.shape)
    else:
        ones = np.ones(n, dtype=np.float32)
        wrote = ggml_library().ggml_quantize_chunk(
            int(kind), values.ctypes.data, out.ctypes.data, 0, n_rows, n, ones.ctypes.data
        )
        if wrote != out.nbytes:
            raise ValueError(f"ggml wrote {wrote} bytes of {kind.name} where {out.nbytes} were expected")
    return out


def dequantise(data: np.ndarray, kind: gguf.GGMLQuantizationType, n: int) -> np.ndarray:
    """uint8 rows [..., row_bytes] to fp32 [..., n] by ggml's `to_float`."""
    data = np.ascontiguousarray(data).view(np.uint8)
    shape = (*data.shape[:-1], n)
    if data.shape[-1] != row_bytes(kind, n):
        raise ValueError(f"{kind.name} rows of {n} values take {row_bytes(kind, n)} bytes, not {data.shape[-1]}")
    if kind == gguf.GGMLQuantizationType.F32:
        return data.view(np.float32).reshape(shape)
    out = np.empty(shape, dtype=np.float32)
    traits = ggml_library().ggml_get_type_traits(int(kind)).contents
    traits.to_float(data.ctypes.data, out.ctypes.data, out.size)
    return out
