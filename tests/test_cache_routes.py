"""/v1/cache/status, /v1/cache/rebuild and `ft ctl` against a real server: a model on the interpreter whose request runs
on while its cache is rebuilt, a model on the CPU, and an engine that takes its time."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import Served, says, serving, write_vocab
from test_engine import collect, wait_until
from test_gpu_engine import N_VOCAB, wide_programs  # noqa: F401
from test_rebuild import N_CTX, TINY, as_placement, small_steps  # noqa: F401

from freetoken import engine as engine_module
from freetoken.cli.main import main
from freetoken.engine import Engine
from freetoken.gguf import open_model
from freetoken.gpu.place import make_plan
from freetoken.gpu.warm import WarmUp
from freetoken.options import EngineOptions, ModelOptions
from freetoken.rebuild import CacheChange
from freetoken.request import EngineState, Request, SamplingParams, TokenEvent
from freetoken.runner import Runner
from freetoken.spec import read_spec
from freetoken.tokenizer import Tokenizer
from tools import tiny_models

GREEDY = SamplingParams(temperature=0.0, n_predict=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = write_vocab(tmp_path_factory.mktemp("vocab") / "v.gguf")
    with open_model(path) as file:
        return Tokenizer(path, file.metadata)


@contextmanager
def engine_of(path: Path, monkeypatch: pytest.MonkeyPatch, **wishes: Any) -> Iterator[Engine]:
    """An engine on the CPU, or on the interpreter where a size of the cache is wished for."""
    options = EngineOptions(**{"n_threads": 1, "n_ctx": N_CTX, "moe_cpu_threads": 1, "n_gpu_layers": 0, **wishes})
    if options.n_gpu_layers:
        with open_model(path) as file:
            plan = make_plan(file, read_spec(file), options, 1 << 30, N_CTX, 4)
        monkeypatch.setattr(WarmUp, "more", lambda self, should_stop: False)
        monkeypatch.setattr(engine_module, "Runner", partial(Runner, placement=as_placement(plan)))
    engine = Engine(ModelOptions(path), options)
    engine.start()
    engine.wait_ready()
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routes")
    return tiny_models.write(folder / "m.gguf", "qwen3moe", file_type="F16", n_layer=1, n_vocab=N_VOCAB, **TINY)


def refused(served: Served, body: Any, code: int, words: str, **more: Any) -> None:
    response = served.post("/v1/cache/rebuild", body, **more)
    assert response.status_code == code, response.text
    error = response.json()["error"]
    assert error["code"] == code and words in error["message"] and error["type"].endswith("_error")


def test_a_request_runs_on(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_of(path, monkeypatch) as on_cpu:
        usual = Request((5, 9), GREEDY)
        on_cpu.submit(usual)
        wanted = collect(usual).tokens
    wishes: dict[str, Any] = {"n_gpu_layers": -2, "moe_backend": "offload", "moe_cache_size": 4}
    with engine_of(path, monkeypatch, **wishes) as engine, serving(engine, tokenizer) as served:  # type: ignore[arg-type]
        request = Request((5, 9), GREEDY)
        engine.submit(request)
        first = request.events.get(timeout=60)
        assert isinstance(first, TokenEvent)
        found = served.ok("/v1/cache/rebuild", {"moe_cache_size": 5})
        assert found["slots"]["n_slots"] == 5 and found["seconds"] > 0 and not found["is_rebuilding"]
        assert found["statistics"]["began_with"] == "rebuild" and engine.slots()[0].is_processing
        refused(served, {"n_ctx": 3}, 400, "requests that run or wait hold 1 pages")
        rebuilt = served.ok("/v1/cache/rebuild", {"kv_pages": 5, "moe_cache_rate": 0.67})
        assert (rebuilt["kv"]["n_pages"], rebuilt["slots"]["n_slots"]) == (5, 4)
        assert [first.token, *collect(request).tokens] == wanted
        refused(served, {"moe_cache_size": 3}, 400, "too small")
        status = served.get("/v1/cache/status").json()
        assert status["last_rebuild"]["error"] and "seconds" not in status and status["backend"] == "offload"
        assert status["statistics"]["misses"] == status["statistics"]["fills"] > 0
        refused(served, {"kv_pages": 2, "n_ctx": 512}, 400, "excludes")
        capsys.readouterr()
        assert main(["ctl", "rebuild", "--moe-cache-size", "5", "--port", str(served.port)]) == 0
        text = capsys.readouterr().out
        assert "slots       5 of 6 experts (83.3%)" in text and "since the rebuild, 0 s ago" in text
        assert "last        moe_cache_size 5: done" in text
        assert main(["ctl", "rebuild", "--moe-cache-size", "3", "--port", str(served.port)]) == 1
        assert "the server answers 400: a cache of 3 experts is too small" in capsys.readouterr().err


def test_on_the_cpu_there_is_nothing_to_rebuild(
    path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine_of(path, monkeypatch) as engine, serving(engine, tokenizer) as served:  # type: ignore[arg-type]
        refused(served, {"moe_cache_auto": True}, 400, "all layers run on the CPU")
        status = served.get("/v1/cache/status").json()
        assert (status["backend"], status["slots"], status["statistics"]) == ("cpu-only", None, None)
        assert status["kv"]["n_free"] + status["kv"]["n_held"] == status["kv"]["n_pages"] > 0
        assert main(["ctl", "status", "-o", "json", "--port", str(served.port)]) == 0
        assert json.loads(capsys.readouterr().out)["backend"] == "cpu-only"


class SlowEngine(FakeEngine):
    """Rebuilds when it is told to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.go = threading.Event()
        self.asked: list[CacheChange] = []

    def rebuild(self, change: CacheChange) -> Any:
        with self.rebuilds.begin(change):
            self.asked.append(change)
            assert self.go.wait(10)
            return self.cache_status()


