"""Speed beside llama.cpp in one run: pairs of runs, ours and theirs in turn, and the median of the pairs' ratios.

Decode feeds fixed tokens one by one after a short prompt, prefill takes 512 at once; nothing is sampled on either
side, and both start each run from an empty sequence. llama.cpp has llama-server's defaults (f16 cache, flash attention
chosen by itself). A ratio above 1 means that we are faster. Exit code 1 when a bar is missed.

    python tools/bench_peer.py --smollm2 FILE --moe FILE [--pairs 7] [--threads 2] [--json FILE]

`--moe auto` writes a synthetic file into a temporary folder: Qwen3-30B-A3B geometry, 4 layers, 32k tokens, 1.6 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken import native
from tools import synth_moe
from tools.ours import Ours
from tools.peer import Peer, system_info

__all__ = ["Result", "measure", "run_pairs"]

N_PROMPT_SHORT = 16
N_DECODE = 64
N_PREFILL = 512
MAX_OTHERS = 0.05
PAUSE_S = 0.05
"""Between runs, so that no thread of the other side still spins."""
BARS = {"SmolLM2 decode": 0.9, "SmolLM2 prompt": 1.5, "MoE decode": 0.8}


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
        own = psutil.Process().cpu_times()
        elapsed = time.monotonic() * (psutil.cpu_count() or 1)
        return elapsed, elapsed - idle, own.user + own.system

    def share(self) -> float:
        """Their share since the start, 0..1."""
        elapsed, busy, own = (now - then for now, then in zip(self._read(), self.start, strict=True))
        return min(max((busy - own) / max(elapsed, 1e-9), 0.0), 1.0)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, path: Path, *, is_decode: bool, n_pairs: int, n_threads: int) -> Result:
    """Run one test in pairs; the same random tokens for both sides."""
    n_ctx = 1024
    with Ours(path, n_ctx=n_ctx, n_threads=n_threads) as ours, Peer(path, n_ctx=n_ctx, n_threads=n_threads) as peer:
        tokens = [int(t) for t in np.random.default_rng(1).integers(0, peer.n_vocab - 3, N_PREFILL)]
        prompt, rest = tokens[:N_PROMPT_SHORT], tokens[N_PROMPT_SHORT : N_PROMPT_SHORT + N_DECODE]

        def decode_ours() -> float:
            ours.clear()
            ours.prefill(prompt)
            return timed(lambda: [ours.step(token).argmax() for token in rest])

        def decode_theirs() -> float:
            peer.clear()
            peer.decode(prompt)
            return timed(lambda: [peer.decode([token]).argmax() for token in rest])

        def prefill_ours() -> float:
            ours.clear()
            return timed(lambda: ours.prefill(tokens))

        def prefill_theirs() -> float:
            peer.clear()
            return timed(lambda: peer.decode(tokens))

        note = reads_per_token(ours) if ours.spec.is_moe else ""
        pair = (decode_ours, decode_theirs) if is_decode else (prefill_ours, prefill_theirs)
        others = OtherProcesses()
        a, b = run_pairs(*pair, n_pairs)
        share = others.share()
    n = len(rest) if is_decode else len(tokens)
    ratios = [theirs / mine for mine, theirs in zip(a, b, strict=True)]
    speeds_ours, speeds_theirs = [n / x for x in a], [n / x for x in b]
    median = statistics.median(ratios)
    return Result(name, path.name, n, n_threads, BARS[name], speeds_ours, speeds_theirs, ratios, median, share, note)


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


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


def reads_per_token(ours: Ours) -> str:
    """What one decoded token reads of a mixture-of-experts file, and which share of it are experts."""
    sizes = {name: tensor.n_bytes for name, tensor in ours.file.tensors.items() if name != "token_embd.weight"}
    experts = sum(n for name, n in sizes.items() if "_exps." in name) * ours.spec.n_expert_used // ours.spec.n_expert
    total = experts + sum(n for name, n in sizes.items() if "_exps." not in name)
    return f"{ours.spec.name}: a token reads {total / 1e6:.0f} MB, {experts / total:.0%} of them experts"


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
            add(measure("MoE decode", moe_file(args.moe, Path(folder)), is_decode=True, **common))
    if args.json:
        args.json.write_text(json.dumps({"machine": facts, "results": [asdict(r) for r in results]}, indent=1))
    return int(not all(r.is_good for r in results))


if __name__ == "__main__":
    sys.exit(main())
