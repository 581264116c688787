"""The order of a start: what runs at load, what while idle, and how a program comes to be a graph."""

from __future__ import annotations

import kernel_bits  # noqa: F401  isort: skip

import dataclasses
import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch

from freetoken.batch import Stopped
from freetoken.gpu import decode
from freetoken.gpu.decode import Program
from freetoken.gpu.warm import PROMPTS, STEPS, WarmUp
from freetoken.kernels.compile_ahead import first_of_each_kind

Runs = list[tuple[str, int, bool]]


@dataclasses.dataclass
class Matrix:
    rows: int
    data: torch.Tensor


def test_launches_of_a_kind_are_met_once() -> None:
    met: list[int] = []

    def product(matrix: Matrix, number: int, *, planes: int) -> None:
        met.append(number)

    class Layer:
        def step(self, number: int) -> None:
            met.append(number)

    room = torch.zeros(64)
    layer, other = Layer(), Layer()
    one, same = (Matrix(2, torch.zeros(2, 4)) for _ in range(2))
    wide, shifted = Matrix(2, torch.zeros(2, 8)), Matrix(2, room[1:9].view(2, 4))
    launches = [
        partial(product, one, 0, planes=2),
        partial(product, same, 0, planes=2),
        partial(product, wide, 1, planes=2),
        partial(product, shifted, 2, planes=2),
        partial(product, same, 3, planes=1),
        partial(layer.step, 4),
        partial(layer.step, 4),
        partial(layer.step, 5),
        partial(other.step, 6),
    ]
    for launch in first_of_each_kind(launches):
        launch()
    assert met == [0, 1, 2, 3, 4, 5, 6]


class Trials:
    """Notes what is run; `n_compiled` kernels of the first step are new, and what is in `fails` raises."""

    first_layer = 0

    def __init__(self, n_compiled: int = 0, max_stepped: int = 8) -> None:
        self.n_compiled, self.max_stepped = n_compiled, max_stepped
        self.runs: Runs = []
        self.fails: set[tuple[str, int]] = set()

    def try_step(self, n: int, *, is_sampled: bool, on_kernel: Callable[[int, int], None] | None = None) -> int:
        self.runs.append(("step", n, is_sampled))
        if ("step", n) in self.fails:
            raise RuntimeError("no memory")
        if on_kernel is not None:
            for i in range(1, 4):
                on_kernel(i, 3)
        return self.n_compiled

    def try_prompt(self, n: int, should_stop: Callable[[], bool]) -> None:
        if should_stop():
            raise Stopped
        self.runs.append(("prompt", n, False))


def test_a_later_start_runs_one_step_and_the_rest_one_by_one() -> None:
    trials, heard = Trials(), list[float]()
    warm = WarmUp(trials)
    warm.load(heard.append)
    assert trials.runs == [("step", 1, True)] and heard[-1] == 1.0
    n = 0
    while warm.more(lambda: False):
        n += 1
        assert len(trials.runs) == 1 + n, "one at a time"
    assert trials.runs[1] == ("step", 1, True), "captured by its second run"
    assert {run[1] for run in trials.runs if run[0] == "prompt"} == set(PROMPTS)
    assert n == len(STEPS) + len(PROMPTS)


def test_the_first_start_runs_what_first_requests_take_with_progress() -> None:
    trials, heard = Trials(n_compiled=9), list[float]()
    warm = WarmUp(trials)
    warm.load(heard.append)
    assert trials.runs == [("step", 1, True), ("prompt", PROMPTS[0], False)]
    assert heard == sorted(heard) and heard[-1] == 1.0 and len(set(heard)) == 4
    while warm.more(lambda: False):
        pass
    assert len(trials.runs) == 2 + len(STEPS) + len(PROMPTS)


def test_prompts_that_run_as_steps_are_not_tried() -> None:
    trials = Trials(n_compiled=1, max_stepped=1 << 30)
    warm = WarmUp(trials)
    warm.load(lambda done: None)
    assert trials.runs == [("step", 1, True), ("step", 8, False)]
    while warm.more(lambda: False):
        pass
    assert all(kind == "step" for kind, _, _ in trials.runs)


def test_what_is_stopped_comes_again_and_what_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trials = Trials()
    warm = WarmUp(trials)
    warm.load(lambda done: None)
    trials.fails = {("step", 2)}
    assert all(warm.more(lambda: True) for _ in range(5)), "the capture, eights, then a prompt that gives way"
    assert [run[0] for run in trials.runs] == ["step"] * 3
    with caplog.at_level(logging.WARNING):
        while warm.more(lambda: False):
            pass
    assert ("prompt", PROMPTS[0], False) in trials.runs and trials.runs[-1][0] == "prompt"
    assert [r.getMessage() for r in caplog.records] == ["warming up a step of 2 failed: RuntimeError: no memory"]


def test_behind_layers_on_the_cpu_nothing_is_sampled() -> None:
    trials = Trials(n_compiled=1)
    trials.first_layer = 3
    warm = WarmUp(trials)
    warm.load(lambda done: None)
    while warm.more(lambda: False):
        pass
    assert len(trials.runs) > 5 and not any(is_sampled for _, _, is_sampled in trials.runs)


def test_what_the_first_step_raises_fails_the_load() -> None:
    trials = Trials()
    trials.fails = {("step", 1)}
    with pytest.raises(RuntimeError, match="no memory"):
        WarmUp(trials).load(lambda done: None)


class Lowered:
    def __init__(self, runs: list[str]) -> None:
        self.launches = [lambda: runs.append("a"), lambda: runs.append("b")]


class Graph:
    def __init__(self, runs: list[str]) -> None:
        self._runs = runs

    def replay(self) -> None:
        self._runs.append("graph")


def test_a_program_is_captured_by_its_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []

    def capture(launches: list[Callable[[], None]]) -> Graph:
        runs.append("capture")
        return Graph(runs)

    monkeypatch.setattr(decode, "capture", capture)
    program = Program(Lowered(runs), is_cuda=True)  # type: ignore[arg-type]
    program.replay()
    assert runs == ["a", "b"]
    program.replay()
    program.replay()
    assert runs == ["a", "b", "capture", "graph", "graph"]


def test_a_program_whose_first_run_fails_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    lowered = Lowered(runs)
    lowered.launches.insert(1, lambda: runs.append(str(1 // (len(runs) - 1))))
    monkeypatch.setattr(decode, "capture", lambda launches: pytest.fail("captured"))
    program = Program(lowered, is_cuda=True)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        program.replay()
    program.replay()
    assert runs == ["a", "a", "1", "b"]


def test_elsewhere_launches_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    monkeypatch.setattr(decode, "capture", lambda launches: pytest.fail("captured"))
    program = Program(Lowered(runs), is_cuda=False)  # type: ignore[arg-type]
    program.replay()
    program.replay()
    assert runs == ["a", "b"] * 2
