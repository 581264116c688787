"""Experts that a prompt leaves in slots: right bytes in every slot, and the logits of an engine that keeps them all."""

from __future__ import annotations

import kernel_bits  # noqa: F401  isort: skip

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken.experts.device import SlotCache
from freetoken.experts.slots import SizeClass, SlotState
from freetoken.gguf import open_model
from freetoken.gpu.experts import GpuExperts
from freetoken.gpu.place import Placement, make_plan
from freetoken.kernels import layout
from freetoken.kernels.fills import fill
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
"""Rows of experts that a later group computes are halved with those around them, whatever the scratch holds there."""

N_CTX = 600


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("survivors")
    return tiny_models.write(folder / "m.gguf", "qwen3moe", file_type="F16", n_layer=3, n_vocab=264)


@contextmanager
def runner(path: Path, n_slots: int, n_buffers: int = 0, buffer_slots: int = 10) -> Iterator[Runner]:
    """A runner on the interpreter with so many slots, the last of them for n_buffers prefill buffers; 0: fused."""
    wishes = EngineOptions(n_threads=1, n_ctx=N_CTX, n_gpu_layers=-2)
    with open_model(path) as file:
        spec = read_spec(file)
        plan = make_plan(file, spec, wishes, 2 << 30, N_CTX, 2)
        assert plan.backend == "fused"
        if n_slots:
            plan = dataclasses.replace(
                plan,
                backend="offload",
                n_slots=(n_slots,),
                n_buffers=n_buffers,
                buffer_pool=0,
                buffer_slots=buffer_slots,
            )
        made = Runner(file, spec, wishes, n_ctx=N_CTX, n_sequences=2, placement=Placement("cpu", plan))
        try:
            yield made
        finally:
            made.close()


def experts_of(made: Runner) -> GpuExperts:
    found = made.gpu.experts  # type: ignore[union-attr]
    assert isinstance(found, GpuExperts)
    return found


def check_slots(experts: GpuExperts) -> int:
    """Every slot that the cache knows holds its expert; returns how many there are."""
    slot_of = experts.cache.tensors.slot_of.numpy()
    owner = experts.cache.tensors.owner.numpy()
    for layer, expert in np.argwhere(slot_of >= 0).tolist():
        slot, pool = int(slot_of[layer, expert]), experts.state.pool_of[layer]
        assert owner[pool.first + slot] == layer * experts.n_expert + expert
        banks = experts.layers[layer]
        memory = experts.memory.of_pool(pool)[slot]
        assert banks is not None
        for bank, at in zip(banks.banks, experts.offsets[layer], strict=True):
            want = torch.zeros(layout.slot_bytes(bank.type, bank.rows, bank.cols), dtype=torch.uint8)
            layout.relay(bank.type, torch.from_numpy(bank.data[expert].copy()), want)
            assert torch.equal(memory[at : at + len(want)], want), (layer, expert, slot)
    assert (owner >= 0).sum() == (slot_of >= 0).sum()
    return int((slot_of >= 0).sum())


def logits_of(made: Runner, prompts: tuple[int, ...], n_steps: int, *, is_mixed: bool = False) -> list[np.ndarray]:
    """Logits of prompts of so many tokens, one after another in one sequence, each followed by decode steps. With
    `is_mixed` experts move between their layers, as other requests' steps would make them."""
    rng = np.random.default_rng(5)
    sequence, found = made.new_sequence(), []
    experts = experts_of(made)

    def between() -> bool:
        for layer in range(3):
            step = experts.cache.step(layer, torch.from_numpy(rng.permutation(10)[:3].astype(np.int32))[None])
            banks, pool = experts.memory.banks(layer), experts.memory.pools[layer]
            fill(banks, pool, step.fill_expert, step.fill_slot, step.counts, n_programs=2)
        check_slots(experts)
        return True

    for n in prompts:
        tokens = np.random.default_rng(n).integers(3, 264, n).tolist()
        logits = made.prefill(sequence, tokens, between_layers=between if is_mixed else None)
        assert logits is not None
        found.append(logits)
        check_slots(experts)
        for i in range(n_steps):
            found.append(made.decode([sequence], [20 + i])[0])
            check_slots(experts)
    return found


PLACES = ((26, 2, 10), (26, 1, 6))
"""Slots, and buffers of so many: two whole layers stream, or parts of one."""


def same(found: list[np.ndarray], want: list[np.ndarray]) -> None:
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def test_prompts_leave_experts_in_slots(path: Path) -> None:
    """All experts differ, so a wrong one would show in the logits of the next prompt, and in its slot."""
    with runner(path, 0) as fused:
        want = logits_of(fused, (9, 12), 0)
    with runner(path, *PLACES[0]) as made:
        same(logits_of(made, (9, 12), 0, is_mixed=True), want)
        assert experts_of(made).survivors.n_kept > 3


@pytest.mark.slow
def test_prompts_that_stream_in_parts_leave_experts_in_slots(path: Path) -> None:
    with runner(path, 0) as fused:
        want = logits_of(fused, (9, 12), 0)
    with runner(path, *PLACES[1]) as made:
        same(logits_of(made, (9, 12), 0), want)
        assert experts_of(made).survivors.n_kept > 3


@pytest.mark.slow
def test_steps_after_a_prompt_have_the_bits_of_a_model_that_is_all_there(path: Path) -> None:
    with runner(path, 0) as fused:
        want = logits_of(fused, (9,), 2)
    for place in PLACES:
        with runner(path, *place) as made:
            same(logits_of(made, (9,), 2), want)


def test_taking_slots_over_on_the_device_as_on_the_host() -> None:
    def state() -> SlotState:
        return SlotState(6, [64] * 4, (SizeClass(64, (0, 2)), SizeClass(128, (1, 3))), (5, 4))

    host = state()
    table = np.arange(13, dtype=np.int32)
    for layer in (0, 1, 2, 3):
        host.step(layer, np.array([[layer, 4]], np.int32), table)
    before = {name: array.copy() for name, array in host.arrays.items()}
    cache = SlotCache(host, "cpu", split=table, fill_order="recent")
    owners = np.array([2 * 6 + 1, 1 * 6 + 5, 3 * 6 + 0], np.int32)
    at = np.array([0, 5 + 2, 5 + 3], np.int32)
    host.take_over(owners, at)
    cache.take_over(torch.from_numpy(owners), torch.from_numpy(at))
    for name, array in host.arrays.items():
        assert np.array_equal(getattr(cache.tensors, name).numpy(), array), name
    assert host.slot_of[2, 1] == 0 and host.slot_of[1, 5] == 2 and host.slot_of[3, 0] == 3
    assert (host.slot_of >= 0).sum() == (before["slot_of"] >= 0).sum() + 3 - (before["owner"][at] >= 0).sum()
