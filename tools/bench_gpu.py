"""The GPU engine measured in this process: decode, prefill, first tokens, start, memory, a hash of all steps' logits.

    python tools/bench_gpu.py -m MODEL.gguf --rates 0,0.37 [--backends offload,hybrid,cpu] [--cpu-threads 6]
        [--parts hash,first,prefill,decode,start] [-r 7]

A rate is the share of experts in slots, 0 keeps them all on the GPU (fused). Decoding is one stream sampled at
temperature 1 from all tokens after a text of the model's own; its roofline is the time of a step whose experts are all
there (without sampling) plus the bytes that were missing, at the copy engine's rate (offload), at that of reading host
memory (cpu), or at both, each taken beside the other (hybrid). Backends are switched in one engine; hash and decoding
are of each, the rest of the first. The hash is taken when an engine is
new and again after all other work, and once more in new engines at `--hash-rates`; all must be equal, or the exit
status is 1. Prints a table; `-r` repeats what is timed and takes the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import hashlib
import json
import logging
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken import native
from freetoken.cores import expert_threads
from freetoken.engine import Engine
from freetoken.experts.pin import Rung
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import DoneEvent, ErrorEvent, Request, SamplingParams, TokenEvent
from freetoken.runner import Runner

PARTS = ("hash", "first", "prefill", "decode", "start")
HASH = "hash of logits"
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)


@dataclass
class Row:
    """One figure of the table."""

    rate: str
    what: str
    value: float
    unit: str
    note: str = ""


@contextmanager
def engine_at(args: argparse.Namespace, rate: float) -> Iterator[Engine]:
    """An engine that has loaded the model, its experts' slots at a rate."""
    options = EngineOptions(
        n_ctx=args.ctx,
        n_threads=args.threads,
        moe_cpu_threads=args.cpu_threads,
        n_gpu_layers=-2,
        moe_cache_rate=rate,
        moe_backend=args.backends[0] if rate else "auto",
    )
    engine = Engine(ModelOptions(args.model), options)
    engine.start()
    engine.wait_ready()
    while not runner_of(engine).gpu.is_warm:  # type: ignore[union-attr]  # the engine's thread uses the card
        time.sleep(0.05)
    try:
        yield engine
    finally:
        engine.close()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def runner_of(engine: Engine) -> Runner:
    """The runner behind an engine; this tool looks inside."""
    runner: Runner = engine._runner
    return runner


@dataclass(frozen=True)
class Answer:
    """What one request met: seconds to the first token, and from it to the last."""

    first_s: float
    rest_s: float
    tokens: list[int]


def ask(engine: Engine, prompt: list[int], params: SamplingParams, *, cache_prompt: bool = True) -> Answer:
    """Run one request to its end; without `cache_prompt` nothing of it is in the KV cache."""
    request = Request(prompt=tuple(prompt), params=params, cache_prompt=cache_prompt)
    started = time.perf_counter()
    engine.submit(request)
    first = last = 0.0
    tokens: list[int] = []
    while True:
        event = request.events.get(timeout=300)
        if isinstance(event, TokenEvent):
            last = time.perf_counter()
            first = first or last
            tokens.append(event.token)
        elif isinstance(event, ErrorEvent):
            raise event.error
        elif isinstance(event, DoneEvent):
            return Answer(first - started, last - first, tokens)


def counters(engine: Engine) -> np.ndarray:
    """Hits, misses, fills, CPU set of all layers, and bytes that were missing; zeros without experts."""
    found = engine.expert_counters()
    if found is None:
        return np.zeros(5, np.int64)
    found = found.copy()
    found[:, 4] = found[:, 1] * runner_of(engine).gpu.experts.state.expert_bytes  # type: ignore[union-attr]
    total: np.ndarray = found.sum(axis=0)
    return total


@dataclass(frozen=True)
class Rates:
    """GB/s of copies to the GPU and of reading by the experts' threads: each alone, and beside the other."""

    copy: float
    read: float
    copy_beside: float
    read_beside: float

    def seconds(self, backend: str, n_bytes: float) -> float:
        """The least time in which a backend can bring so many missing bytes to a product."""
        rate = {"cpu": self.read, "hybrid": self.copy_beside + self.read_beside}.get(backend, self.copy)
        return n_bytes / rate / 1e9

    def rows(self) -> list[Row]:
        return [
            Row("", "copies to the GPU, pinned (B_P)", self.copy, "GB/s", f"{self.copy_beside:.1f} beside reading"),
            Row("", "host memory read (B_H)", self.read, "GB/s", f"{self.read_beside:.1f} beside copies"),
        ]


