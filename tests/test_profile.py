"""The profile: its file, what makes it stale, and the tables of the split that come from it."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import machines
import numpy as np
import pytest
from machines import COUNTS, KIND, MACHINES, NOW

from freetoken.experts import profile
from freetoken.experts.profile import Entry, ExpertFormat, folder, look_up, path_of, store
from freetoken.experts.split import fraction_q16, q16_table
from freetoken.experts.tables import fill_tables, layer_seconds, split_tables

OTHER = ExpertFormat.parse("MXFP4 2880x2880")
straight = partial(machines.straight, least_share=0.0)


def entry(**values: object) -> Entry:
    given: dict[str, object] = {"formats": {KIND: straight(25.0, 60.0)}, "copy_gbs": 25.0, "read_gbs": 60.0}
    return Entry.new(NOW, **(given | values))


# --- formats ---------------------------------------------------------------------------------------------------------


def test_names_of_formats() -> None:
    assert str(KIND) == "Q4_K/Q4_K/Q6_K 2048x768" and str(OTHER) == "MXFP4 2880x2880"
    assert KIND.types == (12, 12, 14) and KIND.expert_bytes == 768 * 1152 * 2 + 2048 * 630
    for name in ("Q4_K", "Q4_K/Q6_K 2048x768", "Q9_Z 2048x768", "Q4_K 2048", "Q4_K 2048x-1", ""):
        with pytest.raises(ValueError, match="no format"):
            ExpertFormat.parse(name)


# --- the file --------------------------------------------------------------------------------------------------------


def test_what_is_stored_is_found(tmp_path: Path) -> None:
    path = store(entry(choices={"model": {"chosen": "hybrid"}}), tmp_path)
    assert path == path_of("GPU-1", tmp_path) and [p.name for p in tmp_path.iterdir()] == [path.name]
    found = look_up(NOW, tmp_path).entry
    assert found is not None and found.conditions == NOW
    assert found.choices == {"model": {"chosen": "hybrid"}} and found.copy_gbs == 25.0
    for n in COUNTS:
        assert found.formats[KIND].cpu_beside[n] == pytest.approx(straight(25.0, 60.0).cpu_beside[n], rel=1e-4)


def test_later_measurements_join_earlier_ones(tmp_path: Path) -> None:
    store(entry(choices={"a": {"chosen": "cpu"}}), tmp_path)
    later = Entry.new(NOW, formats={OTHER: straight(10.0, 20.0, OTHER)}, choices={"b": {"chosen": "offload"}})
    store(later, tmp_path)
    store(replace(later, conditions=replace(NOW, threads=2)), tmp_path)
    found = look_up(NOW, tmp_path).entry
    assert found is not None and set(found.formats) == {KIND, OTHER} and set(found.choices) == {"a", "b"}
    assert found.read_gbs == 60.0
    two = look_up(replace(NOW, threads=2), tmp_path).entry
    assert two is not None and set(two.formats) == {OTHER}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("driver", "581.1"),
        ("link", "4 x8"),
        ("cpu", "Another CPU"),
        ("cores", 8),
        ("threads", 6),
        ("memory_gib", 64),
        ("kernels", "avx2, 2 planes, 0123"),
    ],
)
def test_a_profile_is_stale_when_anything_differs(tmp_path: Path, name: str, value: object) -> None:
    store(entry(), tmp_path)
    found = look_up(replace(NOW, **{name: value}), tmp_path)  # type: ignore[arg-type]
    assert found.entry is None
    assert f"{name} was {getattr(NOW, name)}, is {value}" in found.reason and "does not hold" in found.reason
    assert found.is_link_only == (name == "link")


def test_the_nearest_entry_says_what_differs(tmp_path: Path) -> None:
    store(replace(entry(), conditions=replace(NOW, cpu="X", driver="1")), tmp_path)
    store(replace(entry(), conditions=replace(NOW, threads=6)), tmp_path)
    reason = look_up(NOW, tmp_path).reason
    assert "threads was 6, is 14" in reason and "cpu" not in reason


def test_a_profile_written_elsewhere_is_reported_and_not_used(tmp_path: Path) -> None:
    assert "no profile" in look_up(NOW, tmp_path).reason
    store(replace(entry(), conditions=replace(NOW, gpu="GPU-9")), tmp_path)
    found = look_up(NOW, tmp_path)
    assert found.entry is None and "of other GPUs (GPU-9)" in found.reason
    path_of("GPU-9", tmp_path).rename(path_of("GPU-1", tmp_path))  # copied from another machine
    found = look_up(NOW, tmp_path)
    assert found.entry is None and "gpu was GPU-9, is GPU-1" in found.reason


def broken_files() -> list[object]:
    good = profile._to_json(entry())
    whole = {"version": 1, "entries": [good]}
    times = {"Q4_K 2048x768": {"fill": {"1": -3.0}}}
    return [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"version": 2, "entries": []}',
        '{"version": 1}',
        whole | {"entries": [1]},
        whole | {"entries": {"a": 1}},
        whole | {"entries": [good | {"conditions": {}}]},
        whole | {"entries": [good | {"conditions": good["conditions"] | {"threads": "14"}}]},
        whole | {"entries": [good | {"microseconds": times}]},
        whole | {"entries": [good | {"microseconds": {"Q4_K 2048x768": {"fill": {"0": 3.0}}}}]},
        whole | {"entries": [good | {"microseconds": {"nonsense": {}}}]},
        whole | {"entries": [good | {"copy_gbs": float("nan")}]},
        whole | {"entries": [good | {"choices": [1]}]},
    ]


@pytest.mark.parametrize("data", broken_files(), ids=lambda data: str(data)[:40])
def test_a_damaged_file_counts_as_none_and_is_replaced(tmp_path: Path, data: object) -> None:
    path = path_of("GPU-1", tmp_path)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    found = look_up(NOW, tmp_path)
    assert found.entry is None and str(path) in found.reason
    assert store(entry(), tmp_path) == path and look_up(NOW, tmp_path).entry is not None


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert store(entry(), tmp_path / "file") is None
    assert "cannot be stored" in caplog.text


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(entry(), tmp_path)
    before = path_of("GPU-1", tmp_path).read_text()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    assert store(entry(copy_gbs=1.0), tmp_path) is None
    assert path_of("GPU-1", tmp_path).read_text() == before


def test_a_file_keeps_its_latest_entries(tmp_path: Path) -> None:
    for n in range(40):
        store(replace(entry(), conditions=replace(NOW, threads=n + 1)), tmp_path)
    assert look_up(replace(NOW, threads=40), tmp_path).entry is not None
    assert look_up(replace(NOW, threads=1), tmp_path).entry is None


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"FREETOKEN_PROFILE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"}, Path("/a/b")),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/freetoken")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "freetoken"),
        ({}, Path.home() / ".cache" / "freetoken"),
    ],
)
def test_where_profiles_are_kept(environ: dict[str, str], path: Path) -> None:
    assert folder(environ) == path


def test_names_of_files_stay_in_the_folder(tmp_path: Path) -> None:
    assert path_of("../../etc/x", tmp_path).parent == tmp_path
    assert path_of("", tmp_path).name == "profile-cpu.json"


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_measured_tables_of_the_machines_of_the_paper(name: str) -> None:
    """Where times follow bytes, the measured table costs no more than the Q16 rule's anywhere."""
    b_p, b_h = MACHINES[name]
    times = straight(b_p, b_h)
    table = split_tables(entry(formats={KIND: times}), [KIND], 16)[0]
    rule = q16_table(16, fraction_q16(b_p, b_h))
    for m in range(1, 17):
        cost = [layer_seconds(times, q, m - q) for q in range(m + 1)]
        assert cost[table[m]] <= min(cost) * (1 + 1e-6)
        assert cost[table[m]] <= cost[rule[m]] * (1 + 1e-6)
        assert table[m] >= rule[m] - 1, "the CPU goes on faster once the fills have ended"


