"""Experts that stay on the GPU for good, copied there at load: through pinned buffers, so that no page of the file need
be locked, which takes longer than the copy.

Native threads copy experts of a layer into a buffer while the fill kernel reads the ones before from another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch

from freetoken import native
from freetoken.experts.bank import Bank, LayerBanks
from freetoken.experts.memory import SlotMemory
from freetoken.kernels.fills import fill

__all__ = ["load_residents"]

BUFFER_BYTES = 32 << 20
N_BUFFERS = 3
N_PROGRAMS = 256
_ALIGNMENT = 256


class _Buffer:
    """Host memory that the device reads, and when it has."""

    def __init__(self, n_bytes: int, *, is_cuda: bool) -> None:
        self.bytes = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._read = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    def reuse(self) -> None:
        """Wait until the device has read what is in it; at once where nothing is."""
        if self._read is not None:
            self._read.synchronize()

    def handed_over(self) -> None:
        """What was launched last reads it."""
        if self._read is not None:
            self._read.record()


def load_residents(
    layers: Sequence[LayerBanks | None],
    first_slot: Mapping[int, int],
    memory: SlotMemory,
    pool: native.Pool,
    stream: torch.cuda.Stream | None,
) -> None:
    """Fill the slots first_slot[layer]... with all experts of those layers, on a stream (None: on the host). Returns
    when everything is launched; buffers are freed when it has run."""
    if not first_slot:
        return
    device = memory.pools[next(iter(first_slot))].device
    n_expert = max(len(bank.data) for i in first_slot for bank in _banks(layers[i]))
    largest = max(_size(_banks(layers[i]), 1) for i in first_slot)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        ring = [_Buffer(max(BUFFER_BYTES, largest), is_cuda=stream is not None) for _ in range(N_BUFFERS)]
        numbers = torch.arange(n_expert, dtype=torch.int32, device=device)
        turn = 0
        for layer, first in first_slot.items():
            banks = _banks(layers[layer])
            step = max(BUFFER_BYTES // _size(banks, 1), 1)
            for at in range(0, len(banks[0].data), step):
                buffer = ring[turn % N_BUFFERS]
                turn += 1
                buffer.reuse()
                some = [bank.data[at : at + step] for bank in banks]
                places = []
                to = 0
                for data, bank in zip(some, memory.banks(layer), strict=True):
                    there = buffer.bytes[to : to + data.nbytes]
                    pool.copy(data, there.numpy())
                    places.append(replace(bank, address=there.data_ptr()))
                    to += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
                n = len(some[0])
                counts = torch.full((5,), n, dtype=torch.int32, device=device)
                slots = numbers[:n] + (first + at)
                fill(places, memory.pools[layer], numbers[:n], slots, counts, n_programs=N_PROGRAMS if stream else 2)
                buffer.handed_over()
        for buffer in ring:
            buffer.reuse()


def _banks(layer: LayerBanks | None) -> Sequence[Bank]:
    assert layer is not None
    return layer.banks


def _size(banks: Sequence[Bank], n: int) -> int:
    """Bytes of n experts in a buffer."""
    return sum(-(-n * bank.expert_bytes // _ALIGNMENT) * _ALIGNMENT for bank in banks)
