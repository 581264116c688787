"""What a layer's misses take on this machine: fills, and experts on the CPU, by their number, alone and beside each
other. No torch; the GPU's side is `gpu.fill_bench`.

Called by `ft bench bw`, and by the engine where its profile does not hold. A side runs its operation on experts chosen
at random from banks much larger than the caches, since that is how misses come.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np

from freetoken import native, quants
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks
from freetoken.experts.profile import ExpertFormat, Times
from freetoken.native import Pool, Program

__all__ = [
    "COUNTS",
    "SHORT_COUNTS",
    "Choices",
    "CpuSide",
    "Side",
    "alike",
    "looping",
    "measure",
    "n_figures",
    "read_gbs",
    "sample",
]

COUNTS = (1, 2, 4, 8, 16)
"""Numbers of experts that are measured."""
SHORT_COUNTS = (1, 2, 4, 8)
"""Those where a start waits for them."""
BESIDE = 8
"""How many experts the other side has at a time while one is measured beside it."""
N_ROTATED = 16
"""Steps, each of a layer chosen at random, that a loop goes through."""
N_CHOICES = 509
LEAST_SAMPLES = 7
SEED = 7


class Side(Protocol):
    """Fills, or experts on the CPU."""

    most: int
    """Most experts at a time."""

    def seconds(self, n: int, budget_s: float) -> float:
        """Median time of n experts, taken over about so many seconds."""

    def busy(self, n: int) -> AbstractContextManager[None]:
        """Within it the side runs n experts over and over, from a thread of its own."""


def n_figures(counts: Sequence[int], *, with_fills: bool) -> int:
    """How many times `measure` calls `on_figure`."""
    return len(counts) * (4 if with_fills else 1)


def measure(
    fills: Side | None,
    cpu: Side,
    *,
    counts: Sequence[int] = COUNTS,
    budget_s: float = 0.2,
    on_figure: Callable[[], object] = lambda: None,
) -> Times:
    """All times of one format; `budget_s` for each figure. Without fills only the CPU alone."""

    def series(side: Side) -> dict[int, float]:
        found = {}
        for n in counts:
            if n <= side.most:
                found[n] = side.seconds(n, budget_s)
            on_figure()
        return found

    if fills is None:
        return Times(cpu=series(cpu))
    fill_alone, cpu_alone = series(fills), series(cpu)
    with cpu.busy(min(BESIDE, cpu.most)):
        fill_beside = series(fills)
    with fills.busy(min(BESIDE, fills.most)):
        cpu_beside = series(cpu)
    return Times(fill_alone, fill_beside, cpu_alone, cpu_beside)


def sample(
    work: Callable[[], object],
    budget_s: float,
    prepare: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median seconds of a work that is repeated for a while, each after `prepare`; the first does not count."""
    found: list[float] = []
    began = clock()
    while len(found) <= LEAST_SAMPLES or clock() - began < budget_s:
        prepare()
        started = clock()
        work()
        found.append(clock() - started)
    return statistics.median(found[1:])


