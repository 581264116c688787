"""The GPU engine under Triton's interpreter: the bits of the CPU engine, slots and fills included.

Programs compute more rows than on a card, which no bit depends on: what the interpreter takes its time for is programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from freetoken.gguf import open_model
from freetoken.gpu.experts import GpuExperts
from freetoken.gpu.place import Placement, make_plan, why_not
from freetoken.kernels import matvec
from freetoken.kernels.compile_ahead import first_of_each_kind
from freetoken.options import EngineOptions
from freetoken.quants import GgmlType
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models
from tools.random_blocks import random_rows

N_CTX = 300
N_VOCAB = 264
FEW_EXPERTS = {"n_expert": 6, "n_used": 2, "n_ff_exp": 32}


@pytest.fixture(autouse=True)
def wide_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec, "_shape", lambda kernel, type_id, tokens: matvec._Shape(128, 1))


@contextmanager
def both(path: Path, n_slots: int = 0, n_gpu_layers: int = -2) -> Iterator[tuple[Runner, Runner]]:
    """A runner on the CPU and one whose device is the interpreter, with so few slots where a number is given."""
    wishes = EngineOptions(n_threads=1, n_ctx=N_CTX, n_gpu_layers=n_gpu_layers)
    with open_model(path) as file:
        spec = read_spec(file)
        plan = make_plan(file, spec, wishes, 1 << 30, N_CTX, 3)
        if n_slots:
            plan = dataclasses.replace(plan, backend="offload", n_slots=(n_slots,))
        on_cpu = Runner(file, spec, dataclasses.replace(wishes, n_gpu_layers=0), n_ctx=N_CTX, n_sequences=3)
        on_gpu = Runner(file, spec, wishes, n_ctx=N_CTX, n_sequences=3, placement=Placement("cpu", plan))
        try:
            yield on_cpu, on_gpu
        finally:
            on_cpu.close()
            on_gpu.close()


def same_steps(cpu: Runner, gpu: Runner, prompts: tuple[int, ...], batches: tuple[int, ...]) -> None:
    """Logits of the same tokens, bit by bit: a short prompt of each sequence, then steps of several."""
    rng = np.random.default_rng(1)
    a, b = ([runner.new_sequence() for _ in prompts] for runner in (cpu, gpu))
    for n, x, y in zip(prompts, a, b, strict=True):
        tokens = rng.integers(3, N_VOCAB, n).tolist()
        want, got = cpu.prefill(x, tokens), gpu.prefill(y, tokens)
        assert want is not None and got is not None
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
    for n in batches:
        tokens = rng.integers(3, N_VOCAB, n).tolist()
        want, got = cpu.decode(a[:n], tokens), gpu.decode(b[:n], tokens)
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


def test_a_mixture_whose_experts_take_turns(tmp_path: Path) -> None:
    path = tiny_models.write(
        tmp_path / "m.gguf", "qwen2moe", file_type="Q8_0", n_layer=2, n_vocab=N_VOCAB, **FEW_EXPERTS
    )
    with both(path, n_slots=7) as (cpu, gpu):
        same_steps(cpu, gpu, (2, 1), (2,))
        counters = gpu.expert_counters()
    assert counters is not None
    hits, misses, fills, n_on_cpu, _ = counters.sum(axis=0).tolist()
    assert hits > 0 and misses == fills > 7, "more were filled than there are slots"
    assert n_on_cpu == 0


def test_steps_that_follow_a_text(tmp_path: Path) -> None:
    """Each is launched before the one ahead has ended, with the text's token instead of the sampled one."""
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3", file_type="F16", n_layer=1, n_vocab=N_VOCAB)
    with both(path) as (cpu, gpu):
        logits = []
        for runner in (cpu, gpu):
            sequence = runner.new_sequence()
            runner.follow(sequence, [5, 9, 7])
            assert sequence.tokens == [5, 9, 7]
            logits.append(runner.decode([sequence], [11]))
        np.testing.assert_array_equal(logits[0].view(np.int32), logits[1].view(np.int32))


