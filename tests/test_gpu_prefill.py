"""A prompt on the GPU's kernels, under Triton's interpreter, against the CPU's prefill, for every architecture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken import arch, native
from freetoken.batch import Batch, Stopped
from freetoken.blocks import Weight
from freetoken.cpu.prefill import Prefill as CpuPrefill
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.memory import slot_sizes
from freetoken.experts.stream import ExpertStream, Part, choose_plan
from freetoken.gguf import open_model
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.mixture import cut, spread
from freetoken.gpu.prefill import Prefill
from freetoken.gpu.scratch import Scratch
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels import layout
from freetoken.kvcache import KVCache, KVShape
from freetoken.prompt_memory import row_bytes
from freetoken.spec import ModelSpec, read_spec
from tools import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""Rows of experts that a later group computes are halved with those around them, whatever the scratch holds there."""

DEVICE = torch.device("cpu")
N_TOKENS = 10
BOUND = 2e-3
"""Size of the difference over that of the logits: roundings to fp16, three to seven layers deep."""


@pytest.fixture(scope="module")
def threads() -> Iterator[native.Pool]:
    pool = native.Pool(2)
    yield pool
    pool.close()


class Embedding(DeviceWeights):
    """Dense weights, with embeddings decoded on the host."""

    def embed(self, weight: Weight, tokens: np.ndarray, out: torch.Tensor) -> None:
        x = np.empty((len(tokens), weight.cols), np.float32)
        self._pool.dequantize(weight.type, np.ascontiguousarray(weight.data[tokens]), x)
        out.copy_(torch.from_numpy(x))


@dataclass
class Pool:
    """Experts of a file, of which a share has slots."""

    layers: tuple[LayerBanks | None, ...]
    n_used: int
    staging_layers: float = 2.0
    share: float = 0.0
    edges: tuple[int, ...] = ()
    offsets: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = [layer for layer in self.layers if layer is not None]
        largest = max((layer.expert_bytes * layer.banks[0].n_expert for layer in known), default=0)
        self.staging = torch.zeros(int(self.staging_layers * (largest + 2048)), dtype=torch.uint8)
        n_expert = max((layer.banks[0].n_expert for layer in known), default=1)
        self.slots = np.full((len(self.layers), n_expert), -1, np.int32)
        sizes = slot_sizes(self.layers)
        self.memory = torch.zeros((len(known) * n_expert, max(sizes, default=0)), dtype=torch.uint8)

        rng = np.random.default_rng(3)
        self.place_some(lambda layer, expert: rng.random() < self.share)

    def place_some(self, is_placed: Callable[[int, int], bool]) -> None:
        for slot, (layer, expert) in enumerate(np.ndindex(*self.slots.shape)):
            if is_placed(layer, expert):
                self.place(layer, expert, slot)

    def place(self, layer: int, expert: int, slot: int) -> None:
        banks, at = self.layers[layer], 0
        assert banks is not None
        offsets = []
        for bank in banks.banks:
            size = layout.slot_bytes(bank.type, bank.rows, bank.cols)
            layout.relay(bank.type, torch.from_numpy(bank.data[expert].copy()), self.memory[slot, at : at + size])
            offsets.append(at)
            at += size
        self.offsets[layer] = tuple(offsets)
        self.slots[layer, expert] = slot

    def pool(self, layer: int) -> torch.Tensor:
        return self.memory

    def slot_of(self) -> np.ndarray:
        return self.slots.copy()


