"""`ft bench bw`: what a layer's misses take on this machine, filled over PCIe or run on the CPU, by their number.

Fills and experts are measured alone and beside each other, with a model's own experts or with random ones, and stored
in the profile that the engine reads (`experts.profile`). Without a GPU only the CPU is measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from freetoken import native, quants
from freetoken.cli.bench_kernels import threads_list
from freetoken.cli.expert_banks import RANDOM_TYPES, random_blocks
from freetoken.cli.flag import real
from freetoken.cli.flags_gpu import device_names
from freetoken.cli.table import markdown
from freetoken.cores import expert_threads, last_level_cache_bytes, physical_cores, physical_cpus
from freetoken.errors import OptionError, UnsupportedModelError
from freetoken.experts.bank import Bank, LayerBanks, Span, expert_banks
from freetoken.experts.measure import COUNTS, CpuSide, Side, alike, measure, n_figures, read_gbs
from freetoken.experts.profile import Conditions, Entry, ExpertFormat, Times, store
from freetoken.experts.tables import split_tables
from freetoken.gguf import open_model
from freetoken.gpu import ahead, driver
from freetoken.gpu.driver import Device
from freetoken.gpu.link import conditions
from freetoken.gpu.verdict import survey
from freetoken.native import Pool
from freetoken.spec import read_spec

__all__ = ["add_arguments", "run"]

log = logging.getLogger(__name__)

CANONICAL = (
    *("Q4_K/Q4_K/Q6_K 2048x768", "Q4_K 2048x768", "Q6_K 2048x768", "Q8_0 2048x768", "IQ4_XS 2048x768"),
    *("IQ3_S 2048x768", "MXFP4 2880x2880"),
)
"""Formats that are measured where none is named: of Qwen3-30B-A3B and of gpt-oss."""
SHAPE = "2048x768"
CACHES = 4
"""The banks of a format are at least this many times the last-level cache."""
LEAST_BYTES = 256 << 20
MODEL_BYTES = 4 << 30
"""What is taken of a model's layers of one format."""


@dataclass(frozen=True)
class Result:
    """One row: n experts of a format. Microseconds and gigabytes (1e9) a second, None for what was not measured."""

    format: str
    expert_mib: float
    n_threads: int
    n: int
    fill_us: float | None
    fill_gbs: float | None
    fill_beside_us: float | None
    fill_beside_gbs: float | None
    cpu_us: float | None
    cpu_gbs: float | None
    cpu_beside_us: float | None
    cpu_beside_gbs: float | None
    fills_of_n: int | None
    """How many of n misses the table then fills."""


# --- flags -----------------------------------------------------------------------------------------------------------


