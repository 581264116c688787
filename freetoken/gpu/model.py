"""One open model on a GPU: what the runner hands batches to. Used by the engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import Model
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.pin import Pinned, Rung, pin_banks
from freetoken.gguf import ModelFile
from freetoken.gpu import driver
from freetoken.gpu.chain import DeviceParams, device_chain
from freetoken.gpu.decode import GpuDecoder, Step
from freetoken.gpu.experts import GpuExperts, Staging
from freetoken.gpu.inputs import Draws, Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.place import Placement, place
from freetoken.gpu.prefill import Prefill
from freetoken.gpu.scratch import Scratch
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.pages import PAGE
from freetoken.kernels.sampler import N_FIELDS
from freetoken.kvcache import KVShape, n_pages_for
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.prompt_memory import scratch_bytes
from freetoken.spec import ModelSpec

__all__ = ["GpuModel", "device_chain", "place"]

logger = logging.getLogger(__name__)

N_PIN_THREADS = 4
MAX_STEPPED = 1 << 30
"""Prompts run as decode steps, whatever their length, where no buffer is left for whole layers."""


class GpuModel:
    """Weights, cache, experts and programs on one device. `close` gives host memory back to the system."""

    def __init__(
        self,
        file: ModelFile,
        spec: ModelSpec,
        options: EngineOptions,
        model: Model,
        placement: Placement,
        pool: native.Pool,
    ) -> None:
        """`pool` decodes weights of types without a kernel."""
        started = time.monotonic()
        plan = self.plan = placement.plan
        device = self.device = torch.device(placement.device)
        shapes = [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]
        n_ctx_pages = n_pages_for(plan.n_ctx)
        streams = plan.backend != "offload" or plan.n_buffers > 0
        self.max_stepped = MAX_TOKENS if streams else MAX_STEPPED
        self.n_chunk = plan.n_chunk
        self._pinned: Pinned | None = None
        kv = DeviceKV(shapes, plan.n_pages, options.cache_type_k, device)
        self._weights = DeviceWeights(device, pool)
        self._model, self._kv = model, kv
        self._prefill: Prefill | None = None
        inputs = Inputs(n_ctx_pages, kv.spare, device)
        self.experts: GpuExperts | None = None
        if spec.is_moe:
            self.experts = self._expert_slots(file, spec, options)
        n_positions = n_ctx_pages * PAGE
        self.decoder = GpuDecoder(model, self._weights, kv, inputs, self.experts, n_positions, options.n_planes)
        logger.info("%s: weights and cache ready in %.2f s", device, time.monotonic() - started)

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab]. Raises Stopped.

        `between_layers` is called between the layers of a long chunk; it may run steps of other sequences, and says
        whether it did."""
        if batch.n <= MAX_TOKENS:
            return self.decoder.run(batch)
        with self.experts.streaming() if self.experts is not None else nullcontext():
            logits = self._long_pass().run(batch, should_stop, between_layers)
        found: np.ndarray = logits.cpu().numpy()
        return found

    def expert_counters(self) -> np.ndarray | None:
        """int64 [n_layer, 5] by `experts.slots.COUNTERS`, None without experts."""
        return None if self.experts is None else self.experts.counters()

    def launch(self, batch: Batch, chains: Sequence[DeviceParams], uniforms: Sequence[float], *, follows: bool) -> Step:
        """Start a decode step that samples its tokens itself (`GpuDecoder.launch`)."""
        params = np.zeros((batch.n, N_FIELDS), np.int32)
        for row, chain in zip(params, chains, strict=True):
            chain.write(row)
        return self.decoder.launch(batch, Draws(params, np.asarray(uniforms, np.float64)), follows=follows)

    def _long_pass(self) -> Prefill:
        if self._prefill is None:
            self.decoder.program(1, 1, 1)  # matrices are joined as its launches want them, so it comes first
            self._prefill = Prefill(
                self._model,
                self._weights,
                self._kv,
                self.decoder.head_logits,
                self.device,
                self.experts,
                scratch=Scratch(self.device, scratch_bytes(self.n_chunk)),
                n_chunk=self.n_chunk,
                keep=None if self.experts is None or self.experts.is_fused else self.experts.survivors,
            )
        return self._prefill

    def close(self) -> None:
        """Unlock the experts' pages. The model must not be used afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _expert_slots(self, file: ModelFile, spec: ModelSpec, options: EngineOptions) -> GpuExperts:
        layers: Sequence[LayerBanks | None] = expert_banks(spec, file)
        if self.device.type == "cuda":
            self._pinned = self._pin(layers)
            layers = self._pinned.layers
        plan = self.plan
        experts = GpuExperts(
            layers,
            plan.classes,
            plan.n_slots,
            spec.n_expert_used,
            self.device,
            n_planes=options.n_planes,
            staging=_staging(plan),
            edges=() if self._pinned is None else self._pinned.edges,
        )
        experts.load_residents()
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


def _staging(plan: GpuPlan) -> Staging | int:
    """The last slots of the pool that the plan names, or bytes of their own."""
    if plan.buffer_pool is None:
        return plan.own_buffers_bytes
    n = plan.n_buffers * plan.buffer_slots
    return Staging(plan.buffer_pool, plan.n_slots[plan.buffer_pool] - n, n) if n else 0


def _pinned_memory(n_bytes: int) -> np.ndarray | None:
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return None
