"""Every native operation against freetoken/reference.py, bit for bit, for every set of kernels and 1 to 3 threads.

The reference works token by token, so agreement also says that a token's result does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from freetoken import native, quants, reference
from freetoken.native import Pool, Program
from freetoken.reference import F32, f32

RNG = np.random.default_rng(7)
THREADS = (1, 2, 3)
SCALE_OFFSETS = {
    **dict.fromkeys((Type.Q8_0, Type.IQ2_XXS, Type.IQ2_S, Type.IQ3_S, Type.IQ1_S), (0,)),
    **dict.fromkeys((Type.Q4_1, Type.Q4_K), (0, 2)),
    Type.Q6_K: (208,),
}


def variants() -> list[str]:
    names = []
    for name in native.VARIANTS[1:]:
        try:
            native.set_variant(name)
        except native.EngineError:
            continue
        names.append(name)
    native.set_variant("auto")
    return names


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Pool]]:
    made = [Pool(n) for n in THREADS]
    yield made
    for pool in made:
        pool.close()


def normal(*shape: int) -> F32:
    return RNG.standard_normal(shape).astype(f32)


def weights(type_id: int, rows: int, cols: int) -> np.ndarray:
    """Random weight rows, uint8 [rows, row_bytes], with sane block scales."""
    if type_id in (Type.F32, Type.F16):
        values = normal(rows, cols)
        return (values if type_id == Type.F32 else values.astype(np.float16)).view(np.uint8)
    data = RNG.integers(0, 256, (rows, quants.row_bytes(type_id, cols)), dtype=np.uint8)
    blocks = data.reshape(-1, quants.row_bytes(type_id, 32 if native.type_class(type_id) == 32 else 256))
    for offset in SCALE_OFFSETS[Type(type_id)]:
        scales = RNG.uniform(0.01, 0.05, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data


def product(data: np.ndarray, type_id: int, x: F32, planes: int) -> F32:
    """The reference's product of weight rows with one token's x."""
    cls = reference.TYPE_CLASS.get(type_id, 0)
    if cls:
        return reference.product(data, reference.quantize(x, cls, planes), type_id)
    return reference.float_product(quants.dequantize(type_id, data), x)


def check(pools: list[Pool], record: Callable[[Program], F32], expected: F32) -> None:
    """Record and run for every thread count and set of kernels; the output's bits must be the expected ones."""
    try:
        for name in variants():
            native.set_variant(name)
            for pool in pools:
                program = Program(pool)
                out = record(program)
                program.run()
                found = out.reshape(expected.shape)
                wrong = np.argwhere(found.view(np.uint32) != expected.view(np.uint32))
                assert not len(wrong), (
                    f"{name}, {pool.n_threads} threads: {len(wrong)} of {expected.size} differ, first at {wrong[0]}: "
                    f"{found[tuple(wrong[0])]} for {expected[tuple(wrong[0])]}"
                )
    finally:
        native.set_variant("auto")


def add_quantize(program: Program, x: F32, type_id: int, planes: int = 2) -> np.ndarray:
    """Record the quantisation that a type's product wants; returns what the product then takes."""
    cls = native.type_class(type_id)
    if cls == 0:
        return x
    n, cols = x.shape
    act = native.aligned(native.act_bytes(cls, cols, n))
    program.add(native.OP_QUANTIZE, n, p=(x, act), i=(cls, cols, planes, cols))
    return act


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type_id", "factor"), [(Type.F32, 1.0), (Type.F16, 24.0), (Type.Q8_0, 1.0), (Type.Q8_0, 2.5)])
def test_embed(pools: list[Pool], type_id: int, factor: float) -> None:
    data, tokens = weights(type_id, 50, 96), np.array([49, 0, 7, 7, 3], np.int32)
    expected = quants.dequantize(type_id, data)[tokens]

    def record(program: Program) -> F32:
        out = np.full((5, 96), np.nan, f32)
        shape = (type_id, 50, 96, data.shape[1])
        program.add(native.OP_EMBED, 5, p=(tokens, data, out), i=shape, f=(factor,))
        return out

    check(pools, record, expected * f32(factor))