def _formats(text: str) -> list[str]:
    names = text.upper().split(",")
    known = {type_.name for type_ in RANDOM_TYPES}
    for name in names:
        parts = name.split("/")
        if len(parts) not in (1, 3) or not known.issuperset(parts):
            raise argparse.ArgumentTypeError(
                f"{name!r} is neither a type nor three for gate, up and down, such as Q4_K/Q4_K/Q6_K; known: "
                f"{', '.join(sorted(known))}"
            )
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft bench bw`."""
    add = parser.add_argument
    add("-m", "--model", metavar="FILE", help="measure this model's own experts, not random ones")
    add("--types", type=_formats, metavar="LIST", help="types of random experts, such as Q4_K,Q4_K/Q4_K/Q6_K")
    add("--shape", metavar="DxF", help=f"sizes of random experts: n_embd x n_ff ({SHAPE})")
    add(
        "-t",
        "--threads",
        type=threads_list,
        metavar="LIST",
        help="numbers of CPU threads (as the engine has for experts)",
    )
    add("--seconds", type=real(0.001, 60.0), default=0.2, metavar="S", help="for each figure (0.2)")
    add("-dev", "--device", type=device_names, metavar="DEV", help="the GPU, or none (CUDA0)")
    add("--cpu-planes", type=int, choices=(1, 2), default=2, help="int8 planes of activations (2)")
    add("--no-store", action="store_true", help="do not store the profile")
    add("-o", "--output", choices=("md", "json"), default="md", help="format (md)")


def run(args: argparse.Namespace) -> int:
    """Measure, store and print."""
    if args.model is not None and (args.types or args.shape):
        raise OptionError("--types and --shape are for random experts: leave them out with -m")
    card, problem = _card(args.device)
    bench = _Bench(card, args)
    with ExitStack() as stack:
        sources, bench.edges = stack.enter_context(_sources(args, card))
        n = n_figures(COUNTS, with_fills=card is not None) * len(bench.threads) * len(sources)
        bar = stack.enter_context(tqdm(total=n, desc="experts", leave=False, disable=not sys.stderr.isatty()))
        for kind, make in sources.items():
            bar.set_postfix_str(str(kind))
            bench.measure(kind, make(), bar.update)
    entries = bench.entries()
    path = None
    if not args.no_store:
        for entry in entries:
            path = store(entry)
    if problem and args.output == "json":
        log.warning("no GPU: only the CPU's side was measured (%s)", problem)
    report = _Report(entries, bench.results, None if path is None else str(path), problem)
    (report.write_json if args.output == "json" else report.write_table)()
    return 0


def _card(devices: Sequence[int] | None) -> tuple[Device | None, str]:
    """The card, or why there is none. Raises OptionError where one was named."""
    if devices == ():
        return None, "-dev none"
    verdict = survey(devices[0] if devices else 0)
    if verdict.is_usable:
        return verdict.device, ""
    if devices:
        raise OptionError(f"-dev CUDA{devices[0]}: {verdict.problem}")
    return None, verdict.problem


# --- experts to measure ----------------------------------------------------------------------------------------------

_Sources = dict[ExpertFormat, Callable[[], "list[LayerBanks]"]]


@contextmanager
def _sources(args: argparse.Namespace, card: Device | None) -> Iterator[tuple[_Sources, Sequence[int]]]:
    """What gives the layers of each format, which the card may read until the next ones are asked for, and the
    addresses that no copy may cross."""
    if args.model is None:
        kinds = [_format(f"{name} {args.shape or SHAPE}") for name in args.types or ()] or list(_canonical(args))
        memory = _Memory(card is not None)
        yield {kind: partial(_random_layers, kind, memory) for kind in kinds}, ()
        return
    with open_model(args.model) as model:
        groups = alike(expert_banks(read_spec(model), model), MODEL_BYTES)
        if not groups:
            raise UnsupportedModelError(f"{args.model}: the model has no routed experts: measure without -m")
        chosen = [layer for layers in groups.values() for layer in layers]
        if card is None:
            yield {kind: partial(list, layers) for kind, layers in groups.items()}, ()
            return
        pinned = ahead.pin_experts(chosen, card.index)
        try:
            layers = alike(pinned.layers, MODEL_BYTES)
            yield {kind: partial(list, some) for kind, some in layers.items()}, pinned.edges
        finally:
            pinned.close()


def _canonical(args: argparse.Namespace) -> Iterator[ExpertFormat]:
    names = CANONICAL if args.shape is None else [f"{name.split(' ')[0]} {args.shape}" for name in CANONICAL]
    return map(_format, names)


def _format(name: str) -> ExpertFormat:
    try:
        kind = ExpertFormat.parse(name)
        if kind.n_embd * kind.n_ff > 0 and kind.expert_bytes > 0:
            return kind
    except ValueError as error:
        raise OptionError(str(error)) from None
    raise OptionError(f"{name}: an expert of no bytes")


class _Memory:
    """Host memory that formats use one after another, locked where a card reads it."""

    def __init__(self, is_locked: bool) -> None:
        self._is_locked = is_locked
        self._data = np.empty(0, np.uint8)

    def take(self, n_bytes: int) -> np.ndarray:
        if self._data.size < n_bytes:
            self._data = np.empty(0, np.uint8)
            if self._is_locked:
                found = ahead.pinned_memory(n_bytes)
                if found is None:
                    raise OptionError(f"{n_bytes >> 20} MiB of host memory cannot be locked: raise ulimit -l")
                self._data = found
            else:
                self._data = native.aligned(n_bytes)
        return self._data[:n_bytes]


def _random_layers(kind: ExpertFormat, memory: _Memory) -> list[LayerBanks]:
    """One layer of random experts, much larger than the caches."""
    least = max(LEAST_BYTES, CACHES * last_level_cache_bytes())
    n_expert = max(2 * max(COUNTS), -(-least // kind.expert_bytes))
    data = memory.take(n_expert * kind.expert_bytes)
    banks, at = [], 0
    shapes = ((kind.n_ff, kind.n_embd), (kind.n_ff, kind.n_embd), (kind.n_embd, kind.n_ff))
    for name, type_id, (rows, cols) in zip(("gate", "up", "down"), kind.types, shapes, strict=True):
        size = rows * quants.row_bytes(type_id, cols)
        part = data[at : at + n_expert * size].reshape(n_expert, size)
        part[:] = random_blocks(type_id, size)
        banks.append(Bank(name, type_id, rows, cols, part, Span(0, at, part.nbytes)))
        at += part.nbytes
    return [LayerBanks(0, tuple(banks))]


# --- measuring -------------------------------------------------------------------------------------------------------


class _Bench:
    """Measures formats for all thread counts."""

    def __init__(self, card: Device | None, args: argparse.Namespace) -> None:
        self.threads: list[int] = args.threads or [expert_threads(physical_cores())]
        self.results: list[Result] = []
        self._card, self._seconds, self._n_planes = card, args.seconds, args.cpu_planes
        self._copy_gbs = 0.0
        self.edges: Sequence[int] = ()
        self._read_gbs: dict[int, float] = {}
        self._times: dict[int, dict[ExpertFormat, Times]] = {n: {} for n in self.threads}
        self._conditions: dict[int, Conditions] = {}

    def measure(self, kind: ExpertFormat, layers: list[LayerBanks], on_figure: Callable[[], object]) -> None:
        fills = self._fills(layers)
        cpus = physical_cpus()
        for n_threads in self.threads:
            with Pool(n_threads, cpus[:n_threads] if n_threads <= len(cpus) else None) as pool:
                if n_threads not in self._read_gbs:
                    self._read_gbs[n_threads] = read_gbs(pool, layers)
                side = CpuSide(pool, layers, self._n_planes)
                times = measure(fills, side, budget_s=self._seconds, on_figure=on_figure)
            self._times[n_threads][kind] = times
            self._conditions[n_threads] = conditions(self._card, n_threads, self._n_planes)  # the link is awake now
            self.results += _rows(kind, n_threads, times)

    def entries(self) -> list[Entry]:
        """What goes into the profile: one entry for each thread count."""
        return [
            Entry.new(self._conditions[n], copy_gbs=self._copy_gbs, read_gbs=self._read_gbs[n], formats=self._times[n])
            for n in self.threads
        ]

    def _fills(self, layers: list[LayerBanks]) -> Side | None:
        if self._card is None:
            return None
        ahead.modules().result()  # torch and Triton
        import torch

        from freetoken.gpu.fill_bench import GpuFills, copy_gbs

        device = torch.device(f"cuda:{self._card.index}")
        torch.cuda.set_device(device)
        self._copy_gbs = max(self._copy_gbs, copy_gbs(layers, device, self.edges))
        return GpuFills(layers, device)


def _rows(kind: ExpertFormat, n_threads: int, times: Times) -> Iterator[Result]:
    table = None
    if times.fill:
        entry = Entry.new(_NOWHERE, formats={kind: times})
        table = split_tables(entry, [kind], max(COUNTS))[0]
    for n in sorted(times.cpu):
        pairs: dict[str, float | None] = {}
        for name, by in asdict(times).items():
            seconds = by.get(n)
            pairs[f"{name}_us"] = None if seconds is None else seconds * 1e6
            pairs[f"{name}_gbs"] = None if seconds is None else n * kind.expert_bytes / seconds / 1e9
        yield Result(
            format=str(kind),
            expert_mib=round(kind.expert_bytes / 2**20, 3),
            n_threads=n_threads,
            n=n,
            fills_of_n=None if table is None else int(table[n]),
            **pairs,
        )


_NOWHERE = Conditions("", "", "", "", 0, 0, 0, "")


# --- output ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Report:
    entries: list[Entry]
    results: list[Result]
    path: str | None
    problem: str

    def write_json(self) -> None:
        machines = [
            {**asdict(entry.conditions), "copy_gbs": entry.copy_gbs, "read_gbs": entry.read_gbs}
            for entry in self.entries
        ]
        report: dict[str, Any] = {
            "conditions": machines,
            "results": [asdict(result) for result in self.results],
            "profile": self.path,
            "no_gpu": self.problem or None,
        }
        json.dump(report, sys.stdout, indent=2)
        sys.stdout.write("\n")

    def write_table(self) -> None:
        """Microseconds with GB/s in brackets."""
        has_fills = any(result.fill_us is not None for result in self.results)
        head = ["experts", "MiB", "threads", "n"]
        head += ["fills, us (GB/s)", "beside the CPU"] if has_fills else []
        head += ["CPU, us (GB/s)", *(["beside fills", "filled of n"] if has_fills else [])]
        rows = []
        for r in self.results:
            cells = [r.format, f"{r.expert_mib:.2f}", str(r.n_threads), str(r.n)]
            if has_fills:
                cells += [_cell(r.fill_us, r.fill_gbs), _cell(r.fill_beside_us, r.fill_beside_gbs)]
            cells.append(_cell(r.cpu_us, r.cpu_gbs))
            if has_fills:
                cells += [_cell(r.cpu_beside_us, r.cpu_beside_gbs), "-" if r.fills_of_n is None else str(r.fills_of_n)]
            rows.append(cells)
        lines = markdown(head, rows)
        lines += ["", *self._remarks()]
        sys.stdout.write("\n".join(lines) + "\n")

    def _remarks(self) -> Iterator[str]:
        here = self.entries[0].conditions
        yield f"{here.cpu}, kernels {here.kernels}"
        rates = ", ".join(f"{e.read_gbs:.1f} with -t {e.conditions.threads}" for e in self.entries)
        yield f"DRAM GB/s: {rates}"
        if here.gpu:
            name = next((card.name for card in driver.find_devices() if card.uuid == here.gpu), "")
            yield f"{name} {here.gpu}".strip() + f", driver {here.driver}, PCIe {here.link or 'unknown'}"
            yield f"copy engine GB/s: {self.entries[0].copy_gbs:.1f}"
        else:
            yield f"no GPU: only the CPU's side was measured ({self.problem})"
        yield f"profile: {self.path or 'not stored'}"


def _cell(us: float | None, gbs: float | None) -> str:
    return "-" if us is None or gbs is None else f"{us:.0f} ({gbs:.1f})"
