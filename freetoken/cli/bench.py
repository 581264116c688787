"""`ft bench`: prompt and generation speed of a model, in llama-bench's table and field names."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np
from tqdm import tqdm

from freetoken import __version__
from freetoken.cli.flags import add_engine_flags, add_model_flags, engine_options, model_options
from freetoken.cli.table import markdown
from freetoken.cores import cpu_name
from freetoken.errors import OptionError
from freetoken.gguf import ModelFile, open_model
from freetoken.gpu import driver
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import ModelSpec, read_spec

__all__ = ["add_arguments", "run"]

FORMATS = ("md", "json", "jsonl", "csv")
SEED = 1


@dataclass(frozen=True)
class Result:
    """One row, with llama-bench's field names; times in nanoseconds, speeds in tokens per second."""

    build_commit: str
    cpu_info: str
    gpu_info: str
    backends: str
    model_filename: str
    model_type: str
    model_size: int
    model_n_params: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    type_k: str
    type_v: str
    n_gpu_layers: int
    n_prompt: int
    n_gen: int
    n_depth: int
    test_time: str
    avg_ns: int
    stddev_ns: int
    avg_ts: float
    stddev_ts: float
    samples_ns: list[int]
    samples_ts: list[float]

    @property
    def test(self) -> str:
        """The test's short name, as llama-bench writes it."""
        name = f"pp{self.n_prompt}" if self.n_prompt else f"tg{self.n_gen}"
        return f"{name} @ d{self.n_depth}" if self.n_depth else name


def counts(text: str) -> list[int]:
    """A list of counts such as "128,512"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 128,512") from None
    if any(v < 0 or v > 1 << 20 for v in values):
        raise argparse.ArgumentTypeError(f"{text!r}: counts lie between 0 and {1 << 20}")
    return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft bench`; -p and -n here are counts, as in llama-bench."""
    add_model_flags(parser)
    add_engine_flags(parser, without=("-n", "-c"))
    parser.add_argument(
        "-p", "--n-prompt", type=counts, default=[512], metavar="N", help="prompt tokens (512; 0: none)"
    )
    parser.add_argument(
        "-n", "--n-gen", type=counts, default=[128], metavar="N", help="generated tokens (128; 0: none)"
    )
    parser.add_argument("-d", "--n-depth", type=counts, default=[0], metavar="N", help="tokens in the cache before (0)")
    parser.add_argument("-r", "--repetitions", type=int, default=5, metavar="N", help="runs of each test (5)")
    parser.add_argument("-o", "--output", choices=FORMATS, default="md", help="format (md)")
    parser.add_argument("--no-warmup", action="store_true", help="skip the run before the first measured one")


def run(args: argparse.Namespace) -> int:
    """Run every test and print the rows."""
    if args.repetitions < 1:
        raise OptionError(f"-r {args.repetitions}: at least one repetition is needed")
    tests = [(d, p, 0) for d in args.n_depth for p in args.n_prompt if p]
    tests += [(d, 0, n) for d in args.n_depth for n in args.n_gen if n]
    if not tests:
        raise OptionError("nothing to measure: give -p or -n a count above 0")
    options = engine_options(args)
    model = open_model(model_options(args).path)
    spec = read_spec(model)
    n_ctx = max(d + p + n for d, p, n in tests) + 1
    runner = Runner(model, spec, options, n_ctx=n_ctx, n_sequences=1)
    try:
        results = []
        for depth, n_prompt, n_gen in tests:
            samples = measure(runner, spec, depth, n_prompt, n_gen, args.repetitions, warm_up=not args.no_warmup)
            results.append(result_row(model, spec, options, runner, depth, n_prompt, n_gen, samples))
        write(results, args.output)
    finally:
        runner.close()
        model.close()
    return 0


