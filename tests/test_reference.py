"""The plain numpy of docs/numerics.md against what it stands for, in binary64."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from freetoken import reference
from freetoken.reference import F32, f32

RNG = np.random.default_rng(11)


def normal(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(f32)


def test_lanes_are_folded_in_the_order_of_the_page() -> None:
    x = normal(8)
    assert reference.lanes8(x) == ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    y = normal(32)
    v = [(y[j] + y[j + 16]) + (y[j + 8] + y[j + 24]) for j in range(8)]
    assert reference.lanes32(y) == reference.lanes8(np.array(v, dtype=f32))
    z = normal(70)
    assert reference.lanes32(z) == reference.lanes32(np.concatenate([z, np.zeros(58, f32)]))
    first = f32(z[0] + z[32]) + z[64]
    spread = np.zeros(32, f32)
    spread[0] = first
    assert reference.lanes32(np.where(np.arange(70) % 32 == 0, z, f32(0))) == reference.lanes32(spread)


@pytest.mark.parametrize("width", [32, 256])
@pytest.mark.parametrize("planes", [1, 2])
def test_quantised_activations_are_within_a_unit(width: int, planes: int) -> None:
    x = normal(4 * width) * f32(3)
    a = reference.quantize(x, width, planes)
    assert max(abs(a.hi).max(), abs(a.lo).max()) <= 127
    error = np.abs(a.a * a.dx[:, None].astype(np.float64) - x.reshape(-1, width))
    unit = a.dx[:, None].astype(np.float64)
    assert (error <= unit * (0.51 if planes == 1 else 1.51)).all()
    moved = error > 0.51 * unit  # only where lo would be -128
    assert (a.lo[moved] == -127).all()


@pytest.mark.parametrize(
    ("value", "dx"),
    [
        (0.0, 0.0),
        (2.0**-101, 0.0),
        (np.nan, np.nan),
        (np.inf, np.nan),
        (-np.inf, np.nan),
        (3e38, f32(3e38) / f32(32512)),
    ],
)
def test_special_blocks(value: float, dx: float) -> None:
    x = np.zeros(64, f32)
    x[5] = value
    a = reference.quantize(x, 32)
    assert a.dx[0] == f32(dx) or (np.isnan(dx) and np.isnan(a.dx[0]))
    assert a.dx[1] == 0 and not a.a[1].any()
    assert bool(a.a[0].any()) == (value == 3e38)


def test_the_low_plane_has_no_minus_128() -> None:
    limit = 32512
    q = np.arange(-limit, limit + 1, dtype=np.int64)
    padded = np.concatenate([q, np.full(-len(q) % 256, limit)]).astype(f32)
    x = padded.reshape(-1, 256)
    x[:, 0] = limit  # so that every block's scale is 1
    a = reference.quantize(x.ravel(), 256)
    assert a.lo.min() == -127 and a.lo.max() == 127 and np.abs(a.hi).max() == 127
    assert np.abs(a.a - x).max() == 1 and (np.abs(a.a - x) == 1).mean() < 1 / 200


def factor_offsets(type_id: int) -> list[int]:
    """Where a block's fp16 factors stand."""
    return {Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q6_K: [208]}.get(
        Type(type_id), [0, 2] if type_id in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K) else [0]
    )


@pytest.mark.parametrize("type_id", sorted(reference.TYPE_CLASS), ids=lambda t: Type(t).name)
def test_products_approach_the_dequantised_ones(type_id: int) -> None:
    width, (size, _) = reference.TYPE_CLASS[type_id], reference._FORMS[type_id]
    rows = RNG.integers(0, 256, (4, 5, size), dtype=np.uint8)
    for offset in factor_offsets(type_id):
        scales = RNG.uniform(0.001, 0.02, (4, 5)).astype(np.float16)
        rows[:, :, offset : offset + 2] = scales[..., None].view(np.uint8)
    if type_id == Type.MXFP4:
        rows[:, :, 0] = RNG.integers(118, 124, (4, 5))
    x = normal(5 * width)
    w = dequantize(rows.reshape(4, -1), Type(type_id)).astype(np.float64)
    found = reference.product(rows.reshape(4, -1), reference.quantize(x, width), type_id)
    assert (np.abs(found - w @ x.astype(np.float64)) <= 5e-5 * (np.abs(w) @ np.abs(x))).all()


