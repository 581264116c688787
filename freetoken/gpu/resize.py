"""Slots and pages of another size for a model that runs: the plan, and what is told of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from freetoken.errors import OptionError
from freetoken.gguf import ModelFile
from freetoken.gpu.backends import Backends
from freetoken.gpu.place import make_plan
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.rebuild import CacheChange, SlotClass, SlotStatus, Statistics
from freetoken.spec import ModelSpec

__all__ = ["backend_in_use", "resized", "slot_status", "statistics"]


def resized(
    file: ModelFile,
    spec: ModelSpec,
    options: EngineOptions,
    plan: GpuPlan,
    change: CacheChange,
    free_bytes: int,
    n_pages: int,
) -> GpuPlan:
    """The plan for so many pages, with layers, context and chunks as they are; slots that the change does not name stay
    as many. `free_bytes` counts what the engine holds as free. Raises OptionError for what does not fit."""
    if change.has_slots and not plan.classes:
        raise OptionError("no experts take slots here: there is no cache of experts to rebuild")
    common = [(n, c) for n, c in zip(plan.n_slots, plan.classes, strict=True) if not _is_passing(plan, c.layers)]
    size = change.moe_cache_size or 0
    if change.moe_cache_rate is not None:  # 0 would be all that there is room for
        size = max(round(change.moe_cache_rate * plan.n_expert * sum(len(c.layers) for _, c in common)), 1)
    if not change.has_slots:
        size = sum(n for n, _ in common)
    wishes = replace(
        options,
        n_gpu_layers=plan.n_layer + 1 - plan.first_layer,
        n_ctx=plan.n_ctx,
        moe_cache_size=size,
        moe_cache_rate=0.0,
    )
    found = make_plan(file, spec, wishes, free_bytes, plan.n_ctx, 1, n_chunk=plan.n_chunk, n_pages=n_pages)
    if not change.has_slots and sum(found.n_slots) < sum(plan.n_slots):
        raise OptionError(
            f"{n_pages} pages leave room for {sum(found.n_slots)} of {sum(plan.n_slots)} slots: give fewer pages, or "
            "moe_cache_auto too"
        )
    return found


def _is_passing(plan: GpuPlan, layers: tuple[int, ...]) -> bool:
    return bool(layers) and set(layers) <= set(plan.passing)


def slot_status(plan: GpuPlan) -> SlotStatus:
    """What slots there are, of a plan with some."""
    classes = tuple(
        SlotClass(n, len(c.layers) * plan.n_expert, len(c.layers), c.slot_bytes, _is_passing(plan, c.layers))
        for n, c in zip(plan.n_slots, plan.classes, strict=True)
    )
    n_experts = sum(c.n_experts for c in classes)
    return SlotStatus(sum(plan.n_slots), n_experts, plan.resident_share, plan.slots_bytes, classes)


def statistics(counters: np.ndarray, since: float, began_with: str) -> Statistics:
    """Sums over all layers of counters int64 [n_layer, 5] (`experts.slots.COUNTERS`)."""
    hits, misses, fills, on_cpu, n_bytes = counters.sum(axis=0).tolist()
    rate = hits / (hits + misses) if hits + misses else None
    return Statistics(since, began_with, hits, misses, fills, on_cpu, n_bytes, rate)


def backend_in_use(plan: GpuPlan, backends: Backends | None, wished: tuple[str, ...]) -> tuple[str, str]:
    """How misses run, and why."""
    if not plan.classes:
        return "dense", "the layers on the GPU have no routed experts"
    if not plan.is_offloading:
        return plan.backend, "every expert has a slot"
    if backends is not None:
        return backends.current.name, backends.reason
    return plan.backend, "--moe-backend" if len(wished) == 1 else "the CPU takes no part in the GPU's steps"