class Model:
    """An open tiny file with both prefills over caches of the same pages."""

    def __init__(self, path: Path, threads: native.Pool, scratch: Scratch | None = None, **pool: object) -> None:
        self.file = open_model(path)
        self.spec = read_spec(self.file)
        self.model = arch.build(self.file, self.spec)
        shapes = shapes_of(self.spec)
        self.kv, self.cache = DeviceKV(shapes, 3, "f16", DEVICE), KVCache(shapes, 3)
        self.cpu = CpuPrefill(threads, self.model, self.cache, lambda x, w: x @ values(w, threads).T)
        self.weights = Embedding(DEVICE, threads)
        self.pool = None
        if self.spec.is_moe:
            self.pool = Pool(expert_banks(self.spec, self.file), self.spec.n_expert_used, **pool)  # type: ignore[arg-type]
        self.gpu = Prefill(
            self.model, self.weights, self.kv, lambda x, w: x @ torch.from_numpy(values(w, threads).T), DEVICE,
            self.pool, scratch=scratch or Scratch(DEVICE, 4 << 20),
        )  # fmt: skip

    def batch(self, start: int, n: int, n_outputs: int = 2) -> Batch:
        tokens = np.random.default_rng(3).integers(3, self.spec.n_vocab, 600).astype(np.int32)
        table = np.array([2, 0, 1], np.int32)
        return Batch(tokens[start : start + n], np.arange(start, start + n, dtype=np.int32), [table] * n, n_outputs)


def shapes_of(spec: ModelSpec) -> list[KVShape]:
    return [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]


def values(weight: Weight, threads: native.Pool) -> np.ndarray:
    out = np.empty((weight.rows, weight.cols), np.float32)
    threads.dequantize(weight.type, weight.data, out)
    return out


def difference(found: torch.Tensor, want: np.ndarray) -> float:
    assert want.std() > 1
    return float(np.linalg.norm(found.numpy() - want) / np.linalg.norm(want))


CASES = [
    *(
        ("llama", "F32"),
        ("qwen2", "F32"),
        ("qwen2moe", "F32"),
        ("qwen3moe", "Q4_1"),
        ("gemma3", "F32"),
        ("olmoe", "F16"),
    ),
]
LONG_CASES = [
    *((name, "F32") for name in tiny_models.ARCHITECTURES),
    *(("qwen3moe", kind) for kind in ("mixed", "Q4_K_M", "Q8_0")),
    *(("llama", "Q4_1"), ("gemma3", "Q4_K_M"), ("qwen2moe", "mixed")),
]


def check_chunks(name: str, kind: str, path: Path, threads: native.Pool, chunks: list[tuple[int, int]]) -> None:
    """Logits and keys and values of (start, tokens); half of the experts have slots."""
    n_layer = None if name.startswith("gemma3") else 2
    m = Model(tiny_models.write(path, name, file_type=kind, n_layer=n_layer), threads)
    if m.pool is not None:
        m.pool.place_some(lambda layer, expert: (layer + expert) % 2 == 1)
    end = 0
    for start, n in chunks:
        if start > end:
            fill_cache(m, end, start)
        batch, end = m.batch(start, n), start + n
        want = m.cpu.run(batch)
        assert difference(m.gpu.run(batch), want) < BOUND
        for mine, theirs in ((m.kv.k, m.cache.k), (m.kv.v, m.cache.v)):
            for layer, pages in enumerate(theirs):
                assert np.allclose(mine[layer][2, :, start : start + 6], pages[2, :, start : start + 6], atol=2e-2)
    m.file.close()


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_and_cache(name: str, kind: str, tmp_path: Path, threads: native.Pool) -> None:
    """gemma3 goes across a page and has windows that begin within one."""
    check_chunks(name, kind, tmp_path / "tiny.gguf", threads, [(250, 11)] if name == "gemma3" else [(0, 11)])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), LONG_CASES)
def test_logits_and_cache_of_all(name: str, kind: str, tmp_path: Path, threads: native.Pool) -> None:
    check_chunks(name, kind, tmp_path / "tiny.gguf", threads, [(0, 21), (250, 12)])


def fill_cache(m: Model, first: int, end: int) -> None:
    m.cpu.run(m.batch(first, end - first))
    for mine, theirs in ((m.kv.k, m.cache.k), (m.kv.v, m.cache.v)):
        for layer, pages in enumerate(theirs):
            mine[layer][:3] = torch.from_numpy(pages)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "tiny.gguf"
    return tiny_models.write(path, "qwen3moe", file_type="Q8_0", n_layer=3, n_used=2, n_ff_exp=64)


