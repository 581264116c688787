"""Measuring fills and experts on the CPU: the order of it with sides that are made up, each real side for itself, and
what the engine does about its profile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken import quants
from freetoken.cli.expert_banks import random_blocks
from freetoken.experts.bank import Bank, LayerBanks, Span
from freetoken.experts.measure import CpuSide, alike, looping, measure, n_figures, read_gbs, sample
from freetoken.experts.profile import Conditions, ExpertFormat, Times, look_up, store
from freetoken.gpu import driver, fill_bench, link, profiled
from freetoken.gpu.fill_bench import GpuFills
from freetoken.gpu.profiled import find_or_measure
from freetoken.native import Pool
from freetoken.options import EngineOptions
from freetoken.quants import GgmlType

NOW = Conditions("GPU-1", "580.82", "5 x16", "Some CPU", 16, 2, 128, "avx2, 2 planes, 0123")


def make_layer(
    layer: int = 0, types: Sequence[GgmlType] = (GgmlType.Q4_K,) * 3, n_expert: int = 16, d: int = 256, ff: int = 256
) -> LayerBanks:
    banks = []
    for name, type_id, (rows, cols) in zip(("gate", "up", "down"), types, ((ff, d), (ff, d), (d, ff)), strict=True):
        size = rows * quants.row_bytes(type_id, cols)
        data = random_blocks(type_id, n_expert * size).reshape(n_expert, size)
        banks.append(Bank(f"blk.{layer}.{name}", type_id, rows, cols, data, Span(0, 0, data.nbytes)))
    return LayerBanks(layer, tuple(banks))


class MadeUp:
    """A side that takes `each` seconds an expert, twice that beside the other."""

    def __init__(self, name: str, each: float, log: list[str], most: int = 16) -> None:
        self.name, self.each, self.log, self.most = name, each, log, most
        self.other: MadeUp | None = None
        self.is_busy = False

    def seconds(self, n: int, budget_s: float) -> float:
        assert self.other is not None and not self.is_busy
        self.log.append(f"{self.name} {n}{' beside' if self.other.is_busy else ''}")
        return n * self.each * (2 if self.other.is_busy else 1)

    @contextmanager
    def busy(self, n: int) -> Iterator[None]:
        self.log.append(f"{self.name} busy {n}")
        self.is_busy = True
        yield
        self.is_busy = False


def sides(most: int = 16) -> tuple[MadeUp, MadeUp, list[str]]:
    log: list[str] = []
    fills, cpu = MadeUp("fill", 2e-5, log), MadeUp("cpu", 1e-5, log, most)
    fills.other, cpu.other = cpu, fills
    return fills, cpu, log


def test_each_side_is_measured_alone_and_beside_the_other() -> None:
    fills, cpu, log = sides(most=4)
    n_told = 0

    def on_figure() -> None:
        nonlocal n_told
        n_told += 1

    times = measure(fills, cpu, counts=(1, 8), on_figure=on_figure)
    assert log == [
        *("fill 1", "fill 8", "cpu 1"),
        *("cpu busy 4", "fill 1 beside", "fill 8 beside"),
        *("fill busy 8", "cpu 1 beside"),
    ]
    assert times == Times({1: 2e-5, 8: 16e-5}, {1: 4e-5, 8: 32e-5}, {1: 1e-5}, {1: 2e-5})
    assert n_told == n_figures((1, 8), with_fills=True)
    log.clear()
    assert measure(None, cpu, counts=(1, 4)) == Times(cpu={1: 1e-5, 4: 4e-5}) and log == ["cpu 1", "cpu 4"]


def test_a_sample_is_the_median_without_the_first() -> None:
    now, takes = [0.0], iter([9.0, 1.0, 50.0, 2.0, 3.0, 1.0, 2.0, 1.0, 1.0])

    def work() -> None:
        now[0] += next(takes)

    assert sample(work, 0.0, clock=lambda: now[0]) == 2.0


def test_a_loop_runs_beside_and_ends() -> None:
    runs: list[str] = []

    def work() -> None:
        runs.append(threading.current_thread().name)
        time.sleep(0.001)

    with looping(work, "name"):
        assert runs
    n = len(runs)
    time.sleep(0.01)
    assert len(runs) == n and set(runs) == {"name"}


def test_a_loop_that_fails_says_so() -> None:
    def work() -> None:
        raise ValueError("of the loop")

    with pytest.raises(ValueError, match="of the loop"), looping(work, "name"):
        pass


def test_layers_by_format() -> None:
    q4, q6 = (GgmlType.Q4_K,) * 3, (GgmlType.Q4_K, GgmlType.Q4_K, GgmlType.Q6_K)
    first = make_layer(0, q4)
    layers = [first, None, make_layer(2, q6), make_layer(3, q4), make_layer(4, q4)]
    found = alike(layers, 2 * sum(bank.data.nbytes for bank in first.banks))
    assert {str(kind): [layer.layer for layer in some] for kind, some in found.items()} == {
        "Q4_K 256x256": [0, 3],
        "Q4_K/Q4_K/Q6_K 256x256": [2],
    }


@pytest.mark.parametrize(
    "types",
    [(GgmlType.Q4_K,) * 3, (GgmlType.Q4_K, GgmlType.Q8_0, GgmlType.Q6_K), (GgmlType.F16,) * 3],
    ids=["one class", "two classes", "floats"],
)
def test_experts_on_the_cpu(types: tuple[GgmlType, ...]) -> None:
    with Pool(2) as pool:
        side = CpuSide(pool, [make_layer(0, types), make_layer(1, types)])
        assert side.most == 16
        one, all_ = side.seconds(1, 0.0), side.seconds(16, 0.0)
        assert 0 < one < all_
        with side.busy(4):
            time.sleep(0.01)
        assert read_gbs(pool, [make_layer()], 0.0) > 0


def test_fills_reach_the_slots() -> None:
    """On the interpreter: the graph's fills are those of the engine."""
    layer = make_layer(0, (GgmlType.F32,) * 3, n_expert=4, d=32, ff=32)
    fills = GpuFills([layer], torch.device("cpu"), most=2)
    loop = fills._loop(2)
    fills._choose(loop)
    loop.run()
    chosen = loop.experts[-1].tolist()
    assert len(set(chosen)) == 2
    expected = [np.concatenate([bank.data[e] for bank in layer.banks]) for e in chosen]
    assert np.array_equal(fills._slots.numpy()[:, : expected[0].size], np.stack(expected))
    with fills.busy(1):
        pass
    assert fill_bench.copy_gbs([layer], torch.device("cpu")) == 0.0