BAD: list[tuple[Any, str]] = [
    ({}, "nothing to rebuild"),
    ({"moe_cache_auto": False}, "nothing to rebuild"),
    ({"moe_cache_size": 0}, "must be between 0 < value"),
    ({"moe_cache_size": 1.5}, "type must be a whole number, but is number"),
    ({"moe_cache_size": True}, "but is boolean"),
    ({"moe_cache_rate": 1.5}, "must be between 0 < value <= 1"),
    ({"moe_cache_rate": "half"}, "but is string"),
    ({"moe_cache_rate": 0.5, "moe_cache_auto": True}, "'moe_cache_auto' excludes 'moe_cache_rate'"),
    ({"kv_pages": -1}, "must be between"),
    ({"slots": 3}, "Field 'slots' is unknown"),
    ([], "must be a JSON object"),
    (b"{", "not JSON"),
]


def test_refusals(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    engine = SlowEngine(says("x"))
    with serving(engine, tokenizer, api_keys=("secret",)) as served:
        key = {"headers": {"Authorization": "Bearer secret"}}
        for body, words in BAD:
            refused(served, body, 400, words, **key)
        refused(served, {"moe_cache_size": 4}, 401, "Invalid API Key")
        assert served.get("/v1/cache/status").status_code == 401
        first = SimpleNamespace(response=None)
        body = {"moe_cache_size": 4}
        thread = threading.Thread(
            target=lambda: setattr(first, "response", served.post("/v1/cache/rebuild", body, **key))
        )
        thread.start()
        wait_until(lambda: engine.asked)
        refused(served, body, 409, "already", **key)
        engine.go.set()
        thread.join(10)
        assert first.response.status_code == 200 and engine.asked == [CacheChange(moe_cache_size=4)]
        engine.state = EngineState.LOADING
        refused(served, body, 503, "Loading model", **key)
        engine.state = EngineState.READY
        port = ("--port", str(served.port))
        assert main(["ctl", "status", *port]) == 1
        assert "the server answers 401" in capsys.readouterr().err
        assert main(["ctl", "status", "--api-key", "secret", *port]) == 0
        for argv, message in (
            (["ctl", *port], "expected status or rebuild"),
            (["ctl", "rebuild", *port], "give one of --moe-cache-size"),
            (["ctl", "status", "--kv-pages", "4", *port], "only rebuild takes"),
            (["ctl", "status", "-o", "xml", *port], "expected text or json"),
        ):
            assert main(argv) == 2
            assert message in capsys.readouterr().err
    assert main(["ctl", "status", *port]) == 1
    assert "no answer of a FreeToken server" in capsys.readouterr().err
