"""One open model on a GPU: what the runner hands batches to. Used by the engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import Model
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.memory import slot_sizes
from freetoken.experts.pin import Pinned, Rung, pin_banks
from freetoken.experts.slots import SizeClass, size_classes, slots_per_class
from freetoken.gguf import ModelFile
from freetoken.gpu import driver
from freetoken.gpu.decode import GpuDecoder
from freetoken.gpu.experts import GpuExperts
from freetoken.gpu.inputs import Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kvcache import KVShape
from freetoken.options import EngineOptions
from freetoken.spec import ModelSpec

__all__ = ["GpuModel"]

logger = logging.getLogger(__name__)

N_PIN_THREADS = 4


class GpuModel:
    """Weights, cache, experts and programs on one device. `close` gives host memory back to the system."""

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        options: EngineOptions,
        model: Model,
        shapes: Sequence[KVShape],
        capacity: int,
        n_ctx_pages: int,
        pool: native.Pool,
        device: torch.device | str,
    ) -> None:
        """`capacity` pages of keys and values for all sequences, of which one takes at most n_ctx_pages."""
        started = time.monotonic()
        device = torch.device(device)
        self.device = device
        self.max_stepped = 1 << 30
        self._pinned: Pinned | None = None
        kv = DeviceKV(shapes, capacity, options.cache_type_k, device)
        self._weights = DeviceWeights(device, pool)
        inputs = Inputs(pool, n_ctx_pages, spec.n_embd, kv.spare, device)
        self.experts: GpuExperts | None = None
        if spec.is_moe:
            self.experts = self._expert_slots(file, spec, options)
        n_positions = n_ctx_pages * native.KV_PAGE
        self._decoder = GpuDecoder(model, self._weights, kv, inputs, self.experts, n_positions, options.n_planes)
        logger.info("GPU: %.2f GiB of keys and values, ready in %.2f s", kv.n_bytes / 2**30, time.monotonic() - started)

    def run(self, batch: Batch, should_stop: Callable[[], bool] | None) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab]. Raises Stopped."""
        assert batch.n <= MAX_TOKENS
        return self._decoder.run(batch)

    def close(self) -> None:
        """Unlock the experts' pages. The model must not be used afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _expert_slots(self, file: ModelFile, spec: ModelSpec, options: EngineOptions) -> GpuExperts:
        layers: Sequence[LayerBanks | None] = expert_banks(spec, file)
        classes = size_classes(slot_sizes(layers))
        n_slots = _n_slots(options, spec, classes, self.device)
        if self.device.type == "cuda":
            self._pinned = self._pin(layers)
            layers = self._pinned.layers
        experts = GpuExperts(layers, classes, n_slots, spec.n_expert_used, self.device, n_planes=options.n_planes)
        experts.load_residents()
        logger.info(
            "experts: %s, slots %s of %s", "fused" if experts.is_fused else "offload", n_slots, spec.n_expert
        )
        return experts

    def _pin(self, layers: Sequence[LayerBanks | None]) -> Pinned:
        index = self.device.index or 0
        pinned = pin_banks(
            layers,
            partial(driver.register, device=index),
            partial(driver.unregister, device=index),
            allocate=_pinned_memory,
            n_threads=N_PIN_THREADS,
        )
        if Rung.PAGEABLE in pinned.rungs:
            pinned.close()
            raise EngineError(
                f"{pinned.n_bytes(Rung.PAGEABLE) / 2**20:.0f} MiB of experts can be neither locked in place nor copied "
                "to locked memory: raise the limit on locked memory (ulimit -l), or run on the CPU with -ngl 0"
            )
        return pinned


def _pinned_memory(n_bytes: int) -> np.ndarray | None:
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return None


def _n_slots(
    options: EngineOptions, spec: ModelSpec, classes: tuple[SizeClass, ...], device: torch.device
) -> tuple[int, ...]:
    """Slots of each size class."""
    wanted = tuple(len(c.layers) * spec.n_expert for c in classes)
    total = sum(n * c.slot_bytes for n, c in zip(wanted, classes, strict=True))
    budget = torch.cuda.mem_get_info(device)[0] - 2**30 if device.type == "cuda" else total
    if options.moe_cache_rate:
        budget = int(total * options.moe_cache_rate)
    if total <= budget:
        return wanted
    return slots_per_class(classes, spec.n_expert, budget, 2 * MAX_TOKENS * spec.n_expert_used)
