"""`ft bench kernels`: experts of every type from files, ggml beside ours, forced kernels and several memory nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freetoken import cores, native, quants
from freetoken.cli import bench_kernels
from freetoken.cli.bench_kernels import Nodes
from freetoken.cli.expert_banks import RANDOM_TYPES, random_bank
from freetoken.cli.main import main
from tools import tiny_models

SMALL = ("--expert-mib", "0.2", "--file-mib", "1", "-r", "1", "-t", "1")


def ft(*arguments: object, variant: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freetoken", *map(str, arguments)]
    environ = os.environ | ({} if variant is None else {native.VARIANT_VARIABLE: variant})
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)


def test_every_type_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    names = ",".join(t.name for t in RANDOM_TYPES)
    assert main(["bench", "kernels", "--types", names, *SMALL, "--peer", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["type"] for row in report["results"]] == names.split(",")
    assert report["variant"] == native.variant() and report["cpu"] == cores.cpu_name()
    for row in report["results"]:
        assert row["two_planes_share"] == pytest.approx(row["two_planes_gbs"] / row["dram_gbs"])
        assert min(row["dram_gbs"], row["one_plane_gbs"], row["ggml_gbs"], row["ggml_ratio"]) > 0
        assert 0.1 < row["expert_mib"] < 2.5 and row["n_expert"] * row["expert_mib"] >= 1


def test_table_has_a_row_for_each_size_and_thread_count(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--types", "q4_k,iq3_s", "--expert-mib", "0.2,0.9", "--file-mib", "2", "-t", "1,2", "-r", "1"]
    assert main(["bench", "kernels", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:10]]
    assert [row[0] for row in rows] == ["Q4_K"] * 4 + ["IQ3_S"] * 4
    assert [row[2] for row in rows] == ["1", "2"] * 4
    assert f"kernels {native.variant()}" in lines[-1]


def test_experts_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = tiny_models.write(tmp_path / "dense.gguf", "llama")
    moe = tiny_models.write(tmp_path / "moe.gguf", "qwen3moe")
    assert main(["bench", "kernels", "-m", str(moe), "-t", "2", "-r", "1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["n_expert"] > 1
    assert main(["bench", "kernels", "-m", str(dense)]) == 1
    assert "no layer with experts" in capsys.readouterr().err
    assert main(["bench", "kernels", "-m", str(moe), "--types", "Q4_K"]) == 2
    assert "leave them out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--types", "Q9_Z"], "Q9_Z"),
        (["--expert-mib", "0"], "sizes"),
        (["-t", "0"], "whole numbers"),
        (["-t", "x"], "whole numbers"),
        (["--cpu-variant", "mmx"], "auto"),
    ],
)
def test_bad_flags_are_refused(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", *arguments]) != 0
    error = capsys.readouterr().err
    assert error.startswith("ft: error: ") and word in error and error.count("\n") == 1


@pytest.mark.parametrize("variant", native.VARIANTS)
def test_a_forced_variant_runs_or_is_refused(variant: str) -> None:
    done = ft("bench", "kernels", "--types", "Q4_K,IQ2_S", *SMALL, "-o", "json", variant=variant)
    if done.returncode == 0:
        assert variant in ("auto", json.loads(done.stdout)["variant"])
    else:
        assert done.returncode == 1 and "not for this processor" in done.stderr, done.stderr
    assert done.returncode == 0 or variant not in ("auto", "portable")


def test_an_unknown_variant_is_refused_by_name() -> None:
    done = ft("bench", "kernels", "--types", "Q4_K", *SMALL, variant="avx1024")
    assert done.returncode == 1
    assert "'avx1024'" in done.stderr and "portable" in done.stderr and done.stderr.count("\n") == 1


def test_files_go_away() -> None:
    with random_bank(quants.GgmlType.Q8_0, 0.5, 1 << 20) as bank:
        assert bank.expert_bytes == bank.d * bank.ff * 3 * 34 // 32
        assert bank.n_bytes >= 1 << 20 and not bank.gate.flags.writeable


def test_reading_sums_every_word() -> None:
    rng = np.random.default_rng(2)
    with native.Pool(2) as pool:
        for n in (1, 7, 8, 255, 256, 1000, 262144, 300001):
            data = rng.integers(0, 256, n, np.uint8)
            words = np.concatenate([data, np.zeros(-n % 8, np.uint8)]).view(np.uint64)
            assert pool.read(data) == int(words.sum(dtype=np.uint64))


def test_rows_by_ggml_are_products() -> None:
    rng = np.random.default_rng(3)
    with random_bank(quants.GgmlType.Q6_K, 0.3, 1) as bank, native.Pool(2) as pool:
        x, y = rng.standard_normal(bank.d, np.float32), np.zeros(40, np.float32)
        kernel = quants.ggml_row_kernel(quants.GgmlType.Q6_K)
        assert kernel is not None
        rows = bank.gate[:40]
        pool.call_rows(kernel.vec_dot, rows, bank.d, kernel.activation(x), y)
        exact = quants.dequantize(quants.GgmlType.Q6_K, rows) @ x
        assert np.abs(y - exact).max() < 0.02 * np.abs(exact).max()


def test_nodes_and_caches_of_a_made_up_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_NODES", tmp_path / "node")
    monkeypatch.setattr(cores, "_TOPOLOGY", tmp_path / "cpu")
    monkeypatch.setattr(cores, "physical_cpus", lambda: [0, 1, 2, 8, 9])
    assert cores.numa_nodes() == [[0, 1, 2, 8, 9]] and cores.last_level_cache_bytes() == 32 << 20
    for name, cpus in (("node0", "0-1,4"), ("node1", "2,8-11"), ("node10", "16-31"), ("node2", "")):
        (tmp_path / "node" / name).mkdir(parents=True)
        (tmp_path / "node" / name / "cpulist").write_text(cpus + "\n")
    for cpu, shared in (("cpu0", "0-1"), ("cpu1", "0-1"), ("cpu2", "2")):
        for index, level, size in ((0, 1, "32K"), (3, 3, "2048K")):
            folder = tmp_path / "cpu" / cpu / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for file, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
                (folder / file).write_text(text + "\n")
    assert cores.numa_nodes() == [[0, 1], [2, 8, 9]]
    assert cores.last_level_cache_bytes() == 4 << 20


@pytest.mark.parametrize(("total", "warns"), [(11.9, True), (12.1, False)])
def test_nodes_that_do_not_add_up_are_warned_of(
    total: float, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_kernels, "measure_nodes", lambda nodes: Nodes([10.0, 10.0], total))
    assert main(["bench", "kernels", "--types", "Q8_0", *SMALL]) == 0
    shown = capsys.readouterr()
    assert f"node 0: 10.00, node 1: 10.00; all together {total:.2f}" in shown.out
    assert ("memory nodes together" in shown.err) == warns


def test_nodes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "NODE_BYTES", 8 << 20)
    cpus = cores.physical_cpus()
    found = bench_kernels.measure_nodes([cpus[:1], cpus[-1:]])
    assert found is not None and len(found.node_gbs) == 2 and found.share > 0
    assert bench_kernels.measure_nodes([cpus]) is None
