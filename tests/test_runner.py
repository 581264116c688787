"""The runner: bits that depend on the tokens alone, prompts in pieces, reuse, stopping, and running out of room."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import native
from freetoken import runner as runner_module
from freetoken.cpu import prefill
from freetoken.errors import EngineError, OptionError
from freetoken.gguf import open_model
from freetoken.kvcache import KVCacheFull
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

VARIANTS = ("portable", "avx2", "auto")
FILES = {
    "llama": ("llama", "Q4_1"),
    "mixed": ("qwen3moe", "mixed"),
    "shared": ("qwen2moe", "Q4_K_M"),
    "float": ("qwen2moe", "BF16"),
    "gemma3": ("gemma3", "F32"),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: tiny_models.write(folder / f"{name}.gguf", arch, file_type=file_type)
        for name, (arch, file_type) in FILES.items()
    }


@pytest.fixture(autouse=True)
def torch_from_nine_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts go through torch too, so that they test it."""
    monkeypatch.setattr(runner_module, "MAX_STEPPED", 8)


@contextmanager
def running(
    path: Path, *, n_ctx: int = 1024, n_sequences: int = 1, spec: dict[str, Any] | None = None, **options: Any
) -> Iterator[Runner]:
    """A runner of one thread, options and fields of the spec replaced."""
    with open_model(path) as file:
        changed = dataclasses.replace(read_spec(file), **(spec or {}))
        wishes = EngineOptions(**{"n_threads": 1, **options})
        runner = Runner(file, changed, wishes, n_ctx=n_ctx, n_sequences=n_sequences)
        try:
            yield runner
        finally:
            runner.close()


def prompt(n: int, seed: int = 1) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 380, n)]


def prefill_of(runner: Runner, tokens: list[int]) -> np.ndarray:
    """Logits of a cold run of the whole prompt."""
    s = runner.new_sequence()
    logits = runner.prefill(s, tokens)
    s.release()
    assert logits is not None
    return logits


def steps_of(runner: Runner, tokens: list[int]) -> np.ndarray:
    """Logits after each token, one at a time."""
    s = runner.new_sequence()
    rows = [runner.decode([s], [t])[0] for t in tokens]
    s.release()
    return np.array(rows)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@contextmanager
def kernels(name: str) -> Iterator[None]:
    native.set_variant(name)
    try:
        yield
    finally:
        native.set_variant("auto")


# --- one answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_steps_give_the_same_bits_whatever_runs_them(name: str, paths: dict[str, Path]) -> None:
    tokens = prompt(20)
    with kernels("portable"), running(paths[name]) as runner:
        want = steps_of(runner, tokens)
    for variant in native_variants():
        for n_threads in (1, 2):
            with kernels(variant), running(paths[name], n_threads=n_threads) as runner:
                assert np.array_equal(steps_of(runner, tokens), want), (variant, n_threads)


def native_variants() -> list[str]:
    """The kernels of this processor."""
    found = []
    for variant in VARIANTS:
        try:
            native.set_variant(variant)
            found.append(variant)
        except EngineError:
            continue
    native.set_variant("auto")
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_sequence_gives_the_same_bits_beside_others(name: str, paths: dict[str, Path]) -> None:
    prompts = [prompt(12 + i, seed=i) for i in range(11)]
    with running(paths[name], n_sequences=11, n_parallel=11) as runner:
        alone = [steps_of(runner, p) for p in prompts]
        sequences = [runner.new_sequence() for _ in prompts]
        for step in range(max(map(len, prompts))):
            active = [i for i, p in enumerate(prompts) if step < len(p)]
            logits = runner.decode([sequences[i] for i in active], [prompts[i][step] for i in active])
            for i, row in zip(active, logits, strict=True):
                assert np.array_equal(row, alone[i][step]), (i, step)


@pytest.mark.parametrize("name", ["mixed", "gemma3"])
def test_a_short_prompt_gives_the_same_bits_as_its_tokens_one_by_one(name: str, paths: dict[str, Path]) -> None:
    tokens = prompt(8)
    with running(paths[name]) as runner:
        want = steps_of(runner, tokens)
        for n in range(1, 9):
            assert np.array_equal(prefill_of(runner, tokens[:n]), want[n - 1])


