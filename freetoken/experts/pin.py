"""Locks the experts of the mapped file for the GPU, in place; what the system refuses is copied or stays pageable.

A layer counts as pinned only as a whole: the ranges of a layer that was refused are given back, so that a capped system
(WSL, a limit on locked memory) spends its share on whole layers. Called once at start; how memory is locked and where
copies live is the caller's, so nothing here needs a GPU.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from freetoken.errors import EngineError, PinRefusedError
from freetoken.experts.bank import LayerBanks, PinPlan, pin_plan

__all__ = ["PIECE_BYTES", "Pinned", "Rung", "pin_banks"]

log = logging.getLogger(__name__)

Register = Callable[[int, int], None]
"""Locks [address, address + n_bytes), whole pages. Raises PinRefusedError, then holding nothing."""
Unregister = Callable[[int], None]
Allocate = Callable[[int], "np.ndarray | None"]
"""Locked memory, uint8 of at least so many bytes, kept alive by its views; None where there is none (left)."""

_ALIGNMENT = 128
PIECE_BYTES = 64 << 20
"""Locked at once. The system's lock on the process's memory map is held as long, and whoever maps memory meanwhile, as
every import does, waits. Pieces of 16 MiB make a start no faster, and locking 16 GiB takes 3.3 s instead of 1.8."""


class Rung(Enum):
    """How a layer's experts reach the GPU."""

    IN_PLACE = "pinned in place"
    COPIED = "copied to pinned memory"
    PAGEABLE = "pageable"


@dataclass
class Pinned:
    """`layers` stand for those given: the same where they are locked in place, with `data` in the copy where they were
    copied. `rungs[i]` is None for a layer without experts. `close` before the file is unmapped, once the GPU is done.
    """

    layers: tuple[LayerBanks | None, ...]
    rungs: tuple[Rung | None, ...]
    seconds: float
    _registered: list[int] = field(repr=False)
    _unregister: Unregister = field(repr=False)

    def is_pinned(self, layer: int) -> bool:
        """Whether the GPU may read the layer's experts."""
        return self.rungs[layer] in (Rung.IN_PLACE, Rung.COPIED)

    @property
    def edges(self) -> tuple[int, ...]:
        """Addresses at which ranges that are locked in place begin: no copy may cross one."""
        return tuple(self._registered)

    def n_bytes(self, rung: Rung) -> int:
        """Bytes of the experts on a rung."""
        pairs = zip(self.layers, self.rungs, strict=True)
        return sum(_layer_bytes(layer) for layer, own in pairs if layer is not None and own is rung)

    def close(self) -> None:
        """Unlock in reverse order. What cannot be unlocked is logged: the process is at its end then."""
        while self._registered:
            address = self._registered.pop()
            try:
                self._unregister(address)
            except EngineError as error:
                log.debug("experts at %#x stay locked: %s", address, error)

    def __str__(self) -> str:
        parts = []
        for rung in Rung:
            n = self.rungs.count(rung)
            if n or rung is Rung.IN_PLACE:
                parts.append(f"{self.n_bytes(rung) / 2**30:.2f} GiB {rung.value} ({n} layers)")
        return f"experts: {', '.join(parts)} in {self.seconds:.2f} s"


def pin_banks(
    layers: Sequence[LayerBanks | None],
    register: Register,
    unregister: Unregister,
    *,
    allocate: Allocate | None = None,
    n_threads: int = 1,
    page_bytes: int = mmap.PAGESIZE,
) -> Pinned:
    """Lock the banks of all layers; `allocate` gives memory for the layers that were refused, n_threads lock at once.

    An error other than a refusal unlocks everything and is raised.
    """
    started = time.monotonic()
    known = [layer for layer in layers if layer is not None]
    locker = _Locker(known, register, unregister, page_bytes)
    is_pinned = locker.run(n_threads)
    done = {layer.layer: (layer, Rung.IN_PLACE) for layer, pinned in zip(known, is_pinned, strict=True) if pinned}
    for layer, pinned in zip(known, is_pinned, strict=True):
        copy = None if pinned or allocate is None else _copy(layer, allocate)
        if copy is not None:
            done[layer.layer] = (copy, Rung.COPIED)
        elif not pinned:
            done[layer.layer] = (layer, Rung.PAGEABLE)
    chosen = [(None, None) if layer is None else done[layer.layer] for layer in layers]
    seconds = time.monotonic() - started
    pinned_layers = Pinned(
        tuple(layer for layer, _ in chosen), tuple(rung for _, rung in chosen), seconds, locker.registered, unregister
    )
    if locker.refusal and known:
        log.warning("part of the experts is not locked in place: %s", locker.refusal)
    log.info("%s", pinned_layers)
    return pinned_layers


