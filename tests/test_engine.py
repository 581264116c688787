"""The engine on tiny models with the real runner: scheduling, prefix reuse, cancellation, failures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from freetoken.engine import Engine
from freetoken.errors import ContextExceededError, EngineError, ModelFileError, NotReadyError, RequestError
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import (
    DoneEvent,
    EngineState,
    ErrorEvent,
    PromptEvent,
    Request,
    SamplingParams,
    TokenEvent,
)
from tools import tiny_models

N_CTX = 1024
GREEDY = SamplingParams(temperature=0.0, n_predict=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("engine") / "tiny.gguf", "qwen3moe")


def make_engine(path: Path, **options: object) -> Engine:
    settings: dict[str, object] = {"n_ctx": N_CTX, "n_threads": 2, **options}
    engine = Engine(ModelOptions(path), EngineOptions(**settings))  # type: ignore[arg-type]
    engine.start()
    engine.wait_ready()
    return engine


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    engine = make_engine(model_path)
    yield engine
    engine.close()


def prompt_of(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, n).tolist())


def collect(request: Request, timeout: float = 60.0) -> SimpleNamespace:
    """Wait for a request's end: tokens, prompt events and the last event."""
    tokens, progress = [], []
    while True:
        event = request.events.get(timeout=timeout)
        if isinstance(event, TokenEvent):
            tokens.append(event.token)
        elif isinstance(event, PromptEvent):
            progress.append(event)
        else:
            return SimpleNamespace(tokens=tokens, progress=progress, last=event)


def ask(engine: Engine, prompt: tuple[int, ...], params: SamplingParams = GREEDY, **fields: object) -> SimpleNamespace:
    request = Request(prompt, params, **fields)  # type: ignore[arg-type]
    engine.submit(request)
    return collect(request)


