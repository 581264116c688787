"""Banks of a model file and the pages to register."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from gguf_files import N_EMBD, N_EXPERT, N_FF_EXP, N_LAYER, tiny_keys, tiny_tensors, write

from freetoken import quants
from freetoken.errors import ModelFileError
from freetoken.experts.bank import PinPlan, Span, expert_banks, pin_plan
from freetoken.gguf import open_model
from freetoken.quants import GgmlType
from freetoken.spec import read_spec


def test_banks_of_a_file(tmp_path: pathlib.Path) -> None:
    types = {"blk.0.ffn_gate_exps.weight": GgmlType.Q8_0, "blk.1.ffn_down_exps.weight": GgmlType.Q4_0}
    tensors = tiny_tensors("qwen3moe", types)
    path = write(tmp_path / "m.gguf", tiny_keys("qwen3moe"), tensors)
    with open_model(path) as model:
        layers = expert_banks(read_spec(model), model)
        assert len(layers) == N_LAYER
        for i, layer in enumerate(layers):
            assert layer is not None and layer.layer == i
            gate, up, down = layer.banks
            assert [b.name.split("_")[1] for b in layer.banks] == ["gate", "up", "down"]
            assert (gate.rows, gate.cols, down.rows, down.cols) == (N_FF_EXP, N_EMBD, N_EMBD, N_FF_EXP)
            for bank in layer.banks:
                assert bank.data.shape == (N_EXPERT, bank.rows * quants.row_bytes(bank.type, bank.cols))
                mapping = model.shards[0].mapping
                assert bank.address == mapping.ctypes.data + bank.span.start
                assert bank.span.n_bytes == bank.n_expert * bank.expert_bytes
            assert layer.expert_bytes == gate.expert_bytes + up.expert_bytes + down.expert_bytes
        assert layers[0] is not None and layers[0].banks[0].type == GgmlType.Q8_0
        assert layers[1] is not None and layers[1].banks[2].expert_bytes == N_EMBD * 18
        del layers, layer, gate, up, down, bank, mapping


def test_dense_layers_have_none_and_half_a_layer_is_refused(tmp_path: pathlib.Path) -> None:
    dense = write(tmp_path / "d.gguf", tiny_keys("qwen3"), tiny_tensors("qwen3"))
    with open_model(dense) as model:
        assert expert_banks(read_spec(model), model) == (None,) * N_LAYER
    tensors = [t for t in tiny_tensors("qwen3moe") if t.name != "blk.1.ffn_up_exps.weight"]
    half = write(tmp_path / "h.gguf", tiny_keys("qwen3moe"), tensors)
    with open_model(half) as model, pytest.raises(ModelFileError, match="layer 1 has experts, but no tensor"):
        expert_banks(read_spec(model), model)


def spans(*pairs: tuple[int, int]) -> list[Span]:
    return [Span(0, start, n) for start, n in pairs]


def test_pages_of_a_layer_are_one_range_and_shared_pages_belong_to_one() -> None:
    plan = pin_plan([spans((50, 300), (350, 100)), spans((450, 200), (1000, 1))], 100)
    assert plan.ranges == (Span(0, 0, 500), Span(0, 500, 200), Span(0, 1000, 100))
    assert plan.of_layer == ((0,), (0, 1, 2))
    assert plan.is_pinned({0, 2}) == (True, False) and plan.is_pinned({0, 1, 2}) == (True, True)
    assert plan.pieces(Span(0, 450, 200)) == [Span(0, 450, 50), Span(0, 500, 150)]
    assert plan.pieces(Span(0, 50, 300)) == [Span(0, 50, 300)]


def test_layers_within_one_page_and_files_apart() -> None:
    plan = pin_plan([spans((10, 20)), spans((40, 20)), [Span(1, 10, 20)], []], 100)
    assert plan == PinPlan((Span(0, 0, 100), Span(1, 0, 100)), ((0,), (0,), (1,), ()))
    assert pin_plan([], 100) == PinPlan((), ())


def test_large_ranges_are_cut() -> None:
    whole = pin_plan([spans((50, 900)), spans((950, 100))], 100)
    plan = pin_plan([spans((50, 900)), spans((950, 100))], 100, 400)
    assert [r.n_bytes for r in whole.ranges] == [1000, 100] and whole.of_layer == ((0,), (0, 1))
    assert [(r.start, r.n_bytes) for r in plan.ranges] == [(0, 400), (400, 400), (800, 200), (1000, 100)]
    assert plan.of_layer == ((0, 1, 2), (0, 1, 2, 3)), "a shared range is wanted whole"


def test_random_plans_are_sound() -> None:
    rng = np.random.default_rng(9)
    for _ in range(100):
        page = int(rng.choice([16, 64, 4096]))
        layers: list[list[Span]] = [[] for _ in range(rng.integers(1, 6))]
        ends = [0, 0]
        for _ in range(rng.integers(1, 25)):
            shard, size = int(rng.integers(2)), int(rng.integers(1, 3 * page))
            start = ends[shard] + int(rng.integers(0, 2 * page)) * int(rng.random() < 0.5)
            layers[rng.integers(len(layers))].append(Span(shard, start, size))
            ends[shard] = start + size
        plan = pin_plan(layers, page)
        wanted = {(s.shard, p) for layer in layers for s in layer for p in range(s.start // page, -(-s.end // page))}
        covered = [(r.shard, p) for r in plan.ranges for p in range(r.start // page, r.end // page)]
        assert sorted(covered) == sorted(wanted)  # every page once, none without bytes of a bank
        assert all(r.start % page == 0 and r.n_bytes % page == 0 for r in plan.ranges)
        for layer, needed in zip(layers, plan.of_layer, strict=True):
            for span in layer:
                for piece in plan.pieces(span):
                    inside = [i for i, r in enumerate(plan.ranges) if r.shard == piece.shard
                              and r.start <= piece.start and piece.end <= r.end]  # fmt: skip
                    assert len(inside) == 1 and inside[0] in needed
