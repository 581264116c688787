"""Speed beside llama.cpp in one run: pairs of runs, ours and theirs in turn, and the median of the pairs' ratios.

Decode feeds fixed tokens one by one after a short prompt, prefill takes 512 at once; nothing is sampled on either
side, and both start each run from an empty sequence. llama.cpp has llama-server's defaults (f16 cache, flash attention
chosen by itself), and each engine a process of its own with its own OpenMP settings (tools/bench_worker.py). A ratio
above 1 means that we are faster. Exit code 1 when a bar is missed.

    python tools/bench_peer.py --smollm2 FILE --moe FILE [--pairs 7] [--threads 2] [--json FILE]

`--moe auto` writes a synthetic file into a temporary folder: Qwen3-30B-A3B geometry, 4 layers, 32k tokens, 1.6 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken import native
from freetoken.cores import cpu_name
from freetoken.gguf import open_model
from freetoken.spec import read_spec
from tools import synth_moe
from tools.bench_worker import N_DECODE, N_PREFILL
from tools.peer import system_info

__all__ = ["Result", "measure", "run_pairs"]

MAX_OTHERS = 0.05
PAUSE_S = 0.3
"""Between runs, so that no thread of the other side still spins."""
OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
"""Left unset for both workers: each engine chooses for itself."""
BARS = {"SmolLM2 decode": 1.0, "SmolLM2 prompt": 2.0, "MoE decode": 1.1, "MoE prompt": 1.0}


@dataclass(frozen=True)
class Result:
    """One test: tokens per second of every run, and the pairs' ratios ours / theirs."""

    name: str
    model: str
    n_tokens: int
    n_threads: int
    bar: float
    ours: list[float]
    theirs: list[float]
    ratios: list[float]
    median_ratio: float
    others_share: float
    """Share of all processors' time that other processes took meanwhile; above MAX_OTHERS the figures say little."""
    note: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the median ratio reaches the bar."""
        return self.median_ratio >= self.bar

    def line(self) -> str:
        """The result as printed."""
        spread = f"{min(self.ratios):.2f}..{max(self.ratios):.2f}"
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        verdict = "ok" if self.is_good else "MISSED"
        if self.others_share > MAX_OTHERS:
            verdict += f" (UNRELIABLE: other processes took {self.others_share:.0%} of the processors)"
        speeds = f"ours {ours:7.1f} tok/s  llama.cpp {theirs:7.1f} tok/s"
        return f"{self.name:15} {speeds}  ratio {self.median_ratio:.2f} ({spread})  bar {self.bar}  {verdict}"


def run_pairs(ours: Callable[[], float], theirs: Callable[[], float], n_pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of both, `n_pairs` times in turn; who goes first alternates. One warm-up of each comes before."""
    ours()
    theirs()
    a: list[float] = []
    b: list[float] = []
    for i in range(n_pairs):
        for work, times in ((ours, a), (theirs, b))[:: 1 if i % 2 == 0 else -1]:
            time.sleep(PAUSE_S)
            times.append(work())
    return a, b


