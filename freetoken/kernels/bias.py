"""Logit biases of a few tokens of each row, added before the sampler reads the logits; -inf bans a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check
from freetoken.kernels.launch import options, wait

__all__ = ["N_BIASES", "add_biases"]

N_BIASES = 32
"""Tokens of a row that can be biased; one warp."""


@triton.jit
def add_biases_kernel(logits, biases, n_vocab, SIZE: tl.constexpr, IS_CHAINED: tl.constexpr):
    wait(IS_CHAINED)
    row = tl.program_id(0)
    i = tl.arange(0, SIZE)
    token = tl.load(biases + row * (2 * SIZE) + i)
    bias = tl.load(biases + row * (2 * SIZE) + SIZE + i).to(tl.float32, bitcast=True)
    is_there = (token >= 0) & (token < n_vocab)
    at = logits + row.to(tl.int64) * n_vocab + tl.where(is_there, token, 0)
    value = tl.load(at, mask=is_there, other=0.0)
    tl.store(at, value + bias, mask=is_there)


def add_biases(logits: torch.Tensor, biases: torch.Tensor) -> None:
    """logits fp32 [n, n_vocab] of row r += bias, in place, for the tokens biases[r, 0] (all different, -1: none).

    `biases` int32 [at least n, 2, N_BIASES]: token ids, and the bits of fp32 values.
    """
    n, n_vocab = logits.shape
    check("logits", logits, torch.float32, n, n_vocab)
    check("biases", biases, torch.int32, biases.shape[0], 2, N_BIASES)
    if n > len(biases):
        raise ValueError(f"{n} rows of logits, but biases of {len(biases)}")
    add_biases_kernel[(n,)](logits, biases, n_vocab, SIZE=N_BIASES, num_warps=1, **options(logits))