@pytest.mark.parametrize(("n", "groups", "width"), [(1, 1, 576), (8, 1, 2048), (3, 9, 64), (2, 4, 100), (1, 2, 7)])
def test_rms_norm(pools: list[Pool], n: int, groups: int, width: int) -> None:
    x, w = normal(n, groups * width + 5), normal(width)
    heads = np.ascontiguousarray(x[:, : groups * width]).reshape(n, groups, width)
    expected = reference.rms_norm(heads, w, 1e-5).reshape(n, -1)

    def record(program: Program) -> F32:
        y = np.zeros((n, groups * width), f32)
        sizes = (width, groups, x.shape[1], groups * width)
        program.add(native.OP_RMS_NORM, n, p=(x, w, y), i=sizes, f=(1e-5,))
        return y

    check(pools, record, expected)


def test_add_scale_and_softcap(pools: list[Pool]) -> None:
    a, b = normal(3, 1500), normal(3, 1500)
    expected = np.stack([a + b, a * f32(0.3), reference.softcap(a * f32(8), 30.0)])

    def record(program: Program) -> F32:
        y = np.zeros((3, 3, 1500), f32)
        program.add(native.OP_ADD, 3, p=(a, b, y[0]), i=(1500,))
        program.add(native.OP_SCALE, 3, p=(a, y[1]), i=(1500,), f=(0.3, 0.0))
        program.add(native.OP_SCALE, 3, p=(a, y[2]), i=(1500,), f=(8.0, 30.0))
        return y

    check(pools, record, expected)


@pytest.mark.parametrize(("code", "act"), [(0, reference.silu), (1, reference.gelu)])
@pytest.mark.parametrize(("n", "width"), [(1, 1536), (8, 33)])
def test_glu(pools: list[Pool], code: int, act: Callable[[F32], F32], n: int, width: int) -> None:
    g, u = normal(n, width) * f32(30), normal(n, width)

    def record(program: Program) -> F32:
        y = np.zeros((n, width), f32)
        program.add(native.OP_GLU, n, p=(g, u, y), i=(width, code, width, width))
        return y

    check(pools, record, act(g) * u)


def test_gated_add(pools: list[Pool]) -> None:
    x, g, b = normal(4, 700), normal(4, 1), normal(4, 700)

    def record(program: Program) -> F32:
        y = np.zeros((4, 700), f32)
        program.add(native.OP_GATED_ADD, 4, p=(x, g, b, y), i=(700,))
        return y

    check(pools, record, b + x * reference.sigmoid(g))


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize(("n", "heads", "dim", "rot"), [(1, 9, 64, 64), (8, 3, 80, 32), (2, 4, 256, 256), (1, 1, 6, 2)])
def test_rope(pools: list[Pool], is_neox: bool, n: int, heads: int, dim: int, rot: int) -> None:
    x, angle = normal(n, heads, dim), normal(n, rot // 2)
    cos_sin = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    expected = reference.rope(x, cos_sin[:, None, 0], cos_sin[:, None, 1], is_neox=is_neox)

    def record(program: Program) -> F32:
        y = x.copy()
        program.add(native.OP_ROPE, n, p=(y, cos_sin), i=(heads, dim, rot, int(is_neox), heads * dim))
        return y

    check(pools, record, expected)


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_id", "n", "rows", "cols", "planes", "bias"),
    [
        (Type.Q4_1, 1, 70, 576, 2, True),
        (Type.Q4_1, 8, 33, 96, 1, False),
        (Type.Q8_0, 3, 50, 320, 2, False),
        (Type.Q4_K, 1, 40, 768, 2, True),
        (Type.Q4_K, 5, 17, 512, 1, False),
        (Type.Q6_K, 2, 40, 768, 2, False),
        (Type.F16, 4, 50, 100, 2, True),
        (Type.F32, 1, 65, 576, 2, False),
        (Type.IQ2_XXS, 2, 40, 512, 2, False),
        (Type.IQ1_S, 2, 40, 512, 2, False),
    ],
)
def test_matvec(pools: list[Pool], type_id: int, n: int, rows: int, cols: int, planes: int, bias: bool) -> None:
    assert native.can_decode(type_id)
    data, x, b = weights(type_id, rows, cols), normal(n, cols), normal(rows) if bias else None
    expected = np.stack([product(data, type_id, row, planes) for row in x])
    expected = expected if b is None else expected + b

    def record(program: Program) -> F32:
        y, act = np.zeros((n, rows), f32), add_quantize(program, x, type_id, planes)
        sizes = (type_id, rows, cols, data.shape[1], planes, cols, rows)
        program.add(native.OP_MATVEC, n, p=(act, data, y, b), i=sizes)
        return y

    check(pools, record, expected)


