"""Fills: experts gathered into slots, every type in its form on the GPU, under Triton's interpreter or on a device."""

from __future__ import annotations

import contextlib
import mmap
import pathlib
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files import N_EXPERT as GGUF_EXPERTS
from gguf_files import tiny_keys, tiny_tensors, write
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel
from kernel_bits import DEVICE, array, tensor

from freetoken import quants
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.device import SlotCache
from freetoken.experts.memory import SlotMemory, slot_sizes
from freetoken.experts.slots import SlotState, size_classes
from freetoken.experts.split import bounded_table
from freetoken.gguf import open_model
from freetoken.kernels import layout
from freetoken.kernels.fills import SLOW_UNIT, FillBank, Slow, fill, fill_bank
from freetoken.quants import GgmlType
from freetoken.spec import read_spec

N_EXPERT, N_SLOTS = 5, 4
FILL = 0xA5


def pinned(x: np.ndarray) -> np.ndarray:
    """A copy at an address that the device can read."""
    memory = torch.from_numpy(x)
    return (memory if DEVICE == "cpu" else memory.pin_memory()).numpy()


@contextlib.contextmanager
def registered(layers: tuple[LayerBanks | None, ...]) -> Iterator[None]:
    """The pages of all banks of a mapped file, for a device to read."""
    views = [bank.data for layer in layers if layer is not None for bank in layer.banks]
    start = min(view.ctypes.data for view in views) // mmap.PAGESIZE * mmap.PAGESIZE
    n_bytes = max(view.ctypes.data + view.nbytes for view in views) - start
    if DEVICE == "cpu":
        yield
        return
    read_only = 8
    assert not int(torch.cuda.cudart().cudaHostRegister(start, -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, read_only))
    yield
    torch.cuda.synchronize()
    assert not int(torch.cuda.cudart().cudaHostUnregister(start))


class Layer:
    """A layer's banks of random bytes at `offset` of a page, and a pool of slots."""

    def __init__(self, matrices: list[tuple[int, int, int]], offset: int = 0) -> None:
        rng = np.random.default_rng(len(matrices) + offset)
        self.types = [m[0] for m in matrices]
        self.raw, self.banks, at = [], [], 0
        for type_id, rows, cols in matrices:
            n_bytes = rows * quants.row_bytes(type_id, cols)
            memory = pinned(rng.integers(0, 256, N_EXPERT * n_bytes + 4096, np.uint8))
            start = -memory.ctypes.data % 256 + offset
            self.raw.append(memory[start : start + N_EXPERT * n_bytes].reshape(N_EXPERT, n_bytes))
            address = int(self.raw[-1].ctypes.data)
            self.banks.append(fill_bank(type_id, rows, cols, address, at, DEVICE))
            at += self.banks[-1].slot_bytes
        self.slots = torch.full((N_SLOTS, at + 256), FILL, dtype=torch.uint8)

    def fill(self, pairs: list[tuple[int, int]], n_programs: int = 3, slow: float = 0.0) -> None:
        experts, slots = (torch.tensor([p[i] for p in pairs] + [99, 99], dtype=torch.int32) for i in range(2))
        counts = torch.tensor([9, 9, 9, len(pairs), 9], dtype=torch.int32)
        factor = torch.tensor([round(slow * SLOW_UNIT)], dtype=torch.int32)
        given = Slow(factor, N_EXPERT) if slow else None
        fill(self.banks, self.slots, experts, slots, counts, n_programs=n_programs, slow=given)

    def check(self, pairs: list[tuple[int, int]]) -> None:
        """Slots of `pairs` hold their experts, everything else is as it was."""
        expected = torch.full_like(self.slots, FILL)
        for expert, slot in pairs:
            for type_id, bank, raw in zip(self.types, self.banks, self.raw, strict=True):
                place = expected[slot, bank.slot_offset : bank.slot_offset + bank.slot_bytes]
                layout.relay(type_id, tensor(raw[expert]), place)
        np.testing.assert_array_equal(array(self.slots), array(expected))


