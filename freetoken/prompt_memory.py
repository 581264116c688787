"""GPU memory that prompts take, and how long their chunks are: what `plan` sets aside before slots. Arithmetic only.

A chunk of n tokens takes `row_bytes` for each (gpu.rows plans their places; tests compare) and a scratch that grows
with n, since experts and dense matrices are decoded into it a group at a time. Longer chunks stream the experts less
often, so a chunk is as long as it may be: N_CHUNK, and less where slots for experts need its memory more.
"""

from __future__ import annotations

from freetoken.options import EngineOptions
from freetoken.spec import ModelSpec

__all__ = ["N_CHUNK", "chunk_tokens", "row_bytes", "scratch_bytes", "working_bytes"]

N_CHUNK = 4096
"""Tokens of a chunk where -b and -ub are not given."""
LEAST_CHUNK = 512
SHARE = 0.05
"""Of a card's free memory that a chunk's rows and scratch may take, down to LEAST_CHUNK."""
MOST_BYTES = 480 << 20
"""What rows and scratch may take on any card: models with wide rows have shorter chunks."""
FIXED_BYTES = 160 << 20
"""Kernels, captured graphs and buffers of decode steps, allocators' remains."""
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


def chunk_tokens(spec: ModelSpec, options: EngineOptions, free_bytes: int) -> int:
    """Tokens of a chunk on a card: -b and -ub where they are given."""
    if options.n_chunk != EngineOptions().n_chunk:
        return options.n_chunk
    n = N_CHUNK
    most = min(int(free_bytes * SHARE), MOST_BYTES)
    while n > LEAST_CHUNK and n * row_bytes(spec) + scratch_bytes(n) > most:
        n //= 2
    return n


def working_bytes(spec: ModelSpec, n_chunk: int) -> int:
    """All that decode steps and chunks of so many tokens take beyond weights, slots, keys and values."""
    return FIXED_BYTES + scratch_bytes(n_chunk) + n_chunk * row_bytes(spec)
