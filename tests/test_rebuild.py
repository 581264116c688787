"""Slots and pages of another size in a running engine, under Triton's interpreter: the logits stay the CPU engine's bit
for bit, memory of before is freed first, and a failure brings the old size back."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_engine import N_VOCAB, wide_programs  # noqa: F401
from test_gpu_meet import model_of

from freetoken.errors import DeviceLostError, EngineError, OptionError, RequestError
from freetoken.experts import memory as memory_module
from freetoken.experts.memory import SlotMemory
from freetoken.gguf import open_model
from freetoken.gpu import experts as experts_module
from freetoken.gpu import place
from freetoken.gpu.place import Placement, make_plan
from freetoken.kernels.fills import fill
from freetoken.kvcache import PAGE, KVCache, KVCacheFull, KVShape
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.rebuild import CacheChange, Rebuilds
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

N_CTX = 3 * PAGE
TINY = {"n_expert": 6, "n_used": 2, "n_ff_exp": 32, "n_embd": 32, "n_head": 2, "head_dim": 16}
N_ALL = 6
N_LEAST = 4
"""Slots that steps of one token need: plans are made for those."""


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "MAX_TOKENS", 1)
    monkeypatch.setattr(memory_module, "fill", partial(fill, n_programs=2))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rebuild")
    return tiny_models.write(folder / "m.gguf", "qwen3moe", file_type="F16", n_layer=1, n_vocab=N_VOCAB, **TINY)


def as_placement(plan: GpuPlan) -> Any:
    """On the interpreter."""
    return Placement("cpu", plan)


@contextmanager
def both(path: Path, **wishes: Any) -> Iterator[tuple[Runner, Runner]]:
    """A runner on the CPU, and one on the interpreter as the plan has it."""
    options = EngineOptions(**{"n_threads": 1, "n_gpu_layers": -2, "moe_cpu_threads": 1, "n_ctx": N_CTX, **wishes})
    with open_model(path) as file:
        spec = read_spec(file)
        plan = make_plan(file, spec, options, 1 << 30, N_CTX, 2)
        cpu = Runner(file, spec, EngineOptions(n_threads=1, n_gpu_layers=0), n_ctx=N_CTX, n_sequences=2)
        gpu = Runner(file, spec, options, n_ctx=N_CTX, n_sequences=2, placement=as_placement(plan))
        try:
            yield cpu, gpu
        finally:
            cpu.close()
            gpu.close()


def n_slots(runner: Runner) -> int:
    slots = runner.cache_status().slots
    assert slots is not None
    return slots.n_slots


class Texts:
    """One sequence of each runner, whose logits must agree."""

    def __init__(self, cpu: Runner, gpu: Runner) -> None:
        self.runners, self.sequences = (cpu, gpu), (cpu.new_sequence(), gpu.new_sequence())
        self._rng = np.random.default_rng(1)

    def step(self) -> None:
        token = int(self._rng.integers(3, N_VOCAB))
        want, got = (r.decode([s], [token]) for r, s in zip(self.runners, self.sequences, strict=True))
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


CASES = [("offload", (4, 5), 10), ("hybrid", (5,), 1), ("auto", (6, 4), 2)]
LONG = [("hybrid", (4, 5), 10), ("cpu", (5, 4), 10), ("auto", (4, 6, 5, 6), 10)]


@pytest.mark.parametrize(("backend", "sizes", "n"), [*CASES, *(pytest.param(*c, marks=pytest.mark.slow) for c in LONG)])
def test_a_text_goes_on_with_the_same_bits(path: Path, backend: str, sizes: tuple[int, ...], n: int) -> None:
    """Across n rebuilds; with `auto` to all experts and back."""
    with both(path, moe_backend=backend, moe_cache_size=N_LEAST) as (cpu, gpu):
        texts = Texts(cpu, gpu)
        texts.step()
        for i in range(n):
            size = sizes[i % len(sizes)]
            gpu.rebuild(CacheChange(moe_cache_size=size))
            status = gpu.cache_status()
            assert n_slots(gpu) == size and status.statistics is not None
            assert status.statistics.began_with == "rebuild" and status.statistics.misses == 0
            assert (status.backend == "fused") == (size == N_ALL)
            texts.step()
        counts = gpu.cache_status().statistics
        assert counts is not None
        if backend != "auto":
            assert counts.misses > 0 and (counts.cpu_experts > 0) == (backend != "offload")


@pytest.mark.slow
def test_prompts_and_sampled_steps_after_a_rebuild(path: Path) -> None:
    prompt = np.random.default_rng(2).integers(3, N_VOCAB, 24).tolist()
    with both(path, moe_backend="auto") as (_, gpu):
        found = []
        for change in (None, CacheChange(moe_cache_size=5), CacheChange(moe_cache_auto=True)):
            if change is not None:
                gpu.rebuild(change)
            sequence = gpu.new_sequence()
            model_of(gpu).max_stepped = 8  # as where the slots have room for a buffer, or all experts are there
            logits = gpu.prefill(sequence, prompt)
            assert logits is not None
            found.append(logits)
            gpu.follow(sequence, [5, 7])
            found.append(gpu.decode([sequence], [9])[0])
            sequence.release()
        for got in found[2:4], found[4:]:
            for a, b in zip(got, found[:2], strict=True):
                np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


class Memories:
    """The slots' tensors, of which those of before must be gone when new ones are made; some sizes do not fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.too_large: set[int] = set()
        self.alive: list[weakref.ref[torch.Tensor]] = []
        made = self

        class Noted(SlotMemory):
            def __init__(self, layers: Any, state: Any, *more: Any) -> None:
                assert all(ref() is None for ref in made.alive), "the old slots are still there"
                super().__init__(layers, state, *more)
                made.alive = [weakref.ref(self.of_pool(pool)) for pool in state.pools]
                if sum(pool.n for pool in state.pools) in made.too_large:
                    raise torch.cuda.OutOfMemoryError("no memory for so many")

        monkeypatch.setattr(experts_module, "SlotMemory", Noted)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (0, 0))


