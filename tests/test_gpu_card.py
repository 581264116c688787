"""On a card (`pytest -m gpu`): decode has the bits of the CPU engine, prompts those of every way to bring experts.

Most of the time kernels compile, so models run in a few processes at once; a second run takes seconds.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import test_kernels_slots
from test_engine_ahead import DRAWN, GREEDY, answers

from freetoken import native
from freetoken.batch import Batch
from freetoken.engine import Engine
from freetoken.errors import EngineError
from freetoken.experts.profile import FOLDER_VARIABLE, look_up
from freetoken.experts.tables import unmeasured_table
from freetoken.gguf import Conversion, open_model
from freetoken.kvcache import PAGE
from freetoken.options import EngineOptions, ModelOptions
from freetoken.quants import GgmlType
from freetoken.request import Request
from freetoken.runner import Runner
from freetoken.spec import read_spec
from freetoken.tokenizer import Tokenizer
from tools import tiny_models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_MODEL = ROOT / "models" / "freetoken-small-moe.gguf"
N_CTX, N_SEQUENCES = 1024, 8
N_PROCESSES = 5
PROMPTS = (1, 5, 8, 3, 40, 2, 17, PAGE + 44)
BATCHES = (1, 8, 3, 2, 4, 5, 6, 7, 1, 8)
LONG = (9, 64, 200, 700)
BOUND = 1e-2
"""Of a prompt's logits, as a share of their standard deviation: operands are rounded to fp16."""
FEW_PROMPTS, FEW_BATCHES = (1, 3), (1, 2, 1)


@dataclass(frozen=True)
class Case:
    """A tiny model. `rate`: share of the experts in slots, 0 keeps all there."""

    arch: str
    file_type: str
    rate: float = 0.0
    cache_type: str = "f16"
    sizes: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = PROMPTS
    batches: tuple[int, ...] = BATCHES
    long: tuple[int, ...] = LONG
    backend: str = "offload"
    """Where `rate` is given: what becomes of misses."""
    is_ftw: bool = False
    """Whether both engines read an FTW file."""

    def __str__(self) -> str:
        how = self.backend if self.backend != "offload" else ""
        form = "ftw" if self.is_ftw else ""
        return "-".join(str(part) for part in (self.arch, self.file_type, self.rate, how, form) if part)


@dataclass
class Found:
    """What a case met: steps and those whose bits differ; errors of long prompts, and how many ways gave other bits."""

    backend: str
    n_steps: int = 0
    n_other: int = 0
    errors: list[float] = field(default_factory=list)
    n_other_prompts: int = 0
    counters: list[int] = field(default_factory=list)


MANY = {"n_expert": 64, "n_used": 4, "n_layer": 6}
CASES = [
    Case("llama", "Q4_1"),
    Case("llama", "F16", cache_type="f32"),
    Case("qwen2moe", "Q4_K_M"),
    Case("qwen2moe", "Q4_K_M", 0.5, sizes=MANY),
    Case("qwen3moe", "mixed"),
    Case("qwen3moe", "mixed", 0.7, sizes=MANY | {"n_layer": 12}),
    Case("gemma3", "Q4_1"),
    Case("olmoe", "Q8_0"),
    Case("olmoe", "MXFP4", 0.6, sizes=MANY),
    Case("qwen3moe", "Q6_K", 0.5, sizes=MANY),
    Case("qwen3moe", "Q4_K_M", 0.5, sizes=MANY, backend="hybrid"),
    Case("qwen3moe", "mixed", 0.7, sizes=MANY, backend="cpu"),
    Case("olmoe", "MXFP4", 0.6, sizes=MANY, backend="hybrid"),
    Case("qwen2moe", "Q4_K_M", sizes=MANY, is_ftw=True),
    Case("qwen3moe", "mixed", 0.7, sizes=MANY, is_ftw=True),
    Case("qwen3moe", "Q6_K", 0.5, sizes=MANY, backend="hybrid", is_ftw=True),
]
KNOWN = {case.file_type for case in CASES}
TYPES = (
    *("F32", "BF16", "Q4_0", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "IQ4_XS", "IQ2_XXS", "IQ2_XS"),
    *("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0"),
)
CASES += [
    Case("llama", name, sizes={"n_layer": 1}, prompts=FEW_PROMPTS, batches=FEW_BATCHES, long=(20,)) for name in TYPES
]


