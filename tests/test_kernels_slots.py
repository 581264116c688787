"""The slot step's kernel against the plain rules, bit for bit over long random runs, under Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel
from kernel_bits import DEVICE, array, tensor

from freetoken.experts.device import SlotCache
from freetoken.experts.slots import Pool, SizeClass, SlotState, StepResult, size_classes
from freetoken.experts.split import bounded_table, fraction_q16, q16_table

SPLITS = {
    "offload": lambda n: bounded_table(list(range(n + 1))),
    "cpu": lambda n: bounded_table([0] * (n + 1)),
    "hybrid": lambda n: q16_table(n, fraction_q16(25.3, 56.7)),
    "floor": lambda n: q16_table(n, fraction_q16(11.8, 47.5), max_fetch=3, min_fill=1),
}


def make_state(n_expert: int, sizes: list[int], share: float, limit: int = 2**31 - 2**16) -> SlotState:
    classes = size_classes(sizes)
    n_slots = tuple(max(1, round(share * n_expert * len(c.layers))) for c in classes)
    return SlotState(n_expert, sizes, classes, n_slots, clock_limit=limit)


def route(rng: np.random.Generator, n_tokens: int, k: int, n_expert: int) -> np.ndarray:
    """Skewed routing, the same experts again and again, copies and padding among them."""
    ids = np.minimum(rng.geometric(2.5 / n_expert, (n_tokens, k)) - 1, n_expert - 1).astype(np.int32)
    if rng.random() < 0.2:
        ids[rng.integers(n_tokens), rng.integers(k)] = rng.choice([-1, n_expert, -7])
    if rng.random() < 0.1:
        ids[:] = rng.integers(0, n_expert)
    return ids


def check_step(cache: SlotCache, expected: StepResult, n_tokens: int, k: int) -> None:
    out = cache.outputs(n_tokens, k)
    routes = array(out.routes)
    np.testing.assert_array_equal(routes, [expected.slots, expected.hit_slots, expected.fill_slots])
    assert tuple(out.counts.tolist()) == expected.counts
    fills, cpu = len(expected.fills), len(expected.cpu)
    assert out.fill_expert[:fills].tolist() == [e for e, _ in expected.fills]
    assert out.fill_slot[:fills].tolist() == [s for _, s in expected.fills]
    assert out.cpu_expert[:cpu].tolist() == expected.cpu


def check_state(cache: SlotCache, state: SlotState) -> None:
    for name, values in state.arrays.items():
        np.testing.assert_array_equal(array(getattr(cache.tensors, name)), values, err_msg=name)


def check_sound(state: SlotState) -> None:
    """What holds after any step, whatever the rules say."""
    for layer, pool in state.pool_of.items():
        resident = np.flatnonzero(state.slot_of[layer] >= 0)
        owners = state.owner[pool.first + state.slot_of[layer, resident]]
        np.testing.assert_array_equal(owners, layer * state.n_expert + resident)
    assert (state.owner >= 0).sum() == (state.slot_of >= 0).sum()
    ticks = state.stamp[state.stamp != 2**31 - 1]
    assert len(np.unique(ticks)) == len(ticks) and ticks.max(initial=-1) < state.clock[0]


def run(
    state: SlotState, steps: int, k: int, split: str, order: str, seed: int, max_tokens: int = 8, device: str = DEVICE
) -> None:
    rng = np.random.default_rng(seed)
    cache = SlotCache(state, device, split=SPLITS[split](max_tokens * k), fill_order=order)
    table = SPLITS[split](max_tokens * k)
    layers = list(state.pool_of)
    for i in range(steps):
        n_tokens = int(rng.integers(1, max_tokens + 1))
        ids = route(rng, n_tokens, k, state.n_expert)
        layer = layers[i % len(layers)]
        cache.step(layer, tensor(ids).to(device))
        check_step(cache, state.step(layer, ids, table, order), n_tokens, k)
        if i % 10 == 0 or i == steps - 1:
            check_state(cache, state)
            check_sound(state)


CASES = [
    # experts, slot sizes by layer, share in slots, top-k, split, order, tokens
    (16, [100, 100, 100], 0.4, 4, "offload", "recent", 4),
    (16, [100, 100, 100], 0.4, 4, "hybrid", "lowest", 4),
    (40, [100, 0, 300, 100], 0.3, 10, "hybrid", "recent", 8),
    (40, [100, 0, 300, 100], 1.0, 8, "offload", "recent", 8),  # in the end all hits
    (12, [100, 100], 0.05, 3, "offload", "recent", 8),  # one slot: nearly all overflows
    (24, [100, 200], 0.2, 6, "cpu", "recent", 3),  # all misses
    (300, [100, 120, 400], 0.1, 2, "floor", "recent", 2),
]


@pytest.mark.parametrize(("n_expert", "sizes", "share", "k", "split", "order", "tokens"), CASES)
def test_kernel_follows_the_rules(
    n_expert: int, sizes: list[int], share: float, k: int, split: str, order: str, tokens: int
) -> None:
    run(make_state(n_expert, sizes, share), 60, k, split, order, seed=n_expert + k, max_tokens=tokens)


def test_clock_starts_again_in_time() -> None:
    state = make_state(20, [100, 300, 100], 0.5, limit=200)
    run(state, 150, 4, "hybrid", "recent", seed=5, max_tokens=2)
    assert state.clock[0] < 200 + 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("split", ["offload", "hybrid", "floor"])
def test_kernel_follows_the_rules_over_ten_thousand_steps(split: str) -> None:
    run(make_state(64, [100, 130, 100, 400], 0.37, limit=100_000), 10_000, 10, split, "recent", seed=11)


def test_reserved_slots_are_left_alone_and_come_back() -> None:
    state = make_state(16, [100, 100], 0.75)
    cache = SlotCache(state, DEVICE, split=SPLITS["offload"](32), fill_order="recent")
    rng, table, pool = np.random.default_rng(2), SPLITS["offload"](32), state.pools[0]

    def steps(n: int) -> None:
        for i in range(n):
            ids = route(rng, 4, 4, 16)
            cache.step(i % 2, tensor(ids))
            check_step(cache, state.step(i % 2, ids, table), 4, 4)
            check_state(cache, state)

    steps(20)
    for target in (state, cache):
        target.reserve(pool, 6, 12)
    check_state(cache, state)
    steps(20)
    assert (state.owner[6:18] == -1).all()
    experts = np.flatnonzero(state.slot_of[1] < 0)[:5].astype(np.int32)
    slots = np.arange(8, 13, dtype=np.int32)
    for target in (state, cache):
        target.release(pool, 6, 12)
    state.adopt(1, experts, slots)
    cache.adopt(1, tensor(experts), tensor(slots))
    check_state(cache, state)
    check_sound(state)
    assert (state.slot_of[1, experts] == slots).all()
    steps(30)


def test_counters_are_read_by_layer() -> None:
    state = make_state(8, [100, 100], 1.0)
    cache = SlotCache(state, DEVICE, split=SPLITS["offload"](16), fill_order="recent")
    ids = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    cache.step(1, ids)
    cache.step(1, ids)
    assert cache.counters().tolist() == [[0, 0, 0, 0, 0], [3, 3, 3, 0, 300]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros((1, 2), dtype=torch.int64)}, "ids: torch.int64"),
        ({"table": torch.zeros(2, dtype=torch.int32)}, "a table of 2 entries"),
        ({"layer": 2}, "layer 2 of 2"),
        ({"n_slots": 99}, "slots 0 \\+ 99"),
    ],
)
def test_launcher_refuses(change: dict[str, object], message: str) -> None:
    from freetoken.kernels.slots import StepOutputs, slot_step

    cache = SlotCache(make_state(8, [100, 100], 1.0), DEVICE, split=SPLITS["offload"](16), fill_order="recent")
    ids, table = torch.zeros((1, 2), dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    arguments = {"layer": 0, "first_slot": 0, "n_slots": 16, "ids": ids, "table": table} | change
    options = {"expert_bytes": 1, "clock_limit": 99, "by_recency": True, "out": StepOutputs.empty(1, 2, DEVICE)}
    with pytest.raises(ValueError, match=message):
        slot_step(cache.tensors, **arguments, **options)  # type: ignore[arg-type]


def test_tables_may_differ_by_layer_and_change_in_place() -> None:
    state = SlotState(8, [64, 64], (SizeClass(64, (0, 1)),), (16,))
    assert state.pools == (Pool(0, 16, 64),)
    cache = SlotCache(state, DEVICE, split=np.zeros((2, 9), np.int32), fill_order="recent")
    ids = torch.tensor([[0, 1]], dtype=torch.int32)
    cache.set_split(np.array([[0] * 9, list(range(9))], np.int32))
    cache.step(0, ids)
    assert cache.outputs(1, 2).counts.tolist() == [2, 0, 2, 0, 2]
    cache.step(1, ids)
    assert cache.outputs(1, 2).counts.tolist() == [2, 0, 2, 2, 0]


_POINTERS = (
    "ids_ptr table_ptr slot_of_ptr last_use_ptr owner_ptr stamp_ptr clock_ptr routes_ptr fill_expert_ptr fill_slot_ptr "
    "cpu_expert_ptr counts_ptr"
)
_NUMBERS = "layer n_ids first_slot n_slots n_stamps n_expert n_experts expert_bytes clock_limit"


def compile_step(archs: tuple[int, ...], block_n: int, block_s: int, warps: int) -> None:
    signature = dict.fromkeys(_POINTERS.split(), "*i32") | {"counters_ptr": "*i64"}
    signature |= dict.fromkeys(_NUMBERS.split(), "i32")
    constexprs = {"BY_RECENCY": True, "BLOCK_N": block_n, "BLOCK_S": block_s}
    compile_kernel("freetoken.kernels.slots", "_slot_step", signature, constexprs, warps=warps, archs=archs)


def test_kernel_compiles() -> None:
    compile_step(QUICK, 16, 4096, 4)


@pytest.mark.compile
@pytest.mark.parametrize(("block_n", "block_s", "warps"), [(16, 2048, 2), (128, 16384, 16)])
def test_kernel_compiles_everywhere(block_n: int, block_s: int, warps: int) -> None:
    compile_step(ARCHITECTURES, block_n, block_s, warps)
