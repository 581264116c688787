"""Every product kernel and decoder of every instruction set against the reference, bit for bit (docs/numerics.md).

Weights hold each extreme of their format, activations each special case of section 2. Operations around the products
are in test_ops.py.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from freetoken import native, quants, reference
from freetoken.native import Pool, Program
from freetoken.reference import F32, U8, f32
from freetoken.reference_grids import GRID_UNITS, grid_integers
from tools import grids

FACTORS: dict[int, tuple[int, ...]] = {
    **dict.fromkeys((Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.IQ4_NL, Type.IQ4_XS), (0,)),
    **dict.fromkeys(GRID_UNITS, (0,)),
    **dict.fromkeys((Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K), (0, 2)),
    **{Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q6_K: (208,), Type.MXFP4: ()},
}
"""Where a block's fp16 factors stand."""
SPECIAL_FACTORS = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)
ONE_PLANE_BOUND, TWO_PLANES_BOUND = 5e-3, 5e-5
"""Largest error of a product as a share of sum |w x|. Measured: 3.7e-4 to 1.2e-3, 1.3e-6 to 4e-6."""

types = pytest.mark.parametrize("type_id", sorted(reference.TYPE_CLASS), ids=lambda t: Type(t).name)


def available() -> list[str]:
    names = []
    for name in native.VARIANTS[1:]:
        try:
            native.set_variant(name)
        except native.EngineError:
            continue
        names.append(name)
    native.set_variant("auto")
    return names


