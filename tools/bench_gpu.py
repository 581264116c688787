"""The GPU engine measured in this process: decode, prefill, first tokens, memory, and a hash of every step's logits.

    python tools/bench_gpu.py -m MODEL.gguf --rates 0,0.37 [--parts decode,prefill,first,hash] [-r 7]

A rate is the share of experts in slots, 0 keeps them all on the GPU (fused). Decoding is one stream sampled at
temperature 1 from all tokens after a random prompt; the roofline is the time of a step whose experts are all there plus
the bytes that were missing at the copy engine's rate. Prints a table; `-r` repeats what is timed and takes the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken.engine import Engine
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import DoneEvent, ErrorEvent, Request, SamplingParams, TokenEvent
from freetoken.runner import Runner

PARTS = ("decode", "prefill", "first", "hash")
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
def engine_at(path: Path, rate: float, n_ctx: int, n_threads: int) -> Iterator[Engine]:
    """An engine that has loaded the model, its experts' slots at a rate."""
    options = EngineOptions(n_ctx=n_ctx, n_threads=n_threads, n_gpu_layers=-2, moe_cache_rate=rate)
    if rate:
        options = dataclasses.replace(options, moe_backend="offload")
    engine = Engine(ModelOptions(path), options)
    engine.start()
    engine.wait_ready()
    try:
        yield engine
    finally:
        engine.close()


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


def ask(engine: Engine, prompt: list[int], params: SamplingParams) -> Answer:
    """Run one request to its end."""
    request = Request(prompt=prompt, params=params)
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
    """Hits, misses, fills, CPU set, bytes of all layers; zeros without experts."""
    found = engine.expert_counters()
    return np.zeros(5, np.int64) if found is None else found.sum(axis=0)


def copy_rate() -> float:
    """GB/s of the copy engine from pinned memory in pieces of 64 MiB."""
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for at in range(0, len(host), 1 << 26):
            device[at : at + (1 << 26)].copy_(host[at : at + (1 << 26)], non_blocking=True)
        torch.cuda.synchronize()
        best = max(best, len(host) / (time.perf_counter() - started) / 1e9)
    return best


def step_of_hits(engine: Engine, n_positions: int) -> float:
    """Milliseconds of a step whose experts all have slots: the last one again and again."""
    program = runner_of(engine).gpu.decoder.program(1, 1, n_positions, is_sampled=True)  # type: ignore[union-attr]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        program.replay()
    begin.record()
    for _ in range(20):
        program.replay()
    end.record()
    torch.cuda.synchronize()
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


def decode(engine: Engine, name: str, args: argparse.Namespace, rate_gbs: float) -> list[Row]:
    """Tokens a second of one stream, with its hits and its roofline."""
    speeds, hit_rates, shares = [], [], []
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
        hits_ms = hits_ms or step_of_hits(engine, args.prompt + args.tokens)
        ms = 1e3 * answer.rest_s / n
        speeds.append(1e3 / ms)
        hit_rates.append(found[0] / max(found[0] + found[1], 1))
        shares.append((hits_ms + found[4] / n / rate_gbs / 1e6) / ms)
    rows = [
        Row(name, "decode", statistics.median(speeds), "tok/s", f"{min(speeds):.1f} to {max(speeds):.1f}"),
        Row(name, "step of hits alone", hits_ms, "ms"),
    ]
    if counters(engine).any():
        rows += [
            Row(name, "hit rate", 100 * statistics.median(hit_rates), "%"),
            Row(name, "share of the roofline", 100 * statistics.median(shares), "%", f"B_P {rate_gbs:.1f} GB/s"),
        ]
    return rows


def prefill(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """Tokens a second of a long prompt."""
    rng = np.random.default_rng(6)
    params = SamplingParams(n_predict=1, temperature=0.0)
    times = []
    for _ in range(args.repetitions + 1):
        prompt = rng.integers(300, args.vocab, args.long).tolist()
        times.append(ask(engine, prompt, params).first_s)
    speed = args.long / statistics.median(times[1:])
    return [Row(name, f"prefill of {args.long}", speed, "tok/s", f"first {times[0]:.1f} s")]


def first(engine: Engine, name: str, args: argparse.Namespace) -> list[Row]:
    """Seconds to the first token of a short prompt, and of one new token after a cached prefix."""
    params = SamplingParams(n_predict=4, temperature=0.0)
    short, one = [], []
    for i in range(args.repetitions + 1):
        prompt = own_text(engine, 64, 100 + i, args.vocab)
        own_text(engine, 64, 200 + i, args.vocab)  # another topic has the slots
        short.append(ask(engine, prompt, params).first_s)
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
    return [Row(name, "hash of logits", 0, digest.hexdigest()[:16])]


def memory(engine: Engine, name: str) -> Row:
    """GPU memory beyond weights, slots and keys and values."""
    plan = runner_of(engine).gpu.plan  # type: ignore[union-attr]
    free, _ = torch.cuda.mem_get_info()
    planned = plan.dense_bytes + plan.slots_bytes + plan.kv_bytes
    peak = f"allocated at most {torch.cuda.max_memory_allocated() / 1e6:.0f} MB"
    return Row(name, "GPU memory beyond the plan's parts", (plan.free_bytes - free - planned) / 1e6, "MB", peak)


def run(args: argparse.Namespace) -> list[Row]:
    rate_gbs = copy_rate()
    rows: list[Row] = []
    parts: dict[str, Callable[[Engine, str], list[Row]]] = {
        "hash": lambda e, name: logits_hash(e, name, args),
        "first": lambda e, name: first(e, name, args),
        "prefill": lambda e, name: prefill(e, name, args),
        "decode": lambda e, name: decode(e, name, args, rate_gbs),
    }
    for rate in args.rates:
        name = f"{100 * rate:g}%" if rate else "all"
        started = time.perf_counter()
        with engine_at(args.model, rate, args.ctx, args.threads) as engine:
            rows.append(Row(name, "loaded", time.perf_counter() - started, "s"))
            for part in (p for p in parts if p in args.parts):
                rows += parts[part](engine, name)
                show(rows[-1:])
            rows.append(memory(engine, name))
    return rows


def show(rows: list[Row]) -> None:
    for row in rows:
        print(f"| {row.rate:>5} | {row.what:34} | {row.value:10.2f} {row.unit:16} | {row.note}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--rates", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.37])
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
    rows = run(args)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    show(rows)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