LAID = [t for t in GgmlType if t in quants.TYPES and not layout.is_identity(t)]
PAIRS = [(3, 1), (0, 2)]


@pytest.mark.parametrize("type_id", LAID, ids=lambda t: t.name)
def test_every_laid_type(type_id: int) -> None:
    cols = 2 * quants.TYPES[type_id].block_size
    layer = Layer([(type_id, 3, cols), (type_id, 16, cols)])
    layer.fill(PAIRS)
    layer.check(PAIRS)


@pytest.mark.parametrize("offset", [0, 32, 16, 8, 4, 2, 1])
def test_mixed_types_anywhere_in_memory(offset: int) -> None:
    layer = Layer([(GgmlType.Q4_K, 4, 512), (GgmlType.Q6_K, 3, 256), (GgmlType.MXFP4, 5, 64)], offset)
    layer.fill(PAIRS)
    layer.check(PAIRS)


def test_experts_of_many_chunks_and_more_programs_than_work() -> None:
    layer = Layer([(GgmlType.Q8_0, 40, 512), (GgmlType.F16, 65, 128)])
    pairs = [(4, 0), (0, 3), (1, 1), (2, 2)]
    for n_programs in (1, 7, 64):
        layer.slots.fill_(FILL)
        layer.fill(pairs, n_programs)
        layer.check(pairs)


@pytest.mark.parametrize("slow", [1.0, 1.5, 3.25])
def test_a_slower_link_brings_the_same_bytes(slow: float) -> None:
    layer = Layer([(GgmlType.Q8_0, 40, 512), (GgmlType.Q4_K, 4, 512)])
    pairs = [(4, 0), (0, 3), (1, 1)]
    layer.fill(pairs, slow=slow)
    layer.check(pairs)


def test_no_fills_touch_nothing() -> None:
    layer = Layer([(GgmlType.Q4_K, 4, 512)])
    layer.fill([])
    layer.check([])


def test_units_are_as_wide_as_bytes_allow() -> None:
    def shape(bank: FillBank) -> tuple[int, int, bool]:
        return bank.unit, bank.align, bank.moves is None

    assert shape(fill_bank(GgmlType.Q4_K, 768, 2048, 1 << 20, 0, DEVICE)) == (4, 16, True)
    assert shape(fill_bank(GgmlType.Q6_K, 768, 2048, 1 << 20, 0, DEVICE)) == (2, 16, False)
    assert shape(fill_bank(GgmlType.MXFP4, 768, 2048, 1 << 20, 0, DEVICE)) == (1, 16, False)
    assert shape(fill_bank(GgmlType.F16, 3, 1, 1 << 20, 0, DEVICE)) == (2, 2, True)
    assert shape(fill_bank(GgmlType.Q4_K, 768, 2048, (1 << 20) + 1, 0, DEVICE)) == (1, 1, True)


def test_launcher_refuses() -> None:
    layer = Layer([(GgmlType.Q4_K, 4, 512)])
    lists = (torch.zeros(2, dtype=torch.int32),) * 3
    with pytest.raises(ValueError, match="0 banks"):
        fill([], layer.slots, *lists)
    with pytest.raises(ValueError, match="of a slot, which has 128"):
        fill(layer.banks, torch.zeros((2, 128), dtype=torch.uint8), *lists)
    with pytest.raises(ValueError, match=r"slots: torch\.float32"):
        fill(layer.banks, layer.slots.float(), *lists)
    with pytest.raises(ValueError, match=r"fill_slot: torch\.int64"):
        fill(layer.banks, layer.slots, lists[0], lists[1].long(), lists[2])
    with pytest.raises(ValueError, match="at byte 64 of a slot"):
        fill_bank(GgmlType.Q4_K, 4, 512, 0, 64, DEVICE)


