"""The routed pairs of a prompt in the order of their experts, and the tiles of each expert's rows, all on the device.

Pairs (token, rank) are sorted by expert, those of one expert by token, as a stable sort does. A block of pairs counts
its experts; then each block knows where its pairs go from the counts of the blocks before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import ceil_div, check, next_power_of_2
from freetoken.kernels.fast_launch import launch

__all__ = ["Sorted", "count_pairs", "list_tiles", "sort_pairs", "sort_room"]

ONE_LAUNCH = 4096
"""Up to so many pairs each block counts the ones before itself."""
COMPARED = 1 << 15
"""Pairs times experts that a program compares at once."""


@dataclass(frozen=True)
class Sorted:
    """`index` int32 [pairs]: the token at each position; `positions` int32 and `weights` fp32 [n, k]: where each
    token's pairs stand, in order, and their weights; `starts` int32 [n_expert + 1]: each expert's first position."""

    index: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    """int32 [blocks, n_expert], room for what blocks count; not read by others."""
    tail_counts: torch.Tensor
    """int32 [blocks, n_expert], for `count_pairs` of the last tokens."""
    summary: torch.Tensor
    """int32: `starts` and `tail_counts` in one piece, for the host."""


@triton.jit
def histogram(ids, at, n_pairs, expert, B: tl.constexpr):
    """int32 [experts] of the B pairs from `at` on."""
    pair = at + tl.arange(0, B)
    mine = tl.load(ids + pair, mask=pair < n_pairs, other=-1)
    return tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["n_pairs"])
def count_kernel(ids, counts, n_pairs, N_EXPERT: tl.constexpr, E: tl.constexpr, B: tl.constexpr):
    expert = tl.arange(0, E)
    found = histogram(ids, tl.program_id(0) * B, n_pairs, expert, B)
    tl.store(counts + tl.program_id(0) * N_EXPERT + expert, found, mask=expert < N_EXPERT)


@triton.jit(do_not_specialize=["n_pairs", "n_blocks"])
def sort_kernel(
    ids, weights, counts, index, positions, sorted_weights, starts, n_pairs, n_blocks,
    N_EXPERT: tl.constexpr, E: tl.constexpr, K: tl.constexpr, B: tl.constexpr, STEP: tl.constexpr,
    IS_COUNTED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.arange(0, E)
    before = tl.zeros([E], tl.int32)
    total = tl.zeros([E], tl.int32)
    b = 0
    while b < n_blocks:
        if IS_COUNTED:
            found = tl.load(counts + b * N_EXPERT + expert, mask=expert < N_EXPERT, other=0)
        else:
            found = histogram(ids, b * B, n_pairs, expert, B)
        total += found
        before += tl.where(b < block, found, 0)
        b += 1
    first = tl.cumsum(total, axis=0) - total
    if block == 0:
        tl.store(starts + expert, first, mask=expert < N_EXPERT)
        tl.store(starts + N_EXPERT, n_pairs)
    pair = block * B + tl.arange(0, B)
    is_there = pair < n_pairs
    mine = tl.load(ids + pair, mask=is_there, other=-1)
    place = tl.sum(tl.where(mine[:, None] == expert[None, :], (first + before)[None, :], 0), axis=1)
    for step in range(0, B, STEP):
        other = block * B + step + tl.arange(0, STEP)
        theirs = tl.load(ids + other, mask=other < n_pairs, other=-2)
        is_before = (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
        place += tl.sum(is_before.to(tl.int32), axis=1)
    token = pair // K
    rank = tl.zeros([B], tl.int32)
    for j in range(K):
        rank += (tl.load(ids + token * K + j, mask=is_there, other=0) < mine).to(tl.int32)
    tl.store(index + place, token, mask=is_there)
    tl.store(positions + token * K + rank, place, mask=is_there)
    tl.store(sorted_weights + token * K + rank, tl.load(weights + pair, mask=is_there, other=0.0), mask=is_there)


def sort_room(n: int, k: int, n_expert: int, device: torch.device, n_tail: int = 0) -> Sorted:
    """Room for the pairs of n tokens, of which the last n_tail may be counted."""

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    weights = torch.empty((n, k), dtype=torch.float32, device=device)
    b = _block(n_expert)
    n_tail_blocks = ceil_div(min(n_tail, n) * k, b)
    summary = integers(n_expert + 1 + n_tail_blocks * n_expert)
    starts, tail = summary[: n_expert + 1], summary[n_expert + 1 :].view(n_tail_blocks, n_expert)
    counts = integers(ceil_div(n * k, b), n_expert)
    return Sorted(integers(n * k), integers(n, k), weights, starts, counts, tail, summary)


def _block(n_expert: int) -> int:
    return max(min(COMPARED // max(next_power_of_2(n_expert), 16), 256), 16)


def count_pairs(ids: torch.Tensor, counts: torch.Tensor) -> None:
    """counts int32 [blocks, n_expert]: how often the ids int32 [n, k] name each expert, a block of pairs a row."""
    n_expert = counts.shape[1]
    e, b = max(next_power_of_2(n_expert), 16), _block(n_expert)
    check("counts", counts, torch.int32, ceil_div(ids.numel(), b), n_expert)
    check("ids", ids, torch.int32, *ids.shape)
    launch(count_kernel, (len(counts), 1, 1), (ids, counts, ids.numel()), (n_expert, e, b), 8)


def sort_pairs(ids: torch.Tensor, weights: torch.Tensor, out: Sorted) -> None:
    """Sort the pairs of ids int32 and weights fp32 [n, k], a token's ids all different, into `out`."""
    n, k = ids.shape
    n_expert, n_pairs = len(out.starts) - 1, n * k
    check("ids", ids, torch.int32, n, k)
    check("weights", weights, torch.float32, n, k)
    check("positions", out.positions, torch.int32, n, k)
    e, b = max(next_power_of_2(n_expert), 16), _block(n_expert)
    n_blocks = ceil_div(n_pairs, b)
    is_counted = n_pairs > ONE_LAUNCH
    if is_counted:
        count_pairs(ids, out.counts)
    arguments = (
        ids, weights, out.counts, out.index, out.positions, out.weights, out.starts, n_pairs, n_blocks,
    )  # fmt: skip
    launch(sort_kernel, (max(n_blocks, 1), 1, 1), arguments, (n_expert, e, k, b, min(b, 64), is_counted), 8)


