"""Placement on a made-up machine of two memory nodes, and where pages lie on this one."""

from __future__ import annotations

import logging
import mmap
import os
import platform
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from freetoken import cores, numa

TWO_NODES = {"node0": "0-3,16-19", "node1": "4-7,20-23"}


@pytest.fixture
def calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[tuple[object, ...]]:
    """A machine of two nodes with four cores each, all with two threads; system calls are kept, not made."""
    made: list[tuple[object, ...]] = []

    def call(*arguments: object) -> bool:
        made.append(arguments)
        return True

    caplog.set_level(logging.INFO)
    for name, cpus in TWO_NODES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus + "\n")
    (tmp_path / "has_memory").write_text("0-1\n")
    monkeypatch.setattr(cores, "_NODES", tmp_path)
    monkeypatch.setattr(cores, "physical_cpus", lambda: list(range(7)))  # CPU 7 is not ours
    monkeypatch.setattr(numa, "physical_cpus", lambda: list(range(7)))
    monkeypatch.setattr(numa, "_call", call)
    monkeypatch.setattr(numa, "_current_cpu", lambda: 21)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: made.append(("affinity", pid, tuple(cpus))))
    return made


def test_distribute_takes_turns_and_spreads_memory(
    calls: list[tuple[object, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    assert numa.place("distribute") == [0, 4, 1, 5, 2, 6, 3]
    assert [call[:2] for call in calls] == [(0, 3)]  # set_mempolicy, interleave
    assert "threads over 2 nodes, memory too" in caplog.text


def test_a_refused_policy_is_told(
    calls: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numa, "_call", lambda *arguments: False)
    assert numa.place("distribute") == [0, 4, 1, 5, 2, 6, 3]
    assert "numactl --interleave=all" in caplog.text and "memory is not" in caplog.text


def test_isolate_keeps_to_the_node_of_the_caller(calls: list[tuple[object, ...]]) -> None:
    assert numa.place("isolate") == [4, 5, 6]  # CPU 21 is the second thread of a core of node 1
    assert calls == [("affinity", 0, (4, 5, 6))]


def test_numactl_and_nothing_change_nothing(calls: list[tuple[object, ...]]) -> None:
    assert numa.place("numactl") == list(range(7))
    assert numa.place(None) is None
    assert calls == []


def test_one_node_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cores, "_NODES", tmp_path)
    caplog.set_level(logging.INFO)
    assert numa.place("distribute") is None
    assert "one memory node only" in caplog.text
    numa.tell_places("distribute", [])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("places", "warns"), [({0: 60, 1: 40}, False), ({0: 80, 1: 20}, True)])
def test_pages_on_one_node_are_warned_of(
    calls: list[tuple[object, ...]],
    places: dict[int, int],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(numa, "page_nodes", lambda mappings: Counter(places))
    numa.tell_places("distribute", [])
    assert f"of 100 sampled pages of the file, {places[0]}% on node 0, {places[1]}% on node 1" in caplog.text
    assert ("drop the page cache" in caplog.text) == warns


@pytest.mark.skipif(platform.system() != "Linux", reason="move_pages is Linux's")
def test_only_pages_that_were_read_have_a_place(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(b"x" * (64 * mmap.PAGESIZE))
    with file.open("rb") as opened:
        handle = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    mapping = np.frombuffer(handle, np.uint8)
    before = sum(numa.page_nodes([mapping]).values())
    assert int(mapping[:: mmap.PAGESIZE].sum()) > 0
    after = sum(numa.page_nodes([mapping]).values())
    assert (before, after) in ((0, 64), (0, 0))  # (0, 0): the system does not tell
