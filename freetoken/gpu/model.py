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
from freetoken.experts.pin import Pinned, Rung, pin_banks
from freetoken.gguf import ModelFile
from freetoken.gpu import driver
from freetoken.gpu.chain import DeviceParams, device_chain
from freetoken.gpu.decode import GpuDecoder, Step
from freetoken.gpu.experts import GpuExperts
from freetoken.gpu.inputs import Draws, Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.place import Placement, place
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.pages import PAGE
from freetoken.kernels.sampler import N_FIELDS
from freetoken.kvcache import KVShape, n_pages_for
from freetoken.options import EngineOptions
from freetoken.spec import ModelSpec

__all__ = ["GpuModel", "device_chain", "place"]

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
        placement: Placement,
        pool: native.Pool,
    ) -> None:
        """`pool` decodes weights of types without a kernel."""
        started = time.monotonic()
        plan = self.plan = placement.plan
        device = self.device = torch.device(placement.device)
        shapes = [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]
        n_ctx_pages = n_pages_for(plan.n_ctx)
        self.max_stepped = 1 << 30
        self._pinned: Pinned | None = None
        kv = DeviceKV(shapes, plan.n_pages, options.cache_type_k, device)
        self._weights = DeviceWeights(device, pool)
        inputs = Inputs(n_ctx_pages, kv.spare, device)
        self.experts: GpuExperts | None = None
        if spec.is_moe:
            self.experts = self._expert_slots(file, spec, options)
        n_positions = n_ctx_pages * PAGE
        self._decoder = GpuDecoder(model, self._weights, kv, inputs, self.experts, n_positions, options.n_planes)
        logger.info("%s: weights and cache ready in %.2f s", device, time.monotonic() - started)

    def run(self, batch: Batch, should_stop: Callable[[], bool] | None) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab]. Raises Stopped."""
        assert batch.n <= MAX_TOKENS
        return self._decoder.run(batch)

    def launch(
        self, batch: Batch, chains: Sequence[DeviceParams], uniforms: Sequence[float], *, follows: bool
    ) -> Step:
        """Start a decode step that samples its tokens itself (`GpuDecoder.launch`)."""
        params = np.zeros((batch.n, N_FIELDS), np.int32)
        for row, chain in zip(params, chains, strict=True):
            chain.write(row)
        return self._decoder.launch(batch, Draws(params, np.asarray(uniforms, np.float64)), follows=follows)

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
            layers, plan.classes, plan.n_slots, spec.n_expert_used, self.device, n_planes=options.n_planes
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


def _pinned_memory(n_bytes: int) -> np.ndarray | None:
    try:
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return None
