"""Greedy sampling on the GPU chooses what the CPU's sampler chooses, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_bits import DEVICE, array, tensor

from freetoken.kernels.sampler import N_FIELDS, Mode, SampleRoom, sample


@pytest.mark.parametrize("n_vocab", [100, 4096, 9000])
def test_greedy(n_vocab: int) -> None:
    logits = np.round(np.random.default_rng(n_vocab).standard_normal((6, n_vocab)) * 2).astype(np.float32)
    logits[1] = np.where(np.arange(n_vocab) % 3 == 1, np.float32(0.0), np.float32(-0.0))
    logits[2] = -np.abs(logits[2]) - 1
    logits[3] = -np.inf
    logits[4, 50] = np.inf
    logits[5, [60, 90]] = np.nan
    params = np.zeros((6, N_FIELDS), np.int32)
    params[:, 0] = Mode.GREEDY
    room, uniforms = SampleRoom.empty(6, n_vocab, DEVICE), tensor(np.zeros(6))
    tokens, status = (tensor(np.zeros(6, np.int32)) for _ in range(2))
    for _ in range(2):  # a call leaves the counters as it found them
        sample(tensor(logits), tensor(params), uniforms, tokens, status, room)
        np.testing.assert_array_equal(array(tokens)[:3], np.argmax(logits[:3], axis=1))
        np.testing.assert_array_equal(array(status), [0, 0, 0, 1, 1, 1])
    assert (array(room.best) == -(2**63)).all() and not array(room.counts).any()
