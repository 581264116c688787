"""Kernels of a prompt against fp64: grouped products, rows with a scale, rotation, attention over pages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel

from freetoken import reference
from freetoken.kernels.grouped import Rows, Tile, expert_glu_rows, expert_products, product, tile_for, tiles
from freetoken.kernels.prompt_attention import _shape, attend_chunk
from freetoken.kernels.prompt_rows import add_expert_rows, halve_rows, rms_norm, rotate

BOUND = 1.5e-3
"""Largest error as a share of sqrt(sum (w x)^2): two roundings to fp16 of up to 2^-11 each, mostly far apart."""

TILE = Tile(16, 16, 32, 4, 1)


def halved(x: torch.Tensor) -> Rows:
    rows = Rows(torch.empty(x.shape, dtype=torch.float16), torch.empty(len(x)))
    halve_rows(x.contiguous(), rows.x, rows.scale)
    return rows


def error(found: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    want, size = x.double() @ w.double().T, ((x.double() ** 2) @ (w.double().T ** 2)).sqrt() + 1e-30
    return float(((found.double() - want) / size).abs().max())


def test_rows_with_a_scale() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(8, 100, generator=rng)
    for row, factor in enumerate((1.0, 1e30, 1e-30, 3e37, 0.0, 1e-42, 1e5)):
        x[row] *= factor
    x[7, 3] = np.inf
    rows = halved(x)
    back = rows.x.float() * rows.scale[:, None]
    assert bool(rows.x[:7].isfinite().all())
    size = x[:7].abs().amax(1, keepdim=True)
    assert bool(((back[:7] - x[:7]).abs() <= 2.0**-11 * x[:7].abs() + 2.0**-30 * size).all())
    assert bool(back[7].isinf()[3])
    assert bool((torch.frexp(rows.scale).mantissa == 0.5).all())


@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 5, 40), (17, 33, 64), (40, 16, 72)])
def test_product(n: int, rows: int, cols: int) -> None:
    rng = torch.Generator().manual_seed(n)
    x, w = torch.randn(n, cols, generator=rng) * 100, torch.randn(rows, cols, generator=rng)
    bias = torch.randn(rows, generator=rng)
    out = torch.full((n, rows + 8), 7.0)
    product(halved(x), w.half(), out[:, 4 : 4 + rows], TILE, bias)
    assert error(out[:, 4 : 4 + rows] - bias, x, w) < BOUND
    assert bool((out[:, :4] == 7).all()) and bool((out[:, 4 + rows :] == 7).all())


def test_tiles() -> None:
    found = tiles(np.array([100, 100, 105, 105, 206]), np.array([100, 105, 105, 106, 210]), 4)
    assert found.tolist() == [[1, 100, 104], [1, 104, 105], [3, 105, 106], [4, 206, 210]]
    assert tiles(np.zeros(3, np.int64), np.zeros(3, np.int64), 16).shape == (0, 3)


@pytest.mark.parametrize("counts", [[0, 3, 0, 21, 16], [1], [0, 0, 40]], ids=str)
def test_experts(counts: list[int]) -> None:
    """Ragged counts, experts without rows, one row; rows of `out` begin at the group's first position."""
    rng = torch.Generator().manual_seed(len(counts))
    n, d, ff, first = 11, 64, 48, 6
    total = sum(counts)
    x = torch.randn(n, d, generator=rng)
    w = torch.randn(2, len(counts), ff, d, generator=rng) / 8
    down = torch.randn(len(counts), d, ff, generator=rng) / 8
    index = torch.randint(0, n, (first + total,), generator=rng, dtype=torch.int32)
    tile = TILE
    ends = first + np.cumsum(counts)
    listed = torch.from_numpy(tiles(ends - counts, ends, tile.m))
    h = torch.empty(total, ff)
    expert_glu_rows(halved(x), index, listed, w.half(), h, tile, first=first, activation=0)
    y = torch.empty(total, d)
    expert_products(halved(h), listed, down.half(), y, tile, first=first)
    at = 0
    for expert, count in enumerate(counts):
        if count:
            mine = x[index[first + at : first + at + count].long()]
            gate, up = mine @ w[0, expert].T, mine @ w[1, expert].T
            want = torch.nn.functional.silu(gate) * up
            assert float((h[at : at + count] - want).abs().max()) < 1e-2 * float(want.std())
            assert error(y[at : at + count], h[at : at + count], down[expert]) < BOUND
        at += count


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = torch.Generator().manual_seed(5)
    x, w = torch.randn(40, 96, generator=rng), torch.randn(20, 96, generator=rng).half()
    whole, part = torch.empty(40, 20), torch.empty(3, 20)
    product(halved(x), w, whole, TILE)
    product(halved(x[18:21]), w, part, TILE)
    assert torch.equal(whole[18:21], part)


