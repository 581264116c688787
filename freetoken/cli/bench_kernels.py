"""`ft bench kernels`: how fast experts are run from a mapped file, against what the machine's memory gives.

Each row reads one set of experts, of a temporary file much larger than the caches or of a model, three ways in turn: by
a loop that only adds words up (the DRAM rate), and by the experts' operation for one token with activations in two
planes and in one. Every figure is the best of several passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from freetoken import native, quants
from freetoken.cli.expert_banks import N_USED, RANDOM_TYPES, ExpertBank, model_banks, random_bank
from freetoken.cli.table import markdown
from freetoken.cores import cpu_name, last_level_cache_bytes, numa_nodes, physical_cores, physical_cpus
from freetoken.errors import OptionError
from freetoken.gguf import open_model
from freetoken.native import Pool, Program
from freetoken.quants import GgmlType

__all__ = ["add_arguments", "run", "threads_list"]

log = logging.getLogger(__name__)

BARRED = (
    *("Q4_K", "Q6_K", "MXFP4", "Q8_0", "Q5_K", "Q4_0", "IQ4_XS", "IQ4_NL", "Q3_K", "Q2_K"),
    *("IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ2_XS", "IQ2_S", "BF16", "F16"),
)
"""Types that are measured where none is named."""
CACHES = 4
"""The experts read in a pass are at least this many times the last-level cache."""
LEAST_SHARE = 0.6
"""Below this share of what its nodes read one by one, a machine's memory is not used well."""
NODE_BYTES = 256 << 20


@dataclass(frozen=True)
class Result:
    """One row: gigabytes (1e9) a second, and shares of the DRAM rate."""

    type: str
    expert_mib: float
    n_expert: int
    n_threads: int
    dram_gbs: float
    two_planes_gbs: float
    two_planes_share: float
    one_plane_gbs: float
    one_plane_share: float
    ggml_gbs: float | None = None
    ggml_ratio: float | None = None


@dataclass(frozen=True)
class Nodes:
    """Read rates of a machine with several memory nodes: each alone from its own memory, and all from the file."""

    node_gbs: list[float]
    total_gbs: float

    @property
    def share(self) -> float:
        return self.total_gbs / sum(self.node_gbs)


# --- flags -----------------------------------------------------------------------------------------------------------


