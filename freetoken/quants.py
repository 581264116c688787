"""Block types of ggml: sizes, names, and a plain reference dequantisation. No torch.

Called by the loader (sizes), by `ft info` (names), by tests (reference values) and by `native` (the address of ggml's
`to_float` for types that our kernels do not decode). Knows nothing of files.

Sizes are those of ggml-common.h. They are written down here and not taken from the `gguf` package, because the package
lags behind ggml (no Q2_0 in 0.19) and gives Q8_1 the size of an older layout; types that only the package knows are
added from it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import gguf.quants
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from freetoken.cores import sleeping_openmp
from freetoken.errors import UnsupportedModelError

__all__ = [
    "REMOVED",
    "TYPES",
    "GgmlRowKernel",
    "GgmlType",
    "QuantType",
    "dequantize",
    "describe",
    "ggml_row_kernel",
    "row_bytes",
    "to_float_pointer",
    "type_name",
]


class GgmlType(IntEnum):
    """ggml's type numbers, as stored in files."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


@dataclass(frozen=True)
class QuantType:
    """One type: `block_size` values are stored in `block_bytes` bytes."""

    id: int
    name: str
    block_size: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits of storage for each value."""
        return 8 * self.block_bytes / self.block_size


_SIZES: dict[GgmlType, tuple[int, int]] = {
    GgmlType.F32: (1, 4),
    GgmlType.F16: (1, 2),
    GgmlType.Q4_0: (32, 18),
    GgmlType.Q4_1: (32, 20),
    GgmlType.Q5_0: (32, 22),
    GgmlType.Q5_1: (32, 24),
    GgmlType.Q8_0: (32, 34),
    GgmlType.Q8_1: (32, 36),
    GgmlType.Q2_K: (256, 84),
    GgmlType.Q3_K: (256, 110),
    GgmlType.Q4_K: (256, 144),
    GgmlType.Q5_K: (256, 176),
    GgmlType.Q6_K: (256, 210),
    GgmlType.Q8_K: (256, 292),
    GgmlType.IQ2_XXS: (256, 66),
    GgmlType.IQ2_XS: (256, 74),
    GgmlType.IQ3_XXS: (256, 98),
    GgmlType.IQ1_S: (256, 50),
    GgmlType.IQ4_NL: (32, 18),
    GgmlType.IQ3_S: (256, 110),
    GgmlType.IQ2_S: (256, 82),
    GgmlType.IQ4_XS: (256, 136),
    GgmlType.I8: (1, 1),
    GgmlType.I16: (1, 2),
    GgmlType.I32: (1, 4),
    GgmlType.I64: (1, 8),
    GgmlType.F64: (1, 8),
    GgmlType.IQ1_M: (256, 56),
    GgmlType.BF16: (1, 2),
    GgmlType.TQ1_0: (256, 54),
    GgmlType.TQ2_0: (256, 66),
    GgmlType.MXFP4: (32, 17),
    GgmlType.NVFP4: (64, 36),
    GgmlType.Q1_0: (128, 18),
    GgmlType.Q2_0: (64, 18),
}

REMOVED: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Numbers that ggml gave up; files that use them must be converted again."""


def _table() -> dict[int, QuantType]:
    table = {int(t): QuantType(int(t), t.name, *size) for t, size in _SIZES.items()}
    for t, size in GGML_QUANT_SIZES.items():
        if int(t) not in table and int(t) not in REMOVED:
            table[int(t)] = QuantType(int(t), t.name, *size)
    return table


TYPES: dict[int, QuantType] = _table()
"""Every type that a file may hold, by its number."""

_PLAIN: dict[int, str] = {
    GgmlType.F32: "<f4",
    GgmlType.F16: "<f2",
    GgmlType.I8: "<i1",
    GgmlType.I16: "<i2",
    GgmlType.I32: "<i4",
    GgmlType.I64: "<i8",
    GgmlType.F64: "<f8",
}


def type_name(type_id: int) -> str:
    """Name of a type, or `type N` for a number that we do not know."""
    if type_id in TYPES:
        return TYPES[type_id].name
    return REMOVED.get(type_id, f"type {type_id}")


def describe(type_id: int) -> str:
    """Why a number is no usable type, for error messages; empty for a known type."""
    if type_id in TYPES:
        return ""
    if type_id in REMOVED:
        return f"type {type_id} ({REMOVED[type_id]}), which ggml removed: convert the model again"
    return f"unknown type {type_id}: the file is damaged, or newer than this program (types 0 to {max(TYPES)})"


def row_bytes(type_id: int, n: int) -> int:
    """Bytes of a row of n values. Raises ValueError where the type is unknown or n is not whole blocks."""
    if type_id not in TYPES:
        raise ValueError(describe(type_id))
    t = TYPES[type_id]
    if n < 0 or n % t.block_size:
        raise ValueError(f"a row of {n} values is not a whole number of {t.name} blocks of {t.block_size}")
    return n // t.block_size * t.block_bytes