def test_bits_do_not_depend_on_where_experts_come_from(mixed: Path, threads: native.Pool) -> None:
    """No slots, some, all; streamed, on demand; two layers' room, less than one; small scratch."""
    found = []
    for share, plan, staging, scratch in (
        (0.0, "stream", 2.0, None),
        (0.5, "on_demand", 0.7, None),
        (0.3, "stream", 0.7, Scratch(DEVICE, 300_000)),
        (1.0, "stream", 0.0, Scratch(DEVICE, 16 << 20)),
    ):
        m = Model(mixed, threads, scratch, staging_layers=staging, share=share)
        found.append(m.gpu.run(m.batch(0, N_TOKENS), plan=plan))
        m.file.close()
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.slow  # test_survivors has it by default
def test_experts_that_move_between_layers(mixed: Path, threads: native.Pool) -> None:
    """A decode step between two layers takes slots from some experts and gives them to others."""
    m = Model(mixed, threads)
    assert m.pool is not None
    want = m.gpu.run(m.batch(0, N_TOKENS), plan="stream")
    n_expert = m.pool.slots.shape[1]
    for expert in range(n_expert):
        m.pool.place(2, expert, expert)
    calls = []

    def between() -> bool:
        assert m.pool is not None
        calls.append(0)
        m.pool.slots[2, ::2] = -1
        m.pool.place(1, 3, 0)
        return True

    assert torch.equal(m.gpu.run(m.batch(0, N_TOKENS), between_layers=between, plan="stream"), want)
    assert len(calls) == 2
    m.file.close()


def test_stopping(mixed: Path, threads: native.Pool) -> None:
    m = Model(mixed, threads)
    answers = iter([False, True])
    with pytest.raises(Stopped):
        m.gpu.run(m.batch(0, N_TOKENS), lambda: next(answers))
    want = m.cpu.run(m.batch(0, N_TOKENS))
    assert difference(m.gpu.run(m.batch(0, N_TOKENS)), want) < BOUND
    m.file.close()


@pytest.mark.slow  # test_survivors has it by default
def test_staged_experts_can_be_kept(mixed: Path, threads: native.Pool) -> None:
    m = Model(mixed, threads)
    heard: list[int] = []

    class Keeper:
        def __call__(self, layer: int, tail_counts: np.ndarray, part: Part, slot_of: np.ndarray) -> None:
            assert m.pool is not None and part.staged is not None and slot_of.shape == m.pool.slots.shape
            banks = m.pool.layers[layer]
            assert banks is not None and tail_counts.sum() == (N_TOKENS if layer < 2 else 2) * m.pool.n_used
            staged = part.first + np.flatnonzero(part.staged.experts)
            for bank, base in zip(banks.banks, part.bases, strict=True):
                for expert in staged.tolist():
                    at = base + expert * bank.expert_bytes - m.pool.staging.data_ptr()
                    assert np.array_equal(m.pool.staging[at : at + bank.expert_bytes].numpy(), bank.data[expert])
            heard.append(len(staged))

        def begin(self) -> None:
            heard.clear()

        def flush(self) -> None:
            pass

    m.gpu = Prefill(
        m.model, m.weights, m.kv, lambda x, w: x[:, :1], DEVICE, m.pool, scratch=Scratch(DEVICE, 4 << 20), keep=Keeper()
    )
    m.gpu.run(m.batch(0, N_TOKENS), plan="stream")
    assert len(heard) == 3 and heard[0] == 10
    m.file.close()


@pytest.mark.parametrize("name", ["llama", "qwen2moe", "qwen3moe", "gemma3", "olmoe"])
def test_rows_take_no_more_than_planned(name: str, tmp_path: Path, threads: native.Pool) -> None:
    m = Model(tiny_models.write(tmp_path / "tiny.gguf", name, file_type="F16"), threads)
    plan = m.gpu.program().plan
    assert max(plan.row_bytes, plan.tail_bytes) <= row_bytes(m.spec)
    m.file.close()


