"""Greedy sampling on the GPU: the largest logit, at a tie the lower token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check
from freetoken.kernels.launch import options, wait
from freetoken.kernels.router import order_of

__all__ = ["argmax"]

BLOCK = 4096


@triton.jit
def largest(logits, token, mask):
    """int64 that rises with the logit and falls with the token; a NaN is above all, as in numpy."""
    x = tl.load(logits + token, mask=mask, other=float("-inf"))
    order = tl.where(x == x, order_of(x), 0x7FFFFFFF)
    return tl.where(mask, (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64), -(2**63))


@triton.jit
def argmax_kernel(logits, best, arrived, tokens, N: tl.constexpr, N_PARTS: tl.constexpr, BLOCK: tl.constexpr,
                  IS_CHAINED: tl.constexpr):  # fmt: skip
    """The largest of BLOCK logits; the program that comes last of a row takes the largest of all parts."""
    wait(IS_CHAINED)
    part = tl.program_id(0)
    row = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    key = tl.max(largest(logits + row.to(tl.int64) * N, token, token < N), axis=0)
    tl.atomic_max(best + row, key)
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == N_PARTS - 1:
        top = tl.atomic_max(best + row, -(2**63))
        tl.store(tokens + row, 0x7FFFFFFF - (top & 0x7FFFFFFF).to(tl.int32))
        tl.store(best + row, -(2**63))
        tl.store(arrived + row, 0)


def argmax(logits: torch.Tensor, best: torch.Tensor, arrived: torch.Tensor, tokens: torch.Tensor) -> None:
    """tokens int32 [n] of the largest of logits fp32 [n, n_vocab].

    `best` int64 [n] starts at the least int64 and `arrived` int32 [n] at 0; a launch leaves both so.
    """
    n, n_vocab = logits.shape
    check("logits", logits, torch.float32, n, n_vocab)
    check("best", best, torch.int64, n)
    check("arrived", arrived, torch.int32, n)
    check("tokens", tokens, torch.int32, n)
    n_parts = -(-n_vocab // BLOCK)
    argmax_kernel[(n_parts, n)](
        logits, best, arrived, tokens, N=n_vocab, N_PARTS=n_parts, BLOCK=BLOCK, num_warps=4, **options(logits)
    )