def test_experts_rows_are_added_in_any_cuts() -> None:
    rng = torch.Generator().manual_seed(6)
    n, k, width = 5, 3, 70
    rows = torch.randn(n * k, width, generator=rng)
    positions = torch.randperm(n * k, generator=rng).view(n, k).sort(1).values.int()
    weights = torch.rand(n, k, generator=rng)
    want = torch.zeros(n, width)
    for rank in range(k):
        want += weights[:, rank, None] * rows[positions[:, rank].long()]
    for cuts in ([0, 15], [0, 4, 5, 15]):
        y = torch.zeros(n, width)
        for first, end in itertools.pairwise(cuts):
            add_expert_rows(rows[first:end], positions, weights, y, first, end)
        assert torch.equal(y, want)


def test_norm_and_rotation() -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((9, 3 * 40)).astype(np.float32)
    weight = rng.standard_normal(40).astype(np.float32)
    out = torch.empty(27, 40)
    rms_norm(torch.from_numpy(x.reshape(27, 40)), torch.from_numpy(weight), 1e-6, out)
    assert np.allclose(out.numpy(), reference.rms_norm(x.reshape(27, 40), weight, 1e-6), rtol=1e-5, atol=1e-6)
    angles = rng.random((9, 12))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    for is_neox in (False, True):
        turned = torch.from_numpy(x.copy())
        rotate(turned, torch.from_numpy(table), 3, is_neox=is_neox)
        want = reference.rope(x.reshape(9, 3, 40), table[:, 0, None], table[:, 1, None], is_neox=is_neox)
        assert np.allclose(turned.numpy(), want.reshape(9, -1), atol=1e-6)


