"""Decode steps between the layers of a long prompt: when they are due, and that they change nobody's tokens."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from freetoken import turns as turns_module
from freetoken.engine import Engine
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import DoneEvent, ErrorEvent, Request, SamplingParams, TokenEvent
from freetoken.turns import Turns
from tools import tiny_models

GREEDY = SamplingParams(temperature=0.0, n_predict=40, ignore_eos=True)


def test_a_step_is_due_after_a_while_and_after_its_own_length() -> None:
    clock, lengths = [0.0], [0.2, 0.01]
    ran = []

    def step() -> bool:
        clock[0] += lengths[min(len(ran), 1)]
        ran.append(clock[0])
        return True

    turns = Turns(step, lambda: clock[0])
    turns.begin()
    for at in (0.01, 0.04, 0.06, 0.3, 0.4, 0.47, 0.5, 0.531):
        clock[0] = max(clock[0], at)
        turns()
    assert ran == pytest.approx([0.26, 0.48, 0.541])
    assert turns.n_taken == 3


def test_nobody_to_decode_is_asked_again_later() -> None:
    clock, asked = [0.0], []
    turns = Turns(lambda: bool(asked.append(clock[0])), lambda: clock[0])
    turns.begin()
    for i in range(10):
        clock[0] = i * 0.02
        assert not turns()
    assert len(asked) == 3 and turns.n_taken == 0


def run(path: Path) -> tuple[list[list[int]], int]:
    """A request that generates while a long prompt comes; all tokens, and how many steps went between layers."""
    made = Engine(ModelOptions(path), EngineOptions(n_ctx=2048, n_threads=1, n_gpu_layers=0))
    made.start()
    made.wait_ready()
    try:
        first = Request(prompt=list(range(3, 40)), params=GREEDY)
        made.submit(first)
        assert isinstance(first.events.get(timeout=60), TokenEvent)
        second = Request(prompt=[3 + i % 200 for i in range(900)], params=dataclasses.replace(GREEDY, n_predict=5))
        made.submit(second)
        tokens = []
        for request in (first, second):
            mine = []
            while not isinstance(event := request.events.get(timeout=60), DoneEvent):
                assert not isinstance(event, ErrorEvent), event
                if isinstance(event, TokenEvent):
                    mine.append(event.token)
            tokens.append(mine)
        return tokens, made._turns.n_taken
    finally:
        made.close()


def test_steps_between_layers_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="F16")
    monkeypatch.setattr(turns_module, "INTERVAL_S", 1e9)
    want, n_taken = run(path)
    assert n_taken == 0
    monkeypatch.setattr(turns_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(Turns, "begin", lambda self: setattr(self, "_since", time.monotonic() - 1))
    got, n_taken = run(path)
    assert n_taken > 0 and got == want
