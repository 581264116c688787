"""The CPU's part of a GPU's step, under Triton's interpreter: the bits of the CPU engine whatever is computed where,
and what becomes of a step whose CPU fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu_engine import FEW_EXPERTS, N_VOCAB, same_steps, wide_programs  # noqa: F401

from freetoken import native
from freetoken.cores import expert_threads
from freetoken.errors import EngineError
from freetoken.experts.split import bounded_table, q16_table
from freetoken.gguf import open_model
from freetoken.gpu import experts as experts_module
from freetoken.gpu.meet import Meetings
from freetoken.gpu.model import GpuModel
from freetoken.gpu.place import Placement, make_plan
from freetoken.options import EngineOptions, LayerSet
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

N_CTX = 300
N_MAX = 8 * 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meet")
    return tiny_models.write(folder / "m.gguf", "qwen2moe", file_type="Q8_0", n_layer=2, n_vocab=N_VOCAB, **FEW_EXPERTS)


@contextmanager
def both(path: Path, backend: str, n_slots: tuple[int, ...] = (7,), **wishes: Any) -> Iterator[tuple[Runner, Runner]]:
    """A runner on the CPU, and one on the interpreter whose experts take turns in so many slots."""
    options = EngineOptions(**{"n_threads": 2, "n_gpu_layers": -2, "moe_cpu_threads": 1, **wishes}, n_ctx=N_CTX)
    with open_model(path) as file:
        spec = read_spec(file)
        plan = make_plan(file, spec, options, 1 << 30, N_CTX, 8)
        plan = dataclasses.replace(plan, backend=backend, n_slots=n_slots)
        on_cpu = Runner(file, spec, EngineOptions(n_threads=1, n_gpu_layers=0), n_ctx=N_CTX, n_sequences=8)
        on_gpu = Runner(file, spec, options, n_ctx=N_CTX, n_sequences=8, placement=Placement("cpu", plan))
        try:
            yield on_cpu, on_gpu
        finally:
            on_cpu.close()
            on_gpu.close()


def model_of(runner: Runner) -> GpuModel:
    assert isinstance(runner.gpu, GpuModel)
    return runner.gpu


def meetings_of(runner: Runner) -> Meetings:
    experts = model_of(runner).experts
    assert experts is not None and experts.meetings is not None
    return experts.meetings


def counts(runner: Runner) -> dict[str, int]:
    found = runner.expert_counters()
    assert found is not None
    return dict(zip(("hits", "misses", "fills", "cpu", "bytes"), found.sum(axis=0).tolist(), strict=True))


def test_the_cpu_computes_every_miss(path: Path) -> None:
    with both(path, "cpu") as (cpu, gpu):
        same_steps(cpu, gpu, (2, 1), (2,))
        found = counts(gpu)
    assert found["hits"] == found["fills"] == 0 and found["cpu"] == found["misses"] > 0


@pytest.mark.parametrize(
    "table",
    [
        None,
        pytest.param(q16_table(N_MAX, 20000), marks=pytest.mark.slow),
        bounded_table([0, 1, 1, 2] + [3] * 13),
    ],
    ids=["default", "q16", "few"],
)
def test_some_misses_are_filled_and_some_computed(path: Path, table: np.ndarray | None) -> None:
    with both(path, "hybrid") as (cpu, gpu):
        if table is not None:
            model_of(gpu).use_split("hybrid", table)
        same_steps(cpu, gpu, (2, 1), (2,))
        found = counts(gpu)
    assert found["fills"] > 0 and found["cpu"] > 0 and found["fills"] + found["cpu"] == found["misses"]


def test_experts_beyond_the_slots_run_on_the_cpu(path: Path) -> None:
    """Batches whose distinct experts are more than there are slots, every miss wanted there."""
    with both(path, "hybrid", n_slots=(3,)) as (cpu, gpu):
        model_of(gpu).use_split("hybrid", bounded_table(list(range(N_MAX + 1))))
        same_steps(cpu, gpu, (4, 1), (2,))
        found = counts(gpu)
    assert found["cpu"] > 0 and found["fills"] > 3


@pytest.mark.parametrize("file_type", ["mixed", pytest.param("Q4_K_M", marks=pytest.mark.slow)])
def test_types_differ_from_layer_to_layer(file_type: str, tmp_path: Path) -> None:
    sizes = {"n_expert": 6, "n_used": 2}
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type=file_type, n_layer=2, n_vocab=N_VOCAB, **sizes)
    with open_model(path) as file:
        plan = make_plan(file, read_spec(file), EngineOptions(n_ctx=N_CTX), 1 << 30, N_CTX, 8)
    with both(path, "hybrid", n_slots=tuple(5 for _ in plan.classes)) as (cpu, gpu):
        same_steps(cpu, gpu, (2, 1), (2,))
        found = counts(gpu)
    assert found["cpu"] > 0


def test_backends_change_between_steps(path: Path) -> None:
    with both(path, "offload") as (cpu, gpu):
        model = model_of(gpu)
        assert model.experts is not None and model.experts.meetings is None
        a, b = cpu.new_sequence(), gpu.new_sequence()
        seen = []
        for i, backend in enumerate(("offload", "cpu", "hybrid", "offload", "cpu")):
            model.use_split(backend)
            before = counts(gpu)
            want, got = cpu.decode([a], [5 + i]), gpu.decode([b], [5 + i])
            np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
            seen.append({name: n - before[name] for name, n in counts(gpu).items()})
        assert seen[0]["cpu"] == seen[3]["cpu"] == 0 and seen[1]["fills"] == seen[4]["fills"] == 0
        with pytest.raises(EngineError, match="expected offload, cpu or hybrid"):
            model.use_split("fast")


@pytest.mark.parametrize(
    ("wishes", "n_slots"),
    [({"n_cpu_moe": 1}, (5, 2)), pytest.param({"moe_cpu_layers": LayerSet(count=1)}, (7,), marks=pytest.mark.slow)],
    ids=str,
)
def test_layers_sent_to_the_cpu_meet_it_and_others_do_not(
    path: Path, wishes: dict[str, Any], n_slots: tuple[int, ...]
) -> None:
    with both(path, "offload", n_slots=n_slots, **wishes) as (cpu, gpu):
        same_steps(cpu, gpu, (2, 1), (2,))
        found = gpu.expert_counters()
        assert found is not None
        assert found[0, 2] == 0 and found[0, 3] == found[0, 1] > 0, "no fill where the CPU computes"
        assert found[1, 3] == 0 and found[1, 2] == found[1, 1] > 0


def test_layers_on_the_cpu_share_its_threads(path: Path) -> None:
    """The first layer runs whole on the CPU, by the threads that compute the other's misses."""
    with both(path, "hybrid", n_slots=(4,), n_gpu_layers=2, moe_cpu_threads=2) as (cpu, gpu):
        assert model_of(gpu).first_layer == 1 and meetings_of(gpu)._pool is gpu._pool
        same_steps(cpu, gpu, (2, 1), (2,))
        assert counts(gpu)["cpu"] > 0