def measure_rates(n_threads: int) -> Rates:
    """With so many threads for experts, 0 for as many as the engine takes; copies are of 64 MiB."""
    memory = np.ones(1 << 30, np.uint8)
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")

    def copy() -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for at in range(0, len(source), 1 << 26):
            target[at : at + (1 << 26)].copy_(source[at : at + (1 << 26)], non_blocking=True)
        torch.cuda.synchronize()
        return len(source) / (time.perf_counter() - started) / 1e9

    def read() -> float:
        started = time.perf_counter()
        pool.read(memory)
        return len(memory) / (time.perf_counter() - started) / 1e9

    with native.Pool(n_threads or expert_threads(native.physical_cores())) as pool:
        alone = max(copy() for _ in range(4)), max(read() for _ in range(4))
        is_over = threading.Event()
        copies: list[float] = []

        def keep_copying() -> None:
            while not is_over.is_set():
                copies.append(copy())

        copier = threading.Thread(target=keep_copying)
        copier.start()
        reads = [read() for _ in range(20)]
        is_over.set()
        copier.join()
    return Rates(*alone, statistics.median(copies), statistics.median(reads[2:]))


def step_of_hits(engine: Engine, tokens: list[int]) -> float:
    """Milliseconds of a step behind these tokens whose experts all have slots: the same one again and again, which
    samples nothing, or its token would bring other experts."""
    runner = runner_of(engine)
    sequence = runner.new_sequence()
    runner.prefill(sequence, tokens, want_logits=False)
    runner.decode([sequence], [tokens[-1]])
    program = runner.gpu.decoder.program(1, 1, len(tokens) + 1)  # type: ignore[union-attr]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        program.replay()
    begin.record()
    for _ in range(20):
        program.replay()
    end.record()
    torch.cuda.synchronize()
    sequence.release()
    return float(begin.elapsed_time(end)) / 20


