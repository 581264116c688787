"""Experts: the split of misses, slot sizes, and the plain rules of the slot cache by hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.errors import OptionError
from freetoken.experts.slots import RESERVED, SizeClass, SlotState, size_classes, slots_per_class
from freetoken.experts.split import (
    Q16,
    bounded_table,
    fraction_q16,
    measured_table,
    q16_fills,
    q16_table,
    times,
)

# --- the split ---------------------------------------------------------------------------------------------------

MACHINES = [
    # B_P, B_H in GB/s (arXiv 2608.16157, Table 1), q of 4 misses
    ("5090 server", 52.7, 77.3, 3),
    ("4090", 25.1, 63.2, 1),
    ("3090", 25.3, 56.7, 2),
    ("5090 desktop", 49.0, 53.8, 4),
    ("4060 laptop", 11.8, 47.5, 1),
    ("PRO 6000", 51.5, 178.0, 1),
]


@pytest.mark.parametrize(("name", "b_p", "b_h", "q"), MACHINES, ids=[m[0] for m in MACHINES])
def test_machines_of_the_paper(name: str, b_p: float, b_h: float, q: int) -> None:
    assert q16_fills(4, fraction_q16(b_p, b_h)) == q


@pytest.mark.parametrize("phi", [0.1, 0.2484, 0.3972, 0.415, 0.6817, 0.9108, 1.0])
def test_q16_rule_is_the_integer_optimum(phi: float) -> None:
    fraction = round(phi * Q16)
    for m in range(65):
        q = q16_fills(m, fraction)
        costs = [max(f * (1 - phi), (m - f) * phi) for f in range(m + 1)]
        assert 0 <= q <= m and abs(q - phi * m) <= 1.0
        assert np.isclose(costs[q], min(costs)), (phi, m)


@pytest.mark.parametrize(
    ("m", "fraction", "q"),
    [
        (3, round(0.415 * Q16), 1),  # rounding up would fill 2
        (4, round(0.415 * Q16), 2),
        (12, fraction_q16(52.7, 77.3), 8),
        (1, fraction_q16(11.8, 47.5), 0),
        (3, fraction_q16(11.8, 47.5), 0),
        (9, fraction_q16(80, 77.3), 9),  # the link is at least as fast as the CPU: all
        (9, fraction_q16(77.3, 77.3), 9),
        (9, fraction_q16(200, 47.5), 9),
        (6, fraction_q16(52.7, 20.0), 6),
        (9, 0, 0),  # no link
        (0, 40000, 0),
    ],
)
def test_q16_cases(m: int, fraction: int, q: int) -> None:
    assert q16_fills(m, fraction) == q


def test_no_bandwidths_at_all() -> None:
    assert fraction_q16(0.0, 50.0) == 0
    assert fraction_q16(25.0, 0.0) == Q16


def test_tables_are_bounded() -> None:
    fraction = fraction_q16(11.8, 47.5)
    assert q16_table(8, fraction).tolist() == [0, *(q16_fills(m, fraction) for m in range(1, 9))]
    assert q16_table(4, fraction, min_fill=1).tolist() == [0, 1, 1, 1, 1]
    assert bounded_table(list(range(6)), max_fetch=2).tolist() == [0, 1, 2, 2, 2, 2]
    assert bounded_table([0] * 4, max_fetch=0, min_fill=1).tolist() == [0, 0, 0, 0]
    assert q16_table(8, Q16).dtype == np.int32


def test_measured_table_takes_the_shorter_of_both_branches() -> None:
    fill = np.array([0, 3, 5, 7, 9.0])  # one fill costs more than one of many
    cpu = np.array([0, 4, 5, 6, 7.0])
    table = measured_table(fill, cpu)
    for m, q in enumerate(table):
        cost = [max(fill[f], cpu[m - f]) for f in range(m + 1)]
        assert cost[q] == min(cost) and all(c > min(cost) for c in cost[q + 1 :])
    assert table.tolist() == [0, 1, 1, 2, 2]
    assert measured_table(fill, cpu, max_fetch=1).tolist() == [0, 1, 1, 1, 1]


def test_measured_ties_go_to_more_fills() -> None:
    flat = np.zeros(5)
    assert measured_table(flat, flat).tolist() == [0, 1, 2, 3, 4]
    fill, cpu = np.arange(5.0), np.full(5, 2.0)
    cpu[0] = 0.0
    assert measured_table(fill, cpu).tolist() == [0, 1, 2, 2, 2]
    assert measured_table(fill, cpu, slack=0.5).tolist() == [0, 1, 2, 3, 3]
    with pytest.raises(ValueError, match="equally many"):
        measured_table(fill, cpu[:3])


def test_times_between_and_past_the_measured() -> None:
    assert times({1: 2.0, 2: 3.0, 4: 5.0}, 6).tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert times({2: 4.0}, 3).tolist() == [0, 2, 4, 6]
    assert times({1: 2.0, 2: 1.5, 4: 3.0}, 4).tolist() == [0, 1.5, 1.5, 2.25, 3]
    with pytest.raises(ValueError, match="no measured time"):
        times({0: 1.0}, 3)


# --- slot sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([100] * 4, [(100, (0, 1, 2, 3))]),
        ([87, 100, 87, 100], [(100, (0, 1, 2, 3))]),  # 6.5% unused: Q4_K_M's Q4_K and Q6_K layers
        ([50, 100, 50, 100], [(50, (0, 2)), (100, (1, 3))]),
        ([100, 0, 300, 100], [(100, (0, 3)), (300, (2,))]),
        ([10, 11, 12, 50, 52, 90], [(12, (0, 1, 2)), (52, (3, 4)), (90, (5,))]),
        ([90] + [100] * 20 + [10], [(100, tuple(range(22)))]),  # one small layer does not matter
    ],
)
def test_size_classes(sizes: list[int], expected: list[tuple[int, tuple[int, ...]]]) -> None:
    assert [(c.slot_bytes, c.layers) for c in size_classes(sizes)] == expected


def test_size_classes_waste_little_and_hold_their_layers() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        sizes = rng.integers(0, 6, rng.integers(1, 30)) * 100 + rng.integers(1, 50)
        classes = size_classes(sizes.tolist())
        assert sorted(i for c in classes for i in c.layers) == list(range(len(sizes)))
        assert all(sizes[i] <= c.slot_bytes for c in classes for i in c.layers)
        assert sum(sizes) >= 0.9 * sum(c.slot_bytes * len(c.layers) for c in classes)
        if len(classes) > 1:
            assert sum(sizes) < 0.9 * max(sizes) * len(sizes)


def test_slots_share_the_budget() -> None:
    classes = (SizeClass(100, (0, 1)), SizeClass(300, (2,)))
    assert slots_per_class(classes, 8, 10**9, 4) == (16, 8)  # all of them
    assert slots_per_class(classes, 8, 2000, 4) == (8, 4)
    assert slots_per_class(classes, 8, 1600, 4) == (4, 4)
    assert slots_per_class(classes, 8, 1750, 4) == (5, 4)
    assert slots_per_class(classes, 2, 10**6, 4) == (4, 2)  # fewer experts than the least number of slots
    assert slots_per_class((), 8, 100, 4) == ()
    with pytest.raises(OptionError, match="at least 1600 are needed for 8 experts"):
        slots_per_class(classes, 8, 1599, 4)


def test_slots_never_pass_the_budget() -> None:
    rng = np.random.default_rng(5)
    for _ in range(100):
        classes = tuple(SizeClass(int(rng.integers(1, 100)), (i,)) for i in range(rng.integers(1, 4)))
        need = sum(4 * c.slot_bytes for c in classes)
        budget = int(rng.integers(need, 20 * need))
        counts = slots_per_class(classes, 16, budget, 4)
        spent = sum(n * c.slot_bytes for n, c in zip(counts, classes, strict=True))
        assert all(4 <= n <= 16 for n in counts) and spent <= budget
        assert counts[0] == 16 or budget - spent < classes[0].slot_bytes


# --- the rules ---------------------------------------------------------------------------------------------------

ALL = np.arange(33, dtype=np.int32)


def one_layer(n_slots: int, n_expert: int = 8) -> SlotState:
    return SlotState(n_expert, [10], (SizeClass(10, (0,)),), (n_slots,))


def ids(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.int32)


def test_free_slots_go_first_then_the_least_recent() -> None:
    state = one_layer(3)
    assert state.step(0, ids((5, 2)), ALL).fills == [(5, 0), (2, 1)]
    assert state.stamp.tolist() == [1, 0, -1]  # the router's first is used last
    assert state.step(0, ids((2, 7)), ALL).fills == [(7, 2)]
    result = state.step(0, ids((1, 7)), ALL)
    assert result.fills == [(1, 0)] and state.slot_of[0, 5] == -1
    assert result.slots.tolist() == [[0, 2]] and result.hit_slots.tolist() == [[-1, 2]]
    assert result.fill_slots.tolist() == [[0, -1]]
    assert state.counters.tolist() == [[2, 4, 4, 0, 40]]


def test_experts_of_several_tokens_count_once_in_order_of_first_occurrence() -> None:
    result = one_layer(8).step(0, ids((3, 1), (1, 3), (-1, 0)), ALL)
    assert result.fills == [(3, 0), (1, 1), (0, 2)]
    assert result.slots.tolist() == [[0, 1], [1, 0], [-1, 2]]
    assert result.counts == (3, 0, 3, 3, 0)


def test_no_slot_of_this_step_is_taken_and_the_rest_runs_on_the_cpu() -> None:
    state = one_layer(2)
    state.step(0, ids((0, 1)), ALL)
    result = state.step(0, ids((1, 4, 5)), ALL)
    assert result.fills == [(4, state.slot_of[0, 4])] and result.cpu == [5]
    assert state.slot_of[0, 1] >= 0 and state.slot_of[0, 0] == -1
    assert result.slots[0, 2] == -1


def test_the_misses_routed_last_are_filled_first() -> None:
    one_fill = np.minimum(ALL, 1)
    state = one_layer(2)
    state.step(0, ids((6,)), ALL)
    state.step(0, ids((4,)), ALL)
    state.step(0, ids((1, 2)), ALL)  # evicts both
    assert state.step(0, ids((0, 6, 4)), one_fill).fills == [(4, state.slot_of[0, 4])]
    state.step(0, ids((7,)), np.zeros(33, np.int32))  # the CPU set is remembered too
    assert state.step(0, ids((3, 6, 7)), one_fill).fills[0][0] == 7
    assert state.step(0, ids((6, 5, 3)), one_fill, "lowest").fills[0][0] == 3


def test_layers_of_one_pool_share_its_slots() -> None:
    state = SlotState(4, [10, 30, 10], (SizeClass(10, (0, 2)), SizeClass(30, (1,))), (2, 1))
    state.step(0, ids((0, 1)), ALL)
    state.step(1, ids((0,)), ALL)
    state.step(2, ids((3,)), ALL)
    assert state.owner.tolist() == [0, 11, 4]  # expert 1 of layer 0 went, it was used first
    with pytest.raises(ValueError, match="fill order"):
        state.step(0, ids((0,)), ALL, "oldest")


def test_ticks_start_again_and_keep_their_order() -> None:
    state = SlotState(8, [10], (SizeClass(10, (0,)),), (3,), clock_limit=8)
    for e in (0, 1, 2, 0, 1, 0, 1, 0):
        state.step(0, ids((e,)), ALL)
    assert state.clock[0] == 8 and state.stamp.tolist() == [7, 6, 2]
    assert state.step(0, ids((5,)), ALL).fills == [(5, 2)]
    assert state.clock[0] == 5 and state.stamp.tolist() == [3, 2, 4]
    assert state.last_use[0].tolist() == [3, 2, -1, -1, -1, 4, -1, -1]


def test_reserved_slots_are_nobodys() -> None:
    state = one_layer(4)
    state.step(0, ids((0, 1, 2)), ALL)
    state.reserve(state.pools[0], 1, 3)
    assert state.slot_of[0].tolist()[:3] == [0, -1, -1] and (state.stamp[1:] == RESERVED).all()
    assert state.step(0, ids((5, 6)), ALL).counts == (2, 0, 2, 1, 1)
    state.release(state.pools[0], 1, 3)
    state.adopt(0, np.array([3, 7], np.int32), np.array([2, 1], np.int32))
    assert state.step(0, ids((3, 7, 0)), ALL).fills == [(0, 3)]
