"""`ft bench bw` on a machine without a GPU, and what it prints of a machine with one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from freetoken.cli import bench_bw
from freetoken.cli.bench_bw import _Report, _rows
from freetoken.cli.main import main
from freetoken.cores import expert_threads
from freetoken.experts.profile import FOLDER_VARIABLE, Conditions, Entry, ExpertFormat, Times, look_up
from freetoken.gpu.link import conditions
from tools import tiny_models


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "profiles"))
    monkeypatch.setattr(bench_bw, "LEAST_BYTES", 1 << 20)
    monkeypatch.setattr(bench_bw, "last_level_cache_bytes", lambda: 0)


def bench(*arguments: object) -> int:
    return main(["bench", "bw", "--seconds", "0.001", "-dev", "none", *map(str, arguments)])


def test_random_experts_are_measured_and_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--types", "q4_k,Q4_K/Q4_K/Q6_K", "--shape", "256x256", "-t", "1,2", "-o", "json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert "only the CPU's side was measured" in err and report["no_gpu"] == "-dev none"
    assert [row["format"] for row in report["results"]][::10] == ["Q4_K 256x256", "Q4_K/Q4_K/Q6_K 256x256"]
    assert [row["n"] for row in report["results"]] == [1, 2, 4, 8, 16] * 4
    assert all(row["cpu_us"] > 0 and row["fill_us"] is None for row in report["results"])
    assert report["profile"] == str(tmp_path / "profiles" / "profile-cpu.json")
    for n_threads in (1, 2):
        entry = look_up(conditions(None, n_threads)).entry
        assert entry is not None and len(entry.formats) == 2 and entry.read_gbs > 0


def test_threads_are_the_engines_where_none_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine looks for a profile of its own number of threads."""
    monkeypatch.setattr(bench_bw, "physical_cores", lambda: 4)
    assert bench("--types", "Q8_0", "--shape", "64x32", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["conditions"][0]["threads"] == expert_threads(4) == 3


def test_the_table_says_that_there_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--types", "Q8_0", "--shape", "64x32", "-t", "1", "--no-store") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("|")[1].strip() == "experts" and len(lines) == 2 + 5 + 1 + 4
    assert any("no GPU: only the CPU's side was measured (-dev none)" in line for line in lines)
    assert lines[-1] == "profile: not stored" and not (tmp_path / "profiles").exists()


def test_experts_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = tiny_models.write(tmp_path / "dense.gguf", "llama")
    moe = tiny_models.write(tmp_path / "moe.gguf", "qwen3moe")
    assert bench("-m", moe, "-t", "1", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["cpu_us"] > 0
    assert bench("-m", dense) == 1 and "no routed experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-m", "x.gguf", "--types", "Q4_K"], "leave them out"),
        (["--types", "Q4_K/Q6_K"], "three for gate, up and down"),
        (["--types", "Q9"], "Q9"),
        (["--types", "Q4_K", "--shape", "100x256"], "100"),
        (["--types", "Q4_K", "--shape", "0x0"], "no bytes"),
        (["--types", "Q4_K", "--shape", "big"], "no format"),
        (["-t", "0"], "whole numbers"),
        (["-dev", "CUDA0"], "CUDA0"),
    ],
)
def test_bad_flags_are_refused(arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*arguments) != 0
    error = capsys.readouterr().err
    assert error.startswith("ft: error: ") and word in error and error.count("\n") == 1


def test_what_a_machine_with_a_gpu_prints(capsys: pytest.CaptureFixture[str]) -> None:
    kind = ExpertFormat.parse("Q4_K/Q4_K/Q6_K 2048x768")
    counts = (1, 2, 4, 8, 16)
    times = Times(*({n: n * each for n in counts} for each in (50e-6, 60e-6, 30e-6, 40e-6)))
    here = Conditions("GPU-1", "580.82", "5 x16", "Some CPU", 16, 14, 128, "avx2, 2 planes, 01")
    entry = Entry.new(here, copy_gbs=54.8, read_gbs=73.0, formats={kind: times})
    report = _Report([entry], list(_rows(kind, 14, times)), "/x/profile-GPU-1.json", "")
    report.write_table()
    out = capsys.readouterr().out
    last = [cell.strip() for cell in out.splitlines()[6].strip("|").split("|")]
    assert last[:4] == ["Q4_K/Q4_K/Q6_K 2048x768", "2.92", "14", "16"]
    assert last[4] == "800 (61.2)" and last[5] == "960 (51.0)" and int(last[8]) in (6, 7)
    assert "driver 580.82, PCIe 5 x16" in out and "copy engine GB/s: 54.8" in out and "73.0 with -t 14" in out
    report.write_json()
    assert json.loads(capsys.readouterr().out)["results"][0]["fill_us"] == 50.0


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bw", "--help"]) == 0
    out = capsys.readouterr().out
    parser = argparse.ArgumentParser(add_help=False)
    bench_bw.add_arguments(parser)
    assert all(option in out for action in parser._actions for option in action.option_strings)