def test_products_of_one_input_run_together_and_chains_do_not(pools: list[Pool]) -> None:
    """Twenty products of one input in a row, more than may be joined, then a chain in which each reads the last."""
    data, x = weights(Type.F32, 64, 64), normal(2, 64)
    first = np.stack([product(data, Type.F32, row, 2) for row in x])
    second = np.stack([product(data, Type.F32, row, 2) for row in first])
    expected = np.stack([*[first] * 20, second, np.stack([product(data, Type.F32, row, 2) for row in second])])

    def record(program: Program) -> F32:
        y = np.zeros((22, 2, 64), f32)
        for i in range(22):
            source = x if i < 20 else y[i - 1]
            program.add(native.OP_MATVEC, 2, p=(source, data, y[i]), i=(Type.F32, 64, 64, 256, 2, 64, 64))
        return y

    check(pools, record, expected)


# --- joined rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "width"), [(1, 1536), (1, 576), (3, 1600), (8, 2048)])
def test_norm_of_a_sum_and_its_quantisation_without_a_barrier(pools: list[Pool], n: int, width: int) -> None:
    a, b, w, data = normal(n, width), normal(n, width), normal(width), weights(Type.Q8_0, 8, width)
    total = a + b
    normed = reference.rms_norm(total, w, 1e-5)
    expected = np.concatenate([total, normed, np.stack([product(data, Type.Q8_0, row, 2) for row in normed])], axis=1)

    def record(program: Program) -> F32:
        x, y, z = np.zeros((n, width), f32), np.zeros((n, width), f32), np.zeros((n, 8), f32)
        act = native.aligned(native.act_bytes(32, width, n))
        program.add(native.OP_RMS_NORM, n, p=(a, w, y, b, x), i=(width, 1, width, width), f=(1e-5,))
        assert program.add(native.OP_QUANTIZE, n, p=(y, act), i=(32, width, 2, width), joined=True)
        program.add(native.OP_MATVEC, n, p=(act, data, z, None), i=(Type.Q8_0, 8, width, data.shape[1], 2, width, 8))
        program.run()
        return np.concatenate([x, y, z], axis=1)

    check(pools, record, expected)


@pytest.mark.parametrize(("n", "width"), [(1, 1536), (3, 1600)])
def test_glu_and_its_quantisation_without_a_barrier(pools: list[Pool], n: int, width: int) -> None:
    gate, up, data = normal(n, width), normal(n, width), weights(Type.Q8_0, 8, width)
    expected = np.stack([product(data, Type.Q8_0, row, 2) for row in reference.silu(gate) * up])

    def record(program: Program) -> F32:
        h, z, act = np.zeros((n, width), f32), np.zeros((n, 8), f32), native.aligned(native.act_bytes(32, width, n))
        program.add(native.OP_GLU, n, p=(gate, up, h), i=(width, 0, width, width))
        program.add(native.OP_QUANTIZE, n, p=(h, act), i=(32, width, 2, width), joined=True)
        program.add(native.OP_MATVEC, n, p=(act, data, z, None), i=(Type.Q8_0, 8, width, data.shape[1], 2, width, 8))
        return z

    check(pools, record, expected)


@pytest.mark.parametrize(("n", "n_head", "n_kv"), [(1, 32, 4), (5, 9, 3)])
def test_norm_rope_and_storing_of_heads_without_barriers(pools: list[Pool], n: int, n_head: int, n_kv: int) -> None:
    dim = 128
    q, k, v, w, cos_sin = (
        normal(n, n_head, dim),
        normal(n, n_kv, dim),
        normal(n, n_kv, dim),
        normal(dim),
        normal(n, 2, 64),
    )
    position, table = np.arange(n, dtype=np.int32), np.zeros((n, 1), np.int32)
    turned = [
        reference.rope(reference.rms_norm(x, w, 1e-5), cos_sin[:, None, 0], cos_sin[:, None, 1], is_neox=True)
        for x in (q, k)
    ]
    expected = np.concatenate([*turned, turned[1], v], axis=1)

    def record(program: Program) -> F32:
        turn = [np.zeros_like(x) for x in (q, k)]
        pages = [np.zeros((1, n_kv, 256, dim), f32) for _ in range(2)]
        for x, y in zip((q, k), turn, strict=True):
            heads = x.shape[1]
            sizes = (dim, heads, heads * dim, heads * dim)
            program.add(native.OP_RMS_NORM, n, p=(x, w, y), i=sizes, f=(1e-5,), joined=x is k)
        for y in turn:
            heads = y.shape[1]
            program.add(native.OP_ROPE, n, p=(y, cos_sin), i=(heads, dim, dim, 1, heads * dim), joined=True)
        sizes = (n_kv, dim, dim, 1, n_kv * dim, n_kv * dim, 0)
        program.add(native.OP_KV_STORE, n, p=(turn[1], v, *pages, position, table), i=sizes, joined=True)
        program.run()
        return np.concatenate([*turn, *(page[0, :, :n].swapaxes(0, 1) for page in pages)], axis=1)

    check(pools, record, expected)


