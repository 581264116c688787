"""Products of a long prompt against fp64: every type and set of kernels, any shape; the same bits for any threads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from freetoken import native, reference
from freetoken.blocks import Experts, Weight
from freetoken.cpu import many
from freetoken.cpu.prefill import PrefillOps
from freetoken.errors import EngineError
from freetoken.kvcache import KVCache
from freetoken.native import Pool
from tools.random_blocks import random_rows

THREADS = (1, 2, 3)
BOUND = 5e-5
"""Largest error as a share of sum |w x|. Measured: up to 3e-5 with int16 activations, 2e-7 by torch."""
FLOATS_AND_RARE = (Type.F32, Type.F16, Type.BF16, Type.IQ2_XXS, Type.IQ3_S)
TYPES = (*(Type(t) for t in sorted(reference.TYPE_CLASS)), *FLOATS_AND_RARE)


def variants() -> list[str]:
    """The sets of kernels of this processor."""
    names = []
    for name in native.VARIANTS[1:]:
        try:
            native.set_variant(name)
        except EngineError:
            continue
        names.append(name)
    native.set_variant("auto")
    return names


def tiled() -> list[str]:
    """Those with products of many tokens."""
    return [name for name in variants() if name != "portable"]


@pytest.fixture(params=variants())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    native.set_variant(request.param)
    yield request.param
    native.set_variant("auto")


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool]]:
    made = [Pool(n) for n in THREADS]
    yield made
    for pool in made:
        pool.close()


def weight(kind: Type, rows: int, cols: int, rng: np.random.Generator, *, bias: bool = False) -> Weight:
    data = np.ascontiguousarray(random_rows(rng, kind, rows, cols, cols**-0.5)).view(np.uint8).reshape(rows, -1)
    values = rng.standard_normal(rows).astype(np.float32) if bias else None
    return Weight("w", int(kind), rows, cols, data.shape[1], data, values)


def values_of(pool: Pool, w: Weight) -> np.ndarray:
    """fp64 [rows, cols] of all its rows."""
    native.can_decode(w.type)
    rows = w.data.reshape(-1, w.row_bytes)
    out = np.empty((len(rows), w.cols), np.float32)
    pool.dequantize(w.type, rows, out)
    return out.astype(np.float64)


def activations(n: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Normal values with a few large ones, as models have them."""
    x = rng.standard_normal((n, cols)).astype(np.float32)
    x[rng.random(x.shape) < 0.002] *= 6
    return x


def error(found: np.ndarray, want: np.ndarray, size: np.ndarray) -> float:
    return float((np.abs(found - want) / size).max())


def ops_of(pool: Pool) -> PrefillOps:
    return PrefillOps(pool, KVCache([], 1), lambda x, w: x)


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_linear(kind: Type, variant: str, pools: list[Pool]) -> None:
    rng = np.random.default_rng(int(kind))
    w = weight(kind, 75, 1280, rng, bias=True)
    values = values_of(pools[0], w)
    assert w.bias is not None
    for n in (9, 130):
        x = activations(n, w.cols, rng)
        want, size = x @ values.T + w.bias, np.abs(x) @ np.abs(values).T + np.abs(w.bias)
        y = ops_of(pools[1]).linear(torch.from_numpy(x), w).numpy()
        assert error(y, want, size) < BOUND