# --- failures -----------------------------------------------------------------------------------------------------


def decode_fails(runner: Runner, match: str) -> float:
    sequence = runner.new_sequence()
    started = time.monotonic()
    with pytest.raises(EngineError, match=match):
        runner.decode([sequence], [7])
    sequence.release()
    return time.monotonic() - started


def settle(gpu: Runner) -> None:
    """Until the thread has ended its last step, which may be after the GPU."""
    while meetings_of(gpu).executor.pending:
        time.sleep(0.001)


def serves(cpu: Runner, gpu: Runner) -> None:
    same_steps(cpu, gpu, (1,), (1,))


def test_a_failed_operation_is_an_error_and_the_next_step_runs(path: Path) -> None:
    with both(path, "cpu") as (cpu, gpu):
        serves(cpu, gpu)
        meetings = meetings_of(gpu)
        broken = native.Program(meetings._pool)
        broken.add(native.OP_SCALE, 1, p=(None, None), i=(8,))
        place = meetings.place(1, 1)
        good = meetings.executor._programs[place]
        settle(gpu)
        meetings.executor.set(place, broken)
        decode_fails(gpu, "operation 0 of the experts on the CPU failed at place 1")
        settle(gpu)
        meetings.executor.set(place, good)
        serves(cpu, gpu)


def test_a_cpu_that_does_not_answer_is_an_error_within_a_second_and_fills_take_over(path: Path) -> None:
    with both(path, "cpu") as (cpu, gpu):
        started = time.monotonic()
        serves(cpu, gpu)
        took_s = time.monotonic() - started
        meetings = meetings_of(gpu)
        meetings.executor.slow_down(1e12)
        assert meetings.executor.spent()[0] > 0
        assert decode_fails(gpu, "took too long") < took_s + 1.0
        before = counts(gpu)
        serves(cpu, gpu)
        found = counts(gpu)
        assert found["fills"] > before["fills"] and found["cpu"] == before["cpu"], "without the CPU"
        meetings.executor.slow_down(1.0)
        settle(gpu)
        n_met = meetings.executor.spent()[0]
        serves(cpu, gpu)
        assert meetings.executor.spent()[0] > n_met, "the CPU is back"


def test_a_step_that_cannot_be_launched_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with both(path, "cpu") as (cpu, gpu):
        serves(cpu, gpu)

        def fails(*_: Any) -> None:
            raise EngineError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(experts_module.GpuExperts, "_join", fails)
            model_of(gpu).decoder._programs.clear()
            decode_fails(gpu, "no memory")
        model_of(gpu).decoder._programs.clear()
        assert meetings_of(gpu).executor.pending == 0
        serves(cpu, gpu)


def test_threads_and_places(path: Path) -> None:
    assert [expert_threads(n) for n in (1, 2, 6, 8, 16)] == [1, 1, 5, 7, 14]
    with both(path, "hybrid") as (_, gpu):
        assert gpu.n_threads_experts == 1 and gpu.n_threads == 2
        meetings = meetings_of(gpu)
        assert meetings._pool.n_threads == 1
        assert len({meetings.place(n, layer) for n in range(1, 9) for layer in range(2)}) == 16


def test_without_slots_that_take_turns_there_is_nothing_to_switch(path: Path) -> None:
    with both(path, "fused", n_slots=(12,)) as (_, gpu), pytest.raises(EngineError, match="take turns"):
        model_of(gpu).use_split("cpu")
