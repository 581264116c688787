"""Attention of one new token a sequence over a static cache of ragged lengths: a Triton kernel, and plain torch.

The cache of a layer is [batch, 2 * n_kv, n_ctx, dim]: the keys' heads, then the values'.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU
    triton = None

__all__ = ["decode_attention", "has_kernel"]

BLOCK = 64
QUERY_ROWS = 16
"""The least number of rows of a matrix product in Triton; a group of query heads is padded to it."""


def has_kernel() -> bool:
    """Whether Triton is there."""
    return triton is not None


if triton is not None:

    @triton.jit
    def _kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        cache_ptr,
        pos_ptr,
        out_ptr,
        scale,
        n_ctx,
        N_KV: tl.constexpr,
        GROUP: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        """One program a sequence and key head: online softmax over positions 0..pos."""
        b = tl.program_id(0).to(tl.int64)
        h = tl.program_id(1)
        n = tl.load(pos_ptr + b) + 1
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        q_at = ((b * N_KV + h) * GROUP + rows[:, None]) * DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=rows[:, None] < GROUP, other=0.0)
        k_base = cache_ptr + (b * (2 * N_KV) + h) * n_ctx * DIM
        v_base = k_base + N_KV * n_ctx * DIM
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        start = 0
        while start < n:
            at = start + tl.arange(0, BLOCK)
            where = at[:, None] * DIM + dims[None, :]
            is_in = at < n
            k = tl.load(k_base + where, mask=is_in[:, None], other=0.0)
            v = tl.load(v_base + where, mask=is_in[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale
            scores = tl.where(is_in[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp(scores - new_top[:, None])
            keep = tl.exp(top - new_top)
            total = total * keep + tl.sum(p, 1)
            acc = acc * keep[:, None] + tl.dot(p.to(v.dtype), v)
            top = new_top
            start += BLOCK
        acc = acc / total[:, None]
        tl.store(out_ptr + q_at, acc.to(out_ptr.dtype.element_ty), mask=rows[:, None] < GROUP)


def decode_attention(q: torch.Tensor, cache: torch.Tensor, pos: torch.Tensor, *, kernel: bool) -> torch.Tensor:
    """[batch, n_head, dim] of queries at `pos` [batch] int32, whose keys and values are in the cache already."""
    n, n_head, dim = q.shape
    n_kv, n_ctx = cache.shape[1] // 2, cache.shape[2]
    group = n_head // n_kv
    scale = 1 / math.sqrt(dim)
    if kernel:
        out = torch.empty_like(q)
        launch: Any = _kernel[(n, n_kv)]
        launch(q, cache, pos, out, scale, n_ctx, n_kv, group, dim, BLOCK, QUERY_ROWS, num_warps=4)
        return out
    is_in = torch.arange(n_ctx, device=q.device) <= pos[:, None]
    mask = is_in[:, None, None]
    k, v = cache[:, :n_kv], cache[:, n_kv:]
    y = F.scaled_dot_product_attention(q.view(n, n_kv, group, dim), k, v, attn_mask=mask, scale=scale)
    return y.reshape(n, n_head, dim)
