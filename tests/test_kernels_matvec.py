"""Products of quantised and float weights on the GPU: the bits of docs/numerics.md, under Triton's interpreter."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel
from kernel_bits import DEVICE, array, assert_quantised, assert_same_bits, tensor
from test_kernels import SPECIAL_FACTORS, wild_activations, wild_weights

from freetoken import quants, reference
from freetoken.kernels import layout
from freetoken.kernels import matvec as kernels
from freetoken.kernels.activations import Activation, empty_activation, quantize
from freetoken.kernels.matvec import TYPE_CLASS, Bank, Matrix, Source, expert_down, expert_glu, matvec
from freetoken.quants import GgmlType
from freetoken.reference import F32, U8

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and overflow are part of the cases

QUANTISED = sorted(reference.TYPE_CLASS)
FLOATS = (Type.F32, Type.F16, Type.BF16)
FACTORS: dict[int, tuple[int, ...]] = {
    **{GgmlType.IQ1_S: (0,), GgmlType.IQ1_M: (), GgmlType.TQ1_0: (52,), GgmlType.TQ2_0: (64,)},
    **{GgmlType.NVFP4: (), GgmlType.Q1_0: (0,), GgmlType.Q2_0: (0,)},
}
"""Types without an integer form: where a block's fp16 factor stands."""
quantised = pytest.mark.parametrize("type_id", QUANTISED, ids=lambda t: Type(t).name)
decoded = pytest.mark.parametrize("type_id", sorted(FACTORS), ids=quants.type_name)


def laid(type_id: int, raw: U8, rows: int, cols: int) -> torch.Tensor:
    """A matrix as it lies on the GPU, with bytes between its planes that no kernel may use."""
    out = torch.full((layout.slot_bytes(type_id, rows, cols),), 0xFF, dtype=torch.uint8)
    layout.relay(type_id, tensor(raw), out)
    return out


def activation(x: F32, width: int, planes: int = 2) -> Activation:
    out = empty_activation(width, *x.shape, DEVICE)
    quantize(tensor(x), out, planes)
    return out


def source(x: F32, type_id: int) -> Source:
    return activation(x, TYPE_CLASS[type_id]) if TYPE_CLASS[type_id] else tensor(x)


def float_weights(type_id: int, rows: int, cols: int, rng: np.random.Generator) -> tuple[U8, F32]:
    """Bytes of random weights and their values."""
    w = rng.standard_normal((rows, cols)).astype(np.float32)
    if type_id == Type.F16:
        w = w.astype(np.float16)
    elif type_id == Type.BF16:
        bits = (w.view(np.uint32) >> 16).astype(np.uint16)
        return bits.view(np.uint8).reshape(rows, -1), (bits.astype(np.uint32) << 16).view(np.float32)
    return w.view(np.uint8).reshape(rows, -1), w.astype(np.float32)