def test_copies_end_where_another_locked_range_begins() -> None:
    assert fill_bench.copies(1000, 70, 300, [1250, 900, 1100, 1000, 1300]).tolist() == [
        [70, 1000, 100],
        [170, 1100, 150],
        [320, 1250, 50],
    ]
    assert fill_bench.copies(1000, 70, 300, []).tolist() == [[70, 1000, 300]]


# --- the engine's profile --------------------------------------------------------------------------------------------


def own(tmp_path: Path, layers: list[LayerBanks | None], now: Conditions = NOW) -> tuple[dict[str, Times], list[str]]:
    fills, _, log = sides()

    class Quiet(MadeUp):
        def seconds(self, n: int, budget_s: float) -> float:
            assert budget_s < 0.2
            self.log.append(f"{self.name} {n}")
            return n * self.each

    with Pool(1) as pool:
        found = find_or_measure(
            layers,
            torch.device("cpu"),
            pool,
            lambda: now,
            where=tmp_path,
            make_fills=lambda layers, device: Quiet("fill", fills.each, log),
            measure_s=0.01,
        )
    assert found.conditions == now
    return {str(kind): times for kind, times in found.formats.items()}, log


def test_an_absent_profile_is_measured_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        formats, log = own(tmp_path, [None, make_layer(), make_layer()])
    assert list(formats) == ["Q4_K 256x256"] and "fill 8" in log
    assert "there is no profile" in caplog.text and "measured in" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again, log = own(tmp_path, [make_layer()])
    assert not log and again.keys() == formats.keys() and "follows the profile of" in caplog.text
    assert look_up(NOW, tmp_path).entry is not None


def test_a_stale_profile_is_measured_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own(tmp_path, [make_layer()])
    with caplog.at_level(logging.INFO):
        _, log = own(tmp_path, [make_layer()], replace(NOW, threads=4))
    assert log and "threads was 2, is 4" in caplog.text
    assert not own(tmp_path, [make_layer()])[1], "the other entry stays"


def test_only_missing_formats_are_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own(tmp_path, [make_layer()])
    other = make_layer(1, (GgmlType.Q6_K,) * 3)
    with caplog.at_level(logging.INFO):
        formats, log = own(tmp_path, [make_layer(), other])
    assert set(formats) == {"Q4_K 256x256", "Q6_K 256x256"} and log.count("fill 8") == 2
    assert "lacks Q6_K 256x256" in caplog.text