def test_every_type_is_among_the_cases() -> None:
    from freetoken.kernels.matvec import TYPE_CLASS

    assert {GgmlType(t).name for t in TYPE_CLASS} == (KNOWN | set(TYPES)) - {"Q4_K_M", "mixed"}


# --- one case, in a process of its own -------------------------------------------------------------------------------


def compare(path: Path, case: Case) -> Found:
    """Run a model on both engines."""
    with ExitStack() as stack:
        file = stack.enter_context(open_model(path))
        spec = read_spec(file)

        def runner(**wishes: Any) -> Runner:
            options = EngineOptions(
                n_threads=2, n_ctx=N_CTX, n_parallel=N_SEQUENCES, cache_type_k=case.cache_type,
                cache_type_v=case.cache_type, **wishes,
            )  # fmt: skip
            return stack.enter_context(closing(Runner(file, spec, options, n_ctx=N_CTX, n_sequences=N_SEQUENCES)))

        cpu, fused = runner(n_gpu_layers=0), runner(n_gpu_layers=-2)
        gpu = fused
        if case.rate:
            gpu = runner(n_gpu_layers=-2, moe_backend=case.backend, moe_cache_rate=case.rate)
        assert gpu.gpu is not None
        if case.backend == "hybrid":  # by a table that fills some: the measured one may fill none of such small experts
            gpu.gpu.use_split("hybrid", unmeasured_table(8 * spec.n_expert_used))  # type: ignore[attr-defined]
        found = Found(gpu.gpu.plan.backend)  # type: ignore[attr-defined]
        compare_steps(cpu, gpu, case, spec.n_vocab, found)
        compare_long(cpu, gpu, fused, case, spec.n_vocab, found)
        counters = gpu.expert_counters()
        found.counters = [] if counters is None else counters.sum(axis=0).tolist()
    return found


def compare_steps(cpu: Runner, gpu: Runner, case: Case, n_vocab: int, found: Found) -> None:
    """Prompts in pieces of up to 8 tokens, then batches."""
    rng = np.random.default_rng(3)

    def same(x: np.ndarray | None, y: np.ndarray | None) -> None:
        assert x is not None and y is not None
        found.n_steps += 1
        found.n_other += not np.array_equal(x.view(np.int32), y.view(np.int32))

    a, b = ([runner.new_sequence() for _ in range(N_SEQUENCES)] for runner in (cpu, gpu))
    for n, x, y in zip(case.prompts, a, b, strict=False):
        tokens = rng.integers(3, n_vocab, n).tolist()
        for at in range(0, n, 8):
            same(cpu.prefill(x, tokens[at : at + 8]), gpu.prefill(y, tokens[at : at + 8]))
    for n in case.batches:
        tokens = rng.integers(3, n_vocab, n).tolist()
        same(cpu.decode(a[:n], tokens), gpu.decode(b[:n], tokens))
    for sequence in (*a, *b):
        sequence.release()


def compare_long(cpu: Runner, gpu: Runner, fused: Runner, case: Case, n_vocab: int, found: Found) -> None:
    """Prompts of more than 8 tokens at once: near the CPU's steps, the same bits wherever experts come from."""
    rng = np.random.default_rng(4)
    plan = gpu.gpu.plan  # type: ignore[union-attr]
    assert plan.n_buffers or not case.rate, "give the cache more slots, or nothing streams"
    plans = ("stream", "on_demand") if case.rate else (None,)
    for n in case.long:
        tokens = rng.integers(3, n_vocab, n).tolist()
        x = cpu.new_sequence()
        for at in range(0, n, 8):
            want = cpu.prefill(x, tokens[at : at + 8])
        x.release()
        got = [long_pass(gpu, tokens, plan) for plan in plans]
        if fused is not gpu:
            got.append(long_pass(fused, tokens, None))
        assert want is not None
        found.errors.append(float(np.abs(got[0] - want).max() / want.std()))
        found.n_other_prompts += sum(not np.array_equal(got[0], other) for other in got[1:])


def long_pass(runner: Runner, tokens: Sequence[int], plan: str | None) -> np.ndarray:
    """Logits of one chunk whose experts come in a given way."""
    model: Any = runner.gpu
    n = len(tokens)
    sequence = runner.new_sequence()
    sequence.reserve(n)
    batch = Batch(np.asarray(tokens, np.int32), np.arange(n, dtype=np.int32), [sequence.page_table] * n, 1)
    with ExitStack() as stack:
        if model.experts is not None:
            stack.enter_context(model.experts.streaming())
        logits = model._long_pass().run(batch, plan=plan)
        row: np.ndarray = logits.cpu().numpy()[0]
    sequence.release()
    return row


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Found]]]:
    """All cases that were selected, under way in a few processes."""
    folder = tmp_path_factory.mktemp("card")
    wanted = {str(item.callspec.params.get("case")) for item in request.session.items if hasattr(item, "callspec")}
    with ProcessPoolExecutor(N_PROCESSES, multiprocessing.get_context("spawn")) as pool:
        yield {str(case): pool.submit(write_and_compare, folder, case) for case in CASES if str(case) in wanted}
        pool.shutdown(cancel_futures=True)


