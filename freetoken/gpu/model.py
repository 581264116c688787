"""One open model on a GPU: what the runner hands batches to. Used by the engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace

import numpy as np
import torch

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import Model
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.pin import Pinned
from freetoken.gguf import ModelFile
from freetoken.gpu.ahead import pin_experts, timed
from freetoken.gpu.backends import Backends, OwnText, WatchedStep, Wishes, what_for
from freetoken.gpu.calibrate import Candidate
from freetoken.gpu.chain import GREEDY, DeviceParams, device_chain
from freetoken.gpu.decode import GpuDecoder, Step
from freetoken.gpu.experts import GpuExperts, Staging
from freetoken.gpu.failures import translated
from freetoken.gpu.inputs import Draws, Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.meet import Meetings
from freetoken.gpu.place import Placement, place
from freetoken.gpu.prefill import Prefill
from freetoken.gpu.profiled import OwnProfile, own_profile
from freetoken.gpu.scratch import Scratch
from freetoken.gpu.warm import WarmUp
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.bias import N_BIASES
from freetoken.kernels.pages import PAGE
from freetoken.kernels.sampler import N_FIELDS, Mode
from freetoken.kvcache import KVShape, n_pages_for
from freetoken.options import EngineOptions
from freetoken.plan import GpuPlan
from freetoken.prompt_memory import scratch_bytes
from freetoken.spec import ModelSpec

__all__ = ["GREEDY", "GpuModel", "device_chain", "place"]

logger = logging.getLogger(__name__)

PLAIN = DeviceParams(Mode.LIST, top_k=40)
"""How text is sampled by which backends are timed."""
CPU_STEPPED = 48
"""Prompts up to this long run as decode steps of 8 where the first layers run on the CPU (`runner.MAX_STEPPED`)."""


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
        expert_pool: Callable[[], native.Pool] | None = None,
    ) -> None:
        """`pool` copies experts that stay on the device, and decodes weights of types without a kernel; `expert_pool`
        gives one for experts on the CPU, by default the same."""
        started = time.monotonic()
        plan = self.plan = placement.plan
        device = self.device = torch.device(placement.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of the engine's thread
        shapes = [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]
        n_ctx_pages = n_pages_for(plan.n_ctx)
        self.first_layer = plan.first_layer
        self.max_stepped = _max_stepped(plan)
        self.n_chunk = options.n_chunk if plan.first_layer else plan.n_chunk
        self._pinned: Pinned | None = None
        with timed("memory of the cache"):
            kv = DeviceKV(shapes, plan.n_pages, options.cache_type_k, device, plan.first_layer)
        self._weights = DeviceWeights(device, pool)
        self._model, self._kv = model, kv
        self._prefill: Prefill | None = None
        inputs = self._inputs = Inputs(n_ctx_pages, kv.spare, device)
        self._n_vocab, self._n_embd = spec.n_vocab, spec.n_embd
        self._warm_up = WarmUp(self)
        self.experts: GpuExperts | None = None
        self._wishes = Wishes.of(options, spec.n_layer, plan.passing)
        self._profile: OwnProfile | None = None
        self._backends: Backends | None = None
        if plan.classes:
            self.experts = self._expert_slots(file, spec, options, placement, pool, expert_pool or (lambda: pool))
        elif placement.start is not None:
            placement.start.drop()
        n_positions = n_ctx_pages * PAGE
        self.decoder = GpuDecoder(
            model,
            self._weights,
            kv,
            inputs,
            self.experts,
            n_positions,
            options.n_planes,
            spec.n_embd,
            plan.first_layer,
        )
        self.decoder.tells_counts = self._backends is not None
        logger.info("%s: cache and experts ready in %.2f s", device, time.monotonic() - started)

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None,
        hidden: np.ndarray | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab]. `hidden` fp32 [n, n_embd] are the states
        behind the layers that run on the CPU. Raises Stopped.

        `between_layers` is called between the layers of a long chunk; it may run steps of other sequences, and says
        whether it did."""
        with translated(self.device):
            if batch.n <= MAX_TOKENS:
                return self.decoder.run(batch, hidden)
            with self.experts.streaming() if self.experts is not None else nullcontext():
                logits = self._long_pass().run(batch, should_stop, between_layers, hidden=hidden)
            found: np.ndarray = logits.cpu().numpy()
            return found

    def use_split(self, backend: str, table: np.ndarray | None = None) -> None:
        """How misses are shared between fills and the CPU from the next step on, for good (`GpuExperts.use_split`)."""
        self._backends, self.decoder.tells_counts = None, False
        if self.experts is None or self.experts.is_fused:
            raise EngineError(f"experts' backend {backend!r}: no layer's experts take turns in slots")
        self.experts.use_split(backend, table)

    def expert_counters(self) -> np.ndarray | None:
        """int64 [n_layer, 5] by `experts.slots.COUNTERS`, None without experts."""
        return None if self.experts is None else self.experts.counters()

    def launch(
        self, batch: Batch, chains: Sequence[DeviceParams], uniforms: Sequence[float], *, follows: bool
    ) -> Step | WatchedStep:
        """Start a decode step that samples its tokens itself (`GpuDecoder.launch`)."""
        step = self._launch(batch, chains, uniforms, follows=follows)
        return step if self._backends is None else self._backends.watched(step, batch.n, follows)

    def _launch(
        self, batch: Batch, chains: Sequence[DeviceParams], uniforms: Sequence[float], *, follows: bool
    ) -> Step:
        params, biases = np.zeros((batch.n, N_FIELDS), np.int32), np.zeros((batch.n, 2, N_BIASES), np.int32)
        for row, chain in enumerate(chains):
            chain.write(params[row])
            chain.write_biases(biases[row])
        draws = Draws(params, biases, np.asarray(uniforms, np.float64))
        with translated(self.device):
            return self.decoder.launch(batch, draws, follows=follows)

    @property
    def is_undecided(self) -> bool:
        """Whether `choose_backend` has something to choose."""
        return self._backends is not None and self._backends.is_undecided

    def choose_backend(self, page_table: np.ndarray, n_positions: int) -> None:
        """Time decode steps of each way to run misses, by a text that nobody reads, and go on with the fastest. The
        pages hold n_positions."""
        assert self._backends is not None

        def launch(token: int, position: int, number: float, follows: bool) -> Step:
            batch = Batch(np.array([token], np.int32), np.array([position], np.int32), [page_table], 1)
            return self._launch(batch, [PLAIN], [number], follows=follows)

        with timed("choice of the experts' backend"):
            self._backends.choose(OwnText(launch, 0, n_positions))

    def warm_up(self, on_progress: Callable[[float], None]) -> None:
        """Run what makes the first requests quick (`gpu.warm`)."""
        with translated(self.device):
            self._warm_up.load(on_progress)
            if self.device.type == "cuda":
                with timed("waiting for the first program"):
                    torch.cuda.synchronize(self.device)

    def warm_more(self, should_stop: Callable[[], bool]) -> bool:
        """Run one more program ahead of need, if any is left: whether one was."""
        return self._warm_up.more(should_stop)

    @property
    def is_warm(self) -> bool:
        """Whether all has run that is run ahead of need."""
        return self._warm_up.is_over

    def try_step(self, n: int, *, is_sampled: bool, on_kernel: Callable[[int, int], None] | None = None) -> int:
        """`GpuDecoder.try_out`."""
        with translated(self.device):
            return self.decoder.try_out(n, is_sampled=is_sampled, on_kernel=on_kernel)

    def try_prompt(self, n: int, should_stop: Callable[[], bool]) -> None:
        """Run a prompt of n tokens whose keys and values nobody reads. Raises Stopped."""
        n = min(n, self.plan.n_ctx)
        tokens = np.arange(n, dtype=np.int32) % self._n_vocab
        hidden = np.zeros((n, self._n_embd), np.float32) if self.first_layer else None
        self.run(Batch(tokens, np.arange(n, dtype=np.int32), [self._inputs.spare_pages] * n, 1), should_stop, hidden)

    def _long_pass(self) -> Prefill:
        if self._prefill is None:
            # matrices are joined as a step's launches want them, so a program comes first
            self.decoder.program(1, 1, 1, is_sampled=not self.first_layer)
            if self.experts is not None:
                self.experts.settle()
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
                first_layer=self.first_layer,
            )
        return self._prefill

    def close(self) -> None:
        """Unlock the experts' pages. The model must not be used afterwards."""
        with suppress(RuntimeError, EngineError):  # of a device that is lost
            if self.experts is not None:
                self.experts.close()
                self.experts.settle()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None

    def _expert_slots(
        self,
        file: ModelFile,
        spec: ModelSpec,
        options: EngineOptions,
        placement: Placement,
        pool: native.Pool,
        expert_pool: Callable[[], native.Pool],
    ) -> GpuExperts:
        first = self.first_layer
        layers: Sequence[LayerBanks | None] = [None] * first + list(expert_banks(spec, file)[first:])
        if self.device.type == "cuda":
            with timed("waiting for locked pages"):
                pinned = None if placement.start is None else placement.start.take(first)
            if self.plan.backend != "fused":
                self._pinned = pinned or pin_experts(layers, self.device.index or 0)
                layers = self._pinned.layers
            elif pinned is not None:
                pinned.close()  # they are copied once
        plan = self.plan

        def meet() -> Meetings:
            meetings = Meetings(expert_pool(), layers, spec.n_expert_used, self.device, options.n_planes)
            if options.slow_cpu > 1.0:
                meetings.executor.slow_down(options.slow_cpu)
            return meetings

        def hybrid(n_max: int) -> np.ndarray:
            entry = None if self._profile is None else self._profile.entry
            return self._wishes.hybrid_table(entry, layers, n_max)

        experts = GpuExperts(
            layers,
            plan.classes,
            plan.n_slots,
            spec.n_expert_used,
            self.device,
            n_planes=options.n_planes,
            staging=_staging(plan),
            edges=() if self._pinned is None else self._pinned.edges,
            passing=sorted({*plan.passing, *options.moe_cpu_layers.of(spec.n_layer)}),
            meet=meet,
            slow_fills=options.slow_fills,
            hybrid=hybrid,
        )
        if plan.is_offloading and not experts.is_fused:
            self._profile = own_profile(layers, self.device, expert_pool, options, experts.edges)
            if self._profile is not None and options.moe_backend in ("auto", "hybrid"):
                self._backends = self._make_backends(experts, self._profile, options)
            if self._backends is None:
                experts.use_split(plan.backend)
        experts.load_residents(pool)
        return experts

    def _make_backends(self, experts: GpuExperts, profile: OwnProfile, options: EngineOptions) -> Backends | None:
        """None where the CPU cannot take part and need not."""
        # steps behind layers on the CPU are not timed: the profile decides
        wishes = replace(self._wishes, calibrates=self._wishes.calibrates and not self.first_layer)

        def use(candidate: Candidate) -> None:
            experts.use_split(candidate.backend, candidate.table if candidate.backend == "hybrid" else None)

        try:
            return Backends(
                profile.entry,
                experts.layers,
                MAX_TOKENS * experts.n_used,
                wishes,
                use,
                what_for=what_for(experts.layers, len(experts.state.stamp), wishes),
                is_stored=profile.is_stored,
            )
        except EngineError as error:
            if options.moe_backend != "auto":
                raise
            logger.warning("experts on the CPU take no part, all misses are fetched: %s", error)
            return None


def _max_stepped(plan: GpuPlan) -> int:
    """Tokens of a prompt up to which it runs as decode steps of 8. Wherever experts lie it is the same, though steps
    are quicker for 16 tokens whose experts are all there (11 ms; a pass takes 50): where they lie changes no answer."""
    if plan.is_offloading and not plan.n_buffers:
        return 1 << 30  # without a buffer no layer can be streamed
    return CPU_STEPPED if plan.first_layer else MAX_TOKENS


def _staging(plan: GpuPlan) -> Staging | int:
    """The last slots of the pool that the plan names, or bytes of their own."""
    if plan.buffer_pool is None:
        return plan.own_buffers_bytes
    n = plan.n_buffers * plan.buffer_slots
    return Staging(plan.buffer_pool, plan.n_slots[plan.buffer_pool] - n, n) if n else 0
