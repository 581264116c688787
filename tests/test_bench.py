"""`ft bench` and `ft run` as a person runs them: on a tiny model, in their own process."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from freetoken.cli import bench
from freetoken.gguf import open_model
from freetoken.gpu.place import make_plan
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.write(tmp_path_factory.mktemp("bench") / "tiny.gguf", "llama")


def ft(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "freetoken", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, input=stdin, check=False)


def test_bench_json_has_llama_bench_fields(model_path: Path) -> None:
    done = ft("bench", "-m", model_path, "-p", "32,16", "-n", 4, "-t", 2, "-r", 3, "-o", "json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["n_prompt"], r["n_gen"]) for r in rows] == [(32, 0), (16, 0), (0, 4)]
    for row in rows:
        assert row["n_threads"] == 2
        assert len(row["samples_ts"]) == 3
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 3, rel=1e-3)
        assert row["stddev_ts"] >= 0
        assert row["avg_ns"] > 0


def test_bench_rows_of_a_gpu(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers as they ran, the head among them, and llama-bench's column for them."""
    options = EngineOptions(n_threads=1, n_ctx=64)
    with open_model(model_path) as file:
        spec = read_spec(file)
        runner = Runner(file, spec, dataclasses.replace(options, n_gpu_layers=0), n_ctx=64)
        on_cpu = bench.result_row(file, spec, options, runner, 0, 16, 0, [1000])
        plan = make_plan(file, spec, options, 1 << 30, 64, 1)
        runner.gpu = SimpleNamespace(plan=plan, close=lambda: None)  # type: ignore[assignment]
        on_gpu = bench.result_row(file, spec, options, runner, 0, 16, 0, [1000])
        runner.close()
    assert (on_cpu.backends, on_cpu.n_gpu_layers, on_cpu.gpu_info) == ("CPU", 0, "")
    assert (on_gpu.backends, on_gpu.n_gpu_layers) == ("CUDA", spec.n_layer + 1)
    bench.write([on_cpu], "md")
    bench.write([on_gpu], "md")
    heads = [line for line in capsys.readouterr().out.splitlines() if "backend" in line]
    assert "threads" in heads[0] and "ngl" in heads[1] and "threads" not in heads[1]


def test_bench_takes_the_flags_of_a_gpu(model_path: Path) -> None:
    flags = ["-ngl", 0, "--moe-backend", "offload", "--moe-cache-rate", 0.5, "--memory-ratio", 0.8]
    done = ft("bench", "-m", model_path, "-p", 9, "-n", 0, "-r", 1, "-o", "json", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["n_gpu_layers"] == 0


def test_bench_table_and_csv(model_path: Path) -> None:
    table = ft("bench", "-m", model_path, "-p", 16, "-n", 2, "-r", 2, "-d", 8).stdout.splitlines()
    assert [cell.strip() for cell in table[0].strip("|").split("|")][-2:] == ["test", "t/s"]
    assert "pp16 @ d8" in table[2]
    assert "±" in table[3]
    rows = list(
        csv.DictReader(io.StringIO(ft("bench", "-m", model_path, "-n", 0, "-p", 9, "-r", 1, "-o", "csv").stdout))
    )
    assert rows[0]["n_prompt"] == "9"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "some"], "whole numbers"),
        (["-r", "0"], "repetition"),
        (["-x"], "-x"),
    ],
)
def test_bench_refuses_bad_flags(model_path: Path, arguments: list[str], word: str) -> None:
    done = ft("bench", "-m", model_path, *arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_run_prints_an_answer(model_path: Path) -> None:
    plain = ft("run", "-m", model_path, "-p", "ab", "-n", 8, "--temp", 0, "-no-cnv", "--ignore-eos")
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.strip()
    again = ft("run", "-m", model_path, "-n", 8, "--temp", 0, "-no-cnv", "--ignore-eos", stdin="ab")
    assert again.stdout == plain.stdout
    chat = ft("run", "-m", model_path, "-p", "ab", "-n", 8, "--temp", 0, "--ignore-eos", "-sys", "be brief")
    assert chat.returncode == 0, chat.stderr
    assert chat.stdout != plain.stdout


def test_run_with_a_missing_or_broken_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03")
    for path, word in ((tmp_path / "none.gguf", "none.gguf"), (broken, "broken.gguf")):
        done = ft("run", "-m", path, "-p", "x")
        assert done.returncode == 1
        assert word in done.stderr
        assert "Traceback" not in done.stderr
