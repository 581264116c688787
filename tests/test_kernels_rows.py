"""Norms, sums of expert rows and hidden rows on the GPU: the bits of docs/numerics.md, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_bits import DEVICE, array, assert_quantised, assert_same_bits, tensor

from freetoken import reference
from freetoken.kernels.activations import empty_activation
from freetoken.kernels.glu import glu
from freetoken.kernels.norm import Norm, Rows, Shared, combine_rows
from freetoken.kernels.sums import fold8, fold32, sigmoid, softcap, sum_exp, sum_squares

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and overflow are part of the cases

f32 = np.float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


def special_floats() -> np.ndarray:
    edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.0, 88.5, -87.0, -87.1, 1e-40, -1e-40, 3e38, -3e38]
    rng = np.random.default_rng(5)
    spread = rng.standard_normal(499) * np.exp(rng.uniform(-20, 6, 499))
    return np.concatenate([edges, spread]).astype(f32)


@triton.jit
def functions_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, sigmoid(value))
    tl.store(out + BLOCK + at, softcap(value, 30.0))
    tl.store(out + 2 * BLOCK + tl.arange(0, BLOCK // 8), fold8(tl.reshape(value, [BLOCK // 8, 8])))
    tl.store(out + 3 * BLOCK + tl.arange(0, BLOCK // 32), fold32(tl.reshape(value, [BLOCK // 32, 32])))
    tl.store(out + 4 * BLOCK + tl.arange(0, 1), sum_squares(x, None, BLOCK - 10))
    tl.store(out + 4 * BLOCK + 1 + tl.arange(0, 1), sum_exp(x, 2.0, BLOCK - 3))


def run_functions(x: np.ndarray) -> np.ndarray:
    out = torch.zeros((5, len(x)))
    functions_kernel[(1,)](tensor(x), out, BLOCK=len(x), enable_fp_fusion=False)
    return array(out)


def test_functions_at_the_edges() -> None:
    x = special_floats()
    with np.errstate(all="ignore"):
        out = run_functions(x)
        assert_same_bits(out[0], reference.sigmoid(x))
        assert_same_bits(out[1], reference.softcap(x, 30.0))


def test_sums_in_their_order() -> None:
    x = normal(1, 512)
    out = run_functions(x)
    assert_same_bits(out[2, :64], reference.lanes8(x.reshape(-1, 8)))
    assert_same_bits(out[3, :16], reference.lanes32(x.reshape(-1, 32)))
    assert_same_bits(out[4, 0], reference.lanes32(x[:502] * x[:502]))
    assert_same_bits(out[4, 1], reference.lanes8(reference.exp(x[:509] - f32(2))))


@pytest.mark.parametrize("n, width, cls, planes", [(3, 512, 256, 2), (1, 96, 32, 2), (2, 1280, 256, 1), (2, 64, 32, 1)])
def test_residual_norm_and_quantisation(n: int, width: int, cls: int, planes: int) -> None:
    x, residual, weight = normal(2, n, width), normal(3, n, width) * 8, normal(4, width)
    h, y, out = torch.empty(n, width), torch.empty(n, width), empty_activation(cls, n, width, DEVICE)
    norm = Norm(tensor(weight), 1e-6)
    combine_rows(tensor(x), h, residual=tensor(residual), norm=norm, y=y, quantised=(out,), planes=planes)
    assert_same_bits(h, residual + x)
    assert_same_bits(y, reference.rms_norm(residual + x, weight, 1e-6))
    assert_quantised(out, array(y), planes)


def test_norm_alone_in_two_classes() -> None:
    x, weight = normal(5, 2, 256), normal(6, 256)
    first, second = empty_activation(256, 2, 256, DEVICE), empty_activation(32, 2, 256, DEVICE)
    combine_rows(tensor(x), None, norm=Norm(tensor(weight), 1e-5), quantised=(first, second))
    y = reference.rms_norm(x, weight, 1e-5)
    assert_quantised(first, y)
    assert_quantised(second, y)


@pytest.mark.parametrize("k", [0, 2])
def test_norm_before_and_after_the_residual_in_place(k: int) -> None:
    x, residual, norms = normal(7, 2, max(k, 1), 192), normal(8, 2, 192), normal(9, 2, 192)
    h, y = tensor(residual), torch.empty(2, 192)
    post, norm = Norm(tensor(norms[0]), 1e-6), Norm(tensor(norms[1]), 1e-5)
    source = Rows(tensor(x), torch.ones(2, k)) if k else tensor(x[:, 0])
    combine_rows(source, h, post=post, residual=h, norm=norm, y=y)
    expected = residual + reference.rms_norm(x[:, 0] + x[:, 1] if k else x[:, 0], norms[0], 1e-6)
    assert_same_bits(h, expected)
    assert_same_bits(y, reference.rms_norm(expected, norms[1], 1e-5))


@pytest.mark.parametrize("gated", [None, False, True])
def test_expert_rows_shared_expert_and_residual(gated: bool | None) -> None:
    n, k, width = 2, 6, 128
    rows, weights, residual = normal(10, n, k, width), normal(11, n, k), normal(12, n, width)
    shared, gate = normal(13, n, width), normal(14, n)
    y = np.zeros((n, width), f32)
    for rank in range(k):
        y = y + weights[:, rank, None] * rows[:, rank]
    if gated is not None:
        y = y + (shared * reference.sigmoid(gate)[:, None] if gated else shared)
    part = None if gated is None else Shared(tensor(shared), tensor(gate) if gated else None)
    h = torch.empty(n, width)
    combine_rows(Rows(tensor(rows), tensor(weights)), h, shared=part, residual=tensor(residual))
    assert_same_bits(h, residual + y)


def test_rows_of_special_values_are_quantised() -> None:
    x = np.stack([np.full(64, 1e-31), np.r_[special_floats()[:13], np.ones(51)], np.zeros(64)]).astype(f32)
    h, out = torch.empty(3, 64), empty_activation(32, 3, 64, DEVICE)
    with np.errstate(all="ignore"):
        combine_rows(tensor(x), h, quantised=(out,))
    assert_quantised(out, x)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("width, cls", [(768, 256), (96, 32)])
def test_glu(activation: str, width: int, cls: int) -> None:
    both = normal(15, 3, 2 * width) * 4
    h, out = torch.empty(3, width), empty_activation(cls, 3, width, DEVICE)
    wide = tensor(both)
    glu(wide[:, :width], wide[:, width:], h, out, activation=activation)
    act = reference.silu if activation == "silu" else reference.gelu
    expected = act(both[:, :width]) * both[:, width:]
    assert_same_bits(h, expected)
    assert_quantised(out, expected)


def test_wrong_shapes_are_refused() -> None:
    x, h = torch.zeros(2, 64), torch.zeros(2, 64)
    with pytest.raises(ValueError, match="residual must be contiguous"):
        combine_rows(x, h, residual=torch.zeros(1, 64))
    with pytest.raises(ValueError, match="h is needed"):
        combine_rows(x, None, residual=h)
    with pytest.raises(ValueError, match="do not fit an activation"):
        glu(x, h, None, empty_activation(32, 1, 64, DEVICE))
