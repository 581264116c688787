"""How the memory of a card is shared out for a model: asked once, before any weight is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from freetoken.experts.bank import expert_banks
from freetoken.experts.memory import slot_sizes
from freetoken.gguf import ModelFile
from freetoken.gpu import driver
from freetoken.gpu.ahead import Start
from freetoken.gpu.driver import Device
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.matvec import TYPE_CLASS
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan, dense_bytes, plan_gpu
from freetoken.quants import type_name
from freetoken.spec import ModelSpec

__all__ = ["Placement", "make_plan", "place", "why_not"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Placement:
    """`device` as torch names it; `start` is what has begun there already."""

    device: str
    plan: GpuPlan
    start: Start | None = None


def place(
    file: ModelFile,
    spec: ModelSpec,
    options: EngineOptions,
    card: Device,
    n_ctx: int,
    n_sequences: int,
    start: Start | None = None,
) -> Placement | None:
    """The plan for a card, None where all layers run on the CPU. Raises OptionError where memory is missing."""
    reason = why_not(file, spec)
    if reason:
        logger.warning("%s: all layers run on the CPU", reason)
        return None
    free_bytes = driver.free_bytes(card.index) if start is None else start.free_bytes
    plan = make_plan(file, spec, options, free_bytes, n_ctx, n_sequences)
    logger.info("%s", card)
    logger.info("%s", plan)
    for note in plan.notes:
        logger.warning("%s", note)
    return Placement(f"cuda:{card.index}", plan, start)


def make_plan(
    file: ModelFile,
    spec: ModelSpec,
    options: EngineOptions,
    free_bytes: int,
    n_ctx: int,
    n_sequences: int,
    *,
    n_chunk: int = 0,
    n_pages: int = 0,
) -> GpuPlan:
    """The plan for a card with so much free memory (`plan_gpu`)."""
    sizes = slot_sizes(expert_banks(spec, file)) if spec.is_moe else [0] * spec.n_layer
    return plan_gpu(
        spec,
        options,
        slot_bytes=sizes,
        dense=dense_bytes(file, spec),
        free_bytes=free_bytes,
        max_batch=MAX_TOKENS,
        n_ctx=n_ctx,
        n_sequences=n_sequences,
        names=file.tensors,
        n_chunk=n_chunk,
        n_pages=n_pages,
    )


def why_not(file: ModelFile, spec: ModelSpec) -> str:
    """What of a model no GPU kernel takes, "" for nothing."""
    for layer in expert_banks(spec, file) if spec.is_moe else ():
        for bank in layer.banks if layer is not None else ():
            if bank.type not in TYPE_CLASS:
                return f"tensor {bank.name!r} has the type {type_name(bank.type)}, which the GPU has no kernel for"
    return ""
