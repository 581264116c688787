"""The binding and the thread pool: sleep, oversubscription, validation, decoding, cores of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from freetoken import cores, native, quants
from freetoken.errors import EngineError
from freetoken.native import Pool, Program

RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2) as made:
        yield made


def adding(pool: Pool, n_ops: int, width: int = 4096) -> tuple[Program, np.ndarray]:
    """A program that adds 1 to a row n_ops times."""
    y, one = np.zeros((1, width), np.float32), np.ones((1, width), np.float32)
    program = Program(pool)
    for _ in range(n_ops):
        program.add(native.OP_ADD, 1, p=(y, one, y), i=(width,))
    return program, y


# --- threads ---------------------------------------------------------------------------------------------------------


def test_idle_pool_uses_no_cpu() -> None:
    process = psutil.Process()
    with Pool(4, spin_us=100) as pool:
        adding(pool, 10)[0].run()
        time.sleep(0.05)
        before = process.cpu_times()
        time.sleep(0.5)
        after = process.cpu_times()
    assert (after.user + after.system) - (before.user + before.system) <= 0.05


@pytest.mark.parametrize("spin_us", [0, 200])
def test_workers_wake_after_sleep(spin_us: int) -> None:
    with Pool(3, spin_us=spin_us) as pool:
        program, y = adding(pool, 3)
        for turn in range(60):
            program.run()
            if turn % 20 == 0:
                time.sleep(0.002)
    assert (y == 180).all()


def test_more_threads_than_cores_do_not_collapse() -> None:
    n_ops = 500
    with Pool(4 * (psutil.cpu_count() or 1)) as pool:
        program, y = adding(pool, n_ops)
        started = time.monotonic()
        program.run()
        elapsed = time.monotonic() - started
    assert (y == n_ops).all()
    assert elapsed < 5.0


def test_pools_and_callers_in_parallel() -> None:
    with Pool(2) as first, Pool(2) as second:
        programs = [adding(owner, 50) for owner in (first, first, second)]

        def run(program: Program) -> None:
            for _ in range(20):
                program.run()

        threads = [threading.Thread(target=run, args=(program,)) for program, _ in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all((y == 1000).all() for _, y in programs)


def test_pinned_pool() -> None:
    cpus = native.physical_cpus()[:2]
    with Pool(len(cpus), cpus) as pool:
        program, y = adding(pool, 4)
        program.run()
    assert (y == 4).all()


def test_closed_and_impossible_pools() -> None:
    pool = Pool(1)
    program, _ = adding(pool, 1)
    pool.close()
    pool.close()
    with pytest.raises(EngineError, match="closed"):
        program.run()
    with pytest.raises(EngineError, match="0 threads could not be started"):
        Pool(0)
    with pytest.raises(EngineError, match="could not be started"):
        Pool(2, [0, 1 << 20])
    with pytest.raises(EngineError, match="give one for each"):
        Pool(2, [0])


def test_subnormals_survive_a_caller_that_flushes_them() -> None:
    tiny = np.full((1, 8192), np.float32(2.0**-140), np.float32)
    try:
        assert torch.set_flush_denormal(True)
        flushed = float(torch.tensor([2.0**-140]) * 0.5)
        with Pool(2) as pool:
            y = np.zeros_like(tiny)
            program = Program(pool)
            program.add(native.OP_SCALE, 1, p=(tiny, y), i=(8192,), f=(0.5, 0.0))
            program.run()
        still_flushed = float(torch.tensor([2.0**-140]) * 0.5)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == still_flushed == 0.0
    assert (y == np.float32(2.0**-141)).all()


# --- validation ------------------------------------------------------------------------------------------------------

ROW = np.zeros((8, 512), np.float32)
TOKENS = np.array([0, 1, 2, 3, 4, 5, 6, 600], np.int32)
ACT = native.aligned(1 << 16)
GOOD: dict[int, dict[str, Any]] = {
    native.OP_EMBED: {"p": [TOKENS, ROW, ROW], "i": [Type.F32, 512, 8, 32]},
    native.OP_RMS_NORM: {"p": [ROW, ROW, ROW], "i": [64, 8, 512, 512]},
    native.OP_QUANTIZE: {"p": [ROW, ACT], "i": [32, 512, 2, 512]},
    native.OP_MATVEC: {"p": [ACT, ROW, ROW], "i": [Type.Q8_0, 8, 32, 34, 2, 0, 8]},
    native.OP_ADD: {"p": [ROW, ROW, ROW], "i": [512]},
    native.OP_GLU: {"p": [ROW, ROW, ROW], "i": [512, 0, 512, 512]},
    native.OP_ROPE: {"p": [ROW, ROW], "i": [8, 64, 64, 0, 512]},
    native.OP_KV_STORE: {"p": [ROW, ROW, ROW, ROW, TOKENS, TOKENS], "i": [1, 1, 1, 1, 1, 1, 0]},
    native.OP_ATTENTION: {"p": [ROW, ROW, ROW, ROW, TOKENS, TOKENS, ROW], "i": [1, 1, 1, 1, 1, 0, 0, 1]},
    native.OP_ROUTER: {"p": [ROW, TOKENS, ROW], "i": [8, 2, 0, 0]},
    native.OP_EXPERTS: {
        "p": [ROW, TOKENS, ROW, ROW, ROW, ROW, ROW, ROW, ACT, ACT],
        "i": [4, 2, 32, 32, *[Type.Q8_0] * 3, 34, 34, 34, 0, 2],
    },
    native.OP_GATED_ADD: {"p": [ROW, ROW, ROW, ROW], "i": [512]},
    native.OP_SCALE: {"p": [ROW, ROW], "i": [512]},
}
BAD: list[tuple[int, str, int, Any]] = [  # operation, field, index, value
    *(
        (code, "p", index, None)
        for code, op in GOOD.items()
        for index in range(len(op["p"]))
        if (code, index) != (native.OP_EXPERTS, 7)  # rows alone
    ),
    (native.OP_EMBED, "i", 0, 63),
    (native.OP_EMBED, "i", 1, 0),
    (native.OP_RMS_NORM, "i", 0, 65),
    (native.OP_QUANTIZE, "i", 0, 64),
    (native.OP_QUANTIZE, "i", 1, 500),
    (native.OP_QUANTIZE, "i", 2, 3),
    (native.OP_QUANTIZE, "p", 1, int(ACT.ctypes.data) + 4),
    (native.OP_MATVEC, "i", 0, -1),
    (native.OP_MATVEC, "i", 0, Type.I32),
    (native.OP_MATVEC, "i", 2, 33),
    (native.OP_MATVEC, "i", 4, 0),
    (native.OP_MATVEC, "i", 6, 7),
    (native.OP_ADD, "i", 0, -512),
    (native.OP_GLU, "i", 1, 2),
    (native.OP_ROPE, "i", 2, 66),
    (native.OP_ROPE, "i", 2, 63),
    (native.OP_ROPE, "i", 3, 2),
    (native.OP_KV_STORE, "i", 6, 2),
    (native.OP_ATTENTION, "i", 4, 0),
    (native.OP_ATTENTION, "i", 5, -1),
    (native.OP_ROUTER, "i", 1, 9),
    (native.OP_ROUTER, "i", 2, 3),
    (native.OP_EXPERTS, "i", 1, 5),
    (native.OP_EXPERTS, "i", 2, 33),
    (native.OP_EXPERTS, "i", 3, (1 << 20) + 32),
    (native.OP_EXPERTS, "i", 5, Type.Q4_K),
    (native.OP_EXPERTS, "i", 10, 2),
    (native.OP_EXPERTS, "i", 11, 0),
    (native.OP_SCALE, "i", 0, 1 << 41),
]


@pytest.mark.parametrize(("code", "field", "index", "value"), BAD)
def test_malformed_operation_is_named_and_nothing_runs(
    pool: Pool, code: int, field: str, index: int, value: Any
) -> None:
    program, y = adding(pool, 2)
    op = {"i": list(GOOD[code]["i"]), "p": list(GOOD[code]["p"])}
    op[field][index] = value
    program.add(code, 1, **op)
    with pytest.raises(EngineError, match=rf"operation 2 \({native.OP_NAMES[code]}\) .* is malformed"):
        program.run()
    assert not y.any()


@pytest.mark.parametrize("code", list(GOOD))
def test_well_formed_operation_runs(pool: Pool, code: int) -> None:
    program = Program(pool)
    program.add(code, 1, **GOOD[code])
    program.run()


@pytest.mark.parametrize("code", list(GOOD))
def test_row_count_is_bounded(pool: Pool, code: int) -> None:
    for n in (0, 9, -1):
        program = Program(pool)
        program.add(code, n, **GOOD[code])
        with pytest.raises(EngineError, match="malformed"):
            program.run()


def test_host_tables_are_bounded(pool: Pool) -> None:
    """Tokens past the vocabulary and positions past the page table are seen before anything runs."""
    positions = np.array([256], np.int32)
    for code, at in ((native.OP_KV_STORE, 4), (native.OP_ATTENTION, 4), (native.OP_EMBED, 0)):
        pointers = list(GOOD[code]["p"])
        pointers[at] = TOKENS[7:] if code == native.OP_EMBED else positions
        program = Program(pool)
        program.add(code, 1, p=pointers, i=GOOD[code]["i"])
        with pytest.raises(EngineError, match="malformed"):
            program.run()


def test_unknown_code_and_strided_array(pool: Pool) -> None:
    program = Program(pool)
    program.add(77, 1)
    with pytest.raises(EngineError, match=r"operation 0 \(77\)"):
        program.run()
    with pytest.raises(EngineError, match="array 1 is not contiguous"):
        program.add(native.OP_ADD, 1, p=(ROW, ROW[:, ::2], ROW), i=(256,))


def test_joined_products_need_one_before_them(pool: Pool) -> None:
    joined = {"p": GOOD[native.OP_MATVEC]["p"], "i": [*GOOD[native.OP_MATVEC]["i"], 1]}
    op = native.Op(code=native.OP_MATVEC, n=1)
    op.i[: len(joined["i"])] = joined["i"]
    op.p[:3] = [array.ctypes.data for array in joined["p"]]
    run = native.library().ft_run
    assert run(pool.handle, (native.Op * 1)(op), 1) == -1
    first = native.Op.from_buffer_copy(op)
    first.i[7] = 0
    assert run(pool.handle, (native.Op * 8)(first, *[op] * 7), 8) == 0
    assert run(pool.handle, (native.Op * 9)(first, *[op] * 8), 9) == -9


@pytest.mark.parametrize("fields", [{"p": [ROW, ROW, ROW, ROW]}, {"p": [ROW] * 5, "i": [64, 8, 512, 512]}])
def test_norm_of_a_sum_has_a_place_for_it_and_whole_rows(pool: Pool, fields: dict[str, list[Any]]) -> None:
    program = Program(pool)
    program.add(native.OP_RMS_NORM, 1, **{"i": [512, 1, 512, 512], **fields})
    with pytest.raises(EngineError, match=r"operation 0 \(rms_norm\)"):
        program.run()


def test_rows_join_rows_alone(pool: Pool) -> None:
    for before, is_good in ((native.OP_GLU, True), (native.OP_ROPE, True), (native.OP_ADD, False)):
        program = Program(pool)
        program.add(before, 1, **GOOD[before])
        program.add(native.OP_QUANTIZE, 1, **GOOD[native.OP_QUANTIZE], joined=True)
        if is_good:
            program.run()
        else:
            with pytest.raises(EngineError, match=r"operation 1 \(quantize\)"):
                program.run()
    program = Program(pool)
    program.add(native.OP_QUANTIZE, 1, **GOOD[native.OP_QUANTIZE], joined=True)
    with pytest.raises(EngineError, match=r"operation 0 \(quantize\)"):
        program.run()


def test_program_keeps_its_arrays_alive(pool: Pool) -> None:
    program, y = adding(pool, 1, width=1 << 20)
    assert len(program) == 1
    program.run()
    assert (y == 1).all()


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_id", [Type.F16, Type.BF16, Type.Q4_1, Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.IQ3_S])
@pytest.mark.parametrize(("rows", "cols"), [(1, 256), (300, 512)])
def test_dequantize(pool: Pool, type_id: int, rows: int, cols: int) -> None:
    data = RNG.integers(0, 256, (rows, quants.row_bytes(type_id, cols)), dtype=np.uint8)
    out = np.zeros((rows, cols), np.float32)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(type_id, data)
    pool.dequantize(type_id, data, out)
    np.testing.assert_array_equal(out, expected)


def test_dequantize_refuses_what_does_not_fit(pool: Pool) -> None:
    data, out = np.zeros((4, 34), np.uint8), np.zeros((4, 32), np.float32)
    short = np.ascontiguousarray(data[:, :32])
    cases = (data, out[:3]), (data[:, ::2], out), (data, out.astype(np.float64)), (data[0], out), (short, out)
    for bad_data, bad_out in cases:
        with pytest.raises(EngineError, match="decoding ggml type 8 needs"):
            pool.dequantize(Type.Q8_0, bad_data, bad_out)
    with pytest.raises(EngineError, match="type 26 cannot be decoded"):
        pool.dequantize(Type.I32, out.view(np.uint8), out)
    pool.dequantize(Type.Q8_0, data[:0], out[:0])


def test_types_and_sizes() -> None:
    classes = {Type.F32: 0, Type.F16: 0, Type.Q4_1: 32, Type.Q8_0: 32, Type.Q4_K: 256, Type.Q6_K: 256, Type.IQ1_S: 0}
    assert {type_id: native.type_class(type_id) for type_id in classes} == classes
    assert native.act_bytes(32, 576, 2) == 2 * native.act_bytes(32, 576, 1)
    assert native.act_bytes(256, 512, 1) % native.ALIGNMENT == 0
    with pytest.raises(EngineError, match="class 256"):
        native.act_bytes(256, 300, 1)
    assert native.aligned(100).ctypes.data % 64 == 0 and native.aligned(100).shape == (100,)
    assert native.aligned_zeros(9).dtype == np.float32 and native.aligned_zeros(9).ctypes.data % 64 == 0


# --- the library and the machine -------------------------------------------------------------------------------------


def test_variants() -> None:
    chosen = native.variant()
    try:
        native.set_variant("portable")
        assert native.variant() == "portable"
        with pytest.raises(EngineError, match="unknown or not for this processor"):
            native.set_variant("abacus")
    finally:
        native.set_variant("auto")
    assert native.variant() == chosen


def test_missing_and_foreign_library(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = native.library()
    native.library.cache_clear()
    try:
        monkeypatch.setattr(native, "ABI_VERSION", 99)
        with pytest.raises(EngineError, match=r"expected \(99, .*build it again"):
            native.variant()
        monkeypatch.setattr(native, "_file_name", lambda: "no-such-library.so")
        with pytest.raises(EngineError, match=r"no-such-library.so was not found .* build it with"):
            native.variant()
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert native.library().ft_abi_version() == loaded.ft_abi_version()


@pytest.mark.parametrize(
    ("files", "quota", "n_cores"),
    [
        ({}, None, 4),
        ({"/proc/self/cgroup": "0::/box", "/sys/fs/cgroup/box/cpu.max": "max 100000"}, None, 4),
        ({"/proc/self/cgroup": "0::/box/in", "/sys/fs/cgroup/box/cpu.max": "250000 100000"}, 2.5, 2),
        ({"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5, 1),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/a\n1:name=systemd:/a",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            3.0,
            3,
        ),
    ],
)
def test_cores_respect_topology_and_quota(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None, n_cores: int
) -> None:
    siblings = {
        f"/sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)
    }
    monkeypatch.setattr(cores, "_read", lambda path: (files | siblings).get(Path(path).as_posix()))
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.physical_cpus() == [0, 1, 2, 3]
    assert cores.cpu_quota() == quota
    assert cores.physical_cores() == n_cores


def test_cores_of_this_machine() -> None:
    assert 1 <= native.physical_cores() <= (psutil.cpu_count() or 1)


@pytest.mark.parametrize("n_bytes", [0, 1, 256 * 1024, 1_000_003])
def test_bytes_are_copied_by_all_threads(n_bytes: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, n_bytes, np.uint8)
    to = np.zeros(n_bytes, np.uint8)
    with native.Pool(3) as pool:
        pool.copy(data, to)
        assert np.array_equal(data, to)
        with pytest.raises(EngineError, match="do not fit"):
            pool.copy(data, np.zeros(n_bytes + 1, np.uint8))