def test_exp_is_close_and_bounded() -> None:
    x = np.concatenate([np.linspace(-87, 88, 20001), normal(5000)]).astype(f32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(reference.exp(x) - exact) <= 2e-7 * exact).all()
    ends = np.array([-87.1, -1e30, -np.inf, 0.0, -0.0, 100.0, np.inf], dtype=f32)
    top = reference.exp(np.array([88], f32))[0]
    np.testing.assert_array_equal(reference.exp(ends), np.array([0, 0, 0, 1, 1, top, top], dtype=f32))
    assert np.isnan(reference.exp(np.array([np.nan], f32))).all()


def test_activations_are_close() -> None:
    x = (normal(4000) * 8).astype(f32)
    wide = x.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    for found, exact in (
        (reference.sigmoid(x), sigmoid),
        (reference.silu(x), wide * sigmoid),
        (reference.gelu(x), gelu),
        (reference.softcap(x, 30.0), 30 * np.tanh(wide / 30)),
    ):
        np.testing.assert_allclose(found, exact, rtol=3e-6, atol=5e-6)  # softcap near 0: 30 times an ulp of 1


def test_rms_norm_and_rope() -> None:
    x, w = normal(3, 72), normal(72)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(reference.rms_norm(x, w, 1e-5), exact, rtol=1e-6, atol=1e-6)
    angle = RNG.uniform(0, 6, 8)
    cos, sin = np.cos(angle).astype(f32), np.sin(angle).astype(f32)
    for is_neox in (True, False):
        head = normal(2, 20)
        found = reference.rope(head, cos, sin, is_neox=is_neox)
        pairs = [(i, i + 8) if is_neox else (2 * i, 2 * i + 1) for i in range(8)]
        for i, (a, b) in enumerate(pairs):
            turned = (head[:, a] + 1j * head[:, b]) * np.exp(1j * angle[i])
            np.testing.assert_allclose(found[:, a] + 1j * found[:, b], turned, atol=1e-6)
        np.testing.assert_array_equal(found[:, 16:], head[:, 16:])


@pytest.mark.parametrize(("n", "first"), [(1, 0), (256, 0), (300, 0), (700, 0), (700, 650), (700, 300)])
def test_attention(n: int, first: int) -> None:
    q, k, v = normal(64), normal(n, 64).astype(np.float16), normal(n, 48).astype(np.float16)
    found = reference.attention(q, k, v, scale=0.125, first=first)
    s = k[first:].astype(np.float64) @ q * 0.125
    p = np.exp(s - s.max())
    np.testing.assert_allclose(found, p @ v[first:] / p.sum(), rtol=1e-5, atol=1e-6)


def test_router_and_experts() -> None:
    logits = normal(16)
    logits[3] = logits[9] = 4
    ids, weights = reference.router(logits, 4)
    assert list(ids[:2]) == [3, 9] and abs(float(weights.sum()) - 1) < 1e-6 and (np.diff(weights) <= 0).all()
    prob = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    np.testing.assert_allclose(reference.router(logits, 4, normalise=False)[1], prob[ids], rtol=1e-6)
    chosen = prob[ids] / prob[ids].sum()
    np.testing.assert_allclose(reference.router(logits, 4, gate="softmax_chosen")[1], chosen, rtol=1e-6)
    bias = np.zeros(16, f32)
    bias[12] = 10
    biased, w = reference.router(logits, 2, gate="sigmoid", bias=bias, scale=2.5, normalise=False)
    assert list(biased) == [12, 3]
    np.testing.assert_allclose(w, 2.5 / (1 + np.exp(-logits[[12, 3]].astype(np.float64))), rtol=1e-6)

    bank = {name: normal(16, 12, 20) if name != "down" else normal(16, 20, 12) for name in ("gate", "up", "down")}
    x = normal(20)
    rows, y = reference.experts(x, list(ids), weights, lambda e, name, v: reference.float_product(bank[name][e], v))
    wide = {name: value.astype(np.float64) for name, value in bank.items()}
    for rank, e in enumerate(ids):
        g = wide["gate"][e] @ x
        np.testing.assert_allclose(
            rows[rank], wide["down"][e] @ (g / (1 + np.exp(-g)) * (wide["up"][e] @ x)), rtol=1e-4
        )
    np.testing.assert_allclose(y, weights.astype(np.float64) @ rows, rtol=1e-5, atol=1e-5)
