"""The whole plan of a model on a machine: the card, main memory, speed; as text and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from freetoken.forecast.host import HostPlan, plan_host
from freetoken.forecast.sizes import Sizes
from freetoken.forecast.speed import HYBRID_SHARE, Prediction, Rates, predict
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan

__all__ = ["Machine", "WholePlan", "plan_whole", "sequences"]

_MIB, _GIB = 1 << 20, 1 << 30
N_SLOTS_AUTO = 4
"""Requests served at once where -np is not given (`engine.N_SLOTS_AUTO`; a test compares)."""


@dataclass(frozen=True)
class Machine:
    """`vram_bytes` are free on the card, 0 for no card; the sources say how sizes are known."""

    vram_bytes: int
    vram_source: str
    ram_bytes: int
    ram_source: str
    n_cores: int


@dataclass(frozen=True)
class WholePlan:
    """`gpu` None: all layers run on the CPU."""

    sizes: Sizes
    options: EngineOptions
    machine: Machine
    gpu: GpuPlan | None
    host: HostPlan
    rates: Rates
    prediction: Prediction
    notes: tuple[str, ...]

    @property
    def is_auto(self) -> bool:
        return self.options.moe_backend == "auto"

    def as_json(self) -> dict[str, Any]:
        """Plain values, all sizes in bytes."""
        gpu = None
        if self.gpu is not None:
            more = {
                name: getattr(self.gpu, name)
                for name in ("n_gpu_layers", "slots_bytes", "own_buffers_bytes", "used_bytes", "resident_share")
            }
            gpu = asdict(self.gpu) | more
        host = asdict(self.host) | {"need_bytes": self.host.need_bytes, "resident_share": self.host.resident_share}
        return {
            "model": self.sizes.name,
            "model_bytes": self.sizes.n_bytes,
            "experts_bytes": self.sizes.pool_bytes,
            "machine": asdict(self.machine),
            "gpu": gpu,
            "host": host,
            "prediction": asdict(self.prediction) | {"is_prediction": True, "rates_gbs": asdict(self.rates)},
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        sizes, host = self.sizes, self.host
        lines = [
            f"plan for {sizes.name}: {_gib(sizes.n_bytes)}, {_gib(sizes.pool_bytes)} of it routed experts",
            *(self._card_lines(self.gpu) if self.gpu is not None else [f"no GPU ({self.machine.vram_source})"]),
            f"main memory: {_gib(host.ram_bytes)} ({host.ram_source}), for weights {_gib(host.usable_bytes)} "
            f"after the system, the process ({_mib(host.own_bytes)}) and its context ({_mib(host.kv_bytes)})",
        ]
        if host.weights_bytes:
            lines.append(f"  weights that the CPU computes with: {_gib(host.weights_bytes)}")
        if host.pool_bytes:
            away = host.pool_bytes - host.pinned_bytes
            lines.append(
                f"  experts: {_gib(host.pinned_bytes)} pinned in place ({host.pinned_layers} layers), {_gib(away)} "
                f"pageable; locked buffers {_mib(host.meeting_bytes)}"
            )
        if host.cold_bytes:
            lines.append(f"  does not fit in memory: {_gib(host.cold_bytes)}, read from the file when routed to")
        beside = f", {host.n_threads_experts} for experts beside the GPU" if host.n_threads_experts else ""
        lines += [f"threads: {host.n_threads}{beside}", *self._prediction_lines()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _card_lines(self, gpu: GpuPlan) -> list[str]:
        lines = str(gpu).splitlines()
        lines[1] += f" ({self.machine.vram_source})"
        if not any(self.sizes.spec.n_kv):
            lines = ["  context: not known, not counted" if "  context" in line else line for line in lines]
        if gpu.is_offloading and self.is_auto:
            lines[0] += "; auto times offload, hybrid and cpu at the start"
        if gpu.buffer_pool is not None and gpu.n_buffers:
            n_bytes = gpu.n_buffers * gpu.buffer_slots * gpu.classes[gpu.buffer_pool].slot_bytes
            lines[-1] += f", {_mib(n_bytes)} of the slots' memory while a long prompt runs"
        return lines

    def _prediction_lines(self) -> list[str]:
        p, r = self.prediction, self.rates
        lines = [f"predicted, not measured: {p.tokens_per_s:.0f} tok/s of one stream with {p.backend}"]
        if p.miss_bytes:
            lines[0] += f", {100 * p.hit_rate:.0f}% hits"
        parts = [("GPU", p.gpu_ms), ("misses", p.miss_ms), ("layers on the CPU", p.cpu_ms), ("disk", p.disk_ms)]
        told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in parts if ms)
        card = f"PCIe {r.pcie:g}, GPU {r.gpu:g}, " if self.gpu is not None else ""
        both = f" (hybrid: {HYBRID_SHARE:.0%} of PCIe and CPU together)" if p.backend == "hybrid" else ""
        lines.append(f"  {told} a token; from GB/s of {card}CPU {r.cpu:g}, disk {r.disk:g}{both}")
        return lines


def sequences(options: EngineOptions, n_ctx_train: int) -> tuple[int, int]:
    """How many sequences the engine serves, and the longest one's tokens."""
    n = options.n_parallel if options.n_parallel > 0 else N_SLOTS_AUTO
    total = options.n_ctx or n_ctx_train
    return n, total if options.n_parallel <= 0 else max(total // n, 1)


def plan_whole(
    sizes: Sizes,
    options: EngineOptions,
    machine: Machine,
    gpu: GpuPlan | None,
    rates: Rates,
    notes: Sequence[str] = (),
) -> WholePlan:
    """What there is besides the card's plan."""
    n_sequences, n_ctx = sequences(options, sizes.spec.n_ctx_train)
    host = plan_host(
        sizes,
        options,
        gpu,
        ram_bytes=machine.ram_bytes,
        ram_source=machine.ram_source,
        n_cores=machine.n_cores,
        n_ctx=n_ctx,
        n_sequences=n_sequences,
    )
    is_auto = options.moe_backend == "auto"
    prediction = predict(sizes, gpu, host, rates, is_auto=is_auto)
    all_notes = (*(f"not known: {what}" for what in sizes.unknown), *(gpu.notes if gpu is not None else ()), *notes)
    return WholePlan(sizes, options, machine, gpu, host, rates, prediction, all_notes)


def _mib(n_bytes: int) -> str:
    return f"{-(-n_bytes // _MIB)} MiB"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / _GIB:.2f} GiB"