def test_runs_end_where_a_locked_range_ends(mixed: Path, threads: native.Pool) -> None:
    m = Model(mixed, threads)
    assert m.pool is not None and m.pool.layers[0] is not None
    bank = m.pool.layers[0].banks[1]
    size = bank.expert_bytes
    m.pool.edges = (bank.address + 2 * size + 5, bank.address + 4 * size)
    for expert in (5, 6):
        m.pool.place(0, expert, expert)
    stream = ExpertStream(m.pool, DEVICE)
    runs: list[list[int]] = []
    stream.copies.copy = lambda r: runs.extend(r.tolist())  # type: ignore[method-assign]
    stream.begin(100, 100, "stream")
    mine = [(start - bank.address, n) for _, start, n in runs if bank.address <= start < bank.address + 10 * size]
    first = 2 * size + 5
    assert mine == [(0, first), (first, 2 * size - 5), (4 * size, size), (7 * size, 3 * size)]
    m.file.close()


def test_copies_in_one_call() -> None:
    """The native loop hands each run and the stream to the driver's function, and stops at its first error."""
    seen: list[tuple[int, int, int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    def copy(to: int, start: int, n_bytes: int, stream: int) -> int:
        seen.append((to, start, n_bytes, stream))
        return 7 if n_bytes == 30 else 0

    address = ctypes.cast(copy, ctypes.c_void_p).value
    assert address is not None
    runs = np.array([[1 << 40, 11, 10], [2, 12, 20], [3, 13, 30], [4, 14, 40]], np.uint64)
    assert native.copy_runs(address, runs[:2], 99) == 0
    assert seen == [(1 << 40, 11, 10, 99), (2, 12, 20, 99)]
    assert native.copy_runs(address, runs, 99) == 7
    assert len(seen) == 5
    with pytest.raises(EngineError, match=r"uint64 \[n, 3\]"):
        native.copy_runs(address, runs.astype(np.int64), 99)


def test_plan() -> None:
    class Banks:
        """A layer of Qwen3-30B-A3B: 128 experts of 2.77 MB."""

        banks = tuple(type("Bank", (), {"n_expert": 128, "rows": r, "cols": c}) for r, c in ((768, 2048),) * 3)
        expert_bytes = 2_770_000

    plans = {n: choose_plan(n, Banks, 8, 80.0) for n in (9, 64, 512, 4096)}  # type: ignore[arg-type]
    assert plans == {9: "on_demand", 64: "on_demand", 512: "stream", 4096: "stream"}
    assert choose_plan(9, Banks, 8, 0.0) == "on_demand"  # type: ignore[arg-type]


def test_groups() -> None:
    counts = np.array([0, 3, 2, 0, 9, 1, 1])
    groups = [(g.experts.tolist(), g.first, g.end) for g in cut(counts, 10, 2, 4)]
    assert groups == [([1], 10, 13), ([2], 13, 15), ([4], 15, 19), ([4], 19, 23), ([4, 5], 23, 25), ([6], 25, 26)]


def test_groups_of_experts_in_slots_come_first() -> None:
    counts = np.array([2, 0, 1, 3, 1, 4])
    is_slot = np.array([False, True, True, False, True, True])
    groups = [(g.experts.tolist(), g.first, g.end) for g in spread(counts, 10 + counts.cumsum(), is_slot, 2)]
    assert groups == [([2, 4], 12, 17), ([5], 17, 21), ([0, 3], 10, 16)]


def test_too_little_memory_for_streaming(mixed: Path, threads: native.Pool) -> None:
    m = Model(mixed, threads, staging_layers=0.02)
    with pytest.raises(EngineError, match="does not hold two experts of layer 0"):
        m.gpu.run(m.batch(0, N_TOKENS), plan="stream")
    m.file.close()