def test_bandwidths_alone_follow_the_rule() -> None:
    known = entry(formats={}, copy_gbs=25.3, read_gbs=56.7)
    assert split_tables(known, [KIND], 8)[0].tolist() == q16_table(8, fraction_q16(25.3, 56.7)).tolist()
    nothing = entry(formats={}, copy_gbs=0.0)
    for unknown in (None, nothing):
        assert split_tables(unknown, [KIND], 4)[0].tolist() == [0, 1, 2, 3, 4]
    larger = ExpertFormat(KIND.types, 4096, 1536)
    by_type = split_tables(entry(formats={KIND: straight(20.0, 60.0)}), [larger], 8)[0]
    assert by_type.tolist() == q16_table(8, fraction_q16(20.0, 60.0)).tolist()


def test_every_layer_follows_its_own_format() -> None:
    both = entry(formats={KIND: straight(10.0, 100.0), OTHER: straight(50.0, 51.0, OTHER)})
    tables = split_tables(both, [KIND, None, OTHER, KIND], 8, cpu_layers={3})
    assert tables.dtype == np.int32 and tables.shape == (4, 9)
    assert tables[0, 8] <= 2 and tables[1, 8] == 8 and tables[2, 8] >= 7 and not tables[3].any()


@pytest.mark.parametrize(
    ("limits", "most"),
    [({"max_fetch": -1}, 8), ({"max_fetch": 3}, 3), ({"max_fetch": 0}, 0), ({"max_fetch": 0, "min_fill": 1}, 0)],
)
def test_limits_of_a_table(limits: dict[str, int], most: int) -> None:
    tables = split_tables(entry(formats={KIND: straight(50.0, 50.1)}), [KIND, None], 8, **limits)  # type: ignore[arg-type]
    assert tables.max() == most


def test_a_least_fill_and_a_slower_cpu() -> None:
    slow = entry(formats={KIND: straight(1.0, 100.0)})
    assert not split_tables(slow, [KIND], 4).any()
    assert split_tables(slow, [KIND], 4, min_fill=1)[0].tolist() == [0, 1, 1, 1, 1]
    some = entry(formats={KIND: straight(25.0, 60.0)})
    for known in (some, entry(formats={}, copy_gbs=25.0, read_gbs=60.0)):
        fast, slow_ = (split_tables(known, [KIND], 16, cpu_factor=factor)[0] for factor in (1.0, 2.5))
        assert (slow_ >= fast).all() and slow_.sum() > fast.sum()


def test_a_table_that_fills_everything() -> None:
    assert fill_tables(2, 3, {1}).tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
