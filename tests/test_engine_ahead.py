"""Decode steps launched ahead of the host: the tokens of the plain loop, whatever ends, joins or fails on the way."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import engine as engine_module
from freetoken.batch import Batch
from freetoken.engine import Engine
from freetoken.errors import DeviceLostError, NotReadyError
from freetoken.gpu.chain import device_chain
from freetoken.kernels.sampler import Mode
from freetoken.kvcache import Sequence
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import DoneEvent, EngineState, ErrorEvent, Request, SamplingParams, TokenEvent
from freetoken.runner import Runner
from freetoken.sampler import Sampler
from tools import tiny_models

OPTIONS = EngineOptions(n_ctx=512, n_threads=1, n_gpu_layers=0, n_parallel=0)
GREEDY = SamplingParams(n_predict=24, temperature=0.0)
DRAWN = SamplingParams(n_predict=24, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7)


@dataclasses.dataclass(frozen=True)
class Done:
    """A step that is over when it is launched."""

    tokens: list[int]
    status: list[int]

    def wait(self) -> tuple[list[int], list[int]]:
        return self.tokens, self.status


class AheadRunner(Runner):
    """A runner on the CPU whose steps sample for themselves, as the GPU's do. Every `fails`-th row is left to the
    host, with a wrong token on the way."""

    fails = 0
    n_launched = 0
    most_ahead = 0

    def chains(self, samplers: ListOf[Sampler]) -> list[Any] | None:
        found = [device_chain(sampler) for sampler in samplers]
        return None if None in found else found

    def launch(
        self, sequences: ListOf[Sequence], tokens: ListOf[int], chains: ListOf[Any], uniforms: ListOf[float], ahead: int
    ) -> Done:
        cls = type(self)
        cls.most_ahead = max(cls.most_ahead, ahead)
        these = np.asarray(self._last if ahead else tokens, np.int32)
        positions = np.asarray([len(s) + ahead for s in sequences], np.int32)
        logits = self._decoder.run(Batch(these, positions, [s.page_table for s in sequences], len(sequences)))
        self._last, status = [], []
        for row, chain, u in zip(logits, chains, uniforms, strict=True):
            cls.n_launched += 1
            failed = cls.fails > 0 and cls.n_launched % cls.fails == 0
            self._last.append(3 if failed else choose(row, chain, u))
            status.append(int(failed))
        return Done(list(self._last), status)


def choose(logits: np.ndarray, chain: Any, u: float) -> int:
    """The token of a greedy row, or of a draw from all tokens."""
    if chain.mode == Mode.GREEDY:
        return int(np.argmax(logits))
    assert chain.mode == Mode.ALL and chain.temperature == 1.0
    p = np.exp(logits - logits.max())
    sums = np.cumsum(np.asarray(p / p.sum()), dtype=np.float64)
    return int(np.searchsorted(sums, u * sums[-1], side="right"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("ahead") / "m.gguf", "llama", file_type="F16")


def engine(path: Path, options: EngineOptions = OPTIONS) -> Engine:
    made = Engine(ModelOptions(path), options)
    made.start()
    made.wait_ready()
    return made


def answer(request: Request) -> tuple[list[int], str]:
    """All tokens of a request, and how it ended."""
    tokens = []
    while True:
        event = request.events.get(timeout=60)
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, ErrorEvent):
            raise event.error
        elif isinstance(event, DoneEvent):
            return tokens, event.reason


def answers(made: Engine, requests: list[Request]) -> list[tuple[list[int], str]]:
    for request in requests:
        made.submit(request)
    return [answer(request) for request in requests]


def requests() -> list[Request]:
    """Several at once, which end at different steps, greedy and drawn."""
    lengths = (24, 3, 1, 40)
    kinds = (GREEDY, DRAWN, GREEDY, DRAWN)
    return [
        Request(prompt=[5 + i, 9, 11 + i], params=dataclasses.replace(kind, n_predict=n))
        for i, (n, kind) in enumerate(zip(lengths, kinds, strict=True))
    ]


@pytest.mark.parametrize("fails", [0, 5])
def test_the_same_tokens_as_step_by_step(path: Path, fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = engine(path)
    try:
        want = [answers(plain, [request])[0] for request in requests()]
    finally:
        plain.close()
    monkeypatch.setattr(engine_module, "Runner", AheadRunner)
    monkeypatch.setattr(AheadRunner, "fails", fails)
    monkeypatch.setattr(AheadRunner, "n_launched", 0)
    monkeypatch.setattr(AheadRunner, "most_ahead", 0)
    made = engine(path)
    try:
        assert [answers(made, [request])[0] for request in requests()] == want
        assert answers(made, requests()) == want, "at once"
    finally:
        made.close()
    assert AheadRunner.n_launched > 40 and AheadRunner.most_ahead == 1


def test_a_full_context_ends_the_request(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", AheadRunner)
    made = engine(path, dataclasses.replace(OPTIONS, n_ctx=64, n_parallel=1))
    try:
        tokens, reason = answer_of(made, dataclasses.replace(GREEDY, n_predict=-1))
        assert reason == "limit" and len(tokens) == 64 - 3 + 1
    finally:
        made.close()


def test_cancelling_stops_the_steps(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", AheadRunner)
    made = engine(path)
    try:
        request = Request(prompt=[5, 9, 11], params=dataclasses.replace(GREEDY, n_predict=400))
        made.submit(request)
        assert isinstance(request.events.get(timeout=60), TokenEvent)
        request.cancelled.set()
        tokens, reason = answer(request)
        assert reason == "cancelled" and len(tokens) < 399
        assert answer_of(made, GREEDY)[1] == "limit", "the slot serves on"
    finally:
        made.close()


class LostRunner(AheadRunner):
    """A device that fails for good at its fourth step."""

    def launch(self, *args: Any, **more: Any) -> Done:
        if type(self).n_launched >= 3:
            raise DeviceLostError("the GPU failed: unspecified launch failure")
        return super().launch(*args, **more)


def test_a_lost_device_ends_the_engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", LostRunner)
    monkeypatch.setattr(LostRunner, "n_launched", 0)
    made = engine(path)
    running, waiting = (Request(prompt=[5, 9, 11], params=GREEDY) for _ in range(2))
    made.submit(running)
    with pytest.raises(DeviceLostError, match="unspecified"):
        answer(running)
    made.close()
    assert made.state is EngineState.FAILED and isinstance(made.failure, DeviceLostError)
    with pytest.raises(NotReadyError):
        made.submit(waiting)


def answer_of(made: Engine, params: SamplingParams) -> tuple[list[int], str]:
    return answers(made, [Request(prompt=[5, 9, 11], params=params)])[0]


class WarmingRunner(Runner):
    """Has programs to run ahead of need; each looks whether somebody waits."""

    n_left = 0
    stops: list[bool]
    left_at_prompts: list[int]

    def prefill(self, *args: Any, **more: Any) -> np.ndarray | None:
        type(self).left_at_prompts.append(type(self).n_left)
        return super().prefill(*args, **more)

    def warm_more(self, should_stop: Any) -> bool:
        cls = type(self)
        if not cls.n_left:
            return False
        cls.n_left -= 1
        cls.stops.append(should_stop())
        cls.between()
        return True

    @classmethod
    def between(cls) -> None:
        """What happens while a program runs."""


def test_programs_ahead_of_need_run_one_by_one_while_idle(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Runner", WarmingRunner)
    monkeypatch.setattr(WarmingRunner, "n_left", 6)
    monkeypatch.setattr(WarmingRunner, "stops", [], raising=False)
    monkeypatch.setattr(WarmingRunner, "left_at_prompts", [], raising=False)
    begun, go = threading.Event(), threading.Event()

    def between() -> None:
        begun.set()
        go.wait(10)

    monkeypatch.setattr(WarmingRunner, "between", between)
    made = engine(path)
    try:
        assert begun.wait(10)
        request = Request(prompt=[5, 9, 11], params=GREEDY)
        made.submit(request)
        go.set()
        assert answer(request)[1] == "limit"
        assert WarmingRunner.left_at_prompts == [5], "the request waited for one program only"
        for _ in range(200):
            if not WarmingRunner.n_left:
                break
            time.sleep(0.01)
        assert WarmingRunner.n_left == 0 and not any(WarmingRunner.stops), "the rest came when it was over"
    finally:
        go.set()
        made.close()
