"""One open model on a GPU: what the runner hands batches to. Used by the engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import Model
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.pin import Pinned
from freetoken.gguf import ModelFile
from freetoken.gpu.ahead import pin_experts, timed
from freetoken.gpu.chain import DeviceParams, device_chain
from freetoken.gpu.decode import GpuDecoder, Step
from freetoken.gpu.experts import GpuExperts, Staging
from freetoken.gpu.inputs import Draws, Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.place import Placement, place
from freetoken.gpu.prefill import Prefill
from freetoken.gpu.warm import WarmUp
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.pages import PAGE
from freetoken.kernels.sampler import N_FIELDS
from freetoken.kvcache import KVShape, n_pages_for
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.spec import ModelSpec

__all__ = ["GpuModel", "device_chain", "place"]

logger = logging.getLogger(__name__)

MAX_STEPPED = 1 << 30
"""Prompts run as decode steps, whatever their length, where no buffer is left for whole layers."""
N_CHUNK = 4096
"""Tokens of a prefill chunk where -b and -ub are not given: the experts are streamed once for each."""


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
        self.n_chunk = options.n_chunk if options.n_chunk != EngineOptions().n_chunk else N_CHUNK
        self._pinned: Pinned | None = None
        with timed("memory of the cache"):
            kv = DeviceKV(shapes, plan.n_pages, options.cache_type_k, device)
        self._weights = DeviceWeights(device, pool)
        self._model, self._kv = model, kv
        self._prefill: Prefill | None = None
        inputs = self._inputs = Inputs(n_ctx_pages, kv.spare, device)
        self._n_vocab = spec.n_vocab
        self._warm_up = WarmUp(self)
        self.experts: GpuExperts | None = None
        if spec.is_moe:
            self.experts = self._expert_slots(file, spec, options, placement)
        n_positions = n_ctx_pages * PAGE
        self.decoder = GpuDecoder(model, self._weights, kv, inputs, self.experts, n_positions, options.n_planes)
        logger.info("%s: cache and experts ready in %.2f s", device, time.monotonic() - started)

    def run(self, batch: Batch, should_stop: Callable[[], bool] | None) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab]. Raises Stopped."""
        if batch.n <= MAX_TOKENS:
            return self.decoder.run(batch)
        with self.experts.streaming() if self.experts is not None else nullcontext():
            logits = self._long_pass().run(batch, should_stop)
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

    def warm_up(self, on_progress: Callable[[float], None]) -> None:
        """Run what makes the first requests quick (`gpu.warm`)."""
        self._warm_up.load(on_progress)
        if self.device.type == "cuda":
            with timed("waiting for the first program"):
                torch.cuda.synchronize(self.device)

    def warm_more(self, should_stop: Callable[[], bool]) -> bool:
        """Run one more program ahead of need, if any is left: whether one was."""
        return self._warm_up.more(should_stop)

    def try_step(self, n: int, *, is_sampled: bool, on_kernel: Callable[[int, int], None] | None = None) -> int:
        """`GpuDecoder.try_out`."""
        return self.decoder.try_out(n, is_sampled=is_sampled, on_kernel=on_kernel)

    def try_prompt(self, n: int, should_stop: Callable[[], bool]) -> None:
        """Run a prompt of n tokens whose keys and values nobody reads. Raises Stopped."""
        n = min(n, self.plan.n_ctx)
        tokens = np.arange(n, dtype=np.int32) % self._n_vocab
        self.run(Batch(tokens, np.arange(n, dtype=np.int32), [self._inputs.spare_pages] * n, 1), should_stop)

    def _long_pass(self) -> Prefill:
        if self._prefill is None:
            # matrices are joined as a step's launches want them, so a program comes first
            self.decoder.program(1, 1, 1, is_sampled=True)
            self._prefill = Prefill(
                self._model, self._weights, self._kv, self.decoder.head_logits, self.device, self.experts
            )
        return self._prefill

    def close(self) -> None:
        """Unlock the experts' pages. The model must not be used afterwards."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _expert_slots(
        self, file: ModelFile, spec: ModelSpec, options: EngineOptions, placement: Placement
    ) -> GpuExperts:
        layers: Sequence[LayerBanks | None] = expert_banks(spec, file)
        if self.device.type == "cuda":
            with timed("waiting for locked pages"):
                pinned = None if placement.start is None else placement.start.take()
            self._pinned = pinned or pin_experts(layers, self.device.index or 0)
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
        with timed("launching the copies of residents"):
            experts.load_residents()
        return experts


def _staging(plan: GpuPlan) -> Staging | int:
    """The last slots of the pool that the plan names, or bytes of their own."""
    if plan.buffer_pool is None:
        return plan.own_buffers_bytes
    n = plan.n_buffers * plan.buffer_slots
    return Staging(plan.buffer_pool, plan.n_slots[plan.buffer_pool] - n, n) if n else 0
