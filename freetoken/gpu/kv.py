"""Keys and values in GPU memory: the pages that `kvcache.KVCache` hands out, plus one that no sequence gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.kernels.pages import PAGE
from freetoken.kvcache import KVShape

__all__ = ["KV_TYPES", "DeviceKV", "kv_bytes"]

KV_TYPES = {"f16": torch.float16, "f32": torch.float32}


def kv_bytes(layers: Sequence[KVShape], capacity: int, dtype: str) -> int:
    """GPU memory that `DeviceKV` takes."""
    values = sum(s.n_kv * PAGE * (s.head_dim_k + s.head_dim_v) for s in layers)
    return (capacity + 1) * values * KV_TYPES[dtype].itemsize


class DeviceKV:
    """`k[layer]` [capacity + 1, n_kv, PAGE, head_dim_k], `v[layer]` alike. Page `spare` takes what trial runs write.
    Layers before `first_layer` have no pages here."""

    def __init__(
        self,
        layers: Sequence[KVShape],
        capacity: int,
        dtype: str,
        device: torch.device | str,
        first_layer: int = 0,
    ) -> None:
        self._first_layer = first_layer

        def pages(layer: int, n_kv: int, width: int) -> torch.Tensor:
            n = capacity + 1 if layer >= first_layer else 0
            return torch.zeros((n, n_kv, PAGE, width), dtype=KV_TYPES[dtype], device=device)

        self.k = [pages(i, s.n_kv, s.head_dim_k) for i, s in enumerate(layers)]
        self.v = [pages(i, s.n_kv, s.head_dim_v) for i, s in enumerate(layers)]
        self.spare = capacity

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy pages to others, [(from, to)], none of which is both."""
        if not moves:
            return
        sources, targets = (list(each) for each in zip(*moves, strict=True))
        for memory in (*self.k[self._first_layer :], *self.v[self._first_layer :]):
            memory[targets] = memory[sources]

    def resize(self, capacity: int) -> None:
        """Another number of pages; those with numbers below both stay. One layer after another, so that no more than a
        layer's memory is there twice. After a failure only another `resize` may follow."""
        for memories in (self.k, self.v):
            for i in range(self._first_layer, len(memories)):
                old = memories[i]
                if len(old) == capacity + 1:
                    continue
                n = min(len(old), capacity + 1) - 1  # without the spare one
                new = torch.zeros((capacity + 1, *old.shape[1:]), dtype=old.dtype, device=old.device)
                new[:n].copy_(old[:n])
                memories[i] = new
        self.spare = capacity