def dequantize(type_id: int, data: np.ndarray) -> np.ndarray:
    """fp32 [..., n] of uint8 [..., row_bytes]: the plain reference, slow.

    Through the `gguf` package where it knows the type, else through ggml's `to_float`. Raises UnsupportedModelError
    for the types that neither decodes (Q8_1 and Q8_K, which ggml uses for activations only).
    """
    t = TYPES.get(type_id)
    if t is None:
        raise UnsupportedModelError(describe(type_id))
    if data.dtype != np.uint8 or data.ndim == 0 or data.shape[-1] % t.block_bytes:
        raise ValueError(
            f"{t.name}: need uint8 rows of whole {t.block_bytes}-byte blocks, got {data.dtype} {data.shape}"
        )
    data = np.ascontiguousarray(data)
    if type_id in _PLAIN:
        return data.view(_PLAIN[type_id]).astype(np.float32)
    try:
        with np.errstate(all="ignore"):
            values = gguf.quants.dequantize(data, GGMLQuantizationType(type_id))
    except (NotImplementedError, ValueError):
        return _dequantize_with_ggml(t, data)
    return np.asarray(values, dtype=np.float32)


def _dequantize_with_ggml(t: QuantType, data: np.ndarray) -> np.ndarray:
    address = to_float_pointer(t.id)
    if address is None:
        raise UnsupportedModelError(f"{t.name} is not a type for weights: nothing decodes it")
    out = np.empty((*data.shape[:-1], data.shape[-1] // t.block_bytes * t.block_size), dtype=np.float32)
    if out.size:
        _TO_FLOAT(address)(data.ctypes.data, out.ctypes.data, out.size)
    return out


def to_float_pointer(type_id: int) -> int | None:
    """Address of ggml's `void to_float(const void *src, float *dst, int64_t n)`; None where it has none for the type.

    The library is loaded on the first call. Only numbers of GgmlType are looked up: the oldest llama-cpp-python that
    we allow has them all, and ggml does not check the number. None also where its block differs from ours.
    """
    if type_id not in _SIZES:
        return None
    traits = _ggml().ggml_get_type_traits(type_id).contents
    if (traits.blck_size, traits.type_size) != _SIZES[GgmlType(type_id)]:
        return None
    address: int | None = traits.to_float
    return address


@dataclass(frozen=True)
class GgmlRowKernel:
    """ggml's product of one row on the CPU: address of its `vec_dot`, and how an activation is brought to its form."""

    vec_dot: int
    activation_type: int
    from_float: int | None

    def activation(self, x: np.ndarray) -> np.ndarray:
        """uint8 of an fp32 row, as `vec_dot` takes it."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        if self.from_float is None:
            return x.view(np.uint8).copy()
        out = np.zeros(row_bytes(self.activation_type, x.size), np.uint8)
        _TO_FLOAT(self.from_float)(x.ctypes.data, out.ctypes.data, x.size)
        return out


def ggml_row_kernel(type_id: int) -> GgmlRowKernel | None:
    """ggml's CPU kernel of a weight type, for comparisons; None where there is none or the block differs from ours.

    Raises UnsupportedModelError where ggml's libraries are not found.
    """
    if to_float_pointer(type_id) is None and type_id != GgmlType.F32:
        return None
    cpu = _ggml_cpu()
    traits = cpu.ggml_get_type_traits_cpu(type_id).contents
    if traits.vec_dot is None:
        return None
    act = traits.vec_dot_type
    from_float = None if act == GgmlType.F32 else cpu.ggml_get_type_traits_cpu(act).contents.from_float
    return GgmlRowKernel(traits.vec_dot, act, from_float)


_TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """`struct ggml_type_traits` of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


class _CpuTraits(ctypes.Structure):
    """`struct ggml_type_traits_cpu` of ggml-cpu.h."""

    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


@functools.lru_cache(maxsize=1)
def _ggml_cpu() -> ctypes.CDLL:
    """The ggml-cpu library beside the ggml-base one that `_ggml` loaded."""
    library = ctypes.CDLL(str(_library(Path(_ggml()._name).parent, "ggml-cpu")))
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(_CpuTraits)
    library.ggml_get_type_traits_cpu.argtypes = [ctypes.c_int]
    return library


@functools.lru_cache(maxsize=1)
def _ggml() -> ctypes.CDLL:
    """llama-cpp-python's ggml-base library, its tables initialised. Found without importing the package."""
    spec = importlib.util.find_spec("llama_cpp")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        base = _library(Path(folder) / "lib", "ggml-base")
        cpu = _library(Path(folder) / "lib", "ggml-cpu")
        if base and cpu:
            with sleeping_openmp():
                library = ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL)
                ctypes.CDLL(str(cpu)).ggml_cpu_init()
            library.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
            library.ggml_get_type_traits.argtypes = [ctypes.c_int]
            return library
    raise UnsupportedModelError(f"ggml's libraries were not found in {folders}: reinstall llama-cpp-python")


def _library(folder: Path, name: str) -> Path | None:
    """The file of a library; first the name that its dependants ask for, since wheels hold copies and not links."""
    for file in (f"lib{name}.so.0", f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll"):
        if (folder / file).is_file():
            return folder / file
    return None
