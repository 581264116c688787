"""`ft plan`: what of a model would go where on a machine, and how fast it would run, without loading it.

Neither a GPU nor the machine that is asked about need be there; of a file only the header is read.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace

from freetoken.cli.flag import real
from freetoken.cli.flags import add_engine_flags, add_model_flags, engine_options, model_options
from freetoken.cores import memory_bytes, physical_cores
from freetoken.errors import OptionError
from freetoken.forecast.geometries import GEOMETRIES, geometry_named, sizes_of_geometry, slot_sizes_of_geometry
from freetoken.forecast.sizes import sizes_of
from freetoken.forecast.speed import rates_of
from freetoken.forecast.whole import Machine, WholePlan, plan_whole, sequences
from freetoken.gguf import open_model
from freetoken.gpu import driver
from freetoken.gpu.verdict import choose_device
from freetoken.kvcache import check_cache_types
from freetoken.native import MAX_TOKENS
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan, plan_gpu
from freetoken.spec import read_spec

__all__ = ["add_arguments", "plan_of_geometry", "run"]

_UNITS = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([MGT])(?:I?B)?", re.IGNORECASE)
_GBS = real(1e-3, 1e6)


def memory_size(text: str) -> int:
    """Bytes of a size such as 12G, 11.5G or 800M (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    n_bytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if not n_bytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 12G, 11.5G or 800M")
    return n_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft plan`: a model's, the engine's, and the machine."""
    add_model_flags(parser)
    add_engine_flags(parser)
    group = parser.add_argument_group("plan")
    group.add_argument("--vram", type=memory_size, metavar="SIZE", help="free memory of the card, such as 12G")
    group.add_argument("--ram", type=memory_size, metavar="SIZE", help="main memory, such as 32G")
    names = ", ".join(g.name for g in GEOMETRIES)
    group.add_argument("--geometry", metavar="NAME", help=f"a known model instead of a file: {names}")
    group.add_argument("--mix", metavar="TYPES", default="", help="its types: Q4_K_M, MXFP4, or one for all (Q8_0)")
    group.add_argument("--pcie-gbs", type=_GBS, metavar="R", help="GB/s of fills (by the card's class: 12 to 52)")
    group.add_argument("--cpu-gbs", type=_GBS, metavar="R", help="GB/s of experts on the CPU (50)")
    group.add_argument("--gpu-gbs", type=_GBS, metavar="R", help="GB/s of the card's memory (by its class)")
    group.add_argument("-o", "--output", choices=("text", "json"), default="text", help="format (text)")


def run(args: argparse.Namespace) -> int:
    """Print the plan. Raises OptionError with what is missing where the flags cannot be met."""
    options = engine_options(args)
    check_cache_types(options)
    ram, ram_source = (args.ram, "--ram") if args.ram else memory_bytes()
    vram, vram_source = _card(options, args.vram)
    machine = Machine(vram, vram_source, ram, ram_source, physical_cores())
    rates = {name: getattr(args, f"{name}_gbs") or 0.0 for name in ("pcie", "cpu", "gpu")}
    if args.geometry is not None:
        plan = plan_of_geometry(args.geometry, options, machine, mix=args.mix, **rates)
    elif args.mix:
        raise OptionError("--mix goes with --geometry: a file has its own types")
    else:
        plan = _plan_of_file(args, options, machine, rates)
    print(json.dumps(plan.as_json(), indent=2) if args.output == "json" else plan)
    return 0


def _card(options: EngineOptions, vram: int | None) -> tuple[int, str]:
    """Free bytes of the card that layers go to, 0 for none, and how that is known."""
    if options.is_gpu_off:
        return 0, "-ngl 0 or -dev none"
    if vram is not None:
        return vram, "--vram"
    device = choose_device(options)
    if device is None:
        return 0, "no card that can be used, and no --vram"
    return driver.free_bytes(device.index), device.name


def _plan_of_file(
    args: argparse.Namespace, options: EngineOptions, machine: Machine, rates: dict[str, float]
) -> WholePlan:
    with open_model(model_options(args).path) as file:
        spec = read_spec(file)
        sizes = sizes_of(file, spec)
        gpu, notes = None, []
        if machine.vram_bytes:
            from freetoken.gpu.place import make_plan, why_not

            reason = why_not(file, spec)
            if reason:
                notes.append(f"{reason}: all layers run on the CPU")
                machine = replace(machine, vram_bytes=0, vram_source="no kernels for its types")
            else:
                n_sequences, n_ctx = sequences(options, spec.n_ctx_train)
                gpu = make_plan(file, spec, options, machine.vram_bytes, n_ctx, n_sequences)
        return plan_whole(sizes, options, machine, gpu, rates_of(machine.vram_bytes, **rates), notes)


def plan_of_geometry(
    name: str, options: EngineOptions, machine: Machine, *, mix: str = "", **rates: float
) -> WholePlan:
    """The plan of a known model. Raises OptionError."""
    geometry = geometry_named(name)
    sizes = sizes_of_geometry(geometry, mix)
    gpu: GpuPlan | None = None
    if machine.vram_bytes:
        n_sequences, n_ctx = sequences(options, geometry.n_ctx)
        gpu = plan_gpu(
            sizes.spec,
            options,
            slot_bytes=slot_sizes_of_geometry(geometry, mix),
            dense=sizes.dense,
            free_bytes=machine.vram_bytes,
            max_batch=MAX_TOKENS,
            n_ctx=n_ctx,
            n_sequences=n_sequences,
        )
    return plan_whole(sizes, options, machine, gpu, rates_of(machine.vram_bytes, **rates))
