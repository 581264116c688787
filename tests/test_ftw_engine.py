"""Engines on FTW files: the bits of the GGUF file, on the CPU and, under Triton's interpreter, on the GPU."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_ftw import split_gguf, to_ftw
from test_gpu_engine import FEW_EXPERTS, N_VOCAB, wide_programs  # noqa: F401
from test_gpu_prefill import Model, threads  # noqa: F401

from freetoken import native
from freetoken.cli.expert_banks import model_banks
from freetoken.cli.main import main
from freetoken.errors import EngineError, PinRefusedError
from freetoken.experts.bank import Bank, LayerBanks, Span, expert_banks, pin_plan
from freetoken.experts.measure import CpuSide, read_gbs
from freetoken.experts.pin import Rung, pin_banks
from freetoken.gguf import open_model
from freetoken.gpu.place import Placement, make_plan
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec
from freetoken.tokenizer import Tokenizer
from tools import tiny_models

N_CTX = 300


def logits_hash(
    path: Path,
    prompts: tuple[int, ...] = (5, 70, 1),
    batches: tuple[int, ...] = (1, 3, 2, 3),
    backend: str = "",
    n_slots: tuple[int, ...] = (),
) -> str:
    """Of a prompt for each sequence, and of steps of several; with a backend by the GPU engine on the interpreter."""
    wishes = EngineOptions(n_threads=2, n_ctx=N_CTX, n_gpu_layers=-2 if backend else 0, moe_cpu_threads=1)
    found, rng = hashlib.sha256(), np.random.default_rng(1)
    with open_model(path) as file:
        spec = read_spec(file)
        placement = None
        if backend:
            plan = make_plan(file, spec, wishes, 1 << 30, N_CTX, 3)
            placement = Placement("cpu", replace(plan, backend=backend, n_slots=n_slots or plan.n_slots))
        runner = Runner(file, spec, wishes, n_ctx=N_CTX, n_sequences=3, placement=placement)
        try:
            sequences = [runner.new_sequence() for _ in prompts]
            for sequence, n in zip(sequences, prompts, strict=True):
                logits = runner.prefill(sequence, rng.integers(3, N_VOCAB, n).tolist())
                assert logits is not None
                found.update(logits.tobytes())
            for n in batches:
                found.update(runner.decode(sequences[:n], rng.integers(3, N_VOCAB, n).tolist()).tobytes())
        finally:
            runner.close()
    return found.hexdigest()


CASES = [
    ("llama", "Q4_0"),
    ("llama-moe", "Q8_0"),
    ("qwen2", "F16"),  # tied
    ("qwen2moe", "mixed"),  # a shared expert
    ("qwen3moe", "mixed"),
    ("qwen3moe", "Q4_K_M"),
    ("qwen3moe", "IQ4_NL"),
    ("gemma3", "Q5_1"),
    ("olmoe", "F32"),
    ("olmoe", "BF16"),
]


@pytest.mark.parametrize(("arch", "file_type"), CASES)
def test_logits_have_the_bits_of_the_gguf(arch: str, file_type: str, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, file_type=file_type, n_layer=2, n_vocab=N_VOCAB)
    assert logits_hash(to_ftw(path, tmp_path / "m.ftw")) == logits_hash(path)


def test_logits_of_split_files(tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", "qwen3moe", file_type="mixed", n_layer=3, n_vocab=N_VOCAB)
    want = logits_hash(path)
    parts = split_gguf(path, tmp_path / "parts", 7)
    assert logits_hash(parts) == want
    assert logits_hash(to_ftw(parts, tmp_path / "one.ftw")) == want
    several = to_ftw(parts, tmp_path / "several.ftw", max_bytes=2_500_000)
    assert len(list(tmp_path.glob("several-*"))) > 1
    assert logits_hash(several) == want


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A mixture as GGUF and as FTW, matrices of an expert of different types."""
    folder = tmp_path_factory.mktemp("files")
    sizes = FEW_EXPERTS | {"n_ff_exp": 256}
    path = tiny_models.write(folder / "m.gguf", "qwen2moe", file_type="Q4_K_M", n_layer=2, n_vocab=N_VOCAB, **sizes)
    return path, to_ftw(path, folder / "m.ftw")


@pytest.mark.parametrize(("backend", "n_slots"), [("fused", ()), ("offload", (7,)), ("cpu", (7,))])
def test_steps_on_the_gpu(backend: str, n_slots: tuple[int, ...], files: tuple[Path, Path]) -> None:
    """Residents, fills, and experts that the CPU computes in the middle of the GPU's step: the CPU engine's bits."""
    prompts, batches = (3,), (1, 1)
    gguf, ftw = files
    assert logits_hash(ftw, prompts, batches, backend, n_slots) == logits_hash(gguf, prompts, batches)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("plan", "staging_layers", "share"), [("stream", 3.0, 0.4), ("on_demand", 0.9, 0.0)])
def test_streamed_prompts(
    plan: str,
    staging_layers: float,
    share: float,
    files: tuple[Path, Path],
    threads: native.Pool,  # noqa: F811
) -> None:
    """Whole layers and parts of them, beside experts that have slots; copies end where a locked range does."""
    results = []
    for path in files:
        m = Model(path, threads, staging_layers=staging_layers, share=share)
        assert m.pool is not None and m.pool.layers[1] is not None
        run = m.pool.layers[1].runs[0]
        m.pool.edges = (run.address + 2 * run.stride + 5, run.address + 4 * run.stride)
        results.append(m.gpu.run(m.batch(0, 10), plan=plan))
        m.file.close()
    assert torch.equal(*results)


# --- banks -----------------------------------------------------------------------------------------------------------


