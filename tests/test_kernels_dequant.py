"""Values of quantised matrices: every type, in the file's form and in planes, against the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel

from freetoken import quants
from freetoken.kernels import layout
from freetoken.kernels.dequant import PLANES, RAW, dequantise, is_float
from freetoken.kernels.matvec import TYPE_CLASS
from freetoken.quants import GgmlType
from tools.random_blocks import RANDOM_TYPES, random_rows

TYPES = [GgmlType(t) for t in sorted(TYPE_CLASS)]


def aligned(data: np.ndarray) -> torch.Tensor:
    """A copy that starts at a multiple of 16."""
    memory = torch.zeros(data.size + 16, dtype=torch.uint8)
    out = memory[-memory.data_ptr() % 16 :][: data.size]
    out.copy_(torch.from_numpy(data.reshape(-1)))
    return out


def blocks(rng: np.random.Generator, kind: GgmlType, rows: int, cols: int) -> np.ndarray:
    """uint8 [rows, row_bytes]: of a type that tools cannot make, any bytes whose factors are neither infinite nor NaN,
    first of them every byte that there is."""
    if kind.name in RANDOM_TYPES or is_float(kind):
        made = random_rows(rng, Type(kind), rows, cols, cols**-0.5)
        return np.ascontiguousarray(made).view(np.uint8).reshape(rows, -1)
    size = quants.TYPES[kind].block_bytes
    raw = rng.integers(0, 256, (rows * quants.row_bytes(kind, cols) // size, size), dtype=np.uint8)
    if kind == GgmlType.NVFP4:
        raw[:, :4] = np.arange(raw[:, :4].size, dtype=np.uint8).reshape(-1, 4)
    else:
        at = {GgmlType.IQ1_M: 55, GgmlType.TQ1_0: 53, GgmlType.TQ2_0: 65}.get(kind, 1)
        raw[:, at] &= 0xBF  # a factor below 2
    return raw.reshape(rows, -1)


class Matrices:
    """Random matrices of a type, as they lie in the two forms by turns."""

    def __init__(self, kind: GgmlType, rows: int, cols: int, forms: list[int]) -> None:
        rng = np.random.default_rng(int(kind))
        raw = [blocks(rng, kind, rows, cols) for _ in forms]
        self.values = np.stack(
            [np.asarray(quants.dequantize(int(kind), r.reshape(-1))).reshape(rows, cols) for r in raw]
        )
        self.memory = []
        for form, r in zip(forms, raw, strict=True):
            if form == RAW:
                self.memory.append(aligned(r))
            else:
                laid = aligned(np.zeros(layout.slot_bytes(int(kind), rows, cols), np.uint8))
                layout.relay(int(kind), torch.from_numpy(r.reshape(-1)), laid)
                self.memory.append(laid)
        self.addresses = torch.tensor([m.data_ptr() for m in self.memory])
        self.forms = torch.tensor(forms, dtype=torch.int32)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_values(kind: GgmlType) -> None:
    rows, cols = 5, 33 if is_float(kind) else 512
    m = Matrices(kind, rows, cols, [RAW, PLANES])
    for first, n in ((0, 5), (2, 3)):
        out = torch.full((2, n, cols), -1.0)
        dequantise(int(kind), m.addresses, m.forms, out, matrix_rows=rows, first_row=first)
        assert np.array_equal(out.numpy(), m.values[:, first : first + n])
    half = torch.empty(2, rows, cols, dtype=torch.float16)
    dequantise(int(kind), m.addresses, m.forms, half, matrix_rows=rows)
    assert np.array_equal(half.numpy(), m.values.astype(np.float16))


@pytest.mark.parametrize("kind", [GgmlType.Q6_K, GgmlType.F16], ids=lambda t: t.name)
def test_missing_matrices_and_rows_of_each(kind: GgmlType) -> None:
    rows, cols = 3, 256
    m = Matrices(kind, rows, cols, [RAW, PLANES, PLANES])
    m.addresses[1] = 0
    units = torch.tensor([1, 0, 2]) * (cols if kind == GgmlType.F16 else 1)
    out = torch.full((3, 1, cols), 7.0)
    dequantise(int(kind), m.addresses, m.forms, out, matrix_rows=rows, first_units=units)
    assert np.array_equal(out[0, 0].numpy(), m.values[0, 1])
    assert np.array_equal(out[2, 0].numpy(), m.values[2, 2])
    assert bool((out[1] == 7).all())


def test_what_fp16_cannot_hold() -> None:
    raw = np.array([1e6, -1e6, np.nan, 1.0, 3e-5], np.float32)
    memory, out = aligned(raw.view(np.uint8)), torch.empty(1, 1, 5, dtype=torch.float16)
    dequantise(0, torch.tensor([memory.data_ptr()]), torch.zeros(1, dtype=torch.int32), out, matrix_rows=1)
    assert out[0, 0, :2].tolist() == [65504, -65504]
    assert bool(out[0, 0, 2].isnan())
    assert out[0, 0, 3:].tolist() == [1.0, float(np.float16(3e-5))]


def test_refusals() -> None:
    addresses, forms = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="Q8_K has no kernel"):
        dequantise(int(GgmlType.Q8_K), addresses, forms, torch.empty(1, 1, 256), matrix_rows=1)
    with pytest.raises(ValueError, match="int64 addresses"):
        dequantise(0, addresses, forms, torch.empty(2, 1, 256), matrix_rows=1)
    with pytest.raises(ValueError, match="contiguous fp16"):
        dequantise(0, addresses, forms, torch.empty(1, 1, 4, dtype=torch.float64), matrix_rows=1)


def compiled(kind: GgmlType, archs: tuple[int, ...]) -> str:
    width = quants.TYPES[kind].block_size
    signature = {"addresses": "*i64", "forms": "*i32", "out": "*fp16", "values": "*i32", "n_blocks": "i32"}
    signature |= dict.fromkeys(("first_block", "start1", "start2", "start3", "start4"), "i32")
    numbers = {
        "TYPE": int(kind),
        "BLOCK_BYTES": quants.TYPES[int(kind)].block_bytes,
        "W": width,
        "B": 4096 // width,
        "ALIGN": 16,
        "IS_SAME": layout.is_identity(int(kind)),
        "firsts": None,
    }
    pointers = ("addresses", "forms", "out", "values")
    module = "freetoken.kernels.dequant"
    return compile_kernel(module, "dequantise_kernel", signature, numbers, divisible=pointers, archs=archs)


@pytest.mark.parametrize("kind", [GgmlType.Q6_K, GgmlType.IQ2_XXS], ids=lambda t: t.name)
def test_kernels_compile(kind: GgmlType) -> None:
    ptx = compiled(kind, QUICK)
    assert "st.global.v4" in ptx and "fma.rn.f32" not in ptx


@pytest.mark.compile
@pytest.mark.parametrize("kind", [t for t in TYPES if not is_float(t)], ids=lambda t: t.name)
def test_kernels_compile_everywhere(kind: GgmlType) -> None:
    compiled(kind, ARCHITECTURES)


@pytest.mark.compile
def test_plain_numbers_compile_everywhere() -> None:
    """As rows of an embedding are decoded, and as matrices of a prompt are."""
    for kind, out, firsts in ((0, "*fp32", "*i64"), (1, "*fp16", None), (2, "*fp16", None)):
        signature = {"addresses": "*i64", "out": out, "first_value": "i32", "n_values": "i32"}
        signature |= {} if firsts is None else {"firsts": firsts}
        numbers: dict[str, object] = {"TYPE": kind, "N": 4096, "ALIGN": 16}
        numbers |= {"firsts": None} if firsts is None else {}
        pointers = tuple(name for name, t in signature.items() if t[0] == "*")
        module = "freetoken.kernels.dequant"
        compile_kernel(module, "convert_kernel", signature, numbers, divisible=pointers, archs=ARCHITECTURES)
