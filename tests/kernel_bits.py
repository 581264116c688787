"""What tests of Triton kernels share: bits compared with the reference, activations read back.

FREETOKEN_TEST_DEVICE names a device to run these tests on ("cuda") instead of Triton's interpreter, which conftest.py
turns on. Tensors that tests make without naming a device are made there.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from numpy.typing import ArrayLike

from freetoken import reference
from freetoken.kernels.activations import Activation

DEVICE = os.environ.get("FREETOKEN_TEST_DEVICE") or "cpu"
torch.set_default_device(None if DEVICE == "cpu" else DEVICE)


def tensor(x: ArrayLike) -> torch.Tensor:
    """A tensor of its own with the values of x."""
    return torch.from_numpy(np.array(x)).to(DEVICE)


def array(x: torch.Tensor) -> np.ndarray:
    """Its values."""
    return x.cpu().numpy()


def assert_same_bits(got: torch.Tensor | np.ndarray, expected: ArrayLike) -> None:
    """Equal bit by bit, but for a NaN's sign and payload."""
    a, b = array(got) if isinstance(got, torch.Tensor) else np.asarray(got), np.asarray(expected)
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
    integer = np.dtype(f"i{a.dtype.itemsize}")
    differs = np.ascontiguousarray(a).view(integer) != np.ascontiguousarray(b).view(integer)
    differs &= ~(np.isnan(a) & np.isnan(b))
    assert not differs.any(), f"{differs.sum()} of {a.size} differ, the first at {np.argwhere(differs)[0]}"


def assert_quantised(got: Activation, rows: np.ndarray, planes: int = 2) -> None:
    """The activation holds what section 2 makes of these rows."""
    n, width = rows.shape
    for i, row in enumerate(rows):
        expected = reference.quantize(row, got.width, planes)
        hi, lo = expected.hi.reshape(-1), expected.lo.reshape(-1)
        q, (hi, lo) = array(got.q[i]), (hi, lo) if planes == 2 else (lo, hi)
        np.testing.assert_array_equal(q[:, 0].reshape(-1)[:width], hi)
        np.testing.assert_array_equal(q[:, 1].reshape(-1)[:width], lo)
        assert_same_bits(got.dx[i, : len(expected.dx)], expected.dx)
        per_sum = 16 if got.width == 256 else 32
        sums = expected.a.reshape(-1, per_sum).sum(axis=1)
        np.testing.assert_array_equal(array(got.sums[i]).reshape(-1)[: len(sums)], sums)
    assert n <= got.q.shape[0]
