"""A model on the interpreter that chooses how its misses run: after loading, and while it serves; the answers are the
same whatever it chooses."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gpu_engine import wide_programs  # noqa: F401
from test_gpu_meet import both, model_of, path  # noqa: F401

from freetoken.batch import Batch
from freetoken.errors import EngineError
from freetoken.experts.profile import Conditions, Entry
from freetoken.gpu import backends, watch
from freetoken.gpu import model as model_module
from freetoken.gpu.meet import Meetings
from freetoken.gpu.model import GREEDY, GpuModel
from freetoken.kvcache import Sequence
from freetoken.runner import Runner

N_STEPS = 12
NOWHERE = Conditions("", "", "", "", 1, 1, 1, "")


class NoProfile:
    """Of a machine of which nothing is known."""

    is_stored = False
    entry = Entry.new(NOWHERE, copy_gbs=1.0, read_gbs=2.0)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "own_profile", lambda *_: NoProfile())
    monkeypatch.setattr(backends, "BUDGET_S", 1.0)


def generate(runner: Runner, sequence: Sequence, n: int) -> list[int]:
    """Greedy tokens, two steps under way at once, as the engine has them."""
    gpu = model_of(runner)
    sequence.reserve(n)
    tokens: list[int] = []
    under_way: deque[Any] = deque()
    for i in range(n):
        batch = Batch(np.array([5], np.int32), np.array([i], np.int32), [sequence.page_table], 1)
        under_way.append(gpu.launch(batch, [GREEDY], [0.0], follows=bool(under_way)))
        if len(under_way) == 2:
            tokens += under_way.popleft().wait()[0]
    while under_way:
        tokens += under_way.popleft().wait()[0]
    return tokens


def test_a_choice_is_made_after_loading(path: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    with both(path, "offload") as (_, gpu), caplog.at_level("INFO"):
        model = model_of(gpu)
        assert model.is_undecided and model._backends is not None
        gpu.warm_up()
        assert "is the fastest" in caplog.text
        names = [candidate.name for candidate in model._backends.tried]
        assert {"offload", "cpu", "hybrid"} <= set(names) and model._backends.current.name in names


def test_answers_stay_while_backends_change(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(watch, "FIRST_CHECK", 3)
    monkeypatch.setattr(watch, "LEAST_WINDOW", 3)
    with both(path, "offload") as (cpu, gpu):
        model, on_cpu, want = model_of(gpu), cpu.new_sequence(), [5]
        for _ in range(N_STEPS):
            want.append(int(cpu.decode([on_cpu], want[-1:])[0].argmax()))
        assert model._backends is not None
        used, use = set[str](), model._backends._use

        def count(candidate: backends.Candidate) -> None:
            used.add(candidate.name)
            use(candidate)

        model._backends._use = count
        assert generate(gpu, gpu.new_sequence(), N_STEPS) == want[1:]
        assert len(used) > 1
        step = model.launch(
            Batch(np.array([5], np.int32), np.array([0], np.int32), [gpu.new_sequence().page_table], 1),
            [GREEDY],
            [0.0],
            follows=False,
        )
        step.wait()
        counted = model.decoder._counters[model.decoder._turn].numpy()
        found = gpu.expert_counters()
        assert found is not None and np.array_equal(counted, found) and counted.any()


def test_a_wish_ends_the_watch(path: Path) -> None:  # noqa: F811
    with both(path, "offload") as (_, gpu):
        model = model_of(gpu)
        model.use_split("cpu")
        assert not model.is_undecided and model._backends is None and not model.decoder.tells_counts


@pytest.mark.parametrize("backend", ["auto", "hybrid"])
def test_a_cpu_that_cannot_take_part(
    backend: str,
    path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("no thread could be started")

    monkeypatch.setattr(Meetings, "__init__", fail)
    if backend == "hybrid":
        with pytest.raises(EngineError, match="no thread"), both(path, "hybrid", moe_backend="hybrid"):
            pass
        return
    with both(path, "offload") as (_, gpu):
        model: GpuModel = model_of(gpu)
        assert model._backends is None and "take no part" in caplog.text
        assert generate(gpu, gpu.new_sequence(), 2)