class OtherProcesses:
    """Watches how much of the processors' time goes to others than this process."""

    def __init__(self) -> None:
        self.start = self._read()

    def _read(self) -> tuple[float, float, float]:
        """Seconds of all processors together: elapsed, busy, and those of this process."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        elapsed = time.monotonic() * (psutil.cpu_count() or 1)
        process = psutil.Process()
        own = [p.cpu_times() for p in (process, *process.children())]
        return elapsed, elapsed - idle, sum(t.user + t.system for t in own)

    def share(self) -> float:
        """Their share since the start, 0..1."""
        elapsed, busy, own = (now - then for now, then in zip(self._read(), self.start, strict=True))
        return min(max((busy - own) / max(elapsed, 1e-9), 0.0), 1.0)


class Worker:
    """One engine with one model in its own process; `run(test)` gives its seconds. A context manager."""

    def __init__(self, side: str, path: Path, n_threads: int) -> None:
        script = Path(__file__).with_name("bench_worker.py")
        environment = {k: v for k, v in os.environ.items() if k not in OPENMP_VARIABLES}
        self._process = subprocess.Popen(
            [sys.executable, str(script), side, str(path), str(n_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the benchmark's worker ended with code {self._process.wait()}")
        return line

    def run(self, test: str) -> float:
        """Seconds of one run of a test."""
        assert self._process.stdin is not None
        print(test, file=self._process.stdin, flush=True)
        return float(self._answer())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()


def measure(name: str, path: Path, *, is_decode: bool, n_pairs: int, n_threads: int) -> Result:
    """Run one test in pairs; the same random tokens for both sides."""
    test = "decode" if is_decode else "prompt"
    with Worker("ours", path, n_threads) as ours, Worker("peer", path, n_threads) as peer:
        others = OtherProcesses()
        a, b = run_pairs(lambda: ours.run(test), lambda: peer.run(test), n_pairs)
        share = others.share()
    n = N_DECODE if is_decode else N_PREFILL
    ratios = [theirs / mine for mine, theirs in zip(a, b, strict=True)]
    speeds_ours, speeds_theirs = [n / x for x in a], [n / x for x in b]
    median = statistics.median(ratios)
    note = reads_per_token(path)
    return Result(name, path.name, n, n_threads, BARS[name], speeds_ours, speeds_theirs, ratios, median, share, note)


def machine() -> dict[str, str]:
    """What a figure must be read with: processor, features, versions, date."""
    packages = ("torch", "numpy", "llama-cpp-python")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu_name()}, {len(native.physical_cpus())} physical cores",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "features": f"{native.cpu_features()}; kernels: {native.variant()}",
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
        "llama.cpp": system_info(),
    }


def reads_per_token(path: Path) -> str:
    """What one decoded token reads of a mixture-of-experts file, and which share of it are experts; else ""."""
    with open_model(path) as file:
        spec = read_spec(file)
        sizes = {name: tensor.n_bytes for name, tensor in file.tensors.items() if name != "token_embd.weight"}
    if not spec.is_moe:
        return ""
    experts = sum(n for name, n in sizes.items() if "_exps." in name) * spec.n_expert_used // spec.n_expert
    total = experts + sum(n for name, n in sizes.items() if "_exps." not in name)
    return f"{spec.name}: a token reads {total / 1e6:.0f} MB, {experts / total:.0%} of them experts"


def moe_file(wish: str, folder: Path) -> Path:
    """The MoE file to measure, written where "auto" is asked."""
    if wish != "auto":
        return Path(wish)
    path = folder / "synthetic-qwen3-30b-a3b-4-layers.gguf"
    return synth_moe.write(path, n_layer=4, n_vocab=32000, progress=True)[0]


def main() -> int:
    """Print the table; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="Speed as a ratio to llama.cpp, interleaved.")
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--moe", help="a mixture-of-experts GGUF, or auto")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.smollm2 and not args.moe:
        parser.error("give --smollm2 FILE, --moe FILE or --moe auto")
    facts = machine()
    for key, value in facts.items():
        print(f"{key}: {value}")
    results: list[Result] = []

    def add(result: Result) -> None:
        print(result.line() + (f"  [{result.note}]" if result.note else ""), flush=True)
        results.append(result)

    common = {"n_pairs": args.pairs, "n_threads": args.threads}
    if args.smollm2:
        add(measure("SmolLM2 decode", args.smollm2, is_decode=True, **common))
        add(measure("SmolLM2 prompt", args.smollm2, is_decode=False, **common))
    if args.moe:
        with tempfile.TemporaryDirectory() as folder:
            path = moe_file(args.moe, Path(folder))
            add(measure("MoE decode", path, is_decode=True, **common))
            add(measure("MoE prompt", path, is_decode=False, **common))
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": [asdict(r) for r in results]}, indent=1))
    return int(not all(r.is_good for r in results))


if __name__ == "__main__":
    sys.exit(main())