def test_a_failure_brings_the_old_size_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memories = Memories(monkeypatch)
    gc.disable()
    try:
        with both(path, moe_backend="hybrid", moe_cache_size=4) as (cpu, gpu):
            texts = Texts(cpu, gpu)
            texts.step()
            memories.too_large = {5}
            with pytest.raises(EngineError, match="as large as before: the GPU has no memory"):
                gpu.rebuild(CacheChange(moe_cache_size=5, kv_pages=9))
            assert n_slots(gpu) == 4 and gpu.cache_status().kv.n_pages == 4
            assert len(model_of(gpu)._kv.k[0]) == 5
            texts.step()
            gpu.rebuild(CacheChange(moe_cache_size=6))
            memories.too_large = {4, 6}
            with pytest.raises(DeviceLostError, match="the old size does not fit either"):
                gpu.rebuild(CacheChange(moe_cache_size=4))
            assert gpu.expert_counters() is None
    finally:
        gc.enable()


def test_pages_that_are_held_move_and_stay(path: Path) -> None:
    with both(path, moe_backend="offload", moe_cache_size=N_LEAST) as (cpu, gpu):
        other = gpu.new_sequence()
        other.reserve(2 * PAGE)
        texts = Texts(cpu, gpu)
        texts.step()
        with pytest.raises(KVCacheFull):
            gpu.rebuild(CacheChange(kv_pages=2))
        other.release()
        assert texts.sequences[1].pages == [2]
        for pages, n_ctx in ((1, PAGE), (7, N_CTX)):
            gpu.rebuild(CacheChange(kv_pages=pages))
            status = gpu.cache_status()
            kv = status.kv
            assert (kv.n_pages, kv.n_held, kv.n_free, kv.n_ctx) == (pages, 1, pages - 1, n_ctx)
            assert len(model_of(gpu)._kv.k[0]) == pages + 1 and texts.sequences[1].pages == [0]
            assert n_slots(gpu) == N_LEAST
            texts.step()
        gpu.rebuild(CacheChange(n_ctx=300))
        assert gpu.cache_status().kv.n_pages == 3 and gpu.n_ctx == 300


BAD: list[tuple[CacheChange, type[Exception], str]] = [
    (CacheChange(moe_cache_size=3), OptionError, "too small: 4 are needed"),
    (CacheChange(moe_cache_rate=1e-6), OptionError, "too small: 4 are needed"),
    (CacheChange(kv_pages=10**6), OptionError, "MiB"),
    (CacheChange(n_ctx=10**6), RequestError, "larger -c"),
]


def test_what_cannot_be_changes_nothing(path: Path) -> None:
    with both(path, moe_backend="offload", moe_cache_size=4) as (cpu, gpu):
        experts = model_of(gpu).experts
        for change, kind, words in BAD:
            with pytest.raises(kind, match=words):
                gpu.rebuild(change)
        assert model_of(gpu).experts is experts and n_slots(gpu) == 4
        with pytest.raises(RequestError, match="all layers run on the CPU"):
            cpu.rebuild(CacheChange(moe_cache_auto=True))
        assert cpu.cache_status().slots is None and cpu.cache_status().backend == "cpu-only"


def test_dense_models_and_layers_on_the_cpu(tmp_path: Path) -> None:
    dense = tiny_models.write(tmp_path / "m.gguf", "qwen3", file_type="F16", n_layer=1, n_vocab=N_VOCAB)
    with both(dense) as (cpu, gpu):
        texts = Texts(cpu, gpu)
        texts.step()
        gpu.rebuild(CacheChange(kv_pages=2))
        texts.step()
        status = gpu.cache_status()
        assert (status.backend, status.slots, status.statistics, status.kv.n_pages) == ("dense", None, None, 2)
        with pytest.raises(OptionError, match="no experts take slots"):
            gpu.rebuild(CacheChange(moe_cache_auto=True))
    with both(dense, n_gpu_layers=1) as (_, gpu), pytest.raises(RequestError, match="first layers run on the CPU"):
        gpu.rebuild(CacheChange(kv_pages=2))


def test_pages_are_handed_out_as_before_after_they_moved() -> None:
    cache = KVCache([], 6)
    a, b = cache.new_sequence(4 * PAGE), cache.new_sequence(4 * PAGE)
    a.reserve(2 * PAGE)
    b.reserve(3 * PAGE)
    a.truncate(0)
    assert cache.compact(4) == [(4, 0)] and b.pages == [2, 3, 0] and b.page_table[2] == 0
    cache.resize(4)
    assert cache.n_free == 1 and cache.take() == 1
    cache.give_back([1])
    cache.resize(6)
    assert [cache.take() for _ in range(3)] == [1, 4, 5]
    with pytest.raises(KVCacheFull):
        cache.take()
    with pytest.raises(AssertionError):
        KVCache([KVShape(1, 8, 8)], 2).resize(3)


def test_one_at_a_time() -> None:
    rebuilds = Rebuilds()
    change = CacheChange(moe_cache_rate=0.5, n_ctx=512)
    with rebuilds.begin(change), pytest.raises(RequestError, match="already") as refused, rebuilds.begin(change):
        pass
    assert refused.value.http_status == 409 and not rebuilds.is_under_way
    rebuilds.note(change, 0.0, None)
    assert rebuilds.last is not None and rebuilds.last.asked == "moe_cache_rate 0.5, n_ctx 512"
    assert dataclasses.asdict(rebuilds.last)["error"] is None
