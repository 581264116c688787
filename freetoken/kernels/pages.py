"""Keys and values of one layer in pages of 256 positions, as `freetoken.kvcache` lays them out, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check

__all__ = ["PAGE", "Pages", "page_rows"]

PAGE = 256
"""Positions of one page, and of one split of the attention."""


@dataclass(frozen=True)
class Pages:
    """`k` [capacity, n_kv, PAGE, head_dim_k] and `v` [capacity, n_kv, PAGE, head_dim_v], both fp16 or fp32; for each
    token its `positions` int32 [n] and its sequence's pages, `table` int32 [n, max_pages].
    """

    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor

    @property
    def n_kv(self) -> int:
        return self.k.shape[1]

    def check(self, n: int) -> None:
        """Raise ValueError unless everything fits n tokens."""
        capacity, n_kv, dim_v = self.k.shape[0], self.n_kv, self.v.shape[-1]
        if self.k.dtype not in (torch.float16, torch.float32):
            raise ValueError(f"keys and values are fp16 or fp32, not {self.k.dtype}")
        check("k", self.k, self.k.dtype, capacity, n_kv, PAGE, self.k.shape[-1])
        check("v", self.v, self.k.dtype, capacity, n_kv, PAGE, dim_v)
        check("positions", self.positions, torch.int32, n)
        check("table", self.table, torch.int32, n, self.table.shape[-1])


@triton.jit
def page_rows(table, token, page_number, head, N_KV: tl.constexpr, MAX_PAGES: tl.constexpr):
    """The number, int64, of the row that holds position 0 of a page of a token's sequence, for KV head `head`."""
    page = tl.load(table + token * MAX_PAGES + page_number)
    return (page.to(tl.int64) * N_KV + head) * 256