@pytest.mark.parametrize(("start", "window", "softcap"), [(0, 0, 0.0), (250, 0, 0.0), (300, 40, 0.0), (5, 0, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_attention(start: int, window: int, softcap: float, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(start)
    n, n_head, n_kv, dim, dim_v = 21, 4, 2, 24, 16
    table = torch.tensor([3, 1, 0], dtype=torch.int32)
    k, v = (torch.full((4, n_kv, 256, w), np.nan, dtype=dtype) for w in (dim, dim_v))
    keys, values = (torch.randn(start + n, n_kv, w, generator=rng).to(dtype) for w in (dim, dim_v))
    for at in range(start + n):
        k[table[at // 256], :, at % 256], v[table[at // 256], :, at % 256] = keys[at], values[at]
    q, out = torch.randn(n, n_head * dim, generator=rng), torch.empty(n, n_head * dim_v)
    attend_chunk(q, k, v, table, out, start=start, n_head=n_head, scale=0.3, window=window, softcap=softcap)
    group = n_head // n_kv
    scores = torch.einsum("nhd,mhd->hnm", q.view(n, n_head, dim), keys.float().repeat_interleave(group, 1)) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at, query = torch.arange(start + n)[None, :], start + torch.arange(n)[:, None]
    hidden = (at > query) | (at <= query - window if window else at < 0)
    p = torch.softmax(scores.masked_fill(hidden, -np.inf), -1)
    want = torch.einsum("hnm,mhd->nhd", p, values.float().repeat_interleave(group, 1)).reshape(n, -1)
    assert float((out - want).abs().max()) < 2e-3


# --- compiled --------------------------------------------------------------------------------------------------------


def compile_product(tile: Tile, archs: tuple[int, ...], *, is_double: bool) -> str:
    signature = dict.fromkeys(("x", "b"), "*fp16") | dict.fromkeys(("scale", "out"), "*fp32")
    signature |= {"index": "*i32", "tile_list": "*i32", "second": "i32", "out_stride": "i32"}
    signature |= dict.fromkeys(("n_rows", "first", "x_first"), "i32")
    numbers: dict[str, object] = {"N": 768, "K": 2048, "M_BLOCK": tile.m, "N_BLOCK": tile.n, "K_BLOCK": tile.k}
    numbers |= {"ACTIVATION": 0 if is_double else -1, "bias": None}
    pointers = ("x", "b", "scale", "out", "index", "tile_list", "second", "out_stride")
    return compile_kernel(
        "freetoken.kernels.grouped", "product_kernel", signature, numbers,
        divisible=pointers, archs=archs, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def compile_attention(dim: int, arch: int) -> str:
    m, block, warps, stages = _shape(dim, 2, arch)
    signature = dict.fromkeys(("q", "out", "scale"), "*fp32") | {"scale": "fp32", "table": "*i32"}
    signature |= dict.fromkeys(("k", "v"), "*fp16") | dict.fromkeys(("n", "start", "n_kv"), "i32")
    numbers: dict[str, object] = {
        "N_HEAD": 32,
        "GROUP": 8,
        "DIM": dim,
        "D": dim,
        "DIM_V": dim,
        "DV": dim,
        "M_BLOCK": m,
        "BLOCK": block,
    }
    numbers |= {"WINDOW": 0, "SOFTCAP": 0.0, "IS_WHILE": False}
    return compile_kernel(
        "freetoken.kernels.prompt_attention", "attend_chunk_kernel", signature, numbers,
        divisible=("q", "k", "v", "table", "out"), archs=(arch,), warps=warps, stages=stages,
    )  # fmt: skip


F, H, N = "*fp32", "*fp16", "i32"
ROWS: dict[str, tuple[dict[str, str], dict[str, object]]] = {  # at the widths of Qwen3-30B-A3B
    "halve_kernel": ({"x": F, "out": H, "scale": F, "rows": N}, {"N": 2048, "R": 1, "BLOCK": 2048}),
    "rms_norm_kernel": (
        {"x": F, "weight": F, "out": F, "rows": N, "eps": "fp32"},
        {"N": 2048, "W": 2048, "R": 1},
    ),
    "rotate_kernel": (
        {"x": F, "table": F},
        {"N_HEAD": 32, "HEAD_DIM": 128, "HALF": 64, "BLOCK_HALF": 64, "HEADS": 32, "IS_NEOX": True},
    ),
    "add_expert_rows_kernel": (
        {"rows": F, "positions": "*i32", "weights": F, "y": F, "first": N, "end": N},
        {"N": 2048, "K": 8, "BLOCK": 1024},
    ),
}


def compile_rows(arch: int) -> None:
    for name, (types, numbers) in ROWS.items():
        pointers = tuple(argument for argument, t in types.items() if t[0] == "*")
        place = "freetoken.kernels.prompt_rows"
        compile_kernel(place, name, types, numbers, divisible=pointers, archs=(arch,))


@pytest.mark.parametrize("arch", QUICK)
def test_kernels_compile(arch: int) -> None:
    ptx = compile_product(tile_for(300, arch, is_double=True), (arch,), is_double=True)
    assert arch < 80 or "wgmma" in ptx  # this Triton has no tensor cores below sm_80
    compile_attention(128, arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_everywhere(arch: int) -> None:
    for n_rows in (8, 40, 80, 300):
        for is_double in (False, True):
            compile_product(tile_for(n_rows, arch, is_double=is_double), (arch,), is_double=is_double)
    for dim in (64, 128, 256):
        compile_attention(dim, arch)
    compile_rows(arch)
