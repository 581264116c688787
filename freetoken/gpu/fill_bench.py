"""Fills as `experts.measure` takes them: the engine's own kernel, from locked host memory into slots.

On a card several fills are one CUDA graph, so that what a launch costs the host does not count; elsewhere (Triton's
interpreter) they run one by one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from freetoken import native
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks
from freetoken.experts.measure import COUNTS, LEAST_SAMPLES, SEED, Choices, looping, sample
from freetoken.gpu import driver
from freetoken.gpu.decode import capture
from freetoken.kernels import layout
from freetoken.kernels.fills import FillBank, fill, fill_bank
from freetoken.kernels.slots import StepOutputs

__all__ = ["GpuFills", "copy_gbs"]

N_FILLS = 16
"""Fills in one graph, each of a layer chosen at random."""
COPY_BYTES = 128 << 20


class _Loop:
    """N_FILLS fills of n experts, to be chosen before each run, and what runs them all."""

    def __init__(self, steps: list[StepOutputs], launches: list[Callable[[], None]], n: int, *, is_cuda: bool) -> None:
        self.steps = steps
        self._launches = launches
        self.experts = torch.zeros((N_FILLS, n), dtype=torch.int32, pin_memory=is_cuda)
        self._graph: torch.cuda.CUDAGraph | None = None
        if is_cuda:
            self.run()  # loads the kernel, which a capture may not
            self._graph = capture(launches)

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for launch in self._launches:
            launch()


class GpuFills:
    """Fills from banks whose pages the device may read at their addresses, layers of one format."""

    def __init__(self, layers: Sequence[LayerBanks], device: torch.device, most: int = max(COUNTS)) -> None:
        self.most = min(most, layers[0].banks[0].n_expert)
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._choices = Choices(layers[0].banks[0].n_expert, SEED + 1)
        sizes = [layout.slot_bytes(bank.type, bank.rows, bank.cols) for bank in layers[0].banks]
        self._slots = torch.empty((self.most, sum(sizes)), dtype=torch.uint8, device=device)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._banks = [
            [
                fill_bank(bank.type, bank.rows, bank.cols, bank.address, at, device, bank.stride)
                for bank, at in zip(layer.banks, offsets, strict=True)
            ]
            for layer in layers
        ]
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._loops: dict[int, _Loop] = {}

    def seconds(self, n: int, budget_s: float) -> float:
        loop = self._loop(n)
        if self._stream is None:
            return sample(loop.run, budget_s, partial(self._choose, loop)) / N_FILLS
        found: list[float] = []
        began = time.perf_counter()
        with torch.cuda.stream(self._stream):
            while len(found) <= LEAST_SAMPLES or time.perf_counter() - began < budget_s:
                self._choose(loop)
                first, last = _event(), _event()
                first.record()
                loop.run()
                last.record()
                last.synchronize()
                found.append(first.elapsed_time(last) / 1000 / N_FILLS)
        return statistics.median(found[1:])

    def busy(self, n: int) -> AbstractContextManager[None]:
        """Two graphs are always under way, so that the link has no pause."""
        loop = self._loop(n)
        if self._stream is None:
            return looping(loop.run, "fills")
        self._choose(loop)
        under_way: deque[torch.cuda.Event] = deque()

        def work() -> None:
            with torch.cuda.stream(self._stream):
                loop.run()
                under_way.append(_event())
                under_way[-1].record()
            if len(under_way) > 2:
                under_way.popleft().synchronize()

        return looping(work, "fills")

    def _loop(self, n: int) -> _Loop:
        if n not in self._loops:
            steps = [StepOutputs.empty(1, n, self._device) for _ in range(N_FILLS)]
            rng = np.random.default_rng(SEED)
            launches: list[Callable[[], None]] = []
            for step in steps:
                step.fill_slot.copy_(torch.arange(n, dtype=torch.int32))
                step.counts.copy_(torch.tensor([n, 0, n, n, 0], dtype=torch.int32))
                banks: list[FillBank] = self._banks[int(rng.integers(len(self._banks)))]
                launches.append(partial(fill, banks, self._slots, step.fill_expert, step.fill_slot, step.counts))
            self._loops[n] = _Loop(steps, launches, n, is_cuda=self._is_cuda)
        return self._loops[n]

    def _choose(self, loop: _Loop) -> None:
        """Other experts for the next run; none may be under way that reads the list on the host."""
        for row, step in zip(loop.experts, loop.steps, strict=True):
            row.copy_(torch.from_numpy(self._choices.next(len(row))))
            step.fill_expert.copy_(row, non_blocking=True)


def copy_gbs(layers: Sequence[LayerBanks], device: torch.device, edges: Sequence[int] = (), n_times: int = 12) -> float:
    """GB/s of the copy engine from the banks' locked memory; no copy may cross one of `edges`. 0 on a device that has
    none."""
    if device.type != "cuda":
        return 0.0
    data = layers[0].runs[0].data
    n_bytes = min(data.nbytes, COPY_BYTES)
    target = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    runs = copies(data.ctypes.data, target.data_ptr(), n_bytes, edges)
    stream = torch.cuda.current_stream(device)
    found = []
    for _ in range(n_times):
        first, last = _event(), _event()
        first.record()
        result = native.copy_runs(driver.memcpy_async_address(), runs, stream.cuda_stream)
        last.record()
        last.synchronize()
        if result:
            raise EngineError(f"experts cannot be copied to the GPU (error {result} of the CUDA driver)")
        found.append(n_bytes / first.elapsed_time(last) / 1e6)
    return float(statistics.median(found[2:]))


def copies(start: int, to: int, n_bytes: int, edges: Sequence[int]) -> np.ndarray:
    """uint64 [n, 3] of (device address, host address, bytes), cut at the edges."""
    cuts = [start, *sorted(edge for edge in edges if start < edge < start + n_bytes), start + n_bytes]
    return np.array([[to + a - start, a, b - a] for a, b in itertools.pairwise(cuts)], np.uint64)


def _event() -> torch.cuda.Event:
    """An event whose waiter sleeps: a spinning one would take a core from the experts."""
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
