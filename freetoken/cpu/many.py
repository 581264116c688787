"""Native products of many tokens (docs/numerics.md, section 8), one call each. Called by `prefill`; checks shapes."""

from __future__ import annotations

import numpy as np

from freetoken import native
from freetoken.blocks import Experts, Weight
from freetoken.errors import EngineError

__all__ = ["can_mix", "can_multiply", "mix_experts", "multiply"]

MAX_PAIRS = 8192
"""Tokens times experts of one native call: its scratch is some 14 KB a pair (d 2048, ff 768). More go in parts."""


def can_multiply(weight: Weight) -> bool:
    """Whether `multiply` takes a weight: the kernels in use have a product for its type."""
    return native.has_many(weight.type)


def can_mix(bank: Experts) -> bool:
    """Whether `mix_experts` takes a bank."""
    return all(native.has_many(weight.type) for weight in (bank.gate, bank.up, bank.down))


def multiply(pool: native.Pool, weight: Weight, x: np.ndarray) -> np.ndarray:
    """Fp32 [n, rows]: contiguous fp32 x [n, cols] times the weight's rows, plus its bias.

    Raises EngineError when shapes do not fit or the kernels lack the type.
    """
    _check(x, np.float32, len(x), weight.cols)
    y = np.empty((len(x), weight.rows), np.float32)
    fields = weight.type, weight.rows, weight.cols, weight.row_bytes
    if len(x):
        pool.run_many(native.OP_MATVEC, len(x), (x, weight.data, y, weight.bias), fields, scratch_at=4)
    return y


def mix_experts(
    pool: native.Pool, bank: Experts, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, activation: str
) -> np.ndarray:
    """Fp32 [n, d]: outputs of each token's experts for x [n, d], times their weights, summed in the order of the ids.

    `ids` int32 and `weights` fp32 [n, n_used], contiguous; an id below 0 adds nothing. Raises as `multiply`.
    """
    n, d = len(x), bank.down.rows
    _check(x, np.float32, n, d)
    _check(ids, np.int32, n, bank.n_used)
    _check(weights, np.float32, n, bank.n_used)
    y = np.empty((n, d), np.float32)
    banks = bank.gate, bank.up, bank.down
    types, row_bytes = [b.type for b in banks], [b.row_bytes for b in banks]
    sizes = bank.n_expert, bank.n_used, d, bank.gate.rows
    fields = *sizes, *types, *row_bytes, native.ACTIVATIONS[activation], 0, bank.stride
    step = max(MAX_PAIRS // bank.n_used, 1)
    for first in range(0, n, step):
        some = slice(first, min(first + step, n))
        arrays = x[some], ids[some], weights[some], *(b.data for b in banks), None, y[some]
        pool.run_many(native.OP_EXPERTS, some.stop - first, arrays, fields, scratch_at=8)
    return y


def _check(array: np.ndarray, dtype: type, rows: int, cols: int) -> None:
    if array.dtype != dtype or array.shape != (rows, cols) or not array.flags.c_contiguous:
        raise EngineError(
            f"a product of many tokens needs contiguous {np.dtype(dtype)} {(rows, cols)}, got {array.dtype} "
            f"{array.shape} with strides {array.strides}"
        )