@pytest.fixture(params=available())
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of kernels that runs on this processor."""
    native.set_variant(request.param)
    yield request.param
    native.set_variant("auto")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def tame_weights(type_id: int, rows: int, n_blocks: int, rng: np.random.Generator) -> U8:
    """Random blocks with factors as real files have them: [rows, row_bytes]."""
    size = quants.row_bytes(type_id, reference.TYPE_CLASS[type_id])
    w = rng.integers(0, 256, (rows, n_blocks, size), dtype=np.uint8)
    for offset in FACTORS[type_id]:
        factor = rng.uniform(0.001, 0.03, (rows, n_blocks)).astype(np.float16)
        w[:, :, offset : offset + 2] = factor[..., None].view(np.uint8)
    if type_id == Type.MXFP4:
        w[:, :, 0] = rng.integers(118, 125, (rows, n_blocks))
    return w.reshape(rows, -1)


def wild_weights(type_id: int, rows: int, n_blocks: int, rng: np.random.Generator) -> U8:
    """Blocks of all ones, all zeros, sign bits only, and random ones; factors of either sign, many of them special."""
    w = tame_weights(type_id, rows, n_blocks, rng).reshape(rows, n_blocks, -1)
    for row, fill in enumerate((0xFF, 0x00, 0x80, 0x7F)):
        w[row] = fill
    for offset in FACTORS[type_id]:
        factor = (rng.standard_normal((rows, n_blocks)) * 0.02).astype(np.float16).view(np.uint16)
        chosen = rng.random((rows, n_blocks)) < 0.2
        factor = np.where(chosen, SPECIAL_FACTORS[rng.integers(0, len(SPECIAL_FACTORS), chosen.shape)], factor)
        w[:, :, offset : offset + 2] = factor.astype(np.uint16)[..., None].view(np.uint8)
    return w.reshape(rows, -1)


def wild_activations(n_cols: int, width: int, rng: np.random.Generator) -> F32:
    """Eight tokens: zeros, huge, tiny, a block of zeros, a NaN, an infinity, many -0, twenty orders of magnitude."""
    x = rng.standard_normal((8, n_cols)).astype(f32)
    x[0] = 0
    x[1] = np.copysign(f32(1e38), x[1])
    x[2] *= f32(2.0**-110)
    x[3, :width] = 0
    x[4, n_cols // 2] = np.nan
    x[5, -1] = np.inf
    x[6] = np.where(rng.random(n_cols) < 0.5, f32(-0.0), x[6])
    x[7] *= (10.0 ** rng.integers(-20, 20, n_cols)).astype(f32)
    return x


def run_product(pool: Pool, type_id: int, w: U8, x: F32, planes: int) -> F32:
    """Products [n, rows] of the native library."""
    (rows, row_bytes), (n, n_cols) = w.shape, x.shape
    program, y, act = Program(pool), np.full((n, rows), 7, f32), x
    cls = native.type_class(type_id)
    if cls:
        act = native.aligned(native.act_bytes(cls, n_cols, n))
        act[:] = 77  # what lay there before must not matter
        program.add(native.OP_QUANTIZE, n, p=(x, act), i=(cls, n_cols, planes, n_cols))
    sizes = (type_id, rows, n_cols, row_bytes, planes, n_cols, rows)
    program.add(native.OP_MATVEC, n, p=(act, w, y, None), i=sizes)
    program.run()
    return y


def assert_same_bits(found: F32, expected: F32) -> None:
    """Equal bits; any NaN equals any other."""
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert same.all(), f"{(~same).sum()} of {same.size} differ, first at {np.argwhere(~same)[0]}"


@types
@pytest.mark.parametrize("planes", [1, 2])
def test_products_have_the_bits_of_the_reference(pool: Pool, type_id: int, planes: int) -> None:
    rng = np.random.default_rng(type_id)
    width = reference.TYPE_CLASS[type_id]
    assert native.type_class(type_id) == width
    for n_blocks in (1, 3, 7, 8, 9, 18, 40):
        w = wild_weights(type_id, 11, n_blocks, rng)
        x = wild_activations(n_blocks * width, width, rng)
        expected = np.stack([reference.product(w, reference.quantize(row, width, planes), type_id) for row in x])
        try:
            for name in available():
                native.set_variant(name)
                assert_same_bits(run_product(pool, type_id, w, x, planes), expected)
        finally:
            native.set_variant("auto")


@pytest.mark.parametrize("type_id", [Type.Q4_1, Type.Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("n_blocks", [247, 250, 256])
def test_long_rows(pool: Pool, variant: str, type_id: int, n_blocks: int) -> None:
    rng = np.random.default_rng(n_blocks)
    width = reference.TYPE_CLASS[type_id]
    w, x = tame_weights(type_id, 5, n_blocks, rng), rng.standard_normal((1, n_blocks * width)).astype(f32)
    expected = reference.product(w, reference.quantize(x[0], width), type_id)
    assert_same_bits(run_product(pool, type_id, w, x, 2)[0], expected)


@types
def test_every_tail_of_a_row(pool: Pool, variant: str, type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    width = reference.TYPE_CLASS[type_id]
    for n_blocks in range(1, 17):
        w, x = tame_weights(type_id, 19, n_blocks, rng), rng.standard_normal((3, n_blocks * width)).astype(f32)
        expected = np.stack([reference.product(w, reference.quantize(row, width), type_id) for row in x])
        assert_same_bits(run_product(pool, type_id, w, x, 2), expected)
        assert_same_bits(run_product(pool, type_id, w, x[:1], 2), expected[:1])


@pytest.mark.skipif(os.name != "posix", reason="needs mprotect")
@types
def test_nothing_is_read_beside_the_weights(pool: Pool, variant: str, type_id: int) -> None:
    """Rows that begin or end where the next page must not be read: a kernel that does is killed."""
    rng = np.random.default_rng(type_id)
    width, protect = reference.TYPE_CLASS[type_id], ctypes.CDLL(None).mprotect
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as pages:
        memory = np.frombuffer(pages, np.uint8)
        for page in (0, 3):
            address = ctypes.c_void_p(memory.ctypes.data + page * mmap.PAGESIZE)
            assert protect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
        inside = memory[mmap.PAGESIZE : 3 * mmap.PAGESIZE]
        for rows, n_blocks in ((1, 1), (3, 3), (2, 8), (5, 9), (1, 17)):
            w, x = tame_weights(type_id, rows, n_blocks, rng), rng.standard_normal((2, n_blocks * width)).astype(f32)
            if w.size > inside.size:
                continue
            for place in (inside[: w.size], inside[inside.size - w.size :]):
                place[:] = w.ravel()
                for n in (1, 2):
                    found = run_product(pool, type_id, place.reshape(w.shape), x[:n], 2)
                    assert_same_bits(found, run_product(pool, type_id, w, x[:n], 2))
        del memory, inside, place


@types
def test_a_token_does_not_see_its_neighbours(pool: Pool, variant: str, type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    width = reference.TYPE_CLASS[type_id]
    for n_blocks in (8, 9):
        w = tame_weights(type_id, 40, n_blocks, rng)
        x = wild_activations(n_blocks * width, width, rng)
        alone = np.concatenate([run_product(pool, type_id, w, row[None], 2) for row in x])
        for n in range(2, 9):
            assert_same_bits(run_product(pool, type_id, w, x[:n], 2), alone[:n])


@types
def test_error_against_exact_products(pool: Pool, variant: str, type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    width = reference.TYPE_CLASS[type_id]
    w, x = tame_weights(type_id, 64, 2048 // width, rng), rng.standard_normal((1, 2048)).astype(f32)
    wide = dequantize(w, Type(type_id)).astype(np.float64)
    exact, size = wide @ x[0].astype(np.float64), np.abs(wide) @ np.abs(x[0].astype(np.float64))
    for planes, bound in ((1, ONE_PLANE_BOUND), (2, TWO_PLANES_BOUND)):
        share = np.abs(run_product(pool, type_id, w, x, planes)[0] - exact) / size
        assert share.max() <= bound, f"{planes} planes: {share.max():.2e}"


@types
def test_decoded_rows_are_gguf_s(pool: Pool, variant: str, type_id: int) -> None:
    rng = np.random.default_rng(type_id)
    w = wild_weights(type_id, 9, 5, rng)
    with np.errstate(all="ignore"):
        expected = dequantize(w, Type(type_id))
    out = np.zeros(expected.shape, f32)
    pool.dequantize(type_id, w, out)
    assert_same_bits(out, expected)


@pytest.mark.parametrize("type_id", sorted(GRID_UNITS), ids=lambda t: Type(t).name)
def test_every_code_word_and_sign(pool: Pool, variant: str, type_id: int) -> None:
    w = tame_weights(type_id, 4, 256, np.random.default_rng(type_id))
    out = np.zeros((4, 256 * 256), f32)
    pool.dequantize(type_id, w, out)
    assert_same_bits(out, dequantize(w, Type(type_id)))
    n, _ = grid_integers(type_id, w.reshape(1024, -1))
    words = np.unique(np.abs(n).reshape(-1, 4 if type_id in (Type.IQ3_XXS, Type.IQ3_S) else 8), axis=0)
    assert len(words) == len(np.unique(getattr(gguf.quants, Type(type_id).name).grid[0, 0], axis=0))


def test_code_words_in_the_source_are_gguf_s() -> None:
    source = Path(__file__).parents[1] / "native" / "src" / "grids_data.h"
    assert source.read_text(encoding="utf-8") == grids.text()


def float_rows(type_id: int, rows: int, n_cols: int, rng: np.random.Generator) -> tuple[U8, F32]:
    """Rows of a float type as bytes, and widened."""
    values = rng.standard_normal((rows, n_cols)).astype(f32)
    values.ravel()[:: max(1, values.size // 7)] = f32(6e-8)  # subnormal in fp16
    if type_id == Type.F32:
        return values.view(np.uint8), values
    if type_id == Type.F16:
        halves = values.astype(np.float16)
        return halves.view(np.uint8), halves.astype(f32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return words.view(np.uint8), (words.astype(np.uint32) << 16).view(f32)


@pytest.mark.parametrize("type_id", [Type.F32, Type.F16, Type.BF16], ids=lambda t: t.name)
@pytest.mark.parametrize("n_cols", [1, 31, 32, 33, 80, 576])
def test_float_products(pool: Pool, variant: str, type_id: int, n_cols: int) -> None:
    rng = np.random.default_rng(n_cols)
    w, widened = float_rows(type_id, 13, n_cols, rng)
    x = rng.standard_normal((5, n_cols)).astype(f32)
    x[1] *= f32(1e-38)
    expected = np.stack([reference.float_product(widened, row) for row in x])
    assert_same_bits(run_product(pool, type_id, w, x, 2), expected)


def test_every_half_is_widened_exactly(pool: Pool, variant: str) -> None:
    halves = np.arange(65536, dtype=np.uint16).reshape(1, -1)
    out = np.zeros(halves.shape, f32)
    pool.dequantize(Type.F16, halves.view(np.uint8), out)
    assert_same_bits(out, halves.view(np.float16).astype(f32))


def test_functions_of_awkward_values(pool: Pool, variant: str) -> None:
    rng = np.random.default_rng(5)
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 88, -88, 87, -87, 87.0001, -87.0001, 88.1, 1e-40, -1e-40, 1e38]
    x = np.concatenate([special, np.linspace(-100, 100, 2001), rng.standard_normal(1000) * 30]).astype(f32)
    u = rng.standard_normal(len(x)).astype(f32)
    with np.errstate(all="ignore"):
        expected = [reference.silu(x) * u, reference.gelu(x) * u, reference.softcap(x * f32(0.5), 30.0)]
    found = [np.zeros_like(x) for _ in expected]
    program = Program(pool)
    for code, y in enumerate(found[:2]):
        program.add(native.OP_GLU, 1, p=(x, u, y), i=(len(x), code, len(x), len(x)))
    program.add(native.OP_SCALE, 1, p=(x, found[2]), i=(len(x),), f=(0.5, 30.0))
    program.run()
    for y, exact in zip(found, expected, strict=True):
        assert_same_bits(y, exact)
