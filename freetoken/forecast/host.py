"""What main memory holds of a planned model. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freetoken import native
from freetoken.cores import expert_threads
from freetoken.forecast.sizes import Sizes
from freetoken.kvcache import CACHE_TYPES, PAGE, capacity_for
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan

__all__ = ["HostPlan", "plan_host"]

OWN_BYTES, OWN_GPU_BYTES = 512 << 20, 1536 << 20
"""Of our process beside weights and context: Python, the vocabulary and buffers; with a GPU also torch and its driver.
Assumed, not measured on your machine."""
SPARE_BYTES, SPARE_SHARE = 1 << 30, 0.05
"""Left to the system, the larger of both."""


@dataclass(frozen=True)
class HostPlan:
    """`need_bytes` is what must stay in memory for full speed; what of it does not fit is read from the file again and
    again (`cold_bytes`). `pinned_bytes` are experts that the GPU reads where they lie in the file's pages."""

    ram_bytes: int
    ram_source: str
    usable_bytes: int
    """Less what is left to the system and what our process takes."""
    own_bytes: int
    kv_bytes: int
    """Keys and values of layers on the CPU."""
    meeting_bytes: int
    """Locked buffers through which GPU and CPU exchange rows."""
    weights_bytes: int
    """Of layers on the CPU, all of them."""
    pool_bytes: int
    """Routed experts of layers on the GPU that are not all in slots."""
    pinned_bytes: int
    pinned_layers: int
    cold_bytes: int
    n_threads: int
    n_threads_experts: int
    """Beside a GPU; 0 where no expert can be the CPU's."""

    @property
    def need_bytes(self) -> int:
        return self.own_bytes + self.kv_bytes + self.meeting_bytes + self.weights_bytes + self.pool_bytes

    @property
    def resident_share(self) -> float:
        """Of the weights that main memory should hold."""
        n = self.weights_bytes + self.pool_bytes
        return 1.0 - self.cold_bytes / n if n else 1.0


def plan_host(
    sizes: Sizes,
    options: EngineOptions,
    gpu: GpuPlan | None,
    *,
    ram_bytes: int,
    ram_source: str,
    n_cores: int,
    n_ctx: int,
    n_sequences: int,
) -> HostPlan:
    """The plan for so much memory; `gpu` None runs all layers on the CPU."""
    spec = sizes.spec
    first = spec.n_layer if gpu is None else gpu.first_layer
    own = OWN_BYTES if gpu is None else OWN_GPU_BYTES
    weights = sum(sizes.dense.layers[:first]) + sum(sizes.expert_bytes[:first]) * spec.n_expert
    weights += sizes.dense.head if gpu is None else 0
    is_offloading = gpu is not None and gpu.is_offloading
    pool = sizes.pool_from(first) if is_offloading else 0
    meeting = native.MAX_TOKENS * (1 + spec.n_expert_used) * spec.n_embd * 4 if is_offloading else 0
    pages = capacity_for(n_ctx if gpu is None else gpu.n_ctx, n_sequences, is_shared=options.n_parallel <= 0)
    itemsize = np.dtype(CACHE_TYPES[options.cache_type_k]).itemsize
    kv = sum(spec.n_kv[:first]) * (spec.head_dim_k + spec.head_dim_v) * PAGE * itemsize * pages
    spare = max(SPARE_BYTES, int(ram_bytes * SPARE_SHARE))
    usable = max(ram_bytes - spare - own - kv - meeting, 0)
    pinned, layers = _pinned(sizes, first, usable - weights) if is_offloading else (0, 0)
    threads = options.n_threads or n_cores
    beside = options.moe_cpu_threads or min(threads, expert_threads(n_cores))
    return HostPlan(
        ram_bytes=ram_bytes,
        ram_source=ram_source,
        usable_bytes=usable,
        own_bytes=own,
        kv_bytes=kv,
        meeting_bytes=meeting,
        weights_bytes=weights,
        pool_bytes=pool,
        pinned_bytes=pinned,
        pinned_layers=layers,
        cold_bytes=min(max(weights + pool - usable, 0), weights + pool),
        n_threads=threads,
        n_threads_experts=beside if is_offloading else 0,
    )


def _pinned(sizes: Sizes, first: int, room: int) -> tuple[int, int]:
    """Bytes and number of the layers whose experts can be locked, whole layers in the file's order."""
    total = n = 0
    for expert in sizes.expert_bytes[first:]:
        layer = expert * sizes.spec.n_expert
        if layer and total + layer <= room:
            total, n = total + layer, n + 1
    return total, n