# --- attention -------------------------------------------------------------------------------------------------------


def pages_of(contexts: list[int], n_kv: int, dim: int, dtype: type) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Random sequences [context, n_kv, dim], their pages in a shuffled pool, the page table [n, stride]."""
    stride = max(contexts) // 256 + 2
    table = RNG.permutation(stride * len(contexts)).astype(np.int32).reshape(len(contexts), stride)
    pool = np.full((table.size, n_kv, 256, dim), np.nan, dtype)
    sequences = [normal(context, n_kv, dim).astype(dtype) for context in contexts]
    for row, sequence in zip(table, sequences, strict=True):
        for position, heads in enumerate(sequence):
            pool[row[position // 256], :, position % 256] = heads
    return sequences, pool, table


@pytest.mark.parametrize(
    ("contexts", "n_head", "n_kv", "dim_k", "dim_v", "window", "softcap", "dtype"),
    [
        ([1], 9, 3, 64, 64, 0, 0.0, np.float16),
        ([255, 256, 257], 4, 2, 64, 64, 0, 0.0, np.float16),
        ([700], 6, 2, 80, 80, 0, 0.0, np.float16),
        ([700, 5, 300], 2, 1, 96, 96, 0, 50.0, np.float16),
        ([700, 513, 40], 4, 2, 128, 128, 300, 0.0, np.float16),
        ([257, 100], 2, 2, 256, 256, 0, 0.0, np.float32),
        ([1, 2, 3, 4, 30, 31, 32, 33], 2, 1, 64, 32, 0, 0.0, np.float32),
        ([600], 2, 1, 64, 64, 5, 0.0, np.float32),
    ],
)
def test_kv_store_and_attention(
    pools: list[Pool],
    contexts: list[int],
    n_head: int,
    n_kv: int,
    dim_k: int,
    dim_v: int,
    window: int,
    softcap: float,
    dtype: type,
) -> None:
    n, q = len(contexts), normal(len(contexts), n_head, dim_k)
    keys, k_pages, table = pages_of(contexts, n_kv, dim_k, dtype)
    values, _, _ = pages_of(contexts, n_kv, dim_v, dtype)
    new_k, new_v = normal(n, n_kv, dim_k), normal(n, n_kv, dim_v)
    v_pages = np.full((len(k_pages), n_kv, 256, dim_v), np.nan, dtype)
    for t, context in enumerate(contexts):
        for position in range(context):
            v_pages[table[t, position // 256], :, position % 256] = values[t][position]
        keys[t][-1], values[t][-1] = new_k[t], new_v[t]
    positions = np.array(contexts, np.int32) - 1
    scale = dim_k**-0.5
    expected = np.empty((n, n_head, dim_v), f32)
    for t, context in enumerate(contexts):
        first = max(0, context - window) if window else 0
        for h in range(n_head):
            kv = h // (n_head // n_kv)
            k, v = keys[t][:, kv], values[t][:, kv]
            expected[t, h] = reference.attention(q[t, h], k, v, scale=scale, first=first, softcap_=softcap)

    def record(program: Program) -> F32:
        kp, vp, out = k_pages.copy(), v_pages.copy(), np.zeros((n, n_head, dim_v), f32)
        element, stride = int(dtype == np.float16), table.shape[1]
        widths = (n_kv * dim_k, n_kv * dim_v)
        pointers = (new_k, new_v, kp, vp, positions, table)
        program.add(native.OP_KV_STORE, n, p=pointers, i=(n_kv, dim_k, dim_v, stride, *widths, element))
        scratch = native.aligned(native.attn_scratch_bytes(n, n_head, dim_v, stride * 256, program.n_threads))
        program.add(
            native.OP_ATTENTION,
            n,
            p=(q, kp, vp, out, positions, table, scratch, None),
            i=(n_kv, dim_k, dim_v, stride, n_head, window, element, n_head * dim_k),
            f=(scale, softcap),
        )
        return out

    check(pools, record, expected)


@pytest.mark.parametrize("context", [40, 600])
def test_attention_sinks(pools: list[Pool], context: int) -> None:
    """A sink takes its share of the softmax and gives no value."""
    (keys,), k_pages, table = pages_of([context], 1, 64, np.float32)
    v_pages = normal(*k_pages.shape)
    values = np.concatenate([v_pages[page, 0] for page in table[0]])[:context]
    q, sinks, positions = normal(1, 2, 64), np.array([-1.0, 9.0], f32), np.array([context - 1], np.int32)

    def record(program: Program) -> F32:
        out = np.zeros((1, 2, 64), f32)
        scratch = native.aligned(native.attn_scratch_bytes(1, 2, 64, context, program.n_threads))
        sizes = (1, 64, 64, table.shape[1], 2, 0, 0, 128)
        pointers = (q, k_pages, v_pages, out, positions, table, scratch, sinks)
        program.add(native.OP_ATTENTION, 1, p=pointers, i=sizes, f=(0.125,))
        return out

    of_head = [reference.attention(q[0, h], keys[:, 0], values, scale=0.125, sink=sinks[h]) for h in range(2)]
    check(pools, record, np.array([of_head]))
    weight = np.exp(keys[:, 0].astype(np.float64) @ q[0].astype(np.float64).T * 0.125)
    exact = (weight.T @ values) / (weight.sum(axis=0) + np.exp(sinks.astype(np.float64)))[:, None]
    np.testing.assert_allclose(of_head, exact, rtol=2e-5, atol=2e-6)


# --- experts ---------------------------------------------------------------------------------------------------------

GATES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}


@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize(
    ("n", "n_expert", "k", "normalise", "scale", "bias"),
    [
        (1, 128, 8, True, 1.0, False),
        (8, 60, 4, False, 1.0, False),
        (3, 8, 2, True, 2.5, True),
        (2, 3, 3, False, 1.0, True),
    ],
)
def test_router(
    pools: list[Pool], gate: str, n: int, n_expert: int, k: int, normalise: bool, scale: float, bias: bool
) -> None:
    logits, b = normal(n, n_expert), normal(n_expert) if bias else None
    logits[0, 1:4] = logits[0, 0]  # ties go to the lower number
    routed = [reference.router(row, k, gate=gate, normalise=normalise, scale=scale, bias=b) for row in logits]
    expected = np.stack([np.stack([ids.view(f32), weights_]) for ids, weights_ in routed], axis=1)

    def record(program: Program) -> F32:
        out = np.zeros((2, n, k), f32)
        pointers = (logits, out[0], out[1], b)
        program.add(native.OP_ROUTER, n, p=pointers, i=(n_expert, k, GATES[gate], int(normalise)), f=(scale,))
        return out

    check(pools, record, expected)


def test_router_gives_valid_ids_for_nan(pools: list[Pool]) -> None:
    logits = np.full((1, 16), np.nan, f32)
    ids, chosen = np.full((1, 4), -1, np.int32), np.zeros((1, 4), f32)
    program = Program(pools[0])
    program.add(native.OP_ROUTER, 1, p=(logits, ids, chosen, None), i=(16, 4, 0, 1), f=(1.0,))
    program.run()
    assert ids[0].tolist() == [0, 1, 2, 3] and np.isnan(chosen).all()


def add_experts(
    program: Program,
    x: F32,
    ids: np.ndarray,
    merge: F32,
    banks: tuple[np.ndarray, np.ndarray, np.ndarray],
    types: tuple[int, int, int],
    *,
    ff: int,
    activation: int = 0,
    planes: int = 2,
) -> F32:
    """Record the experts' operation; banks are uint8 [n_expert * rows, row_bytes]. Returns y [n, d]."""
    (n, d), k = x.shape, ids.shape[1]
    acts = [add_quantize(program, x, type_id, planes) for type_id in types[:2]]
    rows, y = np.zeros((n, k, d), f32), np.full((n, d), np.nan, f32)
    scratch = native.aligned(native.experts_scratch_bytes(n, k, d, ff, program.n_threads))
    program.add(
        native.OP_EXPERTS,
        n,
        p=(x, ids, merge, *banks, rows, y, scratch, *(None if act is x else act for act in acts)),
        i=(len(banks[2]) // d, k, d, ff, *types, *(bank.shape[1] for bank in banks), activation, planes),
    )
    return y


@pytest.mark.parametrize(
    ("n", "types", "activation", "planes"),
    [
        (1, (Type.Q4_K, Type.Q4_K, Type.Q6_K), 0, 2),
        (8, (Type.Q4_K, Type.Q4_K, Type.Q4_K), 0, 2),
        (3, (Type.Q4_1, Type.Q6_K, Type.Q8_0), 1, 2),
        (2, (Type.F16, Type.Q8_0, Type.F32), 0, 1),
        (4, (Type.Q4_K, Type.F32, Type.IQ1_S), 0, 2),
        (2, (Type.IQ2_XXS, Type.IQ3_S, Type.IQ2_S), 0, 2),
    ],
)
def test_experts(pools: list[Pool], n: int, types: tuple[int, int, int], activation: int, planes: int) -> None:
    assert all(native.can_decode(type_id) for type_id in types)
    n_expert, k, d, ff = 6, 3, 256, 512
    shapes = {"gate": (ff, d), "up": (ff, d), "down": (d, ff)}
    kinds = dict(zip(shapes, types, strict=True))
    banks = {name: weights(kinds[name], n_expert * shape[0], shape[1]) for name, shape in shapes.items()}
    x, merge = normal(n, d), np.abs(normal(n, k))
    ids = np.stack([RNG.permutation(n_expert)[:k] for _ in range(n)]).astype(np.int32)
    ids[-1, 1] = -1  # skipped: adds nothing

    def matrices(expert: int, name: str, v: F32) -> F32:
        rows = shapes[name][0]
        return product(banks[name][expert * rows : (expert + 1) * rows], kinds[name], v, planes)

    act = reference.gelu if activation else reference.silu
    merged = []
    for t in range(n):
        chosen = np.flatnonzero(ids[t] >= 0)
        merged.append(reference.experts(x[t], ids[t][chosen].tolist(), merge[t][chosen], matrices, act)[1])

    def record(program: Program) -> F32:
        bank = banks["gate"], banks["up"], banks["down"]
        return add_experts(program, x, ids, merge, bank, types, ff=ff, activation=activation, planes=planes)

    check(pools, record, np.stack(merged))


@pytest.mark.parametrize(
    ("n", "k", "n_expert", "d", "ff", "type_id"),
    [
        (1, 8, 16, 1024, 128, Type.Q8_0),
        (8, 4, 5, 544, 96, Type.Q8_0),  # groups of several pairs
        (2, 1, 2, 200, 24, Type.F32),  # no multiple of a claim's rows
        (1, 2, 2, 3, 5, Type.F32),  # fewer rows than threads
        (3, 2, 4, 512, 256, Type.IQ1_S),  # rows are decoded into each thread's scratch
    ],
)
def test_experts_on_many_threads(n: int, k: int, n_expert: int, d: int, ff: int, type_id: Type) -> None:
    assert native.can_decode(type_id)
    shapes = ((ff, d), (ff, d), (d, ff))
    gate, up, down = (weights(type_id, n_expert * rows, cols) for rows, cols in shapes)
    steps = []
    for _ in range(8):
        ids = np.stack([RNG.permutation(n_expert)[:k] for _ in range(n)]).astype(np.int32)
        steps.append((normal(n, d), ids, np.abs(normal(n, k))))
    steps[3][1][:] = -1  # nothing is routed
    steps[5][1][0] = n_expert - 1  # one expert in every rank
    outputs = []
    for n_threads in (1, 2, 5, 16):
        with Pool(n_threads) as pool:
            program = Program(pool)
            ys = [add_experts(program, *step, (gate, up, down), (type_id,) * 3, ff=ff) for step in steps]
            for _ in range(10 if n_threads < 16 else 3):
                for y in ys:
                    y[:] = np.nan
                program.run()
                outputs.append(np.stack(ys))
    assert (outputs[0][3] == 0).all() and np.isfinite(outputs[0]).all()
    assert all(np.array_equal(outputs[0].view(np.uint32), found.view(np.uint32)) for found in outputs[1:])