class _Locker:
    """Registers the ranges of a plan group by group: layers that share a range are a group, which one thread does."""

    def __init__(
        self, layers: Sequence[LayerBanks], register: Register, unregister: Unregister, page_bytes: int
    ) -> None:
        self._plan = pin_plan([layer.spans for layer in layers], page_bytes, PIECE_BYTES)
        self._register, self._unregister = register, unregister
        self._base = {b.span.shard: b.address - b.span.start for layer in layers for b in layer.banks}
        misplaced = [shard for shard, base in self._base.items() if base % page_bytes]
        if misplaced:
            raise EngineError(f"file {misplaced[0] + 1} of the model is not mapped at a page: cannot lock its experts")
        self._held: dict[int, int] = {}
        self._refused: set[int] = set()
        self.refusal = ""

    @property
    def registered(self) -> list[int]:
        """Addresses in the order in which they lie."""
        return [self._held[i] for i in sorted(self._held)]

    def run(self, n_threads: int) -> tuple[bool, ...]:
        """Whether each layer is locked as a whole."""
        try:
            with ThreadPoolExecutor(max(n_threads, 1), thread_name_prefix="pin") as pool:
                for _ in pool.map(self._lock_group, list(_groups(self._plan))):
                    pass
        except BaseException:
            for address in reversed(self.registered):
                self._unregister(address)
            raise
        return self._plan.is_pinned(set(self._held))

    def _lock_group(self, layers: list[int]) -> None:
        for layer in layers:
            wanted = self._plan.of_layer[layer]
            fresh: list[int] = []
            if not all(self._lock(i, fresh) for i in wanted):
                for i in reversed(fresh):
                    self._unregister(self._held.pop(i))

    def _lock(self, i: int, fresh: list[int]) -> bool:
        if i in self._held:
            return True
        if i in self._refused:
            return False
        span = self._plan.ranges[i]
        address = self._base[span.shard] + span.start
        try:
            self._register(address, span.n_bytes)
        except PinRefusedError as error:
            self._refused.add(i)
            self.refusal = self.refusal or str(error)
            return False
        self._held[i] = address
        fresh.append(i)
        return True


def _groups(plan: PinPlan) -> Iterator[list[int]]:
    """Runs of layers joined by shared ranges. Ranges of a layer need not follow one another: a page is shared with
    whichever layer lies next to it in the file."""
    group_of: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for layer, ranges in enumerate(plan.of_layer):
        joined: list[int] = [layer]
        for group in {id(group_of[i]): group_of[i] for i in ranges if i in group_of}.values():
            joined = sorted(joined + group)
            groups.remove(group)
        groups.append(joined)
        for member in joined:
            group_of.update(dict.fromkeys(plan.of_layer[member], joined))
    yield from groups


def _copy(layer: LayerBanks, allocate: Allocate) -> LayerBanks | None:
    """The layer with its banks in locked memory, or None where there is none left."""
    sizes = [-(-bank.data.nbytes // _ALIGNMENT) * _ALIGNMENT for bank in layer.banks]
    memory = allocate(sum(sizes))
    if memory is None:
        return None
    banks, at = [], 0
    for bank, size in zip(layer.banks, sizes, strict=True):
        data = memory[at : at + bank.data.nbytes].reshape(bank.data.shape)
        np.copyto(data, bank.data)
        banks.append(replace(bank, data=data))
        at += size
    return LayerBanks(layer.layer, tuple(banks))


def _layer_bytes(layer: LayerBanks) -> int:
    return sum(bank.data.nbytes for bank in layer.banks)
