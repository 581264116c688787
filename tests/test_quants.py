"""Block types: sizes against ggml, and the reference dequantisation against ggml's to_float."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType

from freetoken import quants
from freetoken.errors import UnsupportedModelError
from freetoken.quants import GgmlType

TO_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
DECODED_BY_BOTH = [t for t in GgmlType if t not in (GgmlType.F32, GgmlType.Q8_1, GgmlType.Q8_K)]
NO_TO_FLOAT = {"F32", "Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}


def random_blocks(type_id: int, n_blocks: int, seed: int = 1) -> np.ndarray:
    """Random bytes [2, n_blocks * block_bytes] of a type."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (2, n_blocks * quants.TYPES[type_id].block_bytes), dtype=np.uint8)


def ggml_values(type_id: int, data: np.ndarray) -> np.ndarray:
    address = quants.to_float_pointer(type_id)
    assert address is not None
    t = quants.TYPES[type_id]
    out = np.empty((*data.shape[:-1], data.shape[-1] // t.block_bytes * t.block_size), dtype=np.float32)
    TO_FLOAT(address)(data.ctypes.data, out.ctypes.data, out.size)
    return out


def test_table_covers_the_package() -> None:
    assert {int(t) for t in GGMLQuantizationType} <= set(quants.TYPES)
    assert not set(quants.TYPES) & set(quants.REMOVED)
    assert sorted(quants.REMOVED) == [4, 5, 31, 32, 33, 36, 37, 38]


@pytest.mark.weights
def test_table_covers_ggml(llama_cpp_source: Path) -> None:
    header = (llama_cpp_source / "ggml/include/ggml.h").read_text()
    numbers = {int(n): name for name, n in re.findall(r"^\s+GGML_TYPE_(\w+)\s*=\s*(\d+),", header, re.M)}
    count = numbers.pop(max(numbers))
    assert count == "COUNT"
    assert numbers == {t.id: t.name for t in quants.TYPES.values()}


@pytest.mark.parametrize("type_id", list(GgmlType), ids=lambda t: t.name)
def test_to_float_exists_for_every_weight_type(type_id: GgmlType) -> None:
    """The address is None only where ggml has none; a wrong block size would also give None."""
    assert (quants.to_float_pointer(type_id) is None) == (type_id.name in NO_TO_FLOAT)


@pytest.mark.parametrize("type_id", [t for t in DECODED_BY_BOTH if t.name not in NO_TO_FLOAT], ids=lambda t: t.name)
def test_dequantize_equals_ggml(type_id: GgmlType) -> None:
    data = random_blocks(type_id, 64)
    ours, theirs = quants.dequantize(type_id, data), ggml_values(type_id, data)
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    finite = np.isfinite(theirs)
    assert finite.mean() > 0.5
    assert np.array_equal(np.isfinite(ours), finite)
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(
    ("type_id", "dtype"), [(24, "i1"), (25, "<i2"), (26, "<i4"), (27, "<i8"), (28, "<f8"), (0, "<f4"), (1, "<f2")]
)
def test_plain_types(type_id: int, dtype: str) -> None:
    values = np.array([[-3, 0, 7, 100]], dtype=dtype)
    assert np.array_equal(quants.dequantize(type_id, values.view(np.uint8)), values.astype(np.float32))


def test_row_bytes() -> None:
    assert quants.row_bytes(GgmlType.Q4_K, 4096) == 16 * 144
    assert quants.row_bytes(GgmlType.Q8_1, 64) == 72
    assert quants.row_bytes(GgmlType.F16, 3) == 6
    assert quants.row_bytes(GgmlType.Q6_K, 0) == 0


@pytest.mark.parametrize(("type_id", "n"), [(12, 100), (2, -32), (4, 32), (200, 32)])
def test_row_bytes_refuses(type_id: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"block|type"):
        quants.row_bytes(type_id, n)


@pytest.mark.parametrize("type_id", [GgmlType.Q8_1, GgmlType.Q8_K, 5, 99])
def test_dequantize_refuses_what_nothing_decodes(type_id: int) -> None:
    with pytest.raises(UnsupportedModelError):
        quants.dequantize(type_id, np.zeros((1, 36 * 292), dtype=np.uint8))


def test_dequantize_refuses_partial_blocks() -> None:
    with pytest.raises(ValueError, match="20-byte blocks"):
        quants.dequantize(GgmlType.Q4_1, np.zeros(30, dtype=np.uint8))


def test_names() -> None:
    assert quants.type_name(12) == "Q4_K" and quants.type_name(31) == "Q4_0_4_4" and quants.type_name(77) == "type 77"
    assert quants.describe(12) == "" and "removed" in quants.describe(36) and "newer" in quants.describe(43)
    assert quants.TYPES[12].bits == 4.5