def wait_until(condition: object, timeout: float = 5.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_greedy_answer_with_counts(engine: Engine) -> None:
    prompt = prompt_of(40, seed=1)
    result = ask(engine, prompt, cache_prompt=False)
    assert isinstance(result.last, DoneEvent)
    assert (result.last.reason, result.last.truncated) == ("limit", False)
    assert len(result.tokens) == 12
    timings = result.last.timings
    assert (timings.cache_n, timings.prompt_n, timings.predicted_n) == (0, 40, 12)
    assert timings.prompt_ms > 0
    assert timings.predicted_ms > 0


def test_parallel_requests_equal_the_same_alone(engine: Engine) -> None:
    """B33: four requests of different lengths at once."""
    prompts = [prompt_of(n, seed=n) for n in (5, 30, 200, 300)]
    alone = [ask(engine, p, cache_prompt=False).tokens for p in prompts]
    requests = [Request(p, GREEDY, cache_prompt=False) for p in prompts]
    for request in requests:
        engine.submit(request)
    assert [collect(r).tokens for r in requests] == alone


@pytest.mark.parametrize("n", [3, 8, 9, 60])
def test_prefix_is_reused_and_the_answer_stays(engine: Engine, n: int) -> None:
    """B34: the same prompt twice, then one token less."""
    prompt = prompt_of(n, seed=100 + n)
    cold = ask(engine, prompt, cache_prompt=False)
    again = ask(engine, prompt)
    assert again.last.timings.cache_n == n - 1
    assert again.last.timings.prompt_n == 1
    assert again.tokens == cold.tokens
    shorter_cold = ask(engine, prompt[:-1], cache_prompt=False)
    ask(engine, prompt)
    shorter = ask(engine, prompt[:-1])
    assert shorter.last.timings.cache_n == n - 2
    assert shorter.tokens == shorter_cold.tokens


def test_next_turn_reuses_prompt_and_answer(engine: Engine) -> None:
    first = ask(engine, prompt_of(50, seed=7))
    turn = (*prompt_of(50, seed=7), *first.tokens, 11, 12, 13)
    second = ask(engine, turn)
    assert second.last.timings.cache_n == 50 + len(first.tokens) - 1  # the last token was never run
    assert second.tokens == ask(engine, turn, cache_prompt=False).tokens


def test_prompt_progress(model_path: Path) -> None:
    engine = make_engine(model_path, n_ubatch=64)
    try:
        result = ask(engine, prompt_of(150, seed=3), return_progress=True)
        assert [(e.n_total, e.n_cached, e.n_done) for e in result.progress] == [
            (150, 0, 0),
            (150, 0, 64),
            (150, 0, 128),
            (150, 0, 150),
        ]
    finally:
        engine.close()


def test_cancel_in_decode_frees_the_slot(engine: Engine) -> None:
    request = Request(prompt_of(10, seed=4), SamplingParams(temperature=0.0, n_predict=900, ignore_eos=True))
    engine.submit(request)
    while not isinstance(request.events.get(timeout=10), TokenEvent):
        pass
    request.cancelled.set()
    result = collect(request)
    assert result.last.reason == "cancelled"
    wait_until(lambda: not any(s.is_processing for s in engine.slots()))


def test_cancelled_in_the_queue_never_starts(engine: Engine) -> None:
    """B39 (a): a queued request whose client has left."""
    long = [Request(prompt_of(4, seed=i), SamplingParams(n_predict=400, ignore_eos=True)) for i in range(4)]
    for request in long:
        engine.submit(request)
    queued = Request(prompt_of(600, seed=9), GREEDY)
    engine.submit(queued)
    queued.cancelled.set()
    result = collect(queued)
    assert result.last.reason == "cancelled"
    assert result.last.timings.prompt_n == 0
    for request in long:
        request.cancelled.set()
        collect(request)


def test_cancel_in_prefill(model_path: Path) -> None:
    engine = make_engine(model_path, n_ubatch=16)
    try:
        request = Request(prompt_of(1000, seed=5), GREEDY, return_progress=True)
        engine.submit(request)
        request.events.get(timeout=10)
        request.cancelled.set()
        result = collect(request)
        assert result.last.reason == "cancelled"
        assert not result.tokens
    finally:
        engine.close()


def test_context_ends_the_answer(engine: Engine) -> None:
    prompt = prompt_of(N_CTX - 5, seed=6)
    result = ask(engine, prompt, SamplingParams(temperature=0.0, n_predict=-1, ignore_eos=True))
    assert (result.last.reason, result.last.truncated) == ("limit", True)
    assert len(prompt) + len(result.tokens) == N_CTX + 1  # the last token needs no room


def test_prompt_that_does_not_fit(engine: Engine) -> None:
    with pytest.raises(ContextExceededError) as error:
        engine.submit(Request(prompt_of(N_CTX), GREEDY))
    assert (error.value.n_prompt_tokens, error.value.n_ctx) == (N_CTX, N_CTX)
    with pytest.raises(RequestError, match="empty"):
        engine.submit(Request((), GREEDY))
    with pytest.raises(RequestError, match="id_slot 4"):
        engine.submit(Request((1,), GREEDY, id_slot=4))


def test_full_cache_takes_idle_pages_then_ends_one(engine: Engine) -> None:
    """B35: four requests that together exceed the shared cache; all end, at least one by its own limit."""
    params = SamplingParams(temperature=0.0, n_predict=700, ignore_eos=True)
    requests = [Request(prompt_of(250, seed=20 + i), params) for i in range(4)]
    for request in requests:
        engine.submit(request)
    results = [collect(r) for r in requests]
    assert all(r.last.reason == "limit" for r in results)
    assert sum(not r.last.truncated for r in results) >= 1
    alone = ask(engine, requests[-1].prompt, params, cache_prompt=False)
    longest = max(results, key=lambda r: len(r.tokens))
    assert len(longest.tokens) == 700
    last = results[-1].tokens
    assert alone.tokens[: len(last)] == last


def test_unified_cache_serves_a_full_context_after_others(engine: Engine) -> None:
    for i in range(4):
        ask(engine, prompt_of(200, seed=40 + i))
    result = ask(engine, prompt_of(N_CTX - 2, seed=50), SamplingParams(n_predict=2, ignore_eos=True))
    assert result.last.timings.prompt_n == N_CTX - 2
    assert not result.last.truncated


@pytest.mark.parametrize("n_prompt", [600, 900])
def test_prompts_that_exceed_the_cache_together_all_run(model_path: Path, n_prompt: int) -> None:
    engine = make_engine(model_path, n_ubatch=64)
    try:
        prompts = [prompt_of(n_prompt, seed=70 + i) for i in range(5)]
        alone = [ask(engine, prompt, cache_prompt=False).tokens for prompt in prompts]
        for _ in range(2):  # the second time with prefixes that have to be evicted
            requests = [Request(prompt, GREEDY) for prompt in prompts]
            for request in requests:
                engine.submit(request)
            results = [collect(request) for request in requests]
            assert [result.tokens for result in results] == alone
            assert not any(result.last.truncated for result in results)
        cache = engine._runner.cache
        assert cache.n_free + cache.n_held == cache.capacity
    finally:
        engine.close()


def test_wished_slot(engine: Engine) -> None:
    for slot in (2, 0, 3):
        assert ask(engine, prompt_of(12, seed=60), id_slot=slot).last.id_slot == slot


def test_n_predict_zero_runs_the_prompt_only(engine: Engine) -> None:
    result = ask(engine, prompt_of(20, seed=61), SamplingParams(n_predict=0))
    assert (result.tokens, result.last.reason, result.last.timings.predicted_n) == ([], "limit", 0)
    assert ask(engine, prompt_of(20, seed=61)).last.timings.cache_n == 19


def test_seed_repeats_and_parallel_context_is_divided(model_path: Path) -> None:
    engine = make_engine(model_path, n_parallel=2)
    try:
        assert (engine.n_slots, engine.n_ctx) == (2, N_CTX // 2)
        params = SamplingParams(seed=5, n_predict=20, ignore_eos=True, temperature=1.5)
        assert ask(engine, prompt_of(9), params).tokens == ask(engine, prompt_of(9), params).tokens
    finally:
        engine.close()


def test_failure_reaches_its_request_and_the_engine_lives_on(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model_path)
    try:
        good = ask(engine, prompt_of(30))
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
            result = ask(engine, prompt_of(30))
            assert isinstance(result.last, ErrorEvent)
            assert isinstance(result.last.error, EngineError)
        assert "ZeroDivisionError" in caplog.text
        assert ask(engine, prompt_of(30)).tokens == good.tokens
    finally:
        engine.close()


def test_idle_engine_uses_no_cpu(engine: Engine) -> None:
    ask(engine, prompt_of(30))
    time.sleep(0.3)
    process = psutil.Process()
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before < 0.1


def test_closing_ends_requests(model_path: Path) -> None:
    engine = make_engine(model_path)
    request = Request(prompt_of(5), SamplingParams(n_predict=-1, ignore_eos=True))
    engine.submit(request)
    engine.close()
    assert collect(request).last.reason == "cancelled"
    with pytest.raises(NotReadyError):
        engine.submit(Request((1,), GREEDY))


def test_engine_that_dies_tells_its_requests_and_takes_no_more(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model_path)
    running, late = Request(prompt_of(5), SamplingParams(n_predict=-1, ignore_eos=True)), Request((1,), GREEDY)
    engine.submit(running)
    running.events.get(timeout=60)
    monkeypatch.setattr(engine, "_drop_cancelled", lambda: 1 / 0)
    assert isinstance(collect(running).last.error, EngineError)
    engine._thread.join()
    assert engine.state is EngineState.FAILED and "ZeroDivisionError" in str(engine.failure)
    with pytest.raises(NotReadyError):
        engine.submit(late)
    assert "ZeroDivisionError" in caplog.text
    engine.close()


def test_loading_failure_is_told(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF")
    engine = Engine(ModelOptions(path), EngineOptions())
    engine.start()
    with pytest.raises(ModelFileError):
        engine.wait_ready()
    assert engine.state is EngineState.FAILED
    engine.close()