def compile_fill(archs: tuple[int, ...], is_slow: bool = False) -> str:
    signature: dict[str, str] = {"slots_ptr": "*u8", "slot_bytes": "i32", "n_expert": "i32"}
    signature |= dict.fromkeys(("expert_ptr", "slot_ptr", "counts_ptr"), "*i32")
    constexprs: dict[str, object] = {"CHUNK": 8192}
    if is_slow:
        signature["slow_ptr"] = "*i32"
    else:
        constexprs["slow_ptr"] = None
    for i, (unit, is_plain) in enumerate(((4, True), (2, False), (1, False))):
        signature |= {
            f"address{i}": "i64",
            f"bytes{i}": "i32",
            f"stride{i}": "i32",
            f"offset{i}": "i32",
            f"moves{i}_ptr": "*i32",
        }
        signature[f"block_units{i}"] = "i32"
        constexprs |= {f"UNIT{i}": unit, f"ALIGN{i}": 16, f"IS_PLAIN{i}": is_plain}
    name = "freetoken.kernels.fills", "_fill"
    return compile_kernel(*name, signature, constexprs, divisible=("slots_ptr",), archs=archs)


def test_kernel_compiles_to_wide_loads() -> None:
    ptx = compile_fill(QUICK)
    assert ptx.count("ld.global.v4.b32") >= 12 * len(QUICK)  # 8192 bytes by 128 threads, for three banks
    assert ptx.count("st.global.v4.b32") >= 4 * len(QUICK)


@pytest.mark.compile
def test_kernel_compiles_everywhere() -> None:
    compile_fill(ARCHITECTURES)
    compile_fill(ARCHITECTURES, is_slow=True)


def test_from_a_file_to_its_slots(tmp_path: pathlib.Path) -> None:
    """Banks of a mapped file, pools by size, steps and their fills: each slot holds its owner's bytes."""
    rng = np.random.default_rng(1)
    types = {f"blk.{i}.ffn_{n}_exps.weight": GgmlType.Q8_0 for i in (0, 1) for n in ("gate", "up", "down")}
    types |= {f"blk.1.ffn_{n}_exps.weight": GgmlType.Q4_0 for n in ("gate", "down")}
    tensors = [
        replace(t, data=rng.integers(0, 256, len(t.content()), np.uint8).tobytes()) if "_exps" in t.name else t
        for t in tiny_tensors("qwen3moe", types)
    ]
    with open_model(write(tmp_path / "m.gguf", tiny_keys("qwen3moe"), tensors)) as model:
        layers = expert_banks(read_spec(model), model)
        sizes = slot_sizes(layers)
        expert_bytes = [layer.expert_bytes for layer in layers if layer is not None]
        state = SlotState(GGUF_EXPERTS, expert_bytes, size_classes(sizes, 0.05), (3, 2))
        cache = SlotCache(state, DEVICE, split=bounded_table(list(range(9))), fill_order="recent")
        memory = SlotMemory(layers, state, DEVICE)
        with registered(layers):
            for i in range(12):
                ids = rng.integers(0, GGUF_EXPERTS, (2, 2)).astype(np.int32)
                memory.fill(i % 2, cache.step(i % 2, tensor(ids)))
                state.step(i % 2, ids, bounded_table(list(range(9))))
                check_slots(layers, state, memory)
        assert state.counters[:, 2].sum() > 6
        del layers, memory


def check_slots(layers: tuple[LayerBanks | None, ...], state: SlotState, memory: SlotMemory) -> None:
    for layer in layers:
        assert layer is not None
        for expert, slot in enumerate(state.slot_of[layer.layer]):
            for bank, at in zip(layer.banks, memory.offsets[layer.layer], strict=True):
                size = layout.slot_bytes(bank.type, bank.rows, bank.cols)
                laid = memory.pools[layer.layer][slot, at : at + size]
                if slot >= 0:
                    raw = array(layout.restore(bank.type, laid, bank.rows, bank.cols))
                    np.testing.assert_array_equal(raw.reshape(-1), bank.data[expert])