def own_text(engine: Engine, n: int, seed: int, vocab: int) -> list[int]:
    """n tokens that the model goes on with itself after a random one, so that their experts are those of a text."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < n:
        start = rng.integers(300, vocab, 1).tolist()
        more = dataclasses.replace(SAMPLED, n_predict=n - len(tokens), seed=int(rng.integers(1 << 30)))
        tokens += [*start, *ask(engine, start, more).tokens]
    return tokens[:n]


def decode(engine: Engine, name: str, args: argparse.Namespace, rates: Rates, backend: str) -> list[Row]:
    """Tokens a second of one stream, with its hits and its roofline."""
    speeds, hit_rates, shares, filled = [], [], [], []
    hits_ms = 0.0
    for i in range(-1, args.repetitions):
        prompt = own_text(engine, args.prompt, i + 50, args.vocab)
        params = dataclasses.replace(SAMPLED, n_predict=args.tokens, seed=i + 2)
        ask(engine, prompt, dataclasses.replace(params, n_predict=1))
        before = counters(engine)
        answer = ask(engine, prompt, params)
        found = counters(engine) - before
        n = len(answer.tokens) - 1
        if i < 0 or n < 1:
            continue
        hits_ms = hits_ms or step_of_hits(engine, prompt + answer.tokens)
        ms = 1e3 * answer.rest_s / n
        speeds.append(1e3 / ms)
        hit_rates.append(found[0] / max(found[0] + found[1], 1))
        filled.append(found[2] / max(found[1], 1))
        shares.append((hits_ms + 1e3 * rates.seconds(backend, found[4] / n)) / ms)
    rows = [
        Row(name, "decode", statistics.median(speeds), "tok/s", f"{min(speeds):.1f} to {max(speeds):.1f}"),
        Row(name, "step of hits alone", hits_ms, "ms"),
    ]
    if counters(engine).any():
        share = f"{100 * statistics.median(filled):.0f}% of misses filled"
        rows += [
            Row(name, "hit rate", 100 * statistics.median(hit_rates), "%", share),
            Row(name, "share of the roofline", 100 * statistics.median(shares), "%"),
        ]
    return rows


def prefill(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """Tokens a second of a long prompt, and of one that finds all slots empty."""
    rng = np.random.default_rng(6)
    params = SamplingParams(n_predict=1, temperature=0.0)

    def timed(before: Callable[[Engine], object]) -> list[float]:
        times = []
        for _ in range(args.repetitions + 1):
            before(engine)
            prompt = rng.integers(300, args.vocab, args.long).tolist()
            times.append(ask(engine, prompt, params, cache_prompt=False).first_s)
        return times

    times = timed(lambda engine: None)
    speed = args.long / statistics.median(times[1:])
    rows = [Row(name, f"prefill of {args.long}", speed, "tok/s", f"first {times[0]:.1f} s")]
    if counters(engine).any():
        speed = args.long / statistics.median(timed(empty_slots)[1:])
        rows.append(Row(name, f"prefill of {args.long}, empty slots", speed, "tok/s"))
    return rows


def empty_slots(engine: Engine) -> None:
    """Make all experts leave their slots."""
    experts = runner_of(engine).gpu.experts  # type: ignore[union-attr]
    for pool in experts.state.pools:
        experts.cache.reserve(pool, 0, pool.n)
        experts.cache.release(pool, 0, pool.n)
    torch.cuda.synchronize()


def first(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """Seconds to the first token of a short prompt, and of one new token after a cached prefix."""
    params = SamplingParams(n_predict=4, temperature=0.0)
    short, one = [], []
    for i in range(args.repetitions + 1):
        prompt = own_text(engine, 64, 100 + i, args.vocab)
        own_text(engine, 64, 200 + i, args.vocab)  # another topic has the slots
        short.append(ask(engine, prompt, params, cache_prompt=False).first_s)
        one.append(ask(engine, [*prompt, 700], params).first_s)
    return [
        Row(name, "first token after 64", 1e3 * statistics.median(short[1:]), "ms"),
        Row(name, "first token after 1 on a prefix", 1e3 * statistics.median(one[1:]), "ms"),
    ]


def logits_hash(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """A hash of the logits of every decode step of a fixed text, one token at a time and in batches."""
    runner = runner_of(engine)
    rng = np.random.default_rng(8)
    digest = hashlib.sha256()
    sequences = [runner.new_sequence() for _ in range(3)]
    for i, sequence in enumerate(sequences):
        for token in rng.integers(300, args.vocab, 8 + i).tolist():
            digest.update(runner.decode([sequence], [token]).tobytes())
    for n in (3, 2, 1, 3):
        digest.update(runner.decode(sequences[:n], rng.integers(300, args.vocab, n).tolist()).tobytes())
    for sequence in sequences:
        sequence.release()
    return [Row(name, HASH, 0, digest.hexdigest()[:16])]


def memory(engine: Engine, name: str) -> list[Row]:
    """GPU memory beyond weights, slots and keys and values; this process's memory, and whether experts are copied."""
    gpu = runner_of(engine).gpu
    plan = gpu.plan  # type: ignore[union-attr]
    free, _ = torch.cuda.mem_get_info()
    planned = plan.dense_bytes + plan.slots_bytes + plan.kv_bytes
    peak = f"allocated at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB"
    rows = [Row(name, "GPU memory beyond the plan's parts", (plan.free_bytes - free - planned) / 1e6, "MB", peak)]
    sizes = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.endswith("kB"):
            key, value = line.split(":")
            sizes[key] = int(value.split()[0]) * 1024 / 1e6
    rows.append(Row(name, "resident, of the mapped file", sizes["RssFile"], "MB"))
    rows.append(Row(name, "resident, all else", sizes["RssAnon"] + sizes["RssShmem"], "MB"))
    locked = f"VmLck; VmPin {sizes.get('VmPin', 0):.0f}"
    rows.append(Row(name, "locked", sizes["VmLck"], "MB", locked))
    pinned = gpu._pinned  # type: ignore[union-attr]
    if pinned is not None:
        in_place, copied = (pinned.n_bytes(rung) / 1e6 for rung in (Rung.IN_PLACE, Rung.COPIED))
        rows.append(Row(name, "experts locked in place", in_place, "MB", f"copied {copied:.0f}"))
    return rows