@pytest.mark.parametrize(
    "kind", [Type.Q4_1, Type.Q8_0, Type.MXFP4, Type.Q2_K, Type.Q4_K, Type.Q6_K], ids=lambda t: t.name
)
@pytest.mark.parametrize("name", tiled())
def test_shapes_and_threads(name: str, kind: Type, pools: list[Pool]) -> None:
    """Odd sizes; a row's result depends neither on the threads nor on the tokens and rows beside it."""
    rng = np.random.default_rng(1)
    native.set_variant(name)
    block = reference.TYPE_CLASS[int(kind)]
    for rows, cols, n in ((1, block, 1), (31, 3 * block, 9), (33, 9 * block, 600), (200, 2 * block, 53)):
        w = weight(kind, rows, cols, rng)
        x = activations(n, cols, rng)
        values = values_of(pools[0], w)
        y = many.multiply(pools[0], w, x)
        assert error(y, x @ values.T, np.abs(x) @ np.abs(values).T + 1e-9) < BOUND
        for pool in pools[1:]:
            assert np.array_equal(many.multiply(pool, w, x), y)
        some = slice(n // 2, n // 2 + 7)
        assert np.array_equal(many.multiply(pools[1], w, x[some]), y[some])
        part = Weight("w", w.type, 1, cols, w.row_bytes, w.data[rows // 2 : rows // 2 + 1])
        assert np.array_equal(many.multiply(pools[1], part, x)[:, 0], y[:, rows // 2])
    native.set_variant("auto")


@pytest.mark.parametrize("kind", [Type.Q5_1, Type.Q5_K], ids=lambda t: t.name)
@pytest.mark.parametrize("name", tiled())
def test_special_activations(name: str, kind: Type, pools: list[Pool]) -> None:
    rng = np.random.default_rng(2)
    native.set_variant(name)
    w = weight(kind, 40, 512, rng)
    x = activations(12, 512, rng)
    x[1], x[2], x[3, 5], x[4, 300] = 0, 2.0**-140, np.nan, -np.inf
    x[5] *= np.float32(2.0**-90)
    x[6] *= np.float32(2.0**60)
    y = many.multiply(pools[1], w, x)
    values = values_of(pools[0], w)
    assert not y[1:3].any()
    assert not np.isfinite(y[3:5]).any()
    for t in (0, 5, 6, 7, 11):
        row = x[t].astype(np.float64)
        assert error(y[t], values @ row, np.abs(values) @ np.abs(row)) < BOUND
    native.set_variant("auto")


def test_refused_products(pools: list[Pool]) -> None:
    rng = np.random.default_rng(3)
    w = weight(Type.Q4_K, 32, 256, rng)
    x = activations(4, 256, rng)
    for bad in (x[:, :128], x.astype(np.float64), np.asfortranarray(x)):
        with pytest.raises(EngineError, match="contiguous float32"):
            many.multiply(pools[0], w, bad)
    assert many.multiply(pools[0], w, x[:0]).shape == (0, 32)
    assert not many.can_multiply(weight(Type.F16, 2, 32, rng))
    rows = np.empty((4, 32), np.float32)
    for fields in ((Type.F16, 32, 256, 512), (Type.Q4_K, 32, 255, 144), (Type.Q4_K, -1, 256, 144), (99, 1, 1, 1)):
        with pytest.raises(EngineError, match=r"operation matvec over 4 tokens is malformed"):
            pools[0].run_many(native.OP_MATVEC, 4, (x, w.data, rows, None), fields, scratch_at=4)
    for code, n in ((native.OP_ADD, 4), (native.OP_MATVEC, 0), (native.OP_MATVEC, -1)):
        with pytest.raises(EngineError, match="malformed"):
            pools[0].run_many(code, n, (x, w.data, rows, None), (Type.Q4_K, 32, 256, 144), scratch_at=4)
    with pytest.raises(EngineError, match="malformed"):
        pools[0].run_many(native.OP_MATVEC, 4, (x, None, rows, None), (Type.Q4_K, 32, 256, 144), scratch_at=4)


# --- experts ---------------------------------------------------------------------------------------------------------

BANKS = [
    (Type.Q4_K, Type.Q4_K, Type.Q6_K, "silu"),
    (Type.Q4_K, Type.Q6_K, Type.Q8_0, "gelu"),
    (Type.Q4_1, Type.Q4_0, Type.Q5_1, "silu"),
    (Type.Q5_K, Type.IQ2_XXS, Type.Q4_K, "silu"),
    (Type.F16, Type.BF16, Type.IQ4_XS, "gelu"),
]
N_EXPERT, N_USED, D, FF = 6, 3, 512, 256


def bank_of(kinds: tuple[Type, Type, Type], rng: np.random.Generator) -> Experts:
    shapes = (FF, D), (FF, D), (D, FF)
    stacked = [weight(kind, N_EXPERT * rows, cols, rng) for kind, (rows, cols) in zip(kinds, shapes, strict=True)]
    banks = [w.data.reshape(N_EXPERT, -1, w.row_bytes) for w in stacked]
    parts = (Weight("w", w.type, b.shape[1], w.cols, w.row_bytes, b) for w, b in zip(stacked, banks, strict=True))
    return Experts(N_EXPERT, N_USED, *parts)


def choice(n: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [n, N_USED]: expert 0 has nearly every token, expert 4 none."""
    others = [rng.permutation([1, 2, 3, 5])[:N_USED] for _ in range(n)]
    ids = np.stack(others).astype(np.int32)
    ids[rng.random(n) < 0.95, 1] = 0
    return ids


def mixed(pool: Pool, bank: Experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, name: str) -> np.ndarray:
    """The experts' sum in fp64."""
    banks = [values_of(pool, w).reshape(N_EXPERT, -1, w.cols) for w in (bank.gate, bank.up, bank.down)]
    y = np.zeros((len(x), D))
    for rank in range(ids.shape[1]):
        gate, up, down = (b[ids[:, rank]] for b in banks)
        g, u = np.einsum("td,tfd->tf", x, gate), np.einsum("td,tfd->tf", x, up)
        act = g / (1 + np.exp(-np.clip(g, -700, 700)))
        if name == "gelu":
            act = g / 2 * (1 + np.tanh(0.7978845608028654 * (g + 0.044715 * g**3)))
        y += weights[:, rank, None] * np.einsum("tf,tdf->td", act * u, down)
    return y


@pytest.mark.parametrize("case", BANKS, ids=lambda case: "-".join(getattr(x, "name", x) for x in case))
def test_experts(case: tuple[Type, Type, Type, str], variant: str, pools: list[Pool]) -> None:
    rng = np.random.default_rng(4)
    *kinds, name = case
    bank = bank_of((kinds[0], kinds[1], kinds[2]), rng)
    for n in (9, 70):
        x, ids = activations(n, D, rng), choice(n, rng)
        weights = rng.random((n, N_USED)).astype(np.float32)
        want = mixed(pools[0], bank, x.astype(np.float64), ids, weights, name)
        tensors = torch.from_numpy(x), torch.from_numpy(ids).long(), torch.from_numpy(weights)
        y = ops_of(pools[1]).experts(*tensors, bank, name).numpy()
        assert np.abs(y - want).max() < 5e-4 * np.abs(want).max()


@pytest.mark.parametrize("name", tiled())
def test_experts_with_any_threads_and_parts(name: str, pools: list[Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits for any threads and parts; one expert with more tokens than a claim takes; ids that add nothing."""
    rng = np.random.default_rng(5)
    native.set_variant(name)
    bank = bank_of((Type.Q4_K, Type.Q4_K, Type.Q4_0), rng)
    x, ids = activations(600, D, rng), choice(600, rng)
    weights = rng.random((600, N_USED)).astype(np.float32)
    ids[7] = -1
    ids[8, 1:] = -1
    y = many.mix_experts(pools[0], bank, x, ids, weights, "silu")
    assert not y[7].any()
    assert y[8].any()
    for pool in pools[1:]:
        assert np.array_equal(many.mix_experts(pool, bank, x, ids, weights, "silu"), y)
    assert not many.mix_experts(pools[1], bank, x, np.full_like(ids, -1), weights, "silu").any()
    monkeypatch.setattr(many, "MAX_PAIRS", 100)
    assert np.array_equal(many.mix_experts(pools[1], bank, x, ids, weights, "silu"), y)
    with pytest.raises(EngineError, match="int32"):
        many.mix_experts(pools[0], bank, x, ids.astype(np.int64), weights, "silu")
    native.set_variant("auto")
