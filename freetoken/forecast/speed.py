"""A prediction of decode speed from bandwidths. It is a prediction: measure before you rely on it.

One stream at the start of a context. A token's time is

    n_layer * LAYER_S + read on the GPU / (GPU_SHARE * gpu) + misses / rate + layers on the CPU / cpu + cold / disk

and the rate of misses that of the best backend: `offload` pcie, `cpu` cpu, `hybrid` HYBRID_SHARE * (pcie + cpu). The
constants are fitted to four figures measured for the Qwen3-30B-A3B geometry with 37% of the experts in slots (synthetic
routing): 3.0 ms a token where all hit, 105 tok/s with offload, 150 with hybrid, 103 with cpu, 70% hits. Hits follow
share ** HIT_EXPONENT, a curve through that point, 0 and 1. Models differ in how they route, so other shares and models
are an extrapolation: for real text FreeToken's authors report 84% hits with 37% of Qwen3.6-35B-A3B's experts, and 61%
with 11% of DeepSeek-V4-Flash's, where this curve has 71% and 46%.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.forecast.host import HostPlan
from freetoken.forecast.sizes import Sizes
from freetoken.plan import GpuPlan

__all__ = ["CARD_CLASSES", "Prediction", "Rates", "hit_rate", "predict", "rates_of"]

GB = 1e9
HIT_EXPONENT = 0.35
"""0.37 ** 0.35 = 0.71."""
LAYER_S = 52e-6
GPU_SHARE = 0.7
HYBRID_SHARE = 0.65
CPU_GBS, DISK_GBS = 50.0, 3.0
"""Two channels of DDR5 as the kernels of experts read them, and an NVMe drive."""

CARD_CLASSES: tuple[tuple[int, float, float], ...] = (
    (9, 12.0, 256.0),
    (13, 25.0, 400.0),
    (20, 25.0, 600.0),
    (28, 25.0, 936.0),
    (48, 50.0, 1790.0),
    (1 << 20, 52.0, 3000.0),
)
"""GiB of memory below which a card belongs to a class; GB/s that fills of experts reach there (PCIe 4.0 x8, x16,
5.0 x16) and the nominal bandwidth of its memory. Defaults: your card's are better."""


@dataclass(frozen=True)
class Rates:
    """GB/s (10^9 bytes): `pcie` of fills, `cpu` of the kernels of experts, `gpu` nominal of the card's memory."""

    pcie: float
    cpu: float
    gpu: float
    disk: float = DISK_GBS


@dataclass(frozen=True)
class Prediction:
    """Tokens a second of one stream, with what they come from."""

    tokens_per_s: float
    backend: str
    hit_rate: float
    gpu_ms: float
    miss_ms: float
    cpu_ms: float
    """Layers that lie on the CPU."""
    disk_ms: float
    miss_bytes: int


def rates_of(vram_bytes: int, *, pcie: float = 0.0, cpu: float = 0.0, gpu: float = 0.0) -> Rates:
    """What was given, and the defaults of the card's class for the rest."""
    _, own_pcie, own_gpu = next(c for c in CARD_CLASSES if vram_bytes < c[0] << 30)
    return Rates(pcie or own_pcie, cpu or CPU_GBS, gpu or own_gpu)


def hit_rate(share: float) -> float:
    """Of experts read, those found where a share of all is kept by last use."""
    return float(min(max(share, 0.0), 1.0) ** HIT_EXPONENT)


def predict(sizes: Sizes, gpu: GpuPlan | None, host: HostPlan, rates: Rates, *, is_auto: bool = True) -> Prediction:
    """With the planned backend, or `is_auto` the best of those that it may choose from."""
    layers = range(sizes.spec.n_layer)
    first = sizes.spec.n_layer if gpu is None else gpu.first_layer
    cpu = sum(sizes.dense.layers[i] + sizes.used_bytes(i) for i in layers[:first])
    cpu += sizes.head_read_bytes if gpu is None else 0
    dense = 0 if gpu is None else sum(sizes.dense.layers[first:]) + sizes.head_read_bytes
    used = sum(sizes.used_bytes(i) for i in layers[first:])
    ways = [_Way("cpu", 0.0, 1.0)] if gpu is None else _ways(gpu, rates, is_auto)
    found = []
    for way in ways:
        miss = used * (1.0 - way.hits)
        gpu_s = (dense + used * way.hits) / (rates.gpu * GB * GPU_SHARE) + LAYER_S * (len(layers) - first)
        miss_s = miss / way.rate
        cpu_s = cpu / (rates.cpu * GB)
        cold_share = 1.0 - hit_rate(host.resident_share)
        read = used + sum(sizes.used_bytes(i) for i in layers[:first])
        from_disk = min(read * cold_share, miss + cpu) if host.cold_bytes else 0.0
        disk_s = from_disk / (rates.disk * GB)
        total = gpu_s + miss_s + cpu_s + disk_s
        ms = [1e3 * s for s in (gpu_s, miss_s, cpu_s, disk_s)]
        found.append(Prediction(1.0 / total, way.backend, way.hits, ms[0], ms[1], ms[2], ms[3], round(miss)))
    return max(found, key=lambda p: p.tokens_per_s)


@dataclass(frozen=True)
class _Way:
    backend: str
    hits: float
    rate: float


def _ways(gpu: GpuPlan, rates: Rates, is_auto: bool) -> list[_Way]:
    """The backends that may be chosen, with hits and bytes a second of misses."""
    if not gpu.is_offloading:
        return [_Way(gpu.backend, 1.0, 1.0)]
    n_all = sum(len(c.layers) for c in gpu.classes) * gpu.n_expert
    kept = [(len(c.layers) * gpu.n_expert, n) for c, n in zip(gpu.classes, gpu.n_slots, strict=True)]
    if gpu.passing:
        kept = kept[:-1]
    moving = sum(n * hit_rate(slots / n) for n, slots in kept) / n_all
    still = sum(slots for _, slots in kept) / n_all
    both = HYBRID_SHARE * (rates.pcie + rates.cpu)
    rows = {
        "offload": (moving, rates.pcie),
        "hybrid": (moving, max(both, rates.pcie, rates.cpu)),
        "cpu": (still, rates.cpu),
    }
    names = rows if is_auto else (gpu.backend,)
    return [_Way(name, rows[name][0], rows[name][1] * GB) for name in names]
