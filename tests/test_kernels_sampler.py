"""Greedy sampling on the GPU chooses what the CPU's sampler chooses, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_bits import array, tensor

from freetoken.kernels.sampler import argmax


@pytest.mark.parametrize("n_vocab", [100, 4096, 9000])
def test_argmax(n_vocab: int) -> None:
    logits = np.round(np.random.default_rng(n_vocab).standard_normal((6, n_vocab)) * 2).astype(np.float32)
    logits[1] = np.where(np.arange(n_vocab) % 3 == 1, np.float32(0.0), np.float32(-0.0))
    logits[2] = -np.inf
    logits[3, 50] = np.inf
    logits[4, [60, 90]] = np.nan
    logits[5] = -np.abs(logits[5]) - 1
    best = torch.full((6,), -(2**63), dtype=torch.int64)
    arrived, tokens = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    for _ in range(2):  # a launch leaves the counters as it found them
        argmax(tensor(logits), best, arrived, tokens)
        np.testing.assert_array_equal(array(tokens), np.argmax(logits, axis=1))
    assert (best == -(2**63)).all() and not arrived.any()
