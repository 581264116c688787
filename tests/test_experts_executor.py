"""The CPU's side of a GPU step, met by a thread that keeps the GPU's part of the protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from freetoken import native
from freetoken.errors import EngineError
from freetoken.experts.executor import ASKED, DONE, PLACE_BYTES, Executor

N_PLACES = 6
WIDTH = 8


class Gpu:
    """Asks at places in order, as a captured step does; `stop` ends it whatever the flags say."""

    def __init__(self, flags: np.ndarray, inputs: np.ndarray, outputs: np.ndarray) -> None:
        words = flags.view(np.uint64).reshape(N_PLACES, -1)
        self.asked, self.done = words[:, ASKED // 8], words[:, DONE // 8]
        self.inputs, self.outputs = inputs, outputs
        self.results: list[np.ndarray] = []
        self.is_over = threading.Event()

    def start(self, places: list[int], values: list[float], before: float = 0.0) -> None:
        self.is_over.clear()
        self.results.clear()
        threading.Thread(target=self._run, args=(places, values, before), daemon=True).start()

    def _run(self, places: list[int], values: list[float], before: float) -> None:
        self.done[places] = 0
        time.sleep(before)
        for place, value in zip(places, values, strict=True):
            self.inputs[place] = value
            self.asked[place] = 1
            while not self.done[place]:
                time.sleep(0)
            self.results.append(self.outputs[place].copy())
        self.is_over.set()


@pytest.fixture
def parts() -> Iterator[tuple[Executor, Gpu, native.Pool]]:
    """Places that double what they are given."""
    flags = native.aligned(N_PLACES * PLACE_BYTES)
    flags[:] = 0
    inputs, outputs = np.zeros((N_PLACES, WIDTH), np.float32), np.zeros((N_PLACES, WIDTH), np.float32)
    pool = native.Pool(2, None)
    executor = Executor(pool, flags)
    for place in range(N_PLACES):
        program = native.Program(pool)
        program.add(native.OP_SCALE, 1, p=(inputs[place], outputs[place]), i=(WIDTH,), f=(2.0, 0.0))
        executor.set(place, program)
    yield executor, Gpu(flags, inputs, outputs), pool
    executor.close()
    pool.close()


def step(executor: Executor, gpu: Gpu, places: list[int], values: list[float], seconds: float = 5.0) -> None:
    executor.expect(places)
    gpu.start(places, values)
    executor.wait(gpu.is_over.is_set, seconds)


def test_many_steps_are_met_in_order(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, _ = parts
    rng = np.random.default_rng(1)
    for _ in range(200):
        places = rng.permutation(N_PLACES)[: rng.integers(1, N_PLACES + 1)].tolist()
        values = rng.integers(1, 100, len(places)).astype(float).tolist()
        step(executor, gpu, places, values)
        assert [r[0] for r in gpu.results] == [2 * v for v in values]
    assert executor.pending == 0


def test_two_steps_may_be_expected_at_once(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, _ = parts
    executor.expect([0, 1])
    executor.expect([2, 1])
    assert executor.pending == 2
    for places, values in (([0, 1], [1.0, 2.0]), ([2, 1], [3.0, 4.0])):
        gpu.start(places, values)
        executor.wait(gpu.is_over.is_set, 5.0)
        assert [r[0] for r in gpu.results] == [2 * v for v in values]


def test_a_failed_operation_is_an_error_and_the_step_ends(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, pool = parts
    broken = native.Program(pool)
    broken.add(native.OP_SCALE, 1, p=(None, None), i=(WIDTH,), f=(2.0, 0.0))
    executor.set(3, broken)
    with pytest.raises(EngineError, match="operation 0 of the experts on the CPU failed at place 3"):
        step(executor, gpu, [0, 3, 4], [1.0, 1.0, 1.0])
    assert gpu.is_over.is_set(), "and the places after it were let through"
    with pytest.raises(EngineError, match="place 3"):
        executor.expect([0])
    executor.reset()
    step(executor, gpu, [0, 4], [5.0, 6.0])
    assert [r[0] for r in gpu.results] == [10.0, 12.0]


def test_a_thread_that_does_not_come_is_given_up_within_its_time(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, _ = parts
    executor.slow_down(1e12)
    executor.expect([0, 1])
    gpu.start([0, 1], [1.0, 1.0])
    started = time.monotonic()
    with pytest.raises(EngineError, match="took too long"):
        executor.wait(gpu.is_over.is_set, 0.3)
    assert time.monotonic() - started < 1.0 and gpu.is_over.is_set()
    with pytest.raises(EngineError, match="not come back"):
        executor.reset()


def test_a_gpu_that_never_asks_leaves_an_error(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, _ = parts
    executor.expect([0])
    with pytest.raises(EngineError, match="took too long"):
        executor.wait(lambda: False, 0.1)
    while executor.pending:
        time.sleep(0.001)
    executor.reset()
    step(executor, gpu, [0], [3.0])
    assert gpu.results[0][0] == 6.0


def test_it_uses_no_time_between_steps(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, _ = parts
    step(executor, gpu, [0], [1.0])
    time.sleep(0.05)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1


def test_wrong_uses_are_refused(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, _, pool = parts
    with pytest.raises(EngineError, match="not all there"):
        executor.expect([N_PLACES])
    with pytest.raises(EngineError, match="cannot be set"):
        executor.set(-1, native.Program(pool))
    with pytest.raises(EngineError, match="expected 128 aligned"):
        Executor(pool, np.zeros(100, np.uint8))
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="has ended"):
        executor.expect([0])


def test_a_second_thread_lets_the_gpu_go_when_the_first_does_not_answer() -> None:
    """Whoever waits for the GPU, in whatever way; afterwards steps run again."""
    flags = native.aligned(N_PLACES * PLACE_BYTES)
    inputs, outputs = np.zeros((N_PLACES, WIDTH), np.float32), np.zeros((N_PLACES, WIDTH), np.float32)
    with native.Pool(1, None) as pool:
        executor = Executor(pool, flags, limit_s=0.1)
        gpu = Gpu(flags, inputs, outputs)
        program = native.Program(pool)
        program.add(native.OP_SCALE, 1, p=(inputs[0], outputs[0]), i=(WIDTH,), f=(2.0, 0.0))
        executor.set(0, program)
        step(executor, gpu, [0], [2.0])
        executor.slow_down(1e12)
        executor.expect([0, 0])
        started = time.monotonic()
        gpu.start([0, 0], [1.0, 1.0])
        assert gpu.is_over.wait(2.0) and 0.05 < time.monotonic() - started < 1.5
        assert "took too long" in executor.failure()
        executor.slow_down(1.0)
        while executor.pending:
            time.sleep(0.001)
        executor.reset()
        step(executor, gpu, [0], [4.0])
        assert gpu.results[0][0] == 8.0
        executor.close()


def test_experts_that_are_all_left_out_run_nothing(parts: tuple[Executor, Gpu, native.Pool]) -> None:
    executor, gpu, pool = parts
    ids = np.array([-1, -1, 7], np.int32)
    program = native.Program(pool)
    program.add(native.OP_SCALE, 1, p=(gpu.inputs[0], gpu.outputs[0]), i=(WIDTH,), f=(2.0, 0.0))
    broken = {"p": (gpu.inputs[0], ids, None, None, None, None, None), "i": (7, 3)}
    program.add(native.OP_EXPERTS, 1, **broken)  # type: ignore[arg-type]
    executor.set(0, program)
    step(executor, gpu, [0], [2.0])
    assert executor.spent()[:2] == (1, 0) and gpu.outputs[0][0] == 0.0
    ids[1] = 3
    with pytest.raises(EngineError, match=r"operation 1 .* failed at place 0"):
        step(executor, gpu, [0], [2.0])
    assert executor.spent()[1] == 1
