"""Kernels of a prompt against fp64: grouped products, rows with a scale, rotation, attention over pages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from gpu_compile import ARCHITECTURES, QUICK, Launches, compile_kernel

from freetoken import quants, reference
from freetoken.kernels import layout, prompt_float, prompt_heads, prompt_sort
from freetoken.kernels.coded import CodedMatrices, CodedTile, can_be_coded, coded_product, expert_coded_glu
from freetoken.kernels.dequant import PLANES, RAW, dequantise
from freetoken.kernels.grouped import Rows, Tile, expert_glu_rows, expert_products, product, tile_for, tiles
from freetoken.kernels.matvec import TYPE_CLASS
from freetoken.kernels.prompt_attention import _shape, attend_chunk
from freetoken.kernels.prompt_float import float_product
from freetoken.kernels.prompt_heads import turn_heads
from freetoken.kernels.prompt_rows import Normed, Shared, add_expert_rows, combine, halve_rows
from freetoken.quants import GgmlType
from tools.ggml import quantise, type_by_name

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


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.from_numpy(reference.rms_norm(x.numpy(), weight.numpy(), eps))


@pytest.mark.parametrize("has_all", [False, True])
def test_sums_with_norms_and_halves(has_all: bool) -> None:
    """In place, from and to parts of wider rows."""
    rng = torch.Generator().manual_seed(7)
    n, width = 9, 70
    x, residual = torch.randn(n, 2 * width, generator=rng)[:, 3 : 3 + width], torch.randn(n, width, generator=rng)
    extra, gate = torch.randn(n, width, generator=rng), torch.randn(n, 1, generator=rng)
    weight, post = torch.randn(2, width, generator=rng)
    want = x.clone()
    if has_all:
        want = residual + rms(x + torch.sigmoid(gate) * extra, post, 1e-6)
    y, half, scale = torch.empty(n, width + 4), torch.empty(n, width, dtype=torch.float16), torch.empty(n)
    norm = Normed(weight, 1e-5, y[:, :width] if has_all else None, half, scale)
    if has_all:
        combine(x, residual, shared=Shared(extra, gate), post=Normed(post, 1e-6), residual=residual, norm=norm)
        assert torch.allclose(residual, want, rtol=1e-5, atol=1e-5)
        assert torch.allclose(y[:, :width], rms(want, weight, 1e-5), rtol=1e-5, atol=1e-5)
    else:
        combine(x, norm=norm)
    rows = halved(rms(want, weight, 1e-5))
    assert torch.equal(scale, rows.scale)
    assert torch.allclose(half.float(), rows.x.float(), rtol=2e-3)


@pytest.mark.parametrize(
    ("is_neox", "dim", "dim_v", "n_rot", "has_norm"),
    [(True, 40, 24, 40, True), (False, 32, 32, 24, False), (True, 32, 32, 24, True)],
)
def test_heads_are_turned_and_stored(is_neox: bool, dim: int, dim_v: int, n_rot: int, has_norm: bool) -> None:
    rng = torch.Generator().manual_seed(8)
    n, n_head, n_kv, start = 9, 6, 3, 250
    joint = torch.randn(n, n_head * dim + n_kv * (dim + dim_v) + 5, generator=rng)
    sizes = [n_head * dim, n_kv * dim, n_kv * dim_v, 5]
    q, k, v, rest = joint.split(sizes, dim=1)
    before = [each.clone() for each in (q, k, v, rest)]
    weight = torch.randn(dim, generator=rng)
    angles = torch.rand(n, 2, n_rot // 2, generator=rng)
    pages = [torch.zeros(3, n_kv, 256, width, dtype=torch.float16) for width in (dim, dim_v)]
    norm = (weight, 1e-6) if has_norm else None
    table = torch.tensor([2, 1], dtype=torch.int32)
    turn_heads(q, k, v, norm, norm, angles, *pages, table, start=start, is_neox=is_neox)

    def turned(x: torch.Tensor, n_heads: int) -> np.ndarray:
        x = x.reshape(n, n_heads, dim)
        x = rms(x, weight, 1e-6) if has_norm else x
        return reference.rope(x.numpy(), angles.numpy()[:, 0, None], angles.numpy()[:, 1, None], is_neox=is_neox)

    assert np.allclose(q.reshape(n, n_head, dim).numpy(), turned(before[0], n_head), atol=1e-5)
    keys, values = turned(before[1], n_kv), before[2].reshape(n, n_kv, dim_v).numpy()
    for i in range(n):
        page, at = table[(start + i) // 256], (start + i) % 256
        assert np.allclose(pages[0][page, :, at].numpy(), keys[i], atol=4e-3)
        assert np.allclose(pages[1][page, :, at].numpy(), values[i], atol=4e-3)
    assert torch.equal(rest, before[3])
    assert int((pages[0] != 0).any(-1).sum()) == n * n_kv


def test_float_product() -> None:
    rng = torch.Generator().manual_seed(9)
    x, w, bias = torch.randn(70, 80, generator=rng)[:, 3:75], torch.randn(11, 72, generator=rng), torch.randn(11)
    out = torch.full((70, 16), 7.0)
    float_product(x, w, out[:, 2:13], bias)
    assert torch.allclose(out[:, 2:13], (x.double() @ w.double().T + bias).float(), rtol=1e-5, atol=1e-5)
    assert bool((out[:, :2] == 7).all()) and bool((out[:, 13:] == 7).all())


@pytest.mark.parametrize(
    ("n", "k", "n_expert", "one_launch"), [(11, 3, 10, 4096), (70, 8, 128, 4096), (70, 8, 128, 0), (1, 2, 8, 0)]
)
def test_sorted_pairs_and_their_tiles(
    n: int, k: int, n_expert: int, one_launch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_sort, "ONE_LAUNCH", one_launch)
    rng = torch.Generator().manual_seed(n)
    ids = torch.stack([torch.randperm(n_expert, generator=rng)[:k] for _ in range(n)]).int()
    weights = torch.rand(n, k, generator=rng)
    found = prompt_sort.sort_room(n, k, n_expert, torch.device("cpu"), n_tail=4)
    prompt_sort.sort_pairs(ids, weights, found)
    order = torch.argsort(ids.reshape(-1), stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(n * k)
    positions, rank = inverse.view(n, k).sort(1)
    assert torch.equal(found.index.long(), order // k)
    assert torch.equal(found.positions.long(), positions) and torch.equal(found.weights, weights.gather(1, rank))
    counts = torch.bincount(ids.reshape(-1), minlength=n_expert)
    assert found.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    prompt_sort.count_pairs(ids[-4:], found.tail_counts)
    assert torch.equal(found.tail_counts.sum(0), torch.bincount(ids[-4:].reshape(-1), minlength=n_expert))
    listed = torch.full((min(n * k, n_expert + n * k // 4), 3), 7, dtype=torch.int32)
    prompt_sort.list_tiles(found.starts, listed, 4, n)
    starts = found.starts.numpy()
    want = tiles(starts[:-1], starts[1:], 4)
    assert np.array_equal(listed[: len(want)].numpy(), want) and bool((listed[len(want) :] == 0).all())


def coded(name: str, n: int, rows: int, cols: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """n matrices of a type, every other in planes; addresses and forms."""
    kind, rng = type_by_name(name), np.random.default_rng(n)
    kept, forms = [], []
    for i in range(n):
        values = rng.standard_normal((rows, cols)).astype(np.float32) / 16
        raw = torch.from_numpy(np.ascontiguousarray(quantise(values, kind)).view(np.uint8).reshape(-1).copy())
        if i % 2:
            size = layout.slot_bytes(kind, rows, cols)
            room = torch.zeros(size + 128, dtype=torch.uint8)
            laid = room[-room.data_ptr() % 128 :][:size]
            layout.relay(kind, raw, laid)
            raw = laid
        kept.append(raw)
        forms.append(PLANES if i % 2 else RAW)
    return kept, torch.tensor([each.data_ptr() for each in kept]), torch.tensor(forms, dtype=torch.int32)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "MXFP4", "IQ4_XS", "TQ1_0", "NVFP4"])
def test_products_that_decode_on_the_way(name: str) -> None:
    """Those of the scratch, but for the order of sums: an expert without rows, entries left over, part of a matrix."""
    kind, rows, cols, n = type_by_name(name), 40, 256, 7
    (gates, gate_at, forms), (ups, up_at, _) = coded(name, 3, rows, cols), coded(name, 3, rows, cols)
    counts = np.array([3, 0, 20])
    ends = counts.cumsum()
    rng = torch.Generator().manual_seed(1)
    x = halved(torch.randn(n, cols, generator=rng))
    index = torch.randint(0, n, (23,), generator=rng, dtype=torch.int32)
    listed = torch.from_numpy(tiles(ends - counts, ends, 16))
    w = torch.empty(2, 3, rows, cols, dtype=torch.float16)
    for each, at in zip(w, (gate_at, up_at), strict=True):
        dequantise(kind, at, forms, each, matrix_rows=rows)
    want, found = torch.empty(23, rows), torch.empty(23, rows)
    expert_glu_rows(x, index, listed, w, want, TILE, first=0, activation=0)
    gate, up = (CodedMatrices(kind, rows, cols, at, forms) for at in (gate_at, up_at))
    more = torch.cat([listed, torch.zeros(2, 3, dtype=torch.int32)])
    expert_coded_glu(x, index, more, gate, up, found, CodedTile(16, 32), first=0, activation=0)
    assert float((found - want).abs().max()) < 1e-4 * float(want.abs().max())
    y, part = torch.empty(n, rows - 8), torch.empty(n, rows - 8)
    product(x, w[0, 0, 8:].contiguous(), y, TILE)
    coded_product(gate, x, part, CodedTile(16, 32), first_row=8)
    assert float((part - y).abs().max()) < 1e-4 * float(y.abs().max())
    assert len(gates) == len(ups) == 3


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
    signature |= dict.fromkeys(("k", "v"), "*fp16") | dict.fromkeys(
        ("n", "start", "n_kv", "q_stride", "out_stride"), "i32"
    )
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
        divisible=("q", "k", "v", "table", "out", "q_stride", "out_stride"), archs=(arch,), warps=warps, stages=stages,
    )  # fmt: skip


def compile_coded(type_id: int, is_double: bool, arch: int) -> None:
    width, block_bytes = quants.TYPES[type_id].block_size, quants.TYPES[type_id].block_bytes
    signature = {"x": "*fp16", "scale": "*fp32", "out": "*fp32", "index": "*i32", "tile_list": "*i32"}
    signature |= {"addresses": "*i64", "others": "*i64", "forms": "*i32", "values": "*i32"}
    integers = ("n_rows", "first", "x_first", "first_row", "out_stride", "start1", "start2", "start3", "start4")
    signature |= dict.fromkeys(integers, "i32")
    numbers: dict[str, object] = {
        "bias": None,
        "TYPE": int(type_id),
        "BLOCK_BYTES": block_bytes,
        "W": width,
        "ALIGN": 16,
    }
    numbers |= {"IS_SAME": layout.is_identity(type_id), "N": 768, "K": 2048, "M_BLOCK": 16, "N_BLOCK": 32}
    numbers |= {"J": max(128 // width, 1), "ACTIVATION": 0 if is_double else -1}
    compile_kernel(
        "freetoken.kernels.coded", "coded_kernel", signature, numbers,
        divisible=("x", "scale", "out", "index", "tile_list", "addresses", "others", "forms", "values", "out_stride"),
        archs=(arch,), stages=2,
    )  # fmt: skip


def compile_sort(arch: int) -> None:
    signature = dict.fromkeys(("ids", "counts", "index", "positions", "starts"), "*i32")
    signature |= {"weights": "*fp32", "sorted_weights": "*fp32", "n_pairs": "i32", "n_blocks": "i32"}
    numbers: dict[str, object] = {"N_EXPERT": 128, "E": 128, "K": 8, "B": 256, "STEP": 64, "IS_COUNTED": False}
    compile_kernel(
        "freetoken.kernels.prompt_sort", "sort_kernel", signature, numbers, archs=(arch,), warps=8, stages=3,
        divisible=("ids", "counts", "index"),
    )  # fmt: skip


F, H, N = "*fp32", "*fp16", "i32"
ROWS: dict[str, tuple[dict[str, str], dict[str, object]]] = {  # at the widths of Qwen3-30B-A3B
    "halve_kernel": ({"x": F, "out": H, "scale": F, "rows": N, "stride": N}, {"N": 2048, "R": 1, "BLOCK": 2048}),
    "combine_kernel": (
        dict.fromkeys(("x", "post", "shared", "gate", "residual", "total", "norm", "y", "scale"), F)
        | {"half": H, "rows": N, "post_eps": "fp32", "eps": "fp32"}
        | dict.fromkeys([f"{name}_stride" for name in ("x", "shared", "gate", "residual", "total", "y")], N),
        {"N": 2048, "W": 2048, "R": 1},
    ),
    "add_expert_rows_kernel": (
        {"rows": F, "positions": "*i32", "weights": F, "y": F, "first": N, "end": N},
        {"N": 2048, "K": 8, "BLOCK": 1024, "IS_FIRST": True},
    ),
}


def compile_rows(arch: int) -> None:
    for name, (types, numbers) in ROWS.items():
        pointers = tuple(argument for argument, t in types.items() if t[0] == "*")
        place = "freetoken.kernels.prompt_rows"
        compile_kernel(place, name, types, numbers, divisible=pointers, archs=(arch,))


def compile_as_launched(monkeypatch: pytest.MonkeyPatch, archs: tuple[int, ...]) -> None:
    """Kernels with the constants that their launchers give them at the sizes of real models."""
    found = Launches()
    for module in (prompt_heads, prompt_float, prompt_sort):
        monkeypatch.setattr(module, "launch", found)
    monkeypatch.setattr(prompt_float, "shape_for", lambda n, is_device, of=prompt_float.shape_for: of(n, True))
    table = torch.zeros(4, dtype=torch.int32)
    for n_head, n_kv, dim, n_rot in ((32, 4, 128, 128), (16, 16, 96, 96), (8, 4, 256, 64), (25, 5, 64, 64)):
        rows = [torch.zeros(3, n * dim) for n in (n_head, n_kv, n_kv)]
        pages = [torch.zeros(1, n_kv, 256, dim, dtype=torch.float16) for _ in range(2)]
        norm = (torch.zeros(dim), 1e-6)
        angles = torch.zeros(3, 2, n_rot // 2)
        turn_heads(*rows, norm, norm, angles, *pages, table, start=0, is_neox=True)  # type: ignore[arg-type]
    for n in (9, 512):
        float_product(torch.zeros(n, 2048), torch.zeros(128, 2048), torch.zeros(n, 128))
    for n in (9, 4096):
        prompt_sort.count_pairs(
            torch.zeros(n, 8, dtype=torch.int32), prompt_sort.sort_room(n, 8, 128, torch.device("cpu")).counts
        )
    prompt_sort.list_tiles(torch.zeros(129, dtype=torch.int32), torch.zeros(300, 3, dtype=torch.int32), 64, 512)
    found.compile(archs)


@pytest.mark.compile
def test_kernels_compile_as_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_as_launched(monkeypatch, ARCHITECTURES)


@pytest.mark.parametrize("arch", QUICK)
def test_kernels_compile(arch: int) -> None:
    ptx = compile_product(tile_for(300, arch, is_double=True), (arch,), is_double=True)
    assert arch < 80 or "wgmma" in ptx  # this Triton has no tensor cores below sm_80
    compile_attention(128, arch)
    compile_sort(arch)
    if arch >= 80:
        compile_coded(GgmlType.Q4_K, True, arch)


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_everywhere(arch: int) -> None:
    for n_rows in (8, 40, 80, 300):
        for is_double in (False, True):
            compile_product(tile_for(n_rows, arch, is_double=is_double), (arch,), is_double=is_double)
    for dim in (64, 128, 256):
        compile_attention(dim, arch)
    compile_rows(arch)
    compile_sort(arch)
    for type_id in TYPE_CLASS:
        if can_be_coded(type_id, arch):
            for is_double in (False, True):
                compile_coded(type_id, is_double, arch)
