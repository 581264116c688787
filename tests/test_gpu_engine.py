"""The GPU engine under Triton's interpreter: the bits of the CPU engine, slots and fills included, and its loop."""

from __future__ import annotations

import kernel_bits  # noqa: F401  isort: skip

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from freetoken.gguf import open_model
from freetoken.gpu.experts import GpuExperts
from freetoken.gpu.place import Placement, _why_not, make_plan
from freetoken.options import EngineOptions
from freetoken.quants import GgmlType
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

N_CTX = 300
SMALL = {"n_layer": 2, "n_vocab": 264}


@contextmanager
def both(path: Path, **options: object) -> Iterator[tuple[Runner, Runner]]:
    """A runner on the CPU and one whose device is the interpreter."""
    wishes = EngineOptions(**{"n_threads": 1, "n_ctx": N_CTX, "n_gpu_layers": -2, **options})  # type: ignore[arg-type]
    with open_model(path) as file:
        spec = read_spec(file)
        plan = make_plan(file, spec, wishes, 1 << 30, N_CTX, 3)
        on_cpu = Runner(file, spec, dataclasses.replace(wishes, n_gpu_layers=0), n_ctx=N_CTX, n_sequences=3)
        on_gpu = Runner(file, spec, wishes, n_ctx=N_CTX, n_sequences=3, placement=Placement("cpu", plan))
        try:
            yield on_cpu, on_gpu
        finally:
            on_cpu.close()
            on_gpu.close()


def same_steps(cpu: Runner, gpu: Runner, batches: tuple[int, ...]) -> None:
    """Logits of the same tokens, bit by bit: a short prompt of each sequence, then steps of several."""
    rng = np.random.default_rng(1)
    a, b = ([runner.new_sequence() for _ in range(max(batches))] for runner in (cpu, gpu))
    for n, (x, y) in enumerate(zip(a, b, strict=True), 2):
        tokens = rng.integers(3, 264, n).tolist()
        want, got = cpu.prefill(x, tokens), gpu.prefill(y, tokens)
        assert want is not None and got is not None
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))
    for n in batches:
        tokens = rng.integers(3, 264, n).tolist()
        want, got = cpu.decode(a[:n], tokens), gpu.decode(b[:n], tokens)
        np.testing.assert_array_equal(got.view(np.int32), want.view(np.int32))


@pytest.mark.parametrize(
    ("arch", "file_type"), [("llama", "Q8_0"), ("gemma3", "Q4_0"), ("qwen2moe", "Q8_0"), ("olmoe", "F16")]
)
def test_steps_have_the_bits_of_the_cpu(arch: str, file_type: str, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, file_type=file_type, **SMALL)  # type: ignore[arg-type]
    with both(path) as (cpu, gpu):
        same_steps(cpu, gpu, (1,))


@pytest.mark.slow
@pytest.mark.parametrize("n_gpu_layers", [1, 2])
def test_first_layers_on_the_cpu(n_gpu_layers: int, tmp_path: Path) -> None:
    """-ngl counts the head first: 1 is the head alone, 2 the last layer too."""
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3", file_type="F16", **SMALL)  # type: ignore[arg-type]
    with both(path, n_gpu_layers=n_gpu_layers) as (cpu, gpu):
        assert gpu.gpu is not None and gpu.gpu.first_layer == 3 - n_gpu_layers
        same_steps(cpu, gpu, (1,))
        prompt = np.random.default_rng(2).integers(3, 264, 60).tolist()
        a, b = cpu.new_sequence(), gpu.new_sequence()
        want, got = cpu.prefill(a, prompt), gpu.prefill(b, prompt)
        assert want is not None and got is not None
        assert np.abs(got - want).max() < 0.01 * want.std()


CODES = ("IQ1_S", "TQ1_0", "NVFP4")
"""Types of gate, up and down, and of the others by turns."""


@pytest.fixture
def codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mixture whose matrices are all of such types."""
    monkeypatch.setattr(tiny_models, "MIXED_CYCLE", CODES)
    return tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="mixed", **SMALL | {"n_layer": 1})  # type: ignore[arg-type]


def test_types_without_an_integer_form_stay_quantised(codes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is made ready, and not run."""
    monkeypatch.setattr(GpuExperts, "load_residents", lambda self: None)
    with open_model(codes) as file:
        assert _why_not(file, read_spec(file)) == ""
    with both(codes) as (_, gpu):
        assert gpu.gpu is not None and gpu.gpu.experts is not None
        gpu.gpu.decoder.program(2, 2, 5)
        kinds = {matrix.type for matrix, _ in gpu.gpu._weights._parts.values()}
        assert kinds == {GgmlType[name] for name in CODES} | {GgmlType.F32}  # routers


@pytest.mark.slow
def test_steps_of_types_without_an_integer_form(codes: Path) -> None:
    with both(codes) as (cpu, gpu):
        same_steps(cpu, gpu, (1,))
