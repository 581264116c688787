"""Angles and powers: right to the last bits, and the same bits on every machine."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from freetoken.blocks import MAX_ROPE_BLOCKS, RopeTable
from freetoken.spec.angles import cos_sin, log, powers


def frequencies(base: float = 1e4, half: int = 32) -> np.ndarray:
    return powers(base, -2.0 * np.arange(half) / (2 * half))


@pytest.mark.parametrize("top", [1.0, 1e3, 1e6])
def test_cosines_and_sines_against_libm(top: float) -> None:
    theta = np.append(np.random.default_rng(1).uniform(0, top, 5000), [0.0, math.pi / 4, math.pi / 2, math.pi])
    for ours, theirs in zip(cos_sin(theta), (np.cos(theta), np.sin(theta)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2**-52)
    assert [float(x[0]) for x in cos_sin(np.zeros(1))] == [1.0, 0.0]


def test_powers_and_logarithms() -> None:
    np.testing.assert_allclose(frequencies(1e6), 1e6 ** (-np.arange(32) / 32), rtol=1e-15)
    assert powers(2.0, np.array([0.0, 10.0, -1.0])).tolist() == [1.0, 1024.0, 0.5]
    assert log(1.0) == 0.0 and log(10.0) == pytest.approx(math.log(10), rel=1e-15)


def test_bits_are_those_of_every_machine() -> None:
    cos, sin = cos_sin(np.arange(4096.0)[:, None] * frequencies())
    digest = hashlib.sha256(frequencies().tobytes() + cos.tobytes() + sin.tobytes()).hexdigest()
    assert digest == "2cd50f2cba3a84f2625e3bf0be8f533d78269f3fe259a582daa93e725b64444f"


def test_a_row_does_not_depend_on_the_others() -> None:
    table = RopeTable(64, frequencies(), 1.25, True)
    positions = np.array([0, 5, 255, 256, 70000, 5], np.int32)
    together = table.cos_sin(positions)
    assert together.shape == (6, 2, 32) and together.dtype == np.float32 and together.flags.c_contiguous
    for row, position in zip(together, positions, strict=True):
        assert np.array_equal(row, RopeTable(64, frequencies(), 1.25, True).cos_sin(np.array([position]))[0])
    theta = positions[:, None] * frequencies()
    np.testing.assert_allclose(together, 1.25 * np.stack([np.cos(theta), np.sin(theta)], 1), atol=1e-7)


def test_a_table_keeps_few_blocks() -> None:
    table = RopeTable(8, frequencies(half=4), 1.0, False)
    for position in range(0, 256 * (MAX_ROPE_BLOCKS + 3), 128):
        table.cos_sin(np.array([position]))
    assert len(table._blocks) == MAX_ROPE_BLOCKS