class Choices:
    """Experts chosen at random: `next` gives n different ones, int32 [n]."""

    def __init__(self, n_expert: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = np.tile(np.arange(n_expert, dtype=np.int32), (N_CHOICES, 1))
        self._rows = rng.permuted(rows, axis=1)
        self._turn = 0

    def next(self, n: int) -> np.ndarray:
        self._turn = (self._turn + 1) % N_CHOICES
        return self._rows[self._turn, :n]


@contextmanager
def looping(work: Callable[[], object], name: str) -> Iterator[None]:
    """Within it a thread repeats a work, once at least before the body begins. What it raises is raised at the end."""
    is_over, has_run = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def loop() -> None:
        try:
            while not is_over.is_set():
                work()
                has_run.set()
        except BaseException as error:
            failures.append(error)
        finally:
            has_run.set()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    has_run.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    if failures:
        raise failures[0]


def alike(layers: Iterable[LayerBanks | None], least_bytes: int) -> dict[ExpertFormat, list[LayerBanks]]:
    """Layers by format: of each the first ones that hold so many bytes together, or all there are."""
    found: dict[ExpertFormat, list[LayerBanks]] = {}
    for layer in layers:
        if layer is None:
            continue
        same = found.setdefault(ExpertFormat.of(layer), [])
        if sum(bank.data.nbytes for known in same for bank in known.banks) < least_bytes:
            same.append(layer)
    return found


class CpuSide:
    """The native operation of a step's experts, for one token, on layers of one format."""

    def __init__(self, pool: Pool, layers: Sequence[LayerBanks], n_planes: int = 2) -> None:
        self.most = layers[0].banks[0].n_expert
        self._pool, self._layers, self._n_planes = pool, layers, n_planes
        self._rng = np.random.default_rng(SEED)
        self._choices = Choices(self.most, SEED)
        for bank in layers[0].banks:
            if not native.can_decode(bank.type):
                raise EngineError(f"{bank.name}: type {quants.type_name(bank.type)} cannot be decoded on the CPU")

    def seconds(self, n: int, budget_s: float) -> float:
        steps = [self._program(n, 1) for _ in range(N_ROTATED)]
        turn = 0

        def prepare() -> None:
            nonlocal turn
            turn = (turn + 1) % N_ROTATED
            self._choose(steps[turn][1])

        return sample(lambda: steps[turn][0].run(), budget_s, prepare)

    def busy(self, n: int) -> AbstractContextManager[None]:
        program, ids = self._program(n, N_ROTATED)

        def work() -> None:
            self._choose(ids)
            program.run()

        return looping(work, "experts")

    def _choose(self, ids: Sequence[np.ndarray]) -> None:
        for some in ids:
            some[:] = self._choices.next(len(some))

    def _program(self, n: int, n_steps: int) -> tuple[Program, list[np.ndarray]]:
        """Steps one after another, each with its own quantisation, and the experts of each, to be chosen before every
        run: int32 [n]."""
        program = Program(self._pool)
        gate, up, down = self._layers[0].banks
        x = self._rng.standard_normal((1, gate.cols), np.float32)
        rows, y = np.zeros((1, n, gate.cols), np.float32), np.zeros((1, gate.cols), np.float32)
        merge = np.full((1, n), 1 / n, np.float32)
        scratch = native.aligned(native.experts_scratch_bytes(1, n, gate.cols, gate.rows, self._pool.n_threads))
        classes = [native.type_class(bank.type) for bank in (gate, up)]
        acts = [native.aligned(native.act_bytes(cls, gate.cols, 1)) if cls else None for cls in classes]
        is_shared = classes[0] == classes[1]
        types = [bank.type for bank in (gate, up, down)]
        row_bytes = [quants.row_bytes(bank.type, bank.cols) for bank in (gate, up, down)]
        chosen = [self._choices.next(n).copy() for _ in range(n_steps)]
        for ids in chosen:
            layer = self._layers[int(self._rng.integers(len(self._layers)))]
            for cls, act in zip(classes[: 1 if is_shared else 2], acts, strict=False):
                if act is not None:
                    program.add(native.OP_QUANTIZE, 1, p=(x, act), i=(cls, gate.cols, self._n_planes, gate.cols))
            data = [bank.data[0] for bank in layer.banks]
            program.add(
                native.OP_EXPERTS,
                1,
                p=(x, ids, merge, *data, rows, y, scratch, acts[0], None if is_shared else acts[1]),
                i=(self.most, n, gate.cols, gate.rows, *types, *row_bytes, 0, self._n_planes, layer.stride),
            )
        return program, chosen


def read_gbs(pool: Pool, layers: Sequence[LayerBanks], budget_s: float = 0.2) -> float:
    """GB/s of threads that only read the banks, the best of several; before that all are read once, which brings a
    file's pages in."""
    banks = [run.data for layer in layers for run in layer.runs]
    for data in banks:
        pool.read(data)
    best, turn, began = 0.0, 0, time.perf_counter()
    while turn < 2 * LEAST_SAMPLES or time.perf_counter() - began < budget_s:
        data = banks[turn % len(banks)]
        started = time.perf_counter()
        pool.read(data)
        best = max(best, data.nbytes / (time.perf_counter() - started) / 1e9)
        turn += 1
    return best