def banks_of(path: Path) -> tuple[LayerBanks, ...]:
    file = open_model(path)
    layers = expert_banks(read_spec(file), file)
    return tuple(layer for layer in layers if layer is not None)


def test_a_layer_is_one_run(files: tuple[Path, Path]) -> None:
    """One piece of memory from the first expert to the end of the last, in which the banks are."""
    for dense, strided in zip(banks_of(files[0]), banks_of(files[1]), strict=True):
        assert [len(layer.runs) for layer in (dense, strided)] == [3, 1] and dense.stride == 0
        run = strided.runs[0]
        assert run.stride == strided.stride == strided.banks[0].stride and run.stride % 4096 == 0
        for i, (bank, other) in enumerate(zip(strided.banks, dense.banks, strict=True)):
            assert np.array_equal(bank.data, other.data) and bank.expert_bytes == other.expert_bytes
            assert np.array_equal(run.data[:, run.starts[i] : run.starts[i] + bank.expert_bytes], bank.data)
        assert sum(bank.expert_bytes for bank in strided.banks) <= run.stride
        assert dense.expert_bytes == strided.expert_bytes


def test_pages_of_layers_are_apart(files: tuple[Path, Path]) -> None:
    """So each layer is one range to lock, and refusing one leaves the others whole."""
    layers = banks_of(files[1])
    plan = pin_plan([layer.spans for layer in layers], 4096)
    assert plan.of_layer == ((0,), (1,))
    for layer, span in zip(layers, plan.ranges, strict=True):
        assert (span.start, span.n_bytes) == (layer.banks[0].span.start, layer.runs[0].data.nbytes)


def test_copied_layers_are_without_gaps(files: tuple[Path, Path]) -> None:
    layers = banks_of(files[1])

    def refuse(address: int, n_bytes: int) -> None:
        raise PinRefusedError("no")

    pinned = pin_banks(layers, refuse, lambda address: None, allocate=lambda n: np.zeros(n, np.uint8))
    assert pinned.rungs == (Rung.COPIED, Rung.COPIED)
    for layer, copy in zip(layers, pinned.layers, strict=True):
        assert copy is not None and copy.stride == 0 and len(copy.runs) == 3
        assert all(np.array_equal(a.data, b.data) for a, b in zip(layer.banks, copy.banks, strict=True))
    pinned.close()


def test_banks_at_different_distances() -> None:
    """What no file of ours has is an error, not wrong bytes."""
    memory = np.zeros(1 << 14, np.uint8)
    banks = []
    for name, stride in (("gate", 512), ("up", 512), ("down", 1024)):
        data = np.lib.stride_tricks.as_strided(memory, (4, 64), (stride, 1))
        banks.append(Bank(name, 0, 4, 4, data, Span(0, 0, 64)))
    with pytest.raises(EngineError, match="bytes apart"):
        _ = LayerBanks(0, tuple(banks)).runs


def test_a_distance_without_room_is_malformed(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The native operations refuse it, those of a step and those of a prompt."""
    with open_model(files[1]) as file:
        runner = Runner(file, read_spec(file), EngineOptions(n_threads=1, n_gpu_layers=0), n_ctx=N_CTX, n_sequences=1)
        monkeypatch.setattr("freetoken.blocks.Experts.stride", 4096)
        for n in (2, 60):
            with pytest.raises(EngineError, match="malformed"):
                runner.prefill(runner.new_sequence(), [5] * n)
        runner.close()


def test_measuring(files: tuple[Path, Path]) -> None:
    """Experts on the CPU and plain reads take banks of either kind."""
    with native.Pool(2) as pool:
        for path in files:
            layers = list(banks_of(path))
            assert read_gbs(pool, layers, 0.0) > 0
            alike = [layer for layer in layers if [b.type for b in layer.banks] == [b.type for b in layers[0].banks]]
            assert CpuSide(pool, alike).seconds(2, 0.0) > 0
    with open_model(files[0]) as a, open_model(files[1]) as b:
        for one, other in zip(model_banks(a), model_banks(b), strict=True):
            assert (one.n_bytes, one.expert_bytes) == (other.n_bytes, other.expert_bytes)
            for some, others in zip(one.pieces, other.pieces, strict=True):
                assert np.array_equal(np.concatenate(some), np.concatenate(others))


# --- real files ------------------------------------------------------------------------------------------------------


def same_answers(path: Path, folder: Path) -> None:
    """Vocabulary and greedy text."""
    ftw = to_ftw(path, folder / "m.ftw")
    texts = []
    for each in (path, ftw):
        with open_model(each) as file:
            spec = read_spec(file)
            tokenizer = Tokenizer(file.shards[0].path, file.metadata)
            runner = Runner(file, spec, EngineOptions(n_threads=2, n_gpu_layers=0), n_ctx=256, n_sequences=1)
            sequence = runner.new_sequence()
            tokens = tokenizer.encode("The capital of France is", add_special=True, parse_special=True)
            logits = runner.prefill(sequence, tokens)
            for _ in range(12):
                assert logits is not None
                tokens.append(int(np.argmax(logits[-1])))
                logits = runner.decode([sequence], tokens[-1:])
            assert logits is not None
            texts.append((tokens, logits.tobytes()))
            runner.close()
    assert texts[0] == texts[1]


def test_the_default_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).resolve().parent.parent / "models" / "freetoken-small-moe.gguf"
    same_answers(path, tmp_path)
    answers = []
    for each in (path, tmp_path / "m.ftw"):
        assert main(["run", "-m", str(each), "-p", "Where is Paris?", "-n", "12", "--temp", "0", "-ngl", "0"]) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1] and answers[0].strip()


@pytest.mark.weights
def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    same_answers(smollm2_path, tmp_path)
