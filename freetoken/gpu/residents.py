"""Experts that stay on the GPU for good, copied there at load: through pinned buffers, so that no page of the file need
be locked, which takes longer than the copy.

Native threads copy experts of a layer into a buffer while the fill kernel reads the ones before from another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from freetoken import native
from freetoken.experts.bank import LayerBanks, Run
from freetoken.experts.memory import SlotMemory
from freetoken.kernels.fills import FillBank, fill

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
    n_expert = max(len(run.data) for i in first_slot for run in _runs(layers[i]))
    largest = max(_size(_runs(layers[i]), 1) for i in first_slot)
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        ring = [_Buffer(max(BUFFER_BYTES, largest), is_cuda=stream is not None) for _ in range(N_BUFFERS)]
        numbers = torch.arange(n_expert, dtype=torch.int32, device=device)
        turn = 0
        for layer, first in first_slot.items():
            runs = _runs(layers[layer])
            step = max(BUFFER_BYTES // _size(runs, 1), 1)
            for at in range(0, len(runs[0].data), step):
                buffer = ring[turn % N_BUFFERS]
                turn += 1
                buffer.reuse()
                places = _stage([run.data[at : at + step] for run in runs], runs, memory.banks(layer), buffer, pool)
                n = min(step, len(runs[0].data) - at)
                counts = torch.full((5,), n, dtype=torch.int32, device=device)
                slots = numbers[:n] + (first + at)
                fill(places, memory.pools[layer], numbers[:n], slots, counts, n_programs=N_PROGRAMS if stream else 2)
                buffer.handed_over()
        for buffer in ring:
            buffer.reuse()


def _stage(
    parts: Sequence[np.ndarray], runs: Sequence[Run], banks: Sequence[FillBank], buffer: _Buffer, pool: native.Pool
) -> list[FillBank]:
    """Copy some experts of each run into the buffer; the banks as if they began there."""
    places = list(banks)
    to = 0
    for data, run in zip(parts, runs, strict=True):
        there = buffer.bytes[to : to + data.nbytes]
        pool.copy(data, there.numpy())
        for i, start in run.starts.items():
            places[i] = replace(places[i], address=there.data_ptr() + start)
        to += -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def _runs(layer: LayerBanks | None) -> Sequence[Run]:
    assert layer is not None
    return layer.runs


def _size(runs: Sequence[Run], n: int) -> int:
    """Bytes of n experts in a buffer."""
    return sum(-(-n * run.stride // _ALIGNMENT) * _ALIGNMENT for run in runs)