def decoded_weights(type_id: int, rows: int, cols: int, rng: np.random.Generator) -> U8:
    """Like `wild_weights`: the first rows are all ones, zeros, sign bits, and the largest integers; wild factors."""
    n, size = quants.row_bytes(type_id, cols), quants.TYPES[type_id].block_bytes
    raw = rng.integers(0, 256, (rows, n // size, size), dtype=np.uint8)
    for row, byte in zip(raw[:4], (0xFF, 0x00, 0x80, 0x7F), strict=False):
        row[:] = byte
    factor = (rng.standard_normal(raw.shape[:2]) * 0.02).astype(np.float16).view(np.uint16)
    chosen = rng.random(factor.shape) < 0.2
    factor = np.where(chosen, SPECIAL_FACTORS[rng.integers(0, len(SPECIAL_FACTORS), factor.shape)], factor)
    for at in FACTORS[type_id]:
        raw[:, :, at : at + 2] = factor.astype(np.uint16)[..., None].view(np.uint8)
    if type_id == GgmlType.IQ1_M:
        for i in range(4):
            raw[:, :, 49 + 2 * i] = (raw[:, :, 49 + 2 * i] & 15) | (((factor >> (4 * i)) & 15) << 4)
    return raw.reshape(rows, -1)


def weights(type_id: int, rows: int, cols: int, rng: np.random.Generator) -> U8:
    if type_id in FLOATS:
        return float_weights(type_id, rows, cols, rng)[0]
    if type_id in FACTORS:
        return decoded_weights(type_id, rows, cols, rng)
    return wild_weights(type_id, rows, cols // reference.TYPE_CLASS[type_id], rng)


def reference_product(type_id: int, raw: U8, x: F32, planes: int = 2) -> F32:
    """Products [rows] of one row of x."""
    if type_id in FLOATS or type_id in FACTORS:
        return reference.float_product(quants.dequantize(type_id, raw), x)
    return reference.product(raw, reference.quantize(x, reference.TYPE_CLASS[type_id], planes), type_id)


@pytest.mark.parametrize("type_id", [*QUANTISED, Type.F32, *sorted(FACTORS)], ids=quants.type_name)
def test_a_layout_moves_every_byte_to_its_destination_and_back(type_id: int) -> None:
    rows, cols = 3, 5 * quants.TYPES[type_id].block_size
    raw = np.random.default_rng(1).integers(0, 256, (rows, quants.row_bytes(type_id, cols)), dtype=np.uint8)
    out = laid(type_id, raw, rows, cols)
    n_blocks = raw.size // quants.TYPES[type_id].block_bytes
    places = [layout.destination(type_id, n_blocks, i) for i in range(raw.size)]
    np.testing.assert_array_equal(array(out)[places], raw.reshape(-1))
    np.testing.assert_array_equal(array(layout.restore(type_id, out, rows, cols)), raw)
    assert len(out) % layout.ALIGNMENT == 0 and len(out) < raw.size + 128 * len(layout.fields(type_id))
    assert layout.is_identity(type_id) == (places == list(range(raw.size)))


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize(("width", "cols"), [(32, 96), (32, 512), (256, 768)])
def test_activations_are_those_of_section_2(width: int, cols: int, planes: int) -> None:
    x = wild_activations(cols, width, np.random.default_rng(cols))
    assert_quantised(activation(x, width, planes), x, planes)


@quantised
@pytest.mark.parametrize(("n_blocks", "tokens", "planes"), [(3, 1, 2), (9, 3, 2), (1, 8, 1)])
def test_dense_products(type_id: int, n_blocks: int, tokens: int, planes: int) -> None:
    rng = np.random.default_rng(type_id)
    width, rows = reference.TYPE_CLASS[type_id], 7
    cols = n_blocks * width * (5 if width == 32 else 1)
    raw, x = wild_weights(type_id, rows, cols // width, rng), wild_activations(cols, width, rng)[8 - tokens :]
    y = torch.full((tokens, rows), 7.0)
    matvec(Matrix(type_id, rows, cols, laid(type_id, raw, rows, cols)), activation(x, width, planes), y)
    assert_same_bits(y, np.stack([reference_product(type_id, raw, row, planes) for row in x]))


@pytest.mark.parametrize("type_id", FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize(("cols", "tokens"), [(31, 1), (160, 3)])
def test_float_products_with_a_bias(type_id: int, cols: int, tokens: int) -> None:
    rng = np.random.default_rng(cols)
    raw, w = float_weights(type_id, 11, cols, rng)
    x, bias = rng.standard_normal((tokens, cols)).astype(np.float32), rng.standard_normal(11).astype(np.float32)
    y = torch.full((tokens, 20), 7.0)
    matvec(Matrix(type_id, 11, cols, laid(type_id, raw, 11, cols)), tensor(x), y[:, 3:14], tensor(bias))
    assert_same_bits(y[:, 3:14].contiguous(), np.stack([reference.float_product(w, row) + bias for row in x]))
    assert (y[:, :3] == 7).all() and (y[:, 14:] == 7).all()


@decoded
def test_products_of_types_without_an_integer_form(type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    rows, tokens, cols = 11, 3, max(256, 3 * quants.TYPES[type_id].block_size)
    raw = decoded_weights(type_id, rows, cols, rng)
    x = np.stack([rng.standard_normal(cols), rng.standard_normal(cols) * 1e38, np.zeros(cols)]).astype(np.float32)
    x[0, 17], bias = -np.inf, rng.standard_normal(rows).astype(np.float32)
    y = torch.full((tokens, rows), 7.0)
    matvec(Matrix(type_id, rows, cols, laid(type_id, raw, rows, cols)), tensor(x), y, tensor(bias))
    assert_same_bits(y, np.stack([reference_product(type_id, raw, row) + bias for row in x]))
    assert np.isfinite(array(y)).any()


MIXES = [  # gate, up, down, n_ff, activation; many programs are slow to interpret
    (Type.Q4_K, Type.Q4_K, Type.Q8_0, 32, 0),
    (Type.MXFP4, Type.MXFP4, Type.MXFP4, 32, 1),
    (Type.Q4_K, Type.Q8_0, Type.Q5_1, 32, 0),
    (Type.IQ4_XS, Type.Q2_K, Type.F16, 32, 1),
    (Type.F16, Type.F16, Type.Q6_K, 256, 0),
    (GgmlType.IQ1_S, GgmlType.IQ1_S, GgmlType.NVFP4, 64, 0),
    (GgmlType.IQ2_XXS, GgmlType.IQ1_M, GgmlType.F16, 16, 1),
    (GgmlType.TQ1_0, GgmlType.F16, GgmlType.F16, 2, 0),
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(map(quants.type_name, mix[:3])))
def test_experts_in_slots(mix: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    if mix[3] > 64:  # by more rows a program than on a card
        monkeypatch.setattr(kernels, "_shape", lambda *_: kernels._Shape(64, 1))
    rng = np.random.default_rng(17)
    types, n_ff, act = mix[:3], *mix[3:]
    cols, n_slots = 256, 3
    shapes = ((n_ff, cols), (n_ff, cols), (5, n_ff))
    sizes = [layout.slot_bytes(t, *shape) for t, shape in zip(types, shapes, strict=True)]
    starts = np.cumsum([128, *sizes])
    raw = [[weights(t, *shape, rng) for t, shape in zip(types, shapes, strict=True)] for _ in range(n_slots)]
    slots = torch.full((n_slots, int(starts[-1])), 0xFF, dtype=torch.uint8)
    for slot, banks in zip(slots, raw, strict=True):
        for t, shape, bank, start in zip(types, shapes, banks, starts, strict=False):
            layout.relay(t, tensor(bank), slot[start : start + layout.slot_bytes(t, *shape)])
    gate, up, down = (Bank(int(t), *s, int(at)) for t, s, at in zip(types, shapes, starts, strict=False))
    ids = torch.tensor([[2, -1], [-1, 0]], dtype=torch.int32)
    x = rng.standard_normal((2, cols)).astype(np.float32)
    h, y = torch.full((4, n_ff), 7.0), torch.full((4, 5), 7.0)
    expert_glu(slots, ids, (gate, up), (source(x, gate.type), source(x, up.type)), h, act)
    activate = (reference.silu, reference.gelu)[act]
    for pair, slot in enumerate(ids.reshape(-1).tolist()):
        if slot < 0:
            assert (h[pair] == 7).all()
            h[pair] = 0
            continue
        g, u = (reference_product(types[i], raw[slot][i], x[pair // 2]) for i in (0, 1))
        assert_same_bits(h[pair], activate(g) * u)
    expert_down(slots, ids, down, source(array(h), down.type), y)
    for pair, slot in enumerate(ids.reshape(-1).tolist()):
        expected = np.full(5, 7, np.float32)
        if slot >= 0:
            expected = reference_product(types[2], raw[slot][2], array(h[pair]))
        assert_same_bits(y[pair], expected)


def test_what_does_not_fit_is_refused() -> None:
    x, y = activation(np.ones((1, 256), np.float32), 256), torch.zeros((1, 4))
    data = torch.zeros(layout.slot_bytes(Type.Q4_K, 4, 256), dtype=torch.uint8)
    for matrix, given, out in (
        (Matrix(Type.Q4_K, 4, 512, data), x, y),
        (Matrix(Type.Q4_K, 5, 256, data), x, torch.zeros((1, 5))),
        (Matrix(Type.Q8_0, 4, 256, data), x, y),
        (Matrix(Type.Q8_K, 4, 256, data), x, y),
        (Matrix(Type.IQ1_S, 4, 256, data), x, y),
        (Matrix(Type.F32, 4, 256, data), x, y),
        (Matrix(Type.Q4_K, 4, 256, data), x, torch.zeros((2, 4))),
    ):
        with pytest.raises(ValueError):
            matvec(matrix, given, out)


POINTERS = {
    **{"*u8": ("w", "slots"), "*fp32": ("dx", "y", "bias", "h", "x"), "*i8": ("q",)},
    "*i32": ("extra", "ids", "sums"),
}
SIZES = ("n_blocks", "rows", "stride", "tokens", "y_stride", "slot_bytes", "down", "cols", "x_stride", "pieces")


def compile_ptx(
    name: str, constants: dict[str, object], archs: tuple[int, ...], module: str = "matvec", warps: int = 4
) -> None:
    """Compiles a kernel; its text has no fused multiply-add, no flush to zero and no approximate division."""
    kernel = getattr(importlib.import_module(f"freetoken.kernels.{module}"), name)
    signature = {}
    for argument in kernel.arg_names:
        last = argument.removeprefix("gate_").removeprefix("up_")
        kinds = [kind for kind, names in POINTERS.items() if last in names]
        signature[argument] = kinds[0] if kinds else "i32"
        if last == "q" and TYPE_CLASS.get(int(str(constants.get("TYPE", constants.get("GATE", -1))))) == 0:
            signature[argument] = "*fp32"
    signature = {k: v for k, v in signature.items() if k not in constants and k != "IS_CHAINED"}
    whole = tuple(k for k, v in signature.items() if v[0] == "*" or k in ("slot_bytes", "gate", "up", "down", "rows"))
    place = f"freetoken.kernels.{module}"
    ptx = compile_kernel(place, name, signature, constants, divisible=whole, warps=warps, archs=archs)
    for word in ("fma.rn.f32", ".ftz", "div.full", "div.approx"):
        assert word not in ptx, word


def dense(type_id: int, tokens: int) -> dict[str, Any]:
    """The constants of a launch for rows of 2048 columns."""
    width = TYPE_CLASS[type_id]
    shape, n = kernels._shape("dense", type_id, tokens), 2048 // quants.TYPES[type_id].block_size
    groups = kernels._groups(type_id, n, shape.warps)
    constants = {"TYPE": int(type_id), "N": n, "ALL": tokens, "T": shape.tokens, "G": groups, "R": shape.rows}
    return {"HAS_BIAS": False, "C": 4 if width == 32 else 1, **constants}


def test_kernels_compile_without_a_gpu() -> None:
    for type_id in (Type.Q4_K, Type.Q8_0, Type.IQ1_S):
        compile_ptx("matvec_kernel", dense(type_id, 1), QUICK)
    compile_ptx("quantize_kernel", {"N": 2048, "WIDTH": 256, "PLANES": 2}, QUICK, "activations", 1)


@pytest.mark.compile
@pytest.mark.parametrize("type_id", [*QUANTISED, *FLOATS, *sorted(FACTORS)], ids=quants.type_name)
def test_every_kernel_compiles_for_every_architecture(type_id: int) -> None:
    for tokens in (1, 8):
        compile_ptx("matvec_kernel", dense(type_id, tokens), ARCHITECTURES)
    one = dense(type_id, 1)
    shape = {"R": one["R"], "G": one["G"], "N": one["N"], "C": one["C"], "TYPE": int(type_id)}
    compile_ptx("down_kernel", shape, ARCHITECTURES)
    banks = {f"{bank}_{name}": one[name] for bank in ("GATE", "UP") for name in ("N", "G", "C")}
    both = {"ACTIVATION": 0, "GATE": int(type_id), "UP": int(type_id), "ROWS": one["G"] * one["R"]}
    compile_ptx("glu_kernel", both | banks, ARCHITECTURES)
