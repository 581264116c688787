"""The router on the GPU: ids and weights of docs/numerics.md, section 7, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_bits import array, assert_same_bits, tensor

from freetoken import reference
from freetoken.kernels.router import route

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN is part of the cases

f32 = np.float32


def check(logits: np.ndarray, n_used: int, **options: object) -> None:
    n = len(logits)
    ids, weights = torch.zeros((n, n_used), dtype=torch.int32), torch.zeros((n, n_used))
    bias = options.pop("bias", None)
    with np.errstate(all="ignore"):
        route(tensor(logits), ids, weights, bias=None if bias is None else tensor(bias), **options)
        for t, row in enumerate(logits):
            expected_ids, expected = reference.router(row, n_used, bias=bias, **options)
            np.testing.assert_array_equal(array(ids[t]), expected_ids)
            assert_same_bits(weights[t], expected)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "softmax_chosen"])
@pytest.mark.parametrize("n_expert, n_used", [(128, 8), (60, 4), (8, 2), (5, 5), (300, 11)])
def test_gates(gate: str, n_expert: int, n_used: int) -> None:
    logits = np.random.default_rng(n_expert).standard_normal((3, n_expert)).astype(f32) * 3
    check(logits, n_used, gate=gate)
    check(logits, n_used, gate=gate, normalise=False, scale=2.5)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "softmax_chosen"])
def test_selection_bias(gate: str) -> None:
    rng = np.random.default_rng(2)
    check(rng.standard_normal((2, 64)).astype(f32), 6, gate=gate, bias=rng.standard_normal(64).astype(f32), scale=1.5)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid", "softmax_chosen"])
def test_ties_go_to_the_lower_number_and_nan_comes_last(gate: str) -> None:
    rng = np.random.default_rng(3)
    logits = np.round(rng.standard_normal((4, 32)) * 2).astype(f32)
    logits[1, :16] = np.where(rng.random(16) < 0.5, f32(0.0), f32(-0.0))
    logits[2, 3:] = np.nan
    logits[3, ::2] = -np.inf
    check(logits, 6, gate=gate)


def test_a_small_sum_is_raised() -> None:
    check(np.full((1, 16), -80, f32), 2, gate="sigmoid")


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route(torch.zeros(1, 4), torch.zeros((1, 5), dtype=torch.int32), torch.zeros(1, 5))