def test_a_prompt_of_some_steps_gives_their_bits(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    n = runner_module.MAX_STEPPED
    tokens = prompt(n + 1)
    with running(paths["mixed"]) as runner:
        steps = steps_of(runner, tokens)
        assert np.array_equal(prefill_of(runner, tokens[:n]), steps[n - 1])
        assert 0 < relative(prefill_of(runner, tokens), steps[n]) < 2e-3


def test_steps_cross_pages_and_splits(paths: dict[str, Path]) -> None:
    tokens = prompt(560)
    with running(paths["gemma3"], cache_type_k="f32", cache_type_v="f32") as runner:
        steps = steps_of(runner, tokens)
        for n in (255, 256, 257, 512, 513, 560):
            assert relative(prefill_of(runner, tokens[:n]), steps[n - 1]) < 1e-5


# --- prompts in pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("n_ubatch", [16, 100, 300])
def test_chunks_do_not_change_a_prompt(name: str, n_ubatch: int, paths: dict[str, Path]) -> None:
    tokens = prompt(700)
    with running(paths[name]) as runner, running(paths[name], n_ubatch=n_ubatch) as pieces:
        assert relative(prefill_of(pieces, tokens), prefill_of(runner, tokens)) < 1e-3


@pytest.mark.parametrize(("constant", "value"), [("GATHER_VALUES", 1), ("SCORE_VALUES", 1), ("TILE_VALUES", 1000)])
def test_small_pieces_of_work_do_not_change_a_prompt(
    constant: str, value: int, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(420)
    with running(paths["gemma3"], n_ubatch=200, cache_type_k="f32", cache_type_v="f32") as runner:
        want = prefill_of(runner, tokens)
        monkeypatch.setattr(prefill, constant, value)
        assert relative(prefill_of(runner, tokens), want) < 1e-5


@pytest.mark.parametrize(
    "spec",
    [
        {"attn_softcap": 3.0},
        {"attn_softcap": 3.0, "window": 50, "is_sliding": (True, False, True)},
        {"final_softcap": 5.0},
        {"expert_gating": "sigmoid"},
        {"expert_gating": "softmax_chosen", "expert_norm": False},
        {"expert_norm": False, "expert_scale": 2.5},
    ],
    ids=str,
)
def test_prompts_and_steps_agree_on_every_setting(spec: dict[str, Any], paths: dict[str, Path]) -> None:
    tokens = prompt(300)
    exact: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32"}
    with running(paths["float"], **exact) as plain, running(paths["float"], spec=spec, n_ubatch=128, **exact) as runner:
        steps = steps_of(runner, tokens)[-1]
        assert relative(prefill_of(runner, tokens), steps) < 1e-5
        assert relative(prefill_of(plain, tokens), steps) > 1e-3


# --- reuse, stopping, room -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 40, 256, 300])
@pytest.mark.parametrize("shorter", [0, 1, 30])
def test_a_reused_prefix_gives_what_a_cold_run_gives(n: int, shorter: int, paths: dict[str, Path]) -> None:
    # Case B34: the same prompt again, or less one token, leaves 0 or 1 token; one must run to give logits.
    tokens = prompt(n)
    again = tokens[: max(n - shorter, 1)]
    with running(paths["llama"]) as runner:
        s = runner.new_sequence()
        runner.prefill(s, tokens)
        runner.decode([s], [5])
        held = min(s.common_prefix(again), len(again) - 1)
        assert held == len(again) - 1
        s.truncate(held)
        logits = runner.prefill(s, again[held:])
        assert logits is not None and s.tokens == again
        cold = prefill_of(runner, again)
        assert logits.argmax() == cold.argmax()
        assert relative(logits, cold) < 2e-3
        assert runner.cache.n_free + runner.cache.n_held == runner.cache.capacity


@pytest.mark.parametrize(("n_calls", "held"), [(0, 0), (1, 0), (3, 0), (4, 100), (5, 100)])
def test_stopping_keeps_whole_chunks_and_the_sequence_usable(n_calls: int, held: int, paths: dict[str, Path]) -> None:
    tokens = prompt(250)  # three layers: each chunk asks once before it and once a layer
    answers = iter([False] * n_calls + [True] * 10)
    heard: list[int] = []
    with running(paths["llama"], n_ubatch=100) as runner:
        s = runner.new_sequence()
        stopped = runner.prefill(s, tokens, should_stop=lambda: next(answers), on_progress=heard.append)
        assert stopped is None
        assert s.tokens == tokens[:held]
        assert heard == ([held] if held else [])
        rest = runner.prefill(s, tokens[held:])
        assert rest is not None
        assert relative(rest, prefill_of(runner, tokens)) < 1e-3


@pytest.mark.parametrize("n", [5, 60])
def test_logits_only_where_they_are_wanted(n: int, paths: dict[str, Path]) -> None:
    tokens = prompt(n + 1)
    with running(paths["shared"]) as runner:
        s = runner.new_sequence()
        assert runner.prefill(s, tokens[:n], want_logits=False) is None
        (logits,) = runner.decode([s], [tokens[n]])
        assert relative(logits, prefill_of(runner, tokens)) < 2e-3


def overfull(runner: Runner, how: str) -> Callable[[], object]:
    a, b = runner.new_sequence(), runner.new_sequence()
    runner.prefill(a, prompt(250))
    runner.prefill(b, prompt(256))
    return (lambda: runner.prefill(a, prompt(20))) if how == "prefill" else (lambda: runner.decode([a, b], [1, 1]))


@pytest.mark.parametrize("how", ["prefill", "decode"])
def test_a_full_cache_leaves_sequences_as_they_were(how: str, paths: dict[str, Path]) -> None:
    with running(paths["llama"], n_ctx=256, n_sequences=2, n_parallel=0) as runner:
        assert runner.cache.capacity == 2
        for n_ctx in (256, 512):
            runner.n_ctx = n_ctx  # a sequence that may outgrow the pages there are
            call = overfull(runner, how)
            a, b = runner.cache._sequences[-2:]
            with pytest.raises(EngineError if n_ctx == 256 else KVCacheFull):
                call()
            assert (len(a), len(b)) == (250, 256)
            a.release()
            b.release()


@pytest.mark.parametrize(("n_parallel", "capacity"), [(4, 16), (0, 7)])
def test_slots_share_the_context_unless_their_number_is_given(
    n_parallel: int, capacity: int, paths: dict[str, Path]
) -> None:
    with running(paths["llama"], n_ctx=1000, n_sequences=4, n_parallel=n_parallel) as runner:
        assert runner.cache.capacity == capacity


def test_the_cache_type_is_one_for_both(paths: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match="f32 for values"), running(paths["llama"], cache_type_v="f32"):
        pass
    with running(paths["llama"]) as half, running(paths["llama"], cache_type_k="f32", cache_type_v="f32") as full:
        assert full.cache.n_bytes == 2 * half.cache.n_bytes
        assert 0 < relative(prefill_of(half, prompt(50)), prefill_of(full, prompt(50))) < 1e-2


def test_warming_up_leaves_nothing_behind(paths: dict[str, Path]) -> None:
    with running(paths["llama"]) as runner:
        runner.warm_up()
        assert runner.cache.n_held == 0


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.weights
def test_smollm2_steps_agree_with_its_prompt(smollm2_path: Path) -> None:
    tokens = prompt(60)
    with running(smollm2_path, n_threads=2) as runner:
        want, found = (x.astype(np.float64) for x in (prefill_of(runner, tokens), steps_of(runner, tokens)[-1]))
    logp, logq = (x - x.max() - np.log(np.exp(x - x.max()).sum()) for x in (want, found))
    assert np.sum(np.exp(logp) * (logp - logq)) < 2e-6
    assert relative(found, want) < 1e-3


MEMORY_SCRIPT = """
import sys
from freetoken.gguf import open_model
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec

file = open_model(sys.argv[1])
runner = Runner(file, read_spec(file), EngineOptions(n_ctx=2048, n_threads=2), n_ctx=2048, n_sequences=4)
runner.warm_up()
sequence = runner.new_sequence()
runner.prefill(sequence, list(range(100, 2100))[:2000])
runner.decode([sequence], [7])
resident, of_model, name = 0, 0, ""
for line in open("/proc/self/smaps"):
    key, *values = line.split()
    if "-" in key and not key.endswith(":"):
        name = values[-1]
    elif key == "Rss:":
        resident += int(values[0])
        of_model += int(values[0]) if name.endswith(".gguf") else 0
print((resident - of_model) / 1024)
"""


@pytest.mark.weights
def test_smollm2_with_2048_positions_fits_beside_its_file(smollm2_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(smollm2_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert float(found.stdout) < 400, "MiB, torch included; the server may add 50"


@pytest.mark.weights
def test_smollm2_gives_the_same_bits_whatever_runs_it(smollm2_path: Path) -> None:
    tokens = prompt(6)
    with kernels("portable"), running(smollm2_path, n_threads=2) as runner:
        want = steps_of(runner, tokens)
    for variant in native_variants():
        for n_threads in (1, 2):
            with kernels(variant), running(smollm2_path, n_threads=n_threads, n_sequences=4, n_parallel=4) as runner:
                assert np.array_equal(steps_of(runner, tokens), want), (variant, n_threads)
                sequences = [runner.new_sequence() for _ in range(4)]
                for step, row in enumerate(want):
                    logits = runner.decode(sequences, [tokens[step], *prompt(3, seed=step)])
                    assert np.array_equal(logits[0], row), (variant, n_threads, step)