def threads_list(text: str) -> list[int]:
    """A list of thread counts."""
    parts = text.split(",")
    if not all(part.isdigit() and 0 < int(part) <= 1024 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers from 1 to 1024, such as 1,2")
    return [int(part) for part in parts]


def _sizes(text: str) -> list[float]:
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(math.isfinite(size) and 0 < size <= 1024 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes in MiB up to 1024, such as 1,3")
    return sizes


def _types(text: str) -> list[GgmlType]:
    known = {type_.name.lower(): type_ for type_ in RANDOM_TYPES}
    names = text.split(",")
    for name in names:
        if name.lower() not in known:
            raise argparse.ArgumentTypeError(f"unknown type {name!r}; known: {', '.join(t.name for t in RANDOM_TYPES)}")
    return [known[name.lower()] for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft bench kernels`."""
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="measure this model's own experts, not random ones")
    add("--types", type=_types, metavar="LIST", help=f"types of random experts ({','.join(BARRED)})")
    add("--expert-mib", type=_sizes, metavar="LIST", help="sizes of an expert: gate, up and down together (1,3)")
    add(
        "--file-mib",
        type=_sizes,
        metavar="N",
        help=f"what a pass reads, at least ({CACHES} times the last-level cache)",
    )
    add("-t", "--threads", type=threads_list, metavar="LIST", help="numbers of threads (the physical cores)")
    add("-r", "--repetitions", type=threads_list, default=[3], metavar="N", help="passes; the best counts (3)")
    add("--cpu-variant", metavar="NAME", help=f"kernels to use: {', '.join(native.VARIANTS)} (auto)")
    add("--peer", action="store_true", help="measure ggml's row kernel beside ours")
    add("-o", "--output", choices=("md", "json"), default="md", help="format (md)")


def run(args: argparse.Namespace) -> int:
    """Measure every row and print them."""
    if args.model is not None and (args.types or args.expert_mib):
        raise OptionError("--types and --expert-mib are for random experts: leave them out with -m")
    if args.cpu_variant is not None:
        native.set_variant(args.cpu_variant)
    threads = args.threads or [physical_cores()]
    least = int(args.file_mib[0] * 2**20) if args.file_mib else CACHES * last_level_cache_bytes()
    results = []
    with _progress(args, len(threads)) as advance:
        for banks in _bank_sets(args, least):
            for n_threads in threads:
                results.append(_measure(banks, n_threads, least, args.repetitions[0], with_ggml=args.peer))
                advance()
    nodes = measure_nodes(numa_nodes())
    if nodes is not None and nodes.share < LEAST_SHARE:
        log.warning(
            "the memory nodes together read %.1f GB/s, %.0f%% of what they read one by one: spread the file's pages "
            "over the nodes (numactl --interleave=all) before the first run",
            nodes.total_gbs,
            100 * nodes.share,
        )
    (_write_json if args.output == "json" else _write_table)(results, nodes)
    return 0


@contextmanager
def _progress(args: argparse.Namespace, n_threads: int) -> Iterator[Callable[[], object]]:
    n_sets = 1 if args.model is not None else len(args.types or BARRED) * len(args.expert_mib or (1, 3))
    with tqdm(total=n_sets * n_threads, desc="kernels", leave=False, disable=not sys.stderr.isatty()) as bar:
        yield bar.update


def _bank_sets(args: argparse.Namespace, least: int) -> Iterator[list[ExpertBank]]:
    """Banks to measure together: of one type and size."""
    if args.model is None:
        for type_id in args.types or [GgmlType[name] for name in BARRED]:
            for size in args.expert_mib or (1.0, 3.0):
                with random_bank(type_id, size, least) as bank:
                    yield [bank]
        return
    with open_model(args.model) as model:
        alike: dict[tuple[Any, ...], list[ExpertBank]] = {}
        for bank in model_banks(model):
            alike.setdefault((bank.types, bank.n_expert, bank.d, bank.ff), []).append(bank)
        yield from alike.values()


# --- one row ---------------------------------------------------------------------------------------------------------


def _measure(banks: list[ExpertBank], n_threads: int, least: int, repetitions: int, *, with_ggml: bool) -> Result:
    """Read the experts in every way; a first pass of each brings the file's pages in."""
    banks = _enough(banks, least)
    n_bytes = sum(bank.n_bytes for bank in banks)
    cpus = physical_cpus()
    with Pool(n_threads, cpus[:n_threads] if n_threads <= len(cpus) else None) as pool:
        works: dict[str, Callable[[], object]] = {
            "dram": lambda: [pool.read(rows) for bank in banks for some in bank.pieces for rows in some],
            "two": _program(pool, banks, planes=2).run,
            "one": _program(pool, banks, planes=1).run,
        }
        foreign = _ggml_rows(pool, banks) if with_ggml else None
        if foreign is not None:
            works["ggml"] = foreign
        best = _rates(works, n_bytes, repetitions)
    return Result(
        type=banks[0].type_name,
        expert_mib=round(banks[0].expert_bytes / 2**20, 3),
        n_expert=sum(bank.n_expert for bank in banks),
        n_threads=n_threads,
        dram_gbs=best["dram"],
        two_planes_gbs=best["two"],
        two_planes_share=best["two"] / best["dram"],
        one_plane_gbs=best["one"],
        one_plane_share=best["one"] / best["dram"],
        ggml_gbs=best.get("ggml"),
        ggml_ratio=best["two"] / best["ggml"] if "ggml" in best else None,
    )


def _enough(banks: list[ExpertBank], least: int) -> list[ExpertBank]:
    """The first banks that hold `least` bytes together; all where they hold less."""
    held, chosen = 0, []
    for bank in banks:
        if held >= least:
            break
        chosen.append(bank)
        held += bank.n_bytes
    return chosen


def _rates(works: dict[str, Callable[[], object]], n_bytes: int, repetitions: int) -> dict[str, float]:
    """Best GB/s of each work, all taken in turn so that other load on the machine meets all of them."""
    best = dict.fromkeys(works, math.inf)
    for round_ in range(repetitions + 1):
        for name, work in works.items():
            started = time.perf_counter_ns()
            work()
            elapsed = time.perf_counter_ns() - started
            if round_ > 0:
                best[name] = min(best[name], elapsed)
    return {name: n_bytes / max(ns, 1) for name, ns in best.items()}


def _program(pool: Pool, banks: list[ExpertBank], planes: int) -> Program:
    """Every expert of the banks once, some at a time in random order, each step with its own quantisation."""
    program, rng = Program(pool), np.random.default_rng(1)
    steps = []
    for bank in banks:
        order = rng.permutation(bank.n_expert).astype(np.int32)
        n_used = min(N_USED, bank.n_expert)
        steps += [(bank, order[i : i + n_used]) for i in range(0, bank.n_expert, n_used)]
    bank, most = banks[0], min(N_USED, banks[0].n_expert)
    x = rng.standard_normal((1, bank.d), np.float32)
    rows, y = np.zeros((1, most, bank.d), np.float32), np.zeros((1, bank.d), np.float32)
    merge = np.full((1, most), 1 / most, np.float32)
    scratch = native.aligned(native.experts_scratch_bytes(1, most, bank.d, bank.ff, pool.n_threads))
    for type_id in bank.types:
        native.can_decode(type_id)
    classes = [native.type_class(type_id) for type_id in bank.types[:2]]
    acts = [native.aligned(native.act_bytes(cls, bank.d, 1)) if cls else None for cls in classes]
    for step, (at, ids) in enumerate(steps):
        for cls, act in zip(classes, acts, strict=True):
            if act is not None and (step == 0 or cls == classes[0]):
                program.add(native.OP_QUANTIZE, 1, p=(x, act), i=(cls, bank.d, planes, bank.d))
        row_bytes = [tensor.shape[-1] for tensor in at.tensors]
        starts = [some[0] for some in at.pieces]
        stride = native.expert_stride(at.tensors) if at.gate.ndim == 3 else 0
        program.add(
            native.OP_EXPERTS,
            1,
            p=(x, np.ascontiguousarray(ids), merge, *starts, rows, y, scratch, *acts),
            i=(at.n_expert, len(ids), at.d, at.ff, *at.types, *row_bytes, 0, planes, stride),
        )
    return program


def _ggml_rows(pool: Pool, banks: list[ExpertBank]) -> Callable[[], object] | None:
    """All rows of the banks by ggml's row kernels; None where ggml has none for a type."""
    kernels = [quants.ggml_row_kernel(type_id) for type_id in banks[0].types]
    calls = []
    for bank in banks:
        for kernel, some, n_cols in zip(kernels, bank.pieces, (bank.d, bank.d, bank.ff), strict=True):
            if kernel is None:
                return None
            act = kernel.activation(np.random.default_rng(2).standard_normal(n_cols, np.float32))
            calls += [(kernel.vec_dot, rows, n_cols, act, np.zeros(len(rows), np.float32)) for rows in some]

    def work() -> None:
        for call in calls:
            pool.call_rows(*call)

    return work


# --- memory nodes ----------------------------------------------------------------------------------------------------


def measure_nodes(nodes: list[list[int]]) -> Nodes | None:
    """Rates of several memory nodes; None for a single one.

    Each node's cores read memory that they touched first. The total is of all cores reading what one thread touched or
    the system spread, which is how a file's pages lie.
    """
    if len(nodes) < 2:
        return None
    alone = [_rate_of(cpus) for cpus in nodes]
    return Nodes(alone, _rate_of([cpu for cpus in nodes for cpu in cpus]))


def _rate_of(cpus: list[int]) -> float:
    """GB/s that threads on these cores read from memory first touched by one of them."""
    rates: list[float] = []

    def work() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus[:1])  # this thread alone
        data = np.ones(NODE_BYTES // 8, np.uint64)
        with Pool(len(cpus), cpus) as pool:
            rates.append(_rates({"read": lambda: pool.read(data)}, data.nbytes, 3)["read"])

    thread = threading.Thread(target=work, name="node")
    thread.start()
    thread.join()
    return rates[0]


# --- output ----------------------------------------------------------------------------------------------------------


def _write_json(results: list[Result], nodes: Nodes | None) -> None:
    report = {
        "cpu": cpu_name(),
        "cpu_features": native.cpu_features(),
        "variant": native.variant(),
        "results": [asdict(result) for result in results],
        "nodes": None if nodes is None else {**asdict(nodes), "share": nodes.share},
    }
    json.dump(report, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _write_table(results: list[Result], nodes: Nodes | None) -> None:
    head = ["type", "expert MiB", "threads", "DRAM GB/s", "2 planes", "of DRAM", "1 plane", "of DRAM"]
    has_ggml = any(result.ggml_gbs is not None for result in results)
    rows = []
    for r in results:
        shares = f"{100 * r.two_planes_share:.0f}%", f"{100 * r.one_plane_share:.0f}%"
        row = [r.type, f"{r.expert_mib:.2f}", str(r.n_threads), f"{r.dram_gbs:.2f}"]
        row += [f"{r.two_planes_gbs:.2f}", shares[0], f"{r.one_plane_gbs:.2f}", shares[1]]
        if has_ggml:
            row += ["-", "-"] if r.ggml_gbs is None else [f"{r.ggml_gbs:.2f}", f"{r.ggml_ratio:.2f}"]
        rows.append(row)
    head += ["ggml", "2 planes / ggml"] if has_ggml else []
    lines = markdown(head, rows)
    lines += ["", f"{cpu_name()}, kernels {native.variant()}"]
    if nodes is not None:
        each = ", ".join(f"node {i}: {rate:.2f}" for i, rate in enumerate(nodes.node_gbs))
        lines.append(f"memory GB/s: {each}; all together {nodes.total_gbs:.2f} ({100 * nodes.share:.0f}% of their sum)")
    sys.stdout.write("\n".join(lines) + "\n")