@triton.jit(do_not_specialize=["n_entries", "n_tiles_most"])
def list_tiles_kernel(
    starts, tile_list, n_entries, n_tiles_most, N_EXPERT: tl.constexpr, E: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, E)
    mask = expert < N_EXPERT
    begin = tl.load(starts + expert, mask=mask, other=0)
    end = tl.load(starts + expert + 1, mask=mask, other=0)
    n_tiles = (end - begin + M - 1) // M
    ends = tl.cumsum(n_tiles, axis=0)
    first = ends - n_tiles
    j = 0
    while j < n_tiles_most:
        entry = tile_list + (first + j) * 3
        is_there = mask & (j < n_tiles)
        tl.store(entry, expert, mask=is_there)
        tl.store(entry + 1, begin + j * M, mask=is_there)
        tl.store(entry + 2, tl.minimum(begin + j * M + M, end), mask=is_there)
        j += 1
    at = tl.sum(n_tiles, axis=0) * 3
    while at < n_entries * 3:
        place = at + tl.arange(0, BLOCK)
        tl.store(tile_list + place, 0, mask=place < n_entries * 3)
        at += BLOCK


def list_tiles(starts: torch.Tensor, tile_list: torch.Tensor, m: int, n_most: int) -> None:
    """tile_list int32 [n, 3] of (expert, first position, end), as `grouped.tiles` makes it, for experts whose rows
    stand at starts[e] to starts[e + 1], n_most at most; entries that are left over have no rows."""
    n_expert = len(starts) - 1
    check("starts", starts, torch.int32, n_expert + 1)
    check("tile_list", tile_list, torch.int32, len(tile_list), 3)
    e = max(next_power_of_2(n_expert), 16)
    arguments = (starts, tile_list, len(tile_list), ceil_div(n_most, m))
    launch(list_tiles_kernel, (1, 1, 1), arguments, (n_expert, e, m, 256), 4)
