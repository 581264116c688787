"""Plans for cards of many sizes and models of real geometries, none of which is there."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from gguf_files import tiny_keys, tiny_tensors, write

from freetoken.errors import OptionError
from freetoken.gguf import open_model
from freetoken.gpu.lower import Room
from freetoken.kernels import layout
from freetoken.kernels.attention import max_splits
from freetoken.kvcache import PAGE
from freetoken.native import MAX_TOKENS
from freetoken.options import EngineOptions
from freetoken.plan import (
    DenseBytes,
    GpuPlan,
    dense_bytes,
    expert_layers_off,
    first_gpu_layer,
    plan_gpu,
)
from freetoken.prompt_memory import context_sizes, room_bytes
from freetoken.spec import ModelSpec, read_spec
from tools.ggml import row_bytes
from tools.synth_moe import PRESETS, choose_type, layer_shapes
from tools.tiny_models import Tiny

GIB = 1 << 30
CARDS = (8, 12, 16, 24, 32, 80, 141)


def sizes(name: str) -> tuple[ModelSpec, tuple[int, ...], DenseBytes]:
    """Spec, slot sizes and dense bytes of a geometry with the Q4_K_M mix."""
    return _sizes(name)


@functools.cache
def _sizes(name: str) -> tuple[ModelSpec, tuple[int, ...], DenseBytes]:
    model = PRESETS[name]
    slots, dense = [], []
    for layer in range(model.n_layer):
        slot = rest = 0
        for role, shape in layer_shapes(model).items():
            kind = choose_type(f"blk.{layer}.{role}.weight", len(shape), "Q4_K_M", model)
            if role.endswith("_exps"):
                slot += layout.slot_bytes(int(kind), shape[1], shape[2])
            else:
                rest += row_bytes(kind, shape[-1]) * (shape[0] if len(shape) > 1 else 1)
        slots.append(slot)
        dense.append(rest)
    table = row_bytes(choose_type("output.weight", 2, "Q4_K_M", model), model.n_embd) * model.n_vocab
    return spec_of(model), tuple(slots), DenseBytes(tuple(dense), table)


def spec_of(model: Tiny) -> ModelSpec:
    n = model.n_layer
    rope: Any = None
    return ModelSpec(
        architecture=model.arch,
        name="",
        n_layer=n,
        n_embd=model.n_embd,
        n_head=(model.n_head,) * n,
        n_kv=(model.n_kv,) * n,
        head_dim_k=model.head_dim,
        head_dim_v=model.head_dim,
        n_ff=(model.n_ff,) * n,
        n_ctx_train=model.n_ctx,
        n_vocab=model.n_vocab,
        eps=1e-6,
        attn_scale=1.0,
        rope=rope,
        is_sliding=(False,) * n,
        n_expert=model.n_expert,
        n_expert_used=model.n_used,
        n_ff_exp=model.n_ff_exp,
    )


def plan(name: str, gib: float, *, batch: int = 4, sequences: int = 4, **wishes: Any) -> GpuPlan:
    spec, slots, dense = sizes(name)
    options = EngineOptions(**wishes)
    return plan_gpu(
        spec,
        options,
        slot_bytes=slots,
        dense=dense,
        free_bytes=int(gib * GIB),
        max_batch=batch,
        n_ctx=options.n_ctx or spec.n_ctx_train,
        n_sequences=sequences,
    )


def check(p: GpuPlan, spec: ModelSpec, batch: int) -> None:
    """What holds for every plan."""
    assert p.used_bytes <= p.budget_bytes <= p.free_bytes
    context = p.kv_bytes + p.room_bytes
    assert p.used_bytes == p.dense_bytes + context + p.slots_bytes + p.own_buffers_bytes + p.scratch_bytes
    n_min = 2 * batch * spec.n_expert_used
    for c, n in zip(p.classes, p.n_slots, strict=True):
        n_all = len(c.layers) * spec.n_expert
        assert min(n_min, n_all) <= n <= n_all and min(c.layers) >= p.first_layer
    if p.buffer_pool is not None:
        assert p.n_slots[p.buffer_pool] - p.n_buffers * p.buffer_slots >= n_min
        assert p.buffer_slots * p.classes[p.buffer_pool].slot_bytes >= p.buffer_bytes or p.n_buffers == 0
    assert str(p).startswith(f"GPU plan: {p.backend}") and str(p.n_ctx) in str(p)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("gib", CARDS)
def test_every_model_on_every_card(name: str, gib: int) -> None:
    spec, slots, _ = sizes(name)
    for batch, sequences, wishes in (
        (1, 1, {}),
        (4, 4, {}),
        (8, 8, {"n_parallel": 8}),
        (4, 4, {"n_ctx": 4096}),
        (4, 4, {"cpu_moe": True}),
        (4, 4, {"n_cpu_moe": spec.n_layer // 3, "memory_ratio": 0.8}),
        (4, 4, {"n_gpu_layers": spec.n_layer // 2}),
    ):
        try:
            p = plan(name, gib, batch=batch, sequences=sequences, **wishes)
        except OptionError as error:
            assert "MiB of GPU memory are missing" in str(error)
            assert gib <= 16 and ("n_gpu_layers" in wishes or spec.n_layer == 94 or name == "qwen2-57b-a14b"), str(
                error
            )
            continue
        check(p, spec, batch)
        if wishes.get("n_ctx"):
            assert p.n_ctx == 4096
        elif sum(slots) * spec.n_expert < gib * GIB / 2 and not wishes:
            assert p.backend == "fused" and p.n_ctx == spec.n_ctx_train


@pytest.mark.parametrize(
    ("gib", "backend", "low", "high"),
    [(8, "offload", 0.20, 0.30), (12, "offload", 0.35, 0.50), (16, "offload", 0.5, 0.75), (24, "fused", 1, 1)],
)
def test_the_model_of_the_bars(gib: int, backend: str, low: float, high: float) -> None:
    p = plan("qwen3-30b-a3b", gib)
    assert p.backend == backend and low <= p.resident_share <= high
    assert p.n_buffers == (2 if backend == "offload" else 0)
    assert p.first_layer == 0 and p.n_ctx >= 8192
    assert plan("qwen3-30b-a3b", 141).n_ctx == 40960 and not plan("qwen3-30b-a3b", 141).notes


def test_slots_of_more_memory_are_never_fewer() -> None:
    before = 0
    for tenths in range(70, 200, 5):
        p = plan("qwen3-30b-a3b", tenths / 10, n_ctx=8192)
        assert p.slots_bytes >= before
        before = p.slots_bytes


def test_the_wished_cache() -> None:
    n_all = 48 * 128
    p = plan("qwen3-30b-a3b", 141, moe_cache_rate=0.37)
    assert p.backend == "offload" and sum(p.n_slots) == round(0.37 * n_all) and p.n_ctx == 40960
    assert sum(plan("qwen3-30b-a3b", 141, moe_cache_size=1000).n_slots) == 1000
    assert plan("qwen3-30b-a3b", 141, moe_cache_size=n_all).backend == "fused"
    whole = plan("qwen3-30b-a3b", 141, moe_cache_size=n_all, moe_backend="offload")
    assert whole.backend == "offload" and sum(whole.n_slots) == n_all
    with pytest.raises(OptionError, match="a cache of 50 experts is too small"):
        plan("qwen3-30b-a3b", 141, moe_cache_size=50)
    with pytest.raises(OptionError, match=r"a cache of 5000 experts needs \d+ MiB.* are missing"):
        plan("qwen3-30b-a3b", 12, moe_cache_size=5000)
    with pytest.raises(OptionError, match="against a cache of 1000"):
        plan("qwen3-30b-a3b", 141, moe_cache_size=1000, moe_backend="fused")
    with pytest.raises(OptionError, match=r"fused: .* MiB of GPU memory are missing for all 6144 experts"):
        plan("qwen3-30b-a3b", 12, moe_backend="fused")
    with pytest.raises(OptionError, match="fused keeps every expert"):
        plan("qwen3-30b-a3b", 141, moe_backend="fused", cpu_moe=True)


def test_layers_whose_experts_pass_through() -> None:
    spec, slots, _ = sizes("qwen3-30b-a3b")
    p = plan("qwen3-30b-a3b", 141, n_cpu_moe=20)
    assert p.backend == "offload" and p.passing == tuple(range(20)) == p.classes[-1].layers
    assert p.n_slots[-1] == 2 * 4 * 8 and p.classes[-1].slot_bytes == max(slots[:20])
    assert sum(p.n_slots[:-1]) == 28 * spec.n_expert, "the others have all theirs"
    assert p.buffer_pool is not None and p.n_buffers == 2
    p = plan("qwen3-30b-a3b", 24, cpu_moe=True)
    assert len(p.classes) == 1 and p.buffer_pool is None and p.n_buffers == 2 and p.n_ctx == 40960
    assert 0 <= p.own_buffers_bytes - 2 * 128 * max(slots) <= 2 * 4096, "two layers, and room to align their banks"
    assert plan("qwen3-30b-a3b", 8, cpu_moe=True).used_bytes < 7.3 * GIB
    assert plan("qwen3-30b-a3b", 141, n_cpu_moe=20, n_gpu_layers=10).passing == (), "they are not on the GPU"


def test_overrides() -> None:
    def off(*rules: tuple[str, str], **wishes: Any) -> tuple[int, ...]:
        return expert_layers_off(EngineOptions(override_tensors=rules, **wishes), range(6))

    assert off() == () and off(cpu_moe=True) == tuple(range(6)) and off(n_cpu_moe=2) == (0, 1)
    assert off(("exps", "CPU")) == tuple(range(6))
    assert off((r"blk\.(1|3)\.ffn_.*_exps\.", "CPU")) == (1, 3)
    assert off(("ffn_up_exps", "CPU")) == tuple(range(6)), "half an expert cannot run"
    assert off((r"blk\.4\.", "CUDA0"), cpu_moe=True) == (0, 1, 2, 3, 5)
    assert off((r"blk\.4\.", "CUDA0"), ("exps", "CPU")) == (0, 1, 2, 3, 5)
    assert off(("exps", "CPU"), (r"blk\.4\.", "CUDA0")) == tuple(range(6)), "the first rule counts"
    assert off(("attn", "CPU")) == ()


def test_overrides_that_move_nothing_are_told() -> None:
    spec, slots, dense = sizes("qwen3-30b-a3b")
    names = ["blk.0.ffn_up_exps.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"]

    def notes(pattern: str) -> tuple[str, ...]:
        options = EngineOptions(override_tensors=((pattern, "CPU"),), n_ctx=4096)
        return plan_gpu(
            spec,
            options,
            slot_bytes=slots,
            dense=dense,
            free_bytes=141 * GIB,
            max_batch=1,
            n_ctx=4096,
            names=names,
        ).notes

    assert notes("_exps") == ()
    assert "blk.0.attn_q.weight and 1 more stay" in notes(r"blk\.")[0]


@pytest.mark.parametrize(
    ("n_gpu_layers", "first"), [(-1, 0), (-2, 0), (0, 49), (1, 48), (2, 47), (48, 1), (49, 0), (99, 0)]
)
def test_layers_count_from_the_end_with_the_head_first(n_gpu_layers: int, first: int) -> None:
    assert first_gpu_layer(n_gpu_layers, 48) == first
    if n_gpu_layers:
        p = plan("qwen3-30b-a3b", 141, n_gpu_layers=n_gpu_layers)
        assert p.first_layer == first and p.n_gpu_layers == 48 - first
        check(p, sizes("qwen3-30b-a3b")[0], 4)
        assert ("on the CPU: layers 0 to" in str(p)) == (first > 0)


def test_only_the_head_on_the_gpu_needs_no_slots() -> None:
    p = plan("qwen3-30b-a3b", 8, n_gpu_layers=1)
    assert (p.backend, p.classes, p.kv_bytes, p.resident_share) == ("dense", (), 0, 1.0)


def test_too_small_a_card_says_what_would_help() -> None:
    with pytest.raises(OptionError) as caught:
        plan("qwen3-30b-a3b", 4, n_gpu_layers=-2, n_ctx=40960, n_parallel=4)
    text = str(caught.value)
    assert "MiB of GPU memory are missing: of 4096 MiB free 3687 MiB may be taken" in text
    n = int(text.split("give -ngl ")[1].split()[0])
    assert plan("qwen3-30b-a3b", 4, n_gpu_layers=n, n_ctx=40960, n_parallel=4).first_layer == 49 - n
    with pytest.raises(OptionError):
        plan("qwen3-30b-a3b", 4, n_gpu_layers=n + 1, n_ctx=40960, n_parallel=4)
    with pytest.raises(OptionError) as caught:
        plan("qwen3-30b-a3b", 5, n_gpu_layers=-2, n_ctx=40960)
    context = int(str(caught.value).split("at most -c ")[1].split()[0])
    assert context >= PAGE and plan("qwen3-30b-a3b", 5, n_gpu_layers=-2, n_ctx=context).n_ctx == context
    with pytest.raises(OptionError, match="-ngl 0 to run on the CPU"):
        plan("qwen3-30b-a3b", 0.5)


def test_left_to_us_the_first_layers_go_to_the_cpu() -> None:
    p = plan("qwen3-235b-a22b", 7)
    assert 0 < p.first_layer < 94 and "run on the CPU" in p.notes[0]
    with pytest.raises(OptionError):
        plan("qwen3-235b-a22b", 7, n_gpu_layers=94 + 1 - p.first_layer + 1)
    with pytest.raises(OptionError):
        plan("qwen3-235b-a22b", 7, fit=False)


def test_the_context() -> None:
    small = plan("qwen3-30b-a3b", 8)
    assert 8192 <= small.n_ctx < 40960 and small.n_ctx % PAGE == 0
    assert any("-c 40960 takes it whole" in note for note in small.notes)
    assert plan("qwen3-30b-a3b", 8, kv_reserve_tokens=512, memory_ratio=0.45).n_ctx < 8192
    assert plan("qwen3-30b-a3b", 24, fit=False).n_ctx == 40960
    given = plan("qwen3-30b-a3b", 8, n_ctx=5000, n_parallel=4)
    assert given.n_ctx == 5000 and given.n_pages == 4 * 20
    shared = plan("qwen3-30b-a3b", 8, n_ctx=5000)
    assert shared.n_pages == 20 + 3 and shared.kv_bytes == 24 * PAGE * 48 * 4 * 256 * 2
    assert plan("qwen3-30b-a3b", 8, n_ctx=5000, cache_type_k="f32", cache_type_v="f32").kv_bytes == 2 * shared.kv_bytes


def test_rooms_of_attention_are_what_decode_steps_make() -> None:
    spec = sizes("qwen3-30b-a3b")[0]
    made = 0
    for n in (2048, 8192, 32768, 40960):
        room = Room.empty(MAX_TOKENS, 32, max_splits(n), 128, torch.device("meta"))
        made += sum(t.nbytes for t in (room.o, room.ml))
    angles = 40960 * 128 * 4
    pages = 4 * PAGE * 128 * 2
    n_pages = 10 * 4096 - 1  # pages that leave no remains: whole units of the allocator
    assert (n_pages + 1) * pages % (2 << 20) == 0
    assert room_bytes(spec, EngineOptions(), 40960, n_pages, 0) == made + angles
    assert context_sizes(100) == [256] and context_sizes(2049) == [2048, 2304]
    assert room_bytes(spec, EngineOptions(), 40960, 163, spec.n_layer) == 0


def test_the_margin_counts_where_it_is_more() -> None:
    assert plan("qwen3-30b-a3b", 10, memory_margin_mib=2048).budget_bytes == 8 * GIB
    assert plan("qwen3-30b-a3b", 10, memory_margin_mib=10).budget_bytes == 9 * GIB


def test_few_slots_mean_no_overlap() -> None:
    assert plan("qwen3-30b-a3b", 141, moe_cache_size=200).n_buffers == 1
    p = plan("qwen3-30b-a3b", 141, moe_cache_size=100)
    assert p.n_buffers == 0 and "fewer than two layers" in p.notes[0] and "one by one" in p.notes[0]


def test_dense_models() -> None:
    spec, _, dense = sizes("qwen3-30b-a3b")
    spec = dataclasses.replace(spec, n_expert=0, n_expert_used=0)
    options = EngineOptions()
    p = plan_gpu(
        spec, options, slot_bytes=[0] * 48, dense=dense, free_bytes=8 * GIB, max_batch=8, n_ctx=40960, n_sequences=4
    )
    assert p.backend == "dense" and p.n_ctx == 40960 and p.resident_share == 1.0


@pytest.mark.parametrize("arch", ["qwen3moe", "gemma3", "qwen2moe"])
def test_dense_bytes_of_a_file(arch: str, tmp_path: Any) -> None:
    path = write(tmp_path / "m.gguf", tiny_keys(arch), tiny_tensors(arch))
    with open_model(path) as model:
        spec = read_spec(model)
        found = dense_bytes(model, spec)
        dense = [t for t in model.tensors.values() if "_exps" not in t.name]
        copies = sum(t.n_bytes for t in dense)
        assert copies <= found.on_gpu(0) <= copies + 1024 * len(dense)
        assert len(found.layers) == spec.n_layer and found.on_gpu(spec.n_layer) == found.head