def test_a_link_that_slept_is_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path, [make_layer()])
    answers = iter([replace(NOW, link="1 x16"), replace(NOW, link="1 x16"), NOW])
    copies: list[int] = []

    def copy(*_: object) -> float:
        copies.append(1)
        return 0.0

    monkeypatch.setattr(profiled, "copy_gbs", copy)
    with Pool(1) as pool:
        found = find_or_measure([make_layer()], torch.device("cpu"), pool, lambda: next(answers), where=tmp_path)
    assert found.conditions == NOW and len(copies) == 2


def test_a_slowed_machine_has_its_own_times(tmp_path: Path) -> None:
    own(tmp_path, [make_layer()])
    found = look_up(NOW, tmp_path).entry
    assert found is not None
    kind = ExpertFormat.of(make_layer())
    real = found.formats[kind]
    slow = profiled.slowed(replace(found, choices={"a": {"chosen": "cpu"}}), 3.0, 1.0)
    assert slow.formats[kind].fill == {n: 3 * t for n, t in real.fill.items()}
    assert slow.formats[kind].cpu == real.cpu and not slow.choices
    assert profiled.slowed(found, 0.0, 2.0).formats[kind].fill == real.fill
    for options, is_stored in ((EngineOptions(), True), (EngineOptions(slow_cpu=2.0), False)):
        profile = profiled.OwnProfile([make_layer()], torch.device("cpu"), lambda: Pool(1), options)
        assert profile.is_stored == is_stored
    assert profiled.own_profile([make_layer()], torch.device("cpu"), lambda: Pool(1), EngineOptions()) is None


def test_a_profile_of_the_cpu_alone_lacks_fills(tmp_path: Path) -> None:
    entry = look_up(NOW, tmp_path).entry
    assert entry is None
    own(tmp_path, [make_layer()])
    known = look_up(NOW, tmp_path).entry
    assert known is not None
    kind = ExpertFormat.of(make_layer())
    store(replace(known, formats={kind: Times(cpu={1: 1e-5})}), tmp_path)
    assert own(tmp_path, [make_layer()])[1]


# --- conditions ------------------------------------------------------------------------------------------------------


def test_conditions_of_the_cpu_alone() -> None:
    now = link.conditions(None, 3)
    assert (now.gpu, now.driver, now.link, now.threads) == ("", "", "", 3)
    assert now == link.conditions(None, 3) and now.memory_gib > 0 and now.cores > 0
    assert now.kernels != link.conditions(None, 3, n_planes=1).kernels


def test_a_link_by_the_systems_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "0000:0a:00.0"
    folder.mkdir()
    (folder / "current_link_speed").write_text("16.0 GT/s PCIe\n")
    (folder / "current_link_width").write_text("8\n")
    monkeypatch.setattr(link, "_PCI", tmp_path)
    monkeypatch.setattr(link, "_library", lambda: None)
    monkeypatch.setattr(driver, "pci_bus_id", lambda index: "0000:0A:00.0" if index == 0 else "")
    assert link.link(0) == "4 x8" and link.link(1) == ""
    (folder / "current_link_speed").write_text("Unknown")
    assert link.link(0) == ""
    monkeypatch.setattr(link, "_RELEASE", tmp_path / "version")
    assert link.driver_release() == ""
    (tmp_path / "version").write_text("580.82.07\n")
    assert link.driver_release() == "580.82.07"


class FakeManagement:
    """NVIDIA's management library with one card."""

    def nvmlSystemGetDriverVersion(self, text: object, _size: object) -> int:
        text.value = b"580.1"  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus: bytes, _handle: object) -> int:
        return 0 if bus == b"0000:01:00.0" else 6

    def nvmlDeviceGetCurrPcieLinkGeneration(self, _handle: object, value: object) -> int:
        value._obj.value = 5  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetCurrPcieLinkWidth(self, _handle: object, value: object) -> int:
        value._obj.value = 16  # type: ignore[attr-defined]
        return 0


def test_a_link_by_the_management_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_library", FakeManagement)
    monkeypatch.setattr(driver, "pci_bus_id", lambda index: f"0000:0{index + 1}:00.0")
    assert link.link(0) == "5 x16" and link.link(1) == "" and link.driver_release() == "580.1"