CASES = [("llama", "Q4_1"), ("gemma3", "Q4_0"), ("olmoe", "F16")]


@pytest.mark.parametrize(("arch", "file_type"), CASES)
def test_steps_have_the_bits_of_the_cpu(arch: str, file_type: str, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, file_type=file_type, n_layer=1, n_vocab=N_VOCAB)
    with both(path) as (cpu, gpu):
        same_steps(cpu, gpu, (3,), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("arch", tiny_models.ARCHITECTURES)
@pytest.mark.parametrize("file_type", ["F32", "Q8_0", "mixed"])
def test_steps_of_every_architecture(arch: str, file_type: str, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, file_type=file_type, n_layer=2, n_vocab=N_VOCAB)
    with both(path) as (cpu, gpu):
        same_steps(cpu, gpu, (8, 7, 5), (3, 1, 2))


@pytest.mark.parametrize("n_gpu_layers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_first_layers_on_the_cpu(n_gpu_layers: int, tmp_path: Path) -> None:
    """-ngl counts the head first: 1 is the head alone, 2 the last layer too."""
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3", file_type="F16", n_layer=2, n_vocab=N_VOCAB)
    with both(path, n_gpu_layers=n_gpu_layers) as (cpu, gpu):
        assert gpu.gpu is not None and gpu.gpu.first_layer == 3 - n_gpu_layers
        same_steps(cpu, gpu, (3,), (1,))
        prompt = np.random.default_rng(2).integers(3, N_VOCAB, 60).tolist()
        a, b = cpu.new_sequence(), gpu.new_sequence()
        want, got = cpu.prefill(a, prompt), gpu.prefill(b, prompt)
        assert want is not None and got is not None
        assert np.abs(got - want).max() < 0.01 * want.std()


CODES = ("IQ1_S", "TQ1_0", "NVFP4")
"""Types of gate, up and down, and of the others by turns."""


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture whose matrices are all of such types, those of IQ1_S random: ggml takes long to quantise the first."""

    def quantise(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
        if kind.name != "IQ1_S":
            return made(values, kind)
        *rows, cols = values.shape
        raw = random_rows(np.random.default_rng(values.size), kind, int(np.prod(rows)), cols, float(values.std()))
        return raw.reshape(*rows, -1)

    made = tiny_models.quantise
    monkeypatch.setattr(tiny_models, "quantise", quantise)
    monkeypatch.setattr(tiny_models, "MIXED_CYCLE", CODES)
    sizes = FEW_EXPERTS | {"n_ff_exp": 256}
    return tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="mixed", n_layer=1, n_vocab=N_VOCAB, **sizes)


def test_types_without_an_integer_form_stay_quantised(codes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is made ready, and not run."""
    monkeypatch.setattr(GpuExperts, "load_residents", lambda self, pool: None)
    with open_model(codes) as file:
        assert why_not(file, read_spec(file)) == ""
    with both(codes) as (_, gpu):
        assert gpu.gpu is not None and gpu.gpu.experts is not None
        gpu.gpu.decoder.program(2, 2, 5)
        kinds = {matrix.type for matrix, _ in gpu.gpu._weights._parts.values()}
        assert kinds == {GgmlType[name] for name in CODES} | {GgmlType.F32}  # routers


@pytest.mark.slow
def test_steps_of_types_without_an_integer_form(codes: Path) -> None:
    with both(codes, n_slots=4) as (cpu, gpu):
        same_steps(cpu, gpu, (2,), (1,))


def test_more_layers_bring_no_more_kinds_of_launches(tmp_path: Path) -> None:
    counts = []
    for n_layer in (2, 4):
        path = tiny_models.write(tmp_path / f"{n_layer}.gguf", "qwen3moe", n_layer=n_layer, n_vocab=N_VOCAB)
        with both(path) as (_, gpu):
            launches = gpu.gpu.decoder.program(1, 1, 5).lowered.launches  # type: ignore[union-attr]
            counts.append((len(launches), len(list(first_of_each_kind(launches)))))
    assert counts[1][0] > 1.5 * counts[0][0] and counts[1][1] == counts[0][1] < 20
