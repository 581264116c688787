"""Locking experts with a fake system: caps, refusals in the middle, copies."""

from __future__ import annotations

import logging
import pathlib
import threading

import numpy as np
import pytest
from gguf_files import N_LAYER, tiny_keys, tiny_tensors, write

from freetoken.errors import EngineError, PinRefusedError
from freetoken.experts.bank import Bank, LayerBanks, Span, expert_banks
from freetoken.experts.pin import Pinned, Rung, pin_banks
from freetoken.gguf import open_model
from freetoken.spec import read_spec

PAGE = 4096


class System:
    """Locks up to `cap` bytes, and nothing at the addresses of `refused`."""

    def __init__(self, cap: int = 1 << 60, refused: tuple[int, ...] = ()) -> None:
        self.cap, self.refused = cap, refused
        self.locked: dict[int, int] = {}
        self.released: list[int] = []
        self._lock = threading.Lock()

    def register(self, address: int, n_bytes: int) -> None:
        with self._lock:
            assert address % PAGE == 0 and address not in self.locked
            assert all(a + n <= address or address + n_bytes <= a for a, n in self.locked.items()), "pages locked twice"
            if sum(self.locked.values()) + n_bytes > self.cap or any(
                address <= a < address + n_bytes for a in self.refused
            ):
                raise PinRefusedError("no more")
            self.locked[address] = n_bytes

    def unregister(self, address: int) -> None:
        with self._lock:
            del self.locked[address]
            self.released.append(address)

    def holds(self, layer: LayerBanks) -> bool:
        pages = {p for a, n in self.locked.items() for p in range(a, a + n, PAGE)}
        return all(
            page in pages
            for bank in layer.banks
            for page in range(bank.address // PAGE * PAGE, bank.address + bank.data.nbytes, PAGE)
        )


def file(n_layer: int, bank_bytes: int = 3 * PAGE, gap: int = 2 * PAGE, start: int = 64) -> list[LayerBanks | None]:
    """Layers of three banks of four experts, one after another with gaps; every second layer in another file."""
    layers: list[LayerBanks | None] = []
    shards = []
    for _ in range(2):
        size = start + n_layer * 3 * (bank_bytes + gap) + PAGE
        memory = np.zeros(size + PAGE, np.uint8)
        shift = -memory.ctypes.data % PAGE
        shards.append(memory[shift : shift + size])
    rng = np.random.default_rng(1)
    for shard in shards:
        shard[:] = rng.integers(0, 256, len(shard), dtype=np.uint8)
    at = [start, start]
    for i in range(n_layer):
        banks = []
        for name in ("gate", "up", "down"):
            where = at[i % 2]
            data = shards[i % 2][where : where + bank_bytes].reshape(4, -1)
            banks.append(Bank(name, 0, 1, bank_bytes // 16, data, Span(i % 2, where, bank_bytes)))
            at[i % 2] += bank_bytes + gap
        layers.append(LayerBanks(i, tuple(banks)))
    return layers


def pin(layers: list[LayerBanks | None], system: System, **more: object) -> Pinned:
    return pin_banks(layers, system.register, system.unregister, page_bytes=PAGE, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_threads", [1, 4])
@pytest.mark.parametrize("gap", [0, 32, 5 * PAGE])
def test_everything_is_locked_once_and_given_back_in_reverse(n_threads: int, gap: int) -> None:
    layers, system = file(6, gap=gap), System()
    pinned = pin([*layers, None], system, n_threads=n_threads)
    assert pinned.rungs == (Rung.IN_PLACE,) * 6 + (None,) and pinned.layers[:6] == tuple(layers)
    assert all(layer is not None and system.holds(layer) for layer in layers)
    order = list(pinned._registered)
    pinned.close()
    assert not system.locked and system.released == order[::-1]
    pinned.close()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_capped_system_holds_whole_layers_and_nothing_else(n_threads: int) -> None:
    layers = file(6)
    total = sum(layer.expert_bytes * 4 for layer in layers if layer is not None)
    system = System(cap=total // 2)
    pinned = pin(layers, system, n_threads=n_threads)
    held = [system.holds(layer) for layer in layers if layer is not None]
    assert held == [rung is Rung.IN_PLACE for rung in pinned.rungs]
    assert 1 <= sum(held) <= 3 and set(pinned.rungs) == {Rung.IN_PLACE, Rung.PAGEABLE}
    if n_threads == 1:
        assert held == [True, True, False, False, False, False], "4 pages a bank: 12 of 27 a layer, 2 layers in 27"
    assert len(system.locked) == 3 * sum(held), "no range of a refused layer stays"


def test_a_refusal_in_the_middle_touches_one_layer() -> None:
    layers = file(6)
    assert layers[2] is not None
    system = System(refused=(layers[2].banks[1].address // PAGE * PAGE,))
    pinned = pin(layers, system)
    assert [i for i, rung in enumerate(pinned.rungs) if rung is Rung.PAGEABLE] == [2]
    assert [pinned.is_pinned(i) for i in range(6)] == [True, True, False, True, True, True]
    assert len(system.locked) == 15


def test_nothing_can_be_locked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        pinned = pin(file(3), System(cap=0))
    assert pinned.rungs == (Rung.PAGEABLE,) * 3 and not pinned.n_bytes(Rung.IN_PLACE)
    assert caplog.text.count("not locked in place: no more") == 1
    assert caplog.text.count("0.00 GiB pinned in place (0 layers), 0.00 GiB pageable (3 layers)") == 1


def test_refused_layers_are_copied_while_there_is_memory() -> None:
    layers = file(5)
    system, left = System(cap=15 * PAGE), [2]

    def allocate(n_bytes: int) -> np.ndarray | None:
        left[0] -= 1
        return np.empty(n_bytes + 100, np.uint8) if left[0] >= 0 else None

    pinned = pin(layers, system, allocate=allocate)
    assert pinned.rungs == (Rung.IN_PLACE, Rung.COPIED, Rung.COPIED, Rung.PAGEABLE, Rung.PAGEABLE)
    for old, new, rung in zip(layers, pinned.layers, pinned.rungs, strict=True):
        assert old is not None and new is not None
        assert (old is not new) == (rung is Rung.COPIED)
        for a, b in zip(old.banks, new.banks, strict=True):
            assert (a.data == b.data).all() and (a.span, a.name) == (b.span, b.name)
            assert (a.address != b.address) == (rung is Rung.COPIED)
    assert pinned.n_bytes(Rung.COPIED) == 2 * 9 * PAGE


@pytest.mark.parametrize("n_threads", [1, 4])
def test_an_error_that_is_no_refusal_unlocks_everything(n_threads: int) -> None:
    layers, system = file(5), System()

    def register(address: int, n_bytes: int) -> None:
        if len(system.locked) == 4:
            raise EngineError("the context is broken")
        system.register(address, n_bytes)

    with pytest.raises(EngineError, match="context is broken"):
        pin_banks(layers, register, system.unregister, page_bytes=PAGE, n_threads=n_threads)
    assert not system.locked


def test_closing_survives_a_driver_that_is_gone() -> None:
    system = System()
    pinned = pin(file(2), system)

    def unregister(address: int) -> None:
        raise EngineError("deinitialized")

    pinned._unregister = unregister
    pinned.close()
    assert not pinned._registered


def test_random_systems(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        layers = file(int(rng.integers(1, 7)), int(rng.integers(1, 5)) * 1024, int(rng.integers(0, 3)) * 1024)
        known = [layer for layer in layers if layer is not None]
        cap = int(rng.integers(0, 2 * sum(layer.expert_bytes * 4 for layer in known)))
        refused = tuple(int(b.address) for layer in known for b in layer.banks if rng.random() < 0.1)
        system = System(cap, refused)
        pinned = pin(layers, system, n_threads=int(rng.integers(1, 4)))
        for layer, rung in zip(known, pinned.rungs, strict=True):
            assert rung is not Rung.IN_PLACE or system.holds(layer)
        pinned.close()
        assert not system.locked


def test_banks_of_a_file(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_keys("qwen3moe"), tiny_tensors("qwen3moe"))
    with open_model(path) as model:
        system = System()
        pinned = pin(list(expert_banks(read_spec(model), model)), system)
        assert pinned.rungs == (Rung.IN_PLACE,) * N_LAYER and system.locked
        pinned.close()
        del pinned