def write_and_compare(folder: Path, case: Case) -> Found:
    path = tiny_models.write(folder / f"{case}.gguf", case.arch, file_type=case.file_type, **case.sizes)
    if case.is_ftw:
        with open_model(path) as file:
            Conversion(file, path.with_suffix(".ftw")).run()
        path = path.with_suffix(".ftw")
    return compare(path, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_of_the_cpu(case: Case, running: dict[str, Future[Found]]) -> None:
    found = running[str(case)].result()
    n_pieces = sum(-(-n // 8) for n in case.prompts)
    assert (found.n_other, found.n_steps) == (0, n_pieces + len(case.batches))
    assert max(found.errors) < BOUND and found.n_other_prompts == 0, found.errors
    if case.rate:
        assert found.backend == case.backend
        hits, misses, fills, n_on_cpu, n_bytes = found.counters
        assert misses == fills + n_on_cpu > 0 and (hits > 0 or case.backend == "cpu")
        assert (n_on_cpu > 0) == (case.backend != "offload")
        assert (n_bytes > 0) == (fills > 0) == (case.backend != "cpu")


def engine(path: Path, **wishes: Any) -> Engine:
    made = Engine(ModelOptions(path), EngineOptions(n_ctx=512, n_threads=2, **wishes))
    made.start()
    made.wait_ready()
    return made


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_card_samples_as_the_host(
    params: Any, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and four at once; drawn tokens may part where a random number falls on the border of two."""
    path = tiny_models.write(tmp_path_factory.mktemp("sample") / "m.gguf", "qwen2moe", file_type="Q8_0")
    prompts = [[5 + i, 9, 11 + i] for i in range(4)]

    def ask() -> list[list[int]]:
        requests = [[Request(prompt=p, params=dataclasses.replace(params, seed=i))] for i, p in enumerate(prompts)]
        with closing(engine(path, n_gpu_layers=-2)) as made:
            alone = [answers(made, each)[0][0] for each in requests]
            again = [Request(prompt=p, params=dataclasses.replace(params, seed=i)) for i, p in enumerate(prompts)]
            return alone + [tokens for tokens, _ in answers(made, again)]

    on_card = ask()
    assert on_card[:4] == on_card[4:], "batch mates change nothing"
    monkeypatch.setattr(Runner, "chains", lambda self, samplers: None)
    assert on_card == ask()


def test_the_default_model_on_a_real_text() -> None:
    """Greedy tokens after a text: those of the CPU, with all experts on the card and with three quarters."""
    prompt = "Once upon a time there was a small ship that wanted to see the other side of the sea. One morning"
    with open_model(DEFAULT_MODEL) as file:
        tokens = Tokenizer(file.shards[0].path, file.metadata).encode(prompt, add_special=True, parse_special=False)
    params = dataclasses.replace(GREEDY, n_predict=48)
    found = {}
    for name, wishes in (
        ("no GPU", {"n_gpu_layers": 0}),
        ("fused", {"n_gpu_layers": -2}),
        ("offload", {"n_gpu_layers": -2, "moe_backend": "offload", "moe_cache_rate": 0.75}),
        ("cpu", {"n_gpu_layers": -2, "moe_backend": "cpu", "moe_cache_rate": 0.75}),
        ("hybrid", {"n_gpu_layers": -2, "moe_backend": "hybrid", "moe_cache_rate": 0.75}),
        ("auto", {"n_gpu_layers": -2, "moe_cache_rate": 0.75}),
        ("auto again", {"n_gpu_layers": -2, "moe_cache_rate": 0.75}),
    ):
        with closing(engine(DEFAULT_MODEL, **wishes)) as made:
            # 8 tokens come as steps, so the cache holds the same bits everywhere
            found[name] = answers(made, [Request(prompt=tokens[:8], params=params)])[0]
            text = answers(made, [Request(prompt=tokens, params=params)])[0]
            assert len(text[0]) > 10
    assert all(tokens == found["no GPU"] for tokens in found.values())


def test_auto_chooses_and_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice by timed steps, stored in the profile; the next start takes it, and requests are answered alike while
    it is checked."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="Q4_K", **MANY)
    params = dataclasses.replace(GREEDY, n_predict=400)
    with closing(engine(path, n_gpu_layers=0)) as made:
        want = answers(made, [Request(prompt=(5, 9, 11), params=params)])
    for is_first in (True, False):
        started = time.monotonic()
        with closing(engine(path, n_gpu_layers=-2, moe_cache_rate=0.5)) as made:
            model: Any = made._runner.gpu
            backends = model._backends
            assert (backends._known is None) == is_first
            entry = look_up(backends._entry.conditions).entry
            assert entry is not None and entry.copy_gbs > 1 and entry.conditions.gpu.startswith("GPU-")
            (choice,) = entry.choices.values()
            assert choice["chosen"] == backends.current.name and len(choice["milliseconds"]) > 1
            assert answers(made, [Request(prompt=(5, 9, 11), params=params)]) == want
            assert backends._watcher is not None
        assert is_first or time.monotonic() - started < 60


@pytest.mark.parametrize("split", ["offload", "hybrid", "floor"])
def test_counters_and_slots_over_ten_thousand_steps(split: str) -> None:
    """Batches of 1 to 8, kernel and mirror."""
    state = test_kernels_slots.make_state(64, [100, 130, 100, 400], 0.37, limit=100_000)
    test_kernels_slots.run(state, 10_000, 10, split, "recent", seed=11, device="cuda")
    assert state.counters.sum() > 0


N_STRESS = 4000


def test_thousands_of_steps_beside_a_cpu_that_fails(tmp_path: Path) -> None:
    """Steps of 1 to 4 rows, the CPU slowed, stalled or failing at random: each ends with the right bits or an error."""
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="Q8_0", n_layer=2, n_expert=64, n_used=4)
    rng = np.random.default_rng(5)
    with ExitStack() as stack:
        file = stack.enter_context(open_model(path))
        wishes = EngineOptions(n_threads=2, n_ctx=N_CTX, n_parallel=4)
        cpu, gpu = (
            stack.enter_context(closing(Runner(file, read_spec(file), options, n_ctx=N_CTX, n_sequences=4)))
            for options in (
                dataclasses.replace(wishes, n_gpu_layers=0),
                dataclasses.replace(wishes, n_gpu_layers=-2, moe_backend="hybrid", moe_cache_rate=0.6),
            )
        )
        model: Any = gpu.gpu
        executor = model.experts.meetings.executor
        broken = native.Program(gpu._experts_pool())
        broken.add(native.OP_SCALE, 1, p=(None, None), i=(8,))
        right = {n: [cpu.new_sequence() for _ in range(n)] for n in range(1, 5)}
        tokens = {n: rng.integers(3, 250, n).tolist() for n in right}
        want = {n: cpu.decode(right[n], tokens[n]) for n in right}
        gpu.decode([gpu.new_sequence()], [3])
        memory = psutil.Process().memory_info().rss
        n_errors, longest = 0, 0.0
        for step in range(N_STRESS):
            n = int(rng.integers(1, 5))
            harm = rng.random()
            place = model.experts.meetings.place(n, 0)
            good = executor._programs.get(place)
            is_broken = harm < 0.02 and good is not None
            while executor.pending:  # the thread ends a step after the GPU
                time.sleep(0)
            if is_broken:
                executor.set(place, broken)
            executor.slow_down(1e12 if 0.02 < harm < 0.022 else 20.0 if harm < 0.05 else 1.0)
            sequences = [gpu.new_sequence() for _ in range(n)]
            started = time.monotonic()
            try:
                got = gpu.decode(sequences, tokens[n])
                np.testing.assert_array_equal(got.view(np.int32), want[n].view(np.int32))
            except EngineError:
                n_errors += 1
            longest = max(longest, time.monotonic() - started)
            executor.slow_down(1.0)
            while executor.pending:
                time.sleep(0)
            if is_broken:
                executor.set(place, good)
            for sequence in sequences:
                sequence.release()
            if step % 50 == 0:
                model.use_split(rng.choice(["cpu", "hybrid", "offload", "hybrid"]).item())
        assert 0 < n_errors < N_STRESS / 10 and longest < 2.0
        assert executor.pending == 0
        assert psutil.Process().memory_info().rss - memory < 200e6