def measure(
    runner: Runner, spec: ModelSpec, depth: int, n_prompt: int, n_gen: int, repetitions: int, *, warm_up: bool
) -> list[int]:
    """Nanoseconds of each run of one test; tokens are random, as in llama-bench, whatever is sampled."""
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, spec.n_vocab, depth + n_prompt + n_gen + 1).tolist()
    sequence = runner.new_sequence()
    samples = []
    name = f"pp{n_prompt}" if n_prompt else f"tg{n_gen}"
    rounds = range(-1 if warm_up else 0, repetitions)
    for round_ in tqdm(rounds, desc=name, leave=False, disable=not sys.stderr.isatty()):
        sequence.truncate(0)
        if depth:
            runner.prefill(sequence, tokens[:depth])
        work: Callable[[], object]
        if n_prompt:
            work = lambda: runner.prefill(sequence, tokens[depth : depth + n_prompt])  # noqa: E731
        else:
            work = lambda: runner.follow(sequence, tokens[depth : depth + n_gen])  # noqa: E731
        started = time.perf_counter_ns()
        work()
        elapsed = time.perf_counter_ns() - started
        if round_ >= 0:
            samples.append(elapsed)
    sequence.release()
    return samples


def result_row(
    model: ModelFile,
    spec: ModelSpec,
    options: EngineOptions,
    runner: Runner,
    depth: int,
    n_prompt: int,
    n_gen: int,
    samples: list[int],
) -> Result:
    """Averages of one test with the facts about model and machine."""
    speeds = [(n_prompt + n_gen) * 1e9 / ns for ns in samples]
    return Result(
        build_commit=__version__,
        cpu_info=cpu_name(),
        gpu_info="" if runner.gpu is None else gpu_name(options),
        backends="CPU" if runner.gpu is None else "CUDA",
        model_filename=str(model.shards[0].path),
        model_type=model_type(model, spec),
        model_size=sum(t.n_bytes for t in model.tensors.values()),
        model_n_params=sum(t.n_values for t in model.tensors.values()),
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_threads=runner.n_threads,
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        n_gpu_layers=0 if runner.gpu is None else runner.gpu.plan.n_gpu_layers + 1,  # the head is one, as for -ngl
        n_prompt=n_prompt,
        n_gen=n_gen,
        n_depth=depth,
        test_time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        avg_ns=round(statistics.fmean(samples)),
        stddev_ns=round(spread(samples)),
        avg_ts=round(statistics.fmean(speeds), 6),
        stddev_ts=round(spread(speeds), 6),
        samples_ns=samples,
        samples_ts=[round(s, 4) for s in speeds],
    )


def gpu_name(options: EngineOptions) -> str:
    """The card that the options name."""
    return next((card.name for card in driver.find_devices() if card.index == options.gpu), "")


def spread(values: list[int] | list[float]) -> float:
    """Sample standard deviation; 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def model_type(model: ModelFile, spec: ModelSpec) -> str:
    """Architecture and the commonest matrix type by bytes, such as "llama Q4_1"."""
    by_type: dict[str, int] = {}
    for tensor in model.tensors.values():
        by_type[tensor.type_name] = by_type.get(tensor.type_name, 0) + tensor.n_bytes
    return f"{spec.architecture} {max(by_type, key=lambda name: by_type[name])}"


def write(results: list[Result], output: str) -> None:
    """Print the rows in the wanted format."""
    if output == "json":
        json.dump([asdict(r) for r in results], sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif output == "jsonl":
        for result in results:
            sys.stdout.write(json.dumps(asdict(result)) + "\n")
    elif output == "csv":
        rows = [asdict(r) for r in results]
        writer = csv.DictWriter(sys.stdout, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    else:
        write_table(results)


def write_table(results: list[Result]) -> None:
    """llama-bench's Markdown table: it has threads, or on a GPU the layers there."""
    is_on_gpu = any(r.n_gpu_layers for r in results)
    head = ("model", "size", "params", "backend", "ngl" if is_on_gpu else "threads", "test", "t/s")
    rows = [
        (
            r.model_type,
            f"{r.model_size / 2**20:.2f} MiB" if r.model_size < 2**30 else f"{r.model_size / 2**30:.2f} GiB",
            f"{r.model_n_params / 1e6:.2f} M" if r.model_n_params < 1e9 else f"{r.model_n_params / 1e9:.2f} B",
            r.backends,
            str(r.n_gpu_layers if is_on_gpu else r.n_threads),
            r.test,
            f"{r.avg_ts:.2f} ± {r.stddev_ts:.2f}",
        )
        for r in results
    ]
    sys.stdout.write("\n".join(markdown(head, rows)) + "\n")
