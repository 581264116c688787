"""GPU memory of all that is no weight, slot, key or value: what `plan` sets aside before slots. Arithmetic only.

A chunk of n tokens takes `row_bytes` for each (gpu.rows plans their places; tests compare) and a scratch that grows
with n, since experts and dense matrices are decoded into it a group at a time. Longer chunks stream the experts less
often, so a chunk is as long as it may be: N_CHUNK, and less where slots for experts need its memory more.
"""

from __future__ import annotations

import numpy as np

from freetoken import native
from freetoken.kvcache import CACHE_TYPES, PAGE, n_pages_for
from freetoken.options import EngineOptions
from freetoken.spec import ModelSpec

__all__ = [
    "CONTEXT_GROWTH",
    "FIRST_CONTEXT",
    "LEAST_CHUNK",
    "N_CHUNK",
    "chunk_tokens",
    "context_sizes",
    "is_chunk_given",
    "room_bytes",
    "row_bytes",
    "scratch_bytes",
    "working_bytes",
]

N_CHUNK = 4096
"""Tokens of a chunk where -b and -ub are not given."""
LEAST_CHUNK = 512
SHARE = 0.05
"""Of a card's free memory that a chunk's rows and scratch may take, down to LEAST_CHUNK."""
MOST_BYTES = 480 << 20
"""What rows and scratch may take on any card: models with wide rows have shorter chunks."""
FIXED_BYTES = 96 << 20
"""Kernels, captured graphs, the slots' state, small buffers of decode steps and what allocators leave between them."""
N_ROWS_KEPT = native.MAX_TOKENS * (native.MAX_TOKENS + 1) // 2
"""Rows of logits that decode steps keep: buffers of 1, 2 ... 8 rows."""
FIRST_CONTEXT, CONTEXT_GROWTH = 2048, 4
"""Decode steps have programs for contexts of 2048 positions, four times as many, and so on to the longest."""
LARGE_BYTES, LARGE_UNIT = 10 << 20, 2 << 20
"""torch takes tensors from LARGE_BYTES on from the driver in whole LARGE_UNITs; smaller ones share blocks."""
SCRATCH_LEAST, SCRATCH_OF_TOKEN = 64 << 20, 40 << 10


def scratch_bytes(n_chunk: int) -> int:
    """Of `gpu.scratch.Scratch`: 224 MiB for chunks of 4096, 104 for 1024."""
    return SCRATCH_LEAST + min(n_chunk, N_CHUNK) * SCRATCH_OF_TOKEN


def row_bytes(spec: ModelSpec) -> int:
    """The most that a token of a chunk takes at once: its rows, where its pairs stand, its angles."""
    d = 4 * spec.n_embd
    half = d // 2 + 16
    most = 0
    for n_head, n_kv in zip(spec.n_head, spec.n_kv, strict=True):
        projected = 4 * (n_head * spec.head_dim_k + n_kv * (spec.head_dim_k + spec.head_dim_v))
        attended = 4 * n_head * spec.head_dim_v
        own = 0 if spec.head_dim_k == spec.head_dim_v else attended
        states = d + half + projected + own  # while queries are projected
        outputs = d + projected + own + attended // 2 + 16  # while what was attended is halved
        result = d + attended // 2 + 16 + d
        most = max(most, states, outputs, result)
    n_routed = 4 * spec.n_expert + 8 * spec.n_expert_used + 48
    mixed = 3 * d + half + n_routed if spec.is_moe else 2 * d + half
    pairs = 12 * spec.n_expert_used if spec.is_moe else 0
    rotated = 8 * 2 * max(spec.head_dim_k, 1)  # tables of two kinds of layers
    return max(most, mixed) + pairs + rotated + 64


def is_chunk_given(options: EngineOptions) -> bool:
    """Whether -b or -ub say how long a chunk is."""
    return options.n_chunk != EngineOptions().n_chunk


def chunk_tokens(spec: ModelSpec, options: EngineOptions, free_bytes: int) -> int:
    """Tokens of a chunk on a card: -b and -ub where they are given."""
    if is_chunk_given(options):
        return options.n_chunk
    n = N_CHUNK
    most = min(int(free_bytes * SHARE), MOST_BYTES)
    while n > LEAST_CHUNK and n * row_bytes(spec) + scratch_bytes(n) > most:
        n //= 2
    return n


def working_bytes(spec: ModelSpec, n_chunk: int) -> int:
    """What decode steps and chunks of so many tokens take whatever the context."""
    return FIXED_BYTES + N_ROWS_KEPT * 4 * spec.n_vocab + scratch_bytes(n_chunk) + n_chunk * row_bytes(spec)


def context_sizes(n_ctx: int) -> list[int]:
    """Positions for which decode steps have programs of their own, where the longest sequence has n_ctx."""
    longest = n_pages_for(n_ctx) * PAGE
    sizes = [FIRST_CONTEXT]
    while sizes[-1] < longest:
        sizes.append(sizes[-1] * CONTEXT_GROWTH)
    return [min(size, longest) for size in sizes]


def room_bytes(spec: ModelSpec, options: EngineOptions, n_ctx: int, n_pages: int, first_layer: int) -> int:
    """What grows with the context beside keys and values, for the layers on the GPU: the splits of attention in each
    size of context, the angles of all positions, and what the allocator leaves behind each layer's pages."""
    if not any(spec.n_kv[first_layer:]):
        return 0
    width = max(PAGE, 1 << max(spec.head_dim_v - 1, 0).bit_length())
    splits = sum(size // PAGE for size in context_sizes(n_ctx))
    rooms = native.MAX_TOKENS * max(spec.n_head[first_layer:]) * splits * (width + 2) * 4
    n_kinds = len(set(spec.is_sliding[first_layer:])) or 1
    angles = n_kinds * n_pages_for(n_ctx) * PAGE * spec.head_dim_k * 4
    itemsize = np.dtype(CACHE_TYPES[options.cache_type_k]).itemsize
    remains = 0
    for n_kv in spec.n_kv[first_layer:]:
        for dim in (spec.head_dim_k, spec.head_dim_v):
            n_bytes = (n_pages + 1) * n_kv * PAGE * dim * itemsize
            remains += -n_bytes % LARGE_UNIT if n_bytes >= LARGE_BYTES else 0
    return rooms + angles + remains
