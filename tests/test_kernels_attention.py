"""Rotation, stores into pages and decode attention on the GPU: sections 5 and 6 of docs/numerics.md, interpreted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from kernel_bits import DEVICE, array, assert_quantised, assert_same_bits, tensor

from freetoken import reference
from freetoken.kernels.activations import empty_activation
from freetoken.kernels.attention import Mask, Partials, attend, heads_per_program, max_splits
from freetoken.kernels.norm import Norm
from freetoken.kernels.pages import PAGE, Pages
from freetoken.kernels.rope import Angles, Projection, rotate_and_store

f32 = np.float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


def empty_pages(positions: list[int], n_kv: int, dim: int, dim_v: int, dtype: torch.dtype = torch.float16) -> Pages:
    """Pages full of NaN, in disorder, for tokens of different sequences."""
    n_pages = max(positions) // PAGE + 1
    capacity = n_pages * len(positions) + 1
    table = np.random.default_rng(9).permutation(capacity)[: n_pages * len(positions)].reshape(len(positions), -1)
    return Pages(
        torch.full((capacity, n_kv, PAGE, dim), float("nan"), dtype=dtype),
        torch.full((capacity, n_kv, PAGE, dim_v), float("nan"), dtype=dtype),
        tensor(np.array(positions, np.int32)),
        tensor(table.astype(np.int32)),
    )


def fill(pages: Pages, k: np.ndarray, v: np.ndarray, token: int) -> None:
    """Store k and v [n, n_kv, width] of a token's sequence."""
    for j in range(len(k)):
        page = int(pages.table[token, j // PAGE])
        pages.k[page, :, j % PAGE] = tensor(k[j])
        pages.v[page, :, j % PAGE] = tensor(v[j])


@dataclass(frozen=True)
class Case:
    positions: list[int]
    n_head: int = 2
    n_kv: int = 1
    dim: int = 64
    dim_v: int = 64
    heads: int = 1
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    dtype: torch.dtype = torch.float16
    cls: int = 32
    n_programs: int = 64


CASES = {
    "three pages and a partial one": Case([515, 3], heads=2),
    "fp32, a head at a time": Case([20], dtype=torch.float32),
    "window within a page": Case([290, 5], window=20),
    "window over pages": Case([700], window=300, heads=2, n_programs=2),
    "softcap and sinks": Case([270], softcap=20.0, has_sinks=True),
    "odd widths": Case([259], n_head=3, n_kv=1, dim=80, dim_v=96),
    "class 256": Case([40, 270], n_head=4, n_kv=2, dim=32, heads=2, cls=256),
    "wide heads": Case([30], n_head=2, n_kv=2, dim=256, dim_v=320),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention(case: Case) -> None:
    n = len(case.positions)
    q = normal(1, n, case.n_head, case.dim)
    sinks = normal(2, case.n_head) + 2 if case.has_sinks else None
    pages = empty_pages(case.positions, case.n_kv, case.dim, case.dim_v, case.dtype)
    scale = 0.3
    expected = np.zeros((n, case.n_head, case.dim_v), f32)
    kept = np.float16 if case.dtype == torch.float16 else np.float32
    for t, position in enumerate(case.positions):
        k = normal(10 + t, position + 1, case.n_kv, case.dim).astype(kept)
        v = normal(20 + t, position + 1, case.n_kv, case.dim_v).astype(kept)
        fill(pages, k, v, t)
        first = max(0, position - case.window + 1) if case.window else 0
        for head in range(case.n_head):
            kv = head // (case.n_head // case.n_kv)
            expected[t, head] = reference.attention(
                q[t, head],
                k[:, kv],
                v[:, kv],
                scale=scale,
                first=first,
                softcap_=case.softcap,
                sink=None if sinks is None else float(sinks[head]),
            )
    splits = max_splits(max(case.positions) + 1, case.window)
    width = case.n_head * case.dim_v
    y, out = torch.empty(n, width), empty_activation(case.cls, n, width, DEVICE)
    mask = Mask(scale, case.softcap, case.window, None if sinks is None else tensor(sinks))
    partials = Partials.empty(n, case.n_head, splits, case.dim_v, DEVICE)
    attend(tensor(q.reshape(n, -1)), pages, mask, partials, y, out, heads=case.heads, n_programs=case.n_programs)
    assert_same_bits(y, expected.reshape(n, -1))
    assert not partials.arrived.any()
    assert_quantised(out, array(y))


def rotated(x: np.ndarray, norm: Norm | None, dim: int, angles: np.ndarray, is_neox: bool) -> np.ndarray:
    """What should become of rows [n, heads * dim]; angles [n, 2, n_rot / 2]."""
    if norm is not None:
        width = len(norm.weight)
        x = reference.rms_norm(x.reshape(len(x), -1, width), array(norm.weight), norm.eps).reshape(x.shape)
    heads = x.reshape(len(x), -1, dim)
    return np.stack([reference.rope(h, a[0], a[1], is_neox=is_neox) for h, a in zip(heads, angles, strict=True)])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("by_head, n_rot, has_bias", [(True, 64, False), (False, 40, True), (None, 48, True)])
def test_rotation_and_store(is_neox: bool, by_head: bool | None, n_rot: int, has_bias: bool) -> None:
    positions, n_head, n_kv, dim, dim_v = [3, 260], 4, 2, 64, 80
    pages = empty_pages(positions, n_kv, dim, dim_v)
    widths = [n_head * dim, n_kv * dim, n_kv * dim_v]
    wide = normal(3, 2, sum(widths))
    parts = np.split(wide, np.cumsum(widths)[:-1], axis=1)
    biases = [normal(4 + i, w) if has_bias else None for i, w in enumerate(widths)]
    norms: list[Norm | None] = [None, None, None]
    if by_head is not None:
        norms[:2] = [Norm(tensor(normal(8, dim if by_head else w)), 1e-6) for w in widths[:2]]
    table = normal(9, 261, 2, n_rot // 2)
    views = torch.split(tensor(wide), widths, dim=1)
    q, k, v = (
        Projection(x, None if b is None else tensor(b), norm) for x, b, norm in zip(views, biases, norms, strict=True)
    )
    q_out = torch.empty(2, widths[0])
    rotate_and_store(q, k, v, Angles(tensor(table), pages.positions, is_neox), pages, q_out)
    x = [p if b is None else p + b for p, b in zip(parts, biases, strict=True)]
    assert_same_bits(q_out, rotated(x[0], norms[0], dim, table[positions], is_neox).reshape(2, -1))
    keys = rotated(x[1], norms[1], dim, table[positions], is_neox)
    for t, position in enumerate(positions):
        page = int(pages.table[t, position // PAGE])
        assert_same_bits(pages.k[page, :, position % PAGE], keys[t].astype(np.float16))
        assert_same_bits(pages.v[page, :, position % PAGE], x[2][t].reshape(n_kv, dim_v).astype(np.float16))
    assert torch.isfinite(pages.k).sum() == 2 * n_kv * dim and torch.isfinite(pages.v).sum() == 2 * n_kv * dim_v


def test_splits_of_a_context() -> None:
    assert [max_splits(n) for n in (1, 256, 257, 4096)] == [1, 1, 2, 16]
    for window in (1, 2, 255, 256, 257, 258, 512, 1024):
        spans = [p // PAGE - max(0, p - window + 1) // PAGE + 1 for p in range(4096)]
        assert max(spans) == max_splits(4096, window), window


def test_heads_of_a_program_leave_enough_programs() -> None:
    assert heads_per_program(1, 32, 4, 3, 132) == 1
    assert heads_per_program(1, 32, 4, 16, 132) == 2
    assert heads_per_program(8, 32, 4, 16, 132) == 2
    assert heads_per_program(8, 28, 4, 64, 132) == 1


def test_a_wrong_number_of_heads_is_refused() -> None:
    pages = empty_pages([0], 2, 64, 64)
    with pytest.raises(ValueError, match="2 of 6 query heads"):
        attend(torch.zeros(1, 384), pages, Mask(1.0), Partials.empty(1, 6, 1, 64), torch.zeros(1, 384), heads=2)
