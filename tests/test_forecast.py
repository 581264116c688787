"""Plans of whole machines, none of which is there: consistent, never more than there is, and monotone."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import tiny_keys, tiny_tensors, write

from freetoken import cores, engine
from freetoken.cli import main as cli
from freetoken.cli.plan import memory_size, plan_of_geometry
from freetoken.errors import OptionError
from freetoken.forecast.geometries import GEOMETRIES, geometry_named, sizes_of_geometry, slot_sizes_of_geometry
from freetoken.forecast.speed import hit_rate, rates_of
from freetoken.forecast.whole import N_SLOTS_AUTO, Machine, WholePlan
from freetoken.options import EngineOptions
from tools import plan_table

GIB = 1 << 30
NAMES = [g.name for g in GEOMETRIES]


def machine(vram: float, ram: float) -> Machine:
    return Machine(int(vram * GIB), "--vram", int(ram * GIB), "--ram", 8)


def random_wishes(rng: np.random.Generator, n_layer: int) -> dict[str, Any]:
    """Some flags of each kind, most of them left out."""
    choices: dict[str, list[Any]] = {
        "n_ctx": [0, 0, 2048, 5000, 32768],
        "n_parallel": [0, 0, 1, 3],
        "n_gpu_layers": [-1, -1, -2, 1, n_layer // 2, n_layer + 1],
        "moe_backend": ["auto", "auto", "offload", "hybrid", "cpu", "fused"],
        "moe_cache_rate": [0.0, 0.0, 0.0, 0.2, 0.9],
        "cpu_moe": [False, False, True],
        "n_cpu_moe": [0, 0, n_layer // 3],
        "memory_ratio": [0.9, 0.5, 1.0],
        "memory_margin_mib": [0, 0, 1024],
        "kv_reserve_tokens": [8192, 1000, 20000],
        "fit": [True, True, False],
        "n_ubatch": [512, 1024],
    }
    wishes = {name: values[rng.integers(len(values))] for name, values in choices.items()}
    kind = ["f16", "f32"][rng.integers(2)]
    return wishes | {"cache_type_k": kind, "cache_type_v": kind}


def check(p: WholePlan) -> None:
    """What holds for every plan."""
    gpu, host, spec = p.gpu, p.host, p.sizes.spec
    assert gpu is not None
    assert gpu.used_bytes <= gpu.budget_bytes <= gpu.free_bytes == p.machine.vram_bytes
    parts = (gpu.dense_bytes, gpu.kv_bytes, gpu.room_bytes, gpu.slots_bytes, gpu.own_buffers_bytes, gpu.scratch_bytes)
    assert gpu.used_bytes == sum(parts) and min(parts) >= 0
    for c, n in zip(gpu.classes, gpu.n_slots, strict=True):
        assert 0 < n <= len(c.layers) * spec.n_expert and min(c.layers) >= gpu.first_layer
    assert 0 < gpu.n_ctx <= (p.options.n_ctx or spec.n_ctx_train)
    if p.options.n_ctx and p.options.n_parallel <= 0:
        assert gpu.n_ctx == p.options.n_ctx, "a context that was given is never shortened"
    assert host.need_bytes - host.cold_bytes <= host.ram_bytes or host.usable_bytes == 0
    assert host.pinned_bytes <= min(host.pool_bytes, host.usable_bytes) and 0 <= host.resident_share <= 1
    assert host.pool_bytes == (p.sizes.pool_from(gpu.first_layer) if gpu.is_offloading else 0)
    q = p.prediction
    assert q.tokens_per_s == pytest.approx(1e3 / (q.gpu_ms + q.miss_ms + q.cpu_ms + q.disk_ms))
    assert (q.miss_bytes > 0) == (gpu.is_offloading and q.hit_rate < 1)
    assert json.loads(json.dumps(p.as_json()))["gpu"]["used_bytes"] == gpu.used_bytes
    assert "predicted, not measured" in str(p) and f"({p.machine.vram_source})" in str(p)


def test_200_random_plans_promise_no_more_than_there_is() -> None:
    rng = np.random.default_rng(7)
    n_plans = n_refused = 0
    while n_plans < 200:
        name = NAMES[rng.integers(len(NAMES))]
        options = EngineOptions(**random_wishes(rng, geometry_named(name).n_layer))
        vram, ram = float(rng.uniform(2, 48)), float(rng.uniform(4, 160))
        n_plans += 1
        try:
            p = plan_of_geometry(name, options, machine(vram, ram))
        except OptionError as error:
            n_refused += 1
            assert "MiB" in str(error) or "fused" in str(error) or "too small" in str(error), str(error)
            continue
        check(p)
        more = plan_of_geometry(name, options, machine(vram * 1.3, ram))  # never refused where less was enough
        check(more)
        assert p.gpu is not None and more.gpu is not None
        assert more.gpu.first_layer <= p.gpu.first_layer
        if more.gpu.first_layer == p.gpu.first_layer:
            assert more.gpu.n_ctx >= p.gpu.n_ctx
            if p.gpu.n_chunk == more.gpu.n_chunk and p.gpu.n_ctx == more.gpu.n_ctx:
                assert more.gpu.slots_bytes >= p.gpu.slots_bytes
    assert 20 < n_refused < 160


@pytest.mark.parametrize("name", NAMES)
def test_more_memory_is_never_slower(name: str) -> None:
    options = EngineOptions(n_ctx=8192)
    rates = {"pcie": 25.0, "cpu": 50.0, "gpu": 900.0}
    speeds = [
        plan_of_geometry(name, options, machine(vram, 256), **rates).prediction.tokens_per_s for vram in range(10, 40)
    ]
    # a longer chunk of prompts may cost a slot or two
    assert all(b >= 0.98 * a for a, b in pairwise(speeds))
    rams = [plan_of_geometry(name, options, machine(12, ram), **rates).prediction.tokens_per_s for ram in (16, 64, 200)]
    assert rams == sorted(rams)


def test_geometries_have_their_models_sizes() -> None:
    billions = {"Qwen3-30B-A3B": 30.5, "Qwen3.6-35B-A3B": 35, "gpt-oss-120b": 117, "GLM-4.5-Air": 106}
    for name, n in (billions | {"DeepSeek-V4-Flash": 284}).items():
        geometry = geometry_named(name.upper())
        # layers that predict further tokens are no part of a plan
        mix = "BF16"
        if geometry.rest_params:
            assert sizes_of_geometry(geometry, mix).n_bytes / 2e9 == pytest.approx(n, rel=0.01)
        assert sizes_of_geometry(geometry, mix).n_bytes / 2e9 == pytest.approx(n, rel=0.03)
        slots, experts = slot_sizes_of_geometry(geometry), sizes_of_geometry(geometry).expert_bytes
        assert all(0 <= slot - own < 2048 for slot, own in zip(slots, experts, strict=True))
    for bad in ("Q9_K", "IQ2_XXS"):
        with pytest.raises(OptionError, match=f"--mix '?{bad}"):
            sizes_of_geometry(geometry_named("gpt-oss-120b"), bad)
    with pytest.raises(OptionError, match="Qwen3-30B-A3B, "):
        geometry_named("gpt-5")


def test_the_prediction_meets_what_was_measured() -> None:
    """The four figures that its constants come from, of the machine with 47 GB/s of fills and 95 on the CPU."""
    for backend, measured in (("offload", 105), ("hybrid", 150), ("cpu", 103)):
        options = EngineOptions(n_ctx=8192, moe_backend=backend, moe_cache_rate=0.37)
        p = plan_of_geometry("Qwen3-30B-A3B", options, machine(40, 125), pcie=47.0, cpu=95.0, gpu=4800.0)
        assert p.prediction.backend == backend
        assert p.prediction.tokens_per_s == pytest.approx(measured, rel=0.1)
    assert hit_rate(0.37) == pytest.approx(0.70, abs=0.01) and hit_rate(0) == 0 and hit_rate(2) == 1
    assert rates_of(32 * GIB, cpu=80.0) == dataclasses.replace(rates_of(32 * GIB), cpu=80.0)


def test_what_memory_does_not_hold_is_told() -> None:
    p = plan_of_geometry("gpt-oss-120b", EngineOptions(), machine(16, 32))
    assert p.host.cold_bytes > 20 * GIB and "does not fit in memory" in str(p) and p.prediction.disk_ms > 0
    assert 0 < p.host.pinned_layers < 36
    p = plan_of_geometry("gpt-oss-120b", EngineOptions(), machine(16, 96))
    assert not p.host.cold_bytes and p.host.pinned_layers == 36 and p.prediction.disk_ms == 0
    assert "context: not known" in str(plan_of_geometry("DeepSeek-V4-Flash", EngineOptions(), machine(16, 192)))


def ft(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *flags])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("flags", [(), ("--cpu-moe",), ("-ngl", "20"), ("-ncmoe", "10"), ("--fit", "off")])
def test_a_shortfall_is_told_in_mib(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ft(capsys, "--geometry", "qwen3-30b-a3b", "--vram", "500M", "--ram", "32G", *flags)
    assert code == 2 and not out and " MiB of GPU memory are missing: of 500 MiB free" in err


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(write(tmp_path / "m.gguf", tiny_keys("qwen3moe"), tiny_tensors("qwen3moe")))
    code, out, _ = ft(capsys, "-m", path, "--vram", "2G", "--ram", "8G")
    assert code == 0 and "GPU plan: fused" in out and "main memory: 8.00 GiB (--ram)" in out
    code, out, _ = ft(capsys, "-m", path, "--vram", "2G", "-o", "json", "-c", "512", "--moe-backend", "hybrid")
    plan = json.loads(out)
    assert plan["gpu"]["n_ctx"] == 512 and plan["gpu"]["backend"] == "hybrid" and plan["prediction"]["is_prediction"]
    for flags in (("-ngl", "0", "--vram", "2G"), ("-dev", "none")):
        code, out, _ = ft(capsys, "-m", path, *flags)
        assert code == 0 and "no GPU" in out and "with cpu" in out
    for flags, text in (
        (("-m", path, "--vram", "12"), "no size such as 12G"),
        (("-m", path, "--mix", "Q8_0"), "--mix goes with --geometry"),
        (("-m", path, "-ctk", "f32"), "give the same type"),
        (("--geometry", "x"), "'x' is unknown"),
    ):
        code, _, err = ft(capsys, *flags)
        assert code == 2 and text in err
    assert (memory_size("12G"), memory_size("1.5gib"), memory_size("800M")) == (12 * GIB, 3 * GIB // 2, 800 << 20)


def test_memory_is_what_the_control_group_grants(monkeypatch: pytest.MonkeyPatch) -> None:
    def system(**files: str) -> tuple[int, str]:
        known = {"/proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB"} | files
        monkeypatch.setattr(cores, "_read", lambda path: known.get(str(path)))
        return cores.memory_bytes()

    root = str(cores._CGROUP_ROOT)
    assert system() == (1 << 20, "MemTotal")
    v2 = {"/proc/self/cgroup": "0::/a/b"}
    assert system(**v2, **{f"{root}/a/b/memory.max": "max"})[1] == "MemTotal"
    both = {f"{root}/a/b/memory.max": "5000", f"{root}/a/memory.max": "4000"}
    assert system(**v2, **both) == (4000, "the control group's limit")
    v1 = {"/proc/self/cgroup": "4:memory:/x"}
    assert system(**v1, **{f"{root}/memory/x/memory.limit_in_bytes": "9223372036854771712"})[1] == "MemTotal"
    assert system(**v1, **{f"{root}/memory/x/memory.limit_in_bytes": "77"})[0] == 77


def test_the_page_of_plans_is_up_to_date() -> None:
    assert plan_table.PATH.read_text(encoding="utf-8") == plan_table.text(), "python -m tools.plan_table"
    assert N_SLOTS_AUTO == engine.N_SLOTS_AUTO