def start(args: argparse.Namespace, rate: float, name: str) -> list[Row]:
    """Seconds from `ft serve` to the first token, in processes of their own."""
    flags = ["-ngl", "all", "-c", str(args.ctx)]
    flags += ["--moe-backend", args.backends[0], "--moe-cache-rate", str(rate)] if rate else []
    flags += ["-t", str(args.threads)] if args.threads else []
    tool = Path(__file__).with_name("first_token.py")
    command = [sys.executable, str(tool), "-m", str(args.model), "-r", str(min(args.repetitions, 3)), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return [Row(name, "ft serve to the first token", float("nan"), "s", "failed")]
    text = done.stdout.strip().splitlines()[-1]
    return [Row(name, "ft serve to the first token", float(text.split()[3]), "s", text)]


def run(args: argparse.Namespace) -> list[Row]:
    rates = measure_rates(args.cpu_threads)
    torch.cuda.empty_cache()  # what is kept would be missing in the engine's plan
    rows = rates.rows()
    show(rows)
    parts: dict[str, Callable[[Engine, str, str], list[Row]]] = {
        "hash": lambda e, name, _: logits_hash(e, name, args),
        "first": lambda e, name, _: first(e, name, args),
        "prefill": lambda e, name, _: prefill(e, name, args),
        "decode": lambda e, name, backend: decode(e, name, args, rates, backend),
    }

    def add(more: list[Row]) -> None:
        show(more)
        rows.extend(more)

    has_hash = "hash" in args.parts
    for rate in args.rates:
        name = name_of(rate)
        started = time.perf_counter()
        with engine_at(args, rate) as engine:
            add([Row(name, "loaded", time.perf_counter() - started, "s")])
            for i, backend in enumerate(args.backends if rate else ["fused"]):
                if i:
                    runner_of(engine).gpu.use_split(backend)  # type: ignore[union-attr]
                of_backend = f"{name} {backend}" if rate else name
                for part in (p for p in parts if p in args.parts and (not i or p in ("hash", "decode"))):
                    add(parts[part](engine, of_backend, backend))
            if has_hash and len(args.parts) > 1:
                add(logits_hash(engine, name, args))
            add(memory(engine, name))
            del engine
        if "start" in args.parts:
            add(start(args, rate, name))
    for rate in args.hash_rates if has_hash else ():
        with engine_at(args, rate) as engine:
            for backend in args.backends:
                runner_of(engine).gpu.use_split(backend)  # type: ignore[union-attr]
                add(logits_hash(engine, f"{name_of(rate)} {backend}", args))
            del engine
    return rows


def name_of(rate: float) -> str:
    return f"{100 * rate:g}%" if rate else "all"


def show(rows: list[Row]) -> None:
    """Lines of a table as in docs/benchmarks.md."""
    for row in rows:
        value = row.note if row.what == HASH else f"{row.value:.2f} {row.unit}"
        print(f"| {row.rate:>11} | {row.what:34} | {value:>20} | {'' if row.what == HASH else row.note} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.37])
    parser.add_argument(
        "--hash-rates", type=lambda text: [float(part) for part in text.split(",") if part], default=[0.37, 0.2, 0.1]
    )
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["offload"])
    parser.add_argument("--cpu-threads", type=int, default=0, help="threads for experts beside the GPU")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument("-t", "--threads", type=int, default=0)
    parser.add_argument("-c", "--ctx", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=512, help="tokens before decoding")
    parser.add_argument("--tokens", type=int, default=256, help="tokens decoded")
    parser.add_argument("--long", type=int, default=4096, help="tokens of the long prompt")
    parser.add_argument("--vocab", type=int, default=30000, help="tokens are drawn below this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"| {'in slots':>11} | {'what':34} | {'value':>20} | note |\n| --- | --- | --- | --- |")
    rows = run(args)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    hashes = {row.note for row in rows if row.what == HASH}
    if len(hashes) > 1:
        print(f"the logits differ: {len(hashes)} hashes", file=sys.stderr)
    return int(len(hashes) > 1)


if __name__ == "__main__":
    sys.exit(main())
