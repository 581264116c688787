"""What goes where on a GPU: layers, context, slots for experts, prefill buffers. Arithmetic only, printable.

`plan_gpu` turns wishes and sizes into a GpuPlan or says what is missing; nothing is allocated, no file is read and no
card asked here. Called once by the runner, before weights are read.

The card's free memory, less what `memory_ratio` and `memory_margin_mib` leave, is spent in this order: dense weights
of the layers on the GPU, scratch of prefill, keys and values (all of `-c`, or at least `kv_reserve_tokens`), the least
slots that a step needs; then all experts where they fit (fused), else a part of the rest for a longer context and all
else for slots (offload, cpu, hybrid).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from freetoken.errors import OptionError
from freetoken.experts.slots import SizeClass, size_classes, slots_per_class
from freetoken.gguf import ModelFile
from freetoken.kvcache import CACHE_TYPES, PAGE, capacity_for, n_pages_for
from freetoken.options import SPLITS, EngineOptions
from freetoken.prompt_memory import LEAST_CHUNK, chunk_tokens, is_chunk_given, room_bytes, working_bytes
from freetoken.spec import ModelSpec

__all__ = ["DenseBytes", "GpuPlan", "dense_bytes", "expert_layers_off", "first_gpu_layer", "plan_gpu"]

KV_SHARE = 0.25
"""Of the memory that slots and a longer context compete for, where -c is not given."""
N_BUFFERS = 2
"""Layers in flight when prefill streams them: one computes while the next arrives."""

_MIB = 1 << 20
_TENSOR_SLACK = 1024
"""A tensor laid out for the GPU is at most this much larger than in the file: its planes start at multiples of 128."""
_BUFFER_SLACK = 4096
"""Where the banks of a layer start in a buffer is aligned."""
_CPU_EXPERTS = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_BANKS = ("gate", "up", "down")


@dataclass(frozen=True)
class DenseBytes:
    """GPU bytes of what is no routed expert: each layer, and embedding and head."""

    layers: tuple[int, ...]
    head: int

    def on_gpu(self, first_layer: int) -> int:
        """With the layers from `first_layer` on."""
        return sum(self.layers[first_layer:]) + self.head


def dense_bytes(file: ModelFile, spec: ModelSpec) -> DenseBytes:
    """From the header of an open model. Tensors past the trunk count nowhere."""
    layers = [0] * spec.n_layer
    head = 0
    for name, tensor in file.tensors.items():
        n_bytes = tensor.n_bytes + _TENSOR_SLACK
        parts = name.split(".")
        if parts[0] == "blk":
            if int(parts[1]) < spec.n_layer and not _CPU_EXPERTS.search(name):
                layers[int(parts[1])] += n_bytes
        else:
            head += n_bytes
    return DenseBytes(tuple(layers), head)


@dataclass(frozen=True)
class GpuPlan:
    """`classes` and `n_slots` go to `experts.slots.SlotState`: the pools of the common cache, then one for the layers
    of `passing` (-cmoe, -ncmoe, -ot), whose experts only pass through.

    Prefill streams through `n_buffers` buffers: `buffer_slots` neighbouring slots each of pool `buffer_pool`, or
    `buffer_bytes` of their own each where that is None. 0 buffers: nothing streams.
    """

    backend: str
    """ "dense", "fused" (every expert has a slot for good), or how misses run: "offload", "cpu" or "hybrid"."""
    n_layer: int
    first_layer: int
    """Layers before this one run on the CPU; n_layer: only the head is on the GPU."""
    n_ctx: int
    """Tokens of the longest sequence."""
    n_pages: int
    """KV pages of each layer, of all sequences."""
    n_expert: int
    classes: tuple[SizeClass, ...]
    n_slots: tuple[int, ...]
    passing: tuple[int, ...]
    n_buffers: int
    buffer_pool: int | None
    buffer_slots: int
    buffer_bytes: int
    dense_bytes: int
    kv_bytes: int
    room_bytes: int
    """What else grows with the context: rooms of attention, angles."""
    free_bytes: int
    budget_bytes: int
    n_chunk: int
    """Tokens of a prompt that run at once."""
    scratch_bytes: int
    """Activations and scratch of prefill, and all else that decode steps take."""
    notes: tuple[str, ...] = ()
    """What was left out or made smaller without being asked; one warning each."""

    @property
    def is_offloading(self) -> bool:
        """Whether experts take turns in slots."""
        return self.backend in SPLITS

    @property
    def n_gpu_layers(self) -> int:
        return self.n_layer - self.first_layer

    @property
    def slots_bytes(self) -> int:
        return sum(n * c.slot_bytes for n, c in zip(self.n_slots, self.classes, strict=True))

    @property
    def own_buffers_bytes(self) -> int:
        """Of prefill buffers that are not slots."""
        return self.n_buffers * self.buffer_bytes if self.buffer_pool is None else 0

    @property
    def used_bytes(self) -> int:
        """Everything planned, scratch included."""
        context = self.kv_bytes + self.room_bytes
        return self.dense_bytes + context + self.slots_bytes + self.own_buffers_bytes + self.scratch_bytes

    @property
    def resident_share(self) -> float:
        """Slots as a share of the experts of the layers on the GPU; 1 without experts."""
        n = sum(len(c.layers) for c in self.classes) * self.n_expert
        return sum(self.n_slots) / n if n else 1.0

    def __str__(self) -> str:
        lines = [
            f"GPU plan: {self.backend}, {self.n_gpu_layers} of {self.n_layer} layers and the head on the GPU",
            f"  free {_mib(self.free_bytes)}, may take {_mib(self.budget_bytes)}, takes {_mib(self.used_bytes)}",
            f"  dense weights {_mib(self.dense_bytes)}, scratch {_mib(self.scratch_bytes)} (chunks of {self.n_chunk})",
            f"  context {self.n_ctx} tokens, {self.n_pages} pages, {_mib(self.kv_bytes)}; rooms and angles "
            f"{_mib(self.room_bytes)}",
        ]
        if self.first_layer:
            lines.insert(1, f"  on the CPU: layers 0 to {self.first_layer - 1}")
        for c, n in zip(self.classes, self.n_slots, strict=True):
            n_all = len(c.layers) * self.n_expert
            kind = "passing through" if set(c.layers) <= set(self.passing) else "cached"
            lines.append(
                f"  experts {kind}: {n} slots of {c.slot_bytes} bytes ({100 * n / n_all:.1f}% of the {n_all} of "
                f"{len(c.layers)} layers), {_mib(n * c.slot_bytes)}"
            )
        if self.is_offloading:
            where = f"{self.buffer_slots} slots" if self.buffer_pool is not None else _mib(self.buffer_bytes)
            n = self.n_buffers
            lines.append(
                f"  prefill streams through {n} buffer{'s' * (n > 1)} of {where}" if n else "  no prefill buffer"
            )
        return "\n".join(lines)


def first_gpu_layer(n_gpu_layers: int, n_layer: int) -> int:
    """As llama.cpp counts: the head is the first of the N, then come the last layers. n_layer + 1 for no GPU at all."""
    return 0 if n_gpu_layers < 0 else max(n_layer + 1 - n_gpu_layers, 0)


def expert_layers_off(options: EngineOptions, layers: Iterable[int]) -> tuple[int, ...]:
    """Those of `layers` whose experts shall take no slots of the cache: one bank that was sent to the CPU is enough."""
    rules = [(re.compile(pattern), kind) for pattern, kind in options.override_tensors]
    off = []
    for layer in layers:
        for bank in _BANKS:
            name = f"blk.{layer}.ffn_{bank}_exps.weight"
            given = next((kind for rule, kind in rules if rule.search(name)), None)
            is_default_off = options.cpu_moe or layer < options.n_cpu_moe
            if given == "CPU" or (given is None and is_default_off):
                off.append(layer)
                break
    return tuple(off)


def _unmoved(options: EngineOptions, names: Iterable[str]) -> list[str]:
    """A note on tensors that -ot sends to the CPU and that stay where their layer is: all but routed experts."""
    rules = [(re.compile(pattern), kind) for pattern, kind in options.override_tensors]
    found = []
    for name in names if rules else ():
        kind = next((kind for rule, kind in rules if rule.search(name)), "")
        if kind == "CPU" and not _CPU_EXPERTS.search(name):
            found.append(name)
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"-ot moves routed experts only: {found[0]}{more} stay where their layer is (-ngl N moves whole layers)"]


def plan_gpu(
    spec: ModelSpec,
    options: EngineOptions,
    *,
    slot_bytes: Sequence[int],
    dense: DenseBytes,
    free_bytes: int,
    max_batch: int,
    n_ctx: int,
    n_sequences: int = 1,
    names: Iterable[str] = (),
    n_chunk: int = 0,
    n_pages: int = 0,
) -> GpuPlan:
    """The plan for a card with so much free memory.

    `slot_bytes` is one expert's slot in each layer (0: it has none), `max_batch` the tokens of the largest decode step,
    `n_ctx` the longest sequence wished for; it shrinks only where `options.n_ctx` is 0. `names` are the model's
    tensors, to say which of them -ot does not move. `n_chunk` and `n_pages` are given where an engine that runs already
    plans its slots anew. Raises OptionError saying how many MiB are missing and what to
    change.
    """
    if options.is_gpu_off:
        raise ValueError("a plan for a GPU that the options leave out")
    if options.moe_backend == "fused" and expert_layers_off(options, range(spec.n_layer)) and any(slot_bytes):
        raise OptionError("--moe-backend fused keeps every expert on the GPU, against --cpu-moe, --n-cpu-moe or -ot")
    chunk = n_chunk or chunk_tokens(spec, options, free_bytes)
    planner = _Planner(spec, options, slot_bytes, dense, free_bytes, max_batch, n_ctx, n_sequences, chunk, n_pages)
    is_free = options.n_gpu_layers == -1 and options.fit
    last = spec.n_layer if is_free else 1
    first = first_gpu_layer(options.n_gpu_layers, spec.n_layer)
    is_fixed = n_chunk > 0 or is_chunk_given(options)
    for attempt in range(first, first + last):
        while planner.missing(attempt) > 0 and planner.n_chunk > LEAST_CHUNK and not is_fixed:
            planner = replace(planner, n_chunk=planner.n_chunk // 2)
        if planner.missing(attempt) <= 0:
            plan = planner.plan(attempt)
            return replace(plan, notes=(*plan.notes, *_unmoved(options, names)))
    raise OptionError(planner.shortfall(first))


@dataclass(frozen=True)
class _Planner:
    spec: ModelSpec
    options: EngineOptions
    slot_bytes: Sequence[int]
    dense: DenseBytes
    free_bytes: int
    max_batch: int
    n_ctx: int
    n_sequences: int
    n_chunk: int
    given_pages: int = 0

    # --- what is fixed -----------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        options = self.options
        return max(
            min(int(self.free_bytes * options.memory_ratio), self.free_bytes - options.memory_margin_mib * _MIB), 0
        )

    @property
    def scratch_bytes(self) -> int:
        return working_bytes(self.spec, self.n_chunk)

    @property
    def is_ctx_fixed(self) -> bool:
        return self.options.n_ctx > 0 or not self.options.fit

    @property
    def floor_ctx(self) -> int:
        """The shortest context of a sequence that we accept."""
        if self.is_ctx_fixed:
            return self.n_ctx
        shares = self.n_sequences if self.options.n_parallel > 0 else 1
        return min(self.n_ctx, max(self.options.kv_reserve_tokens // shares, PAGE))

    @property
    def n_min(self) -> int:
        return 2 * self.max_batch * self.spec.n_expert_used

    def n_pages(self, n_ctx: int) -> int:
        """As the runner shares pages between sequences."""
        if self.given_pages:
            return self.given_pages
        return capacity_for(n_ctx, self.n_sequences, is_shared=self.options.n_parallel <= 0)

    def kv_bytes(self, first: int, n_ctx: int) -> int:
        """Keys and values of the layers on the GPU, and a page that no sequence gets."""
        return (self.n_pages(n_ctx) + 1) * self.page_bytes(first)

    def page_bytes(self, first: int) -> int:
        """One page in every layer on the GPU."""
        width = self.spec.head_dim_k + self.spec.head_dim_v
        itemsize = np.dtype(CACHE_TYPES[self.options.cache_type_k]).itemsize
        return sum(self.spec.n_kv[first:]) * width * PAGE * itemsize

    def room_bytes(self, first: int, n_ctx: int) -> int:
        return room_bytes(self.spec, self.options, n_ctx, self.n_pages(n_ctx), first)

    def context_bytes(self, first: int, n_ctx: int) -> int:
        """All that a context takes."""
        return self.kv_bytes(first, n_ctx) + self.room_bytes(first, n_ctx)

    def longest_ctx(self, first: int, n_bytes: int) -> int:
        """The longest context of a sequence that so many bytes hold, at most the wished one, in whole pages."""
        low, high = 0, n_pages_for(self.n_ctx)
        while low < high:
            middle = (low + high + 1) // 2
            if self.context_bytes(first, min(middle * PAGE, self.n_ctx)) <= n_bytes:
                low = middle
            else:
                high = middle - 1
        return min(self.n_ctx, low * PAGE)

    def classes(self, first: int) -> tuple[tuple[SizeClass, ...], tuple[SizeClass, ...]]:
        """Of the common cache, and the one of layers whose experts pass through."""
        on_gpu = [i for i, n in enumerate(self.slot_bytes) if i >= first and n]
        off = expert_layers_off(self.options, on_gpu)
        kept = set(on_gpu) - set(off)
        common = size_classes([n if i in kept else 0 for i, n in enumerate(self.slot_bytes)])
        return common, (SizeClass(max(self.slot_bytes[i] for i in off), off),) if off else ()

    def least_slots(self, classes: Iterable[SizeClass]) -> int:
        """Bytes of the fewest slots."""
        return sum(min(self.n_min, len(c.layers) * self.spec.n_expert) * c.slot_bytes for c in classes)

    def base(self, first: int) -> int:
        """All but slots and context."""
        return self.dense.on_gpu(first) + self.scratch_bytes

    def missing(self, first: int, n_ctx: int | None = None) -> int:
        """Bytes that the smallest plan needs above the budget."""
        common, passing = self.classes(first)
        context = self.context_bytes(first, self.floor_ctx if n_ctx is None else n_ctx)
        return self.base(first) + context + self.least_slots((*common, *passing)) - self.budget

    # --- the plan ----------------------------------------------------------------------------------------------------

    def plan(self, first: int) -> GpuPlan:
        common, passing = self.classes(first)
        n_all = tuple(len(c.layers) * self.spec.n_expert for c in common)
        all_bytes = sum(n * c.slot_bytes for n, c in zip(n_all, common, strict=True))
        room = self.budget - self.base(first)
        floor = self.context_bytes(first, self.floor_ctx)
        if not common and not passing:
            return self.finish(first, "dense", (), (), room)
        wanted = self.options.moe_cache_size or round(self.options.moe_cache_rate * sum(n_all))
        is_whole = not passing and (not wanted or wanted >= sum(n_all))
        if is_whole and self.options.moe_backend not in SPLITS and floor + all_bytes <= room:
            return self.finish(first, "fused", common, n_all, room - all_bytes)
        if self.options.moe_backend == "fused":
            if not is_whole:
                raise OptionError(
                    f"--moe-backend fused keeps all {sum(n_all)} experts on the GPU, against a cache of {wanted}: "
                    "take --moe-backend offload, or leave --moe-cache-size and --moe-cache-rate out"
                )
            raise OptionError(
                f"--moe-backend fused: {_mib(floor + all_bytes - room)} of GPU memory are missing for all "
                f"{sum(n_all)} experts: take --moe-backend offload, fewer layers (-ngl) or a smaller context (-c)"
            )
        return self.offload(first, common, passing, wanted)

    def offload(
        self, first: int, common: tuple[SizeClass, ...], passing: tuple[SizeClass, ...], wanted: int
    ) -> GpuPlan:
        backend = self.options.moe_backend if self.options.moe_backend in SPLITS else "offload"
        room = self.budget - self.base(first) - self.least_slots(passing)
        pass_slots = tuple(min(self.n_min, len(c.layers) * self.spec.n_expert) for c in passing)
        context = self.context_bytes(first, self.floor_ctx)
        if wanted and common:
            n_slots = self.wanted_slots(common, wanted, room - context)
            taken = sum(n * c.slot_bytes for n, c in zip(n_slots, common, strict=True))
            return self.finish(first, backend, (*common, *passing), (*n_slots, *pass_slots), room - taken)
        spare = room - self.least_slots(common) - context
        if not self.is_ctx_fixed:
            buffers = N_BUFFERS * self.spec.n_expert * max((c.slot_bytes for c in passing), default=0)
            share = int(spare * KV_SHARE) if common else max(spare - buffers, 0)
            longer = self.longest_ctx(first, context + share)
            context = max(context, self.context_bytes(first, longer))
        n_slots = slots_per_class(common, self.spec.n_expert, room - context, self.n_min)
        return self.finish(first, backend, (*common, *passing), (*n_slots, *pass_slots), context)

    def wanted_slots(self, classes: tuple[SizeClass, ...], wanted: int, room: int) -> tuple[int, ...]:
        """A number of slots shared out as `slots_per_class` shares out bytes."""
        most = [len(c.layers) * self.spec.n_expert for c in classes]
        least = [min(self.n_min, n) for n in most]
        if wanted < sum(least):
            raise OptionError(
                f"a cache of {wanted} experts is too small: {sum(least)} are needed for steps of {self.max_batch} "
                "tokens: give more, or serve fewer requests at once (-np)"
            )
        share = min(1.0, (wanted - sum(least)) / max(sum(most) - sum(least), 1))
        counts = [low + int((high - low) * share) for low, high in zip(least, most, strict=True)]
        for i, high in enumerate(most):
            counts[i] = min(high, counts[i] + max(wanted - sum(counts), 0))
        need = sum(n * c.slot_bytes for n, c in zip(counts, classes, strict=True))
        if need > room:
            raise OptionError(
                f"a cache of {sum(counts)} experts needs {_mib(need)}, the GPU has {_mib(max(room, 0))} left for it: "
                f"{_mib(need - room)} are missing: give a smaller --moe-cache-size or --moe-cache-rate, or leave it out"
            )
        return tuple(counts)

    def finish(
        self, first: int, backend: str, classes: tuple[SizeClass, ...], n_slots: tuple[int, ...], context_room: int
    ) -> GpuPlan:
        """The plan whose context may take `context_room` bytes; the floor is known to fit."""
        n_ctx = self.n_ctx if self.is_ctx_fixed else max(self.longest_ctx(first, context_room), self.floor_ctx)
        passing = classes[-1].layers if classes and backend in SPLITS and self.classes(first)[1] else ()
        plan = GpuPlan(
            backend=backend,
            n_layer=self.spec.n_layer,
            first_layer=first,
            n_ctx=n_ctx,
            n_pages=self.n_pages(n_ctx),
            n_expert=self.spec.n_expert,
            classes=classes,
            n_slots=n_slots,
            passing=passing,
            n_buffers=0,
            buffer_pool=None,
            buffer_slots=0,
            buffer_bytes=0,
            dense_bytes=self.dense.on_gpu(first),
            kv_bytes=self.kv_bytes(first, n_ctx),
            room_bytes=self.room_bytes(first, n_ctx),
            free_bytes=self.free_bytes,
            budget_bytes=self.budget,
            n_chunk=self.n_chunk,
            scratch_bytes=self.scratch_bytes,
        )
        if backend in SPLITS:
            plan = self.with_buffers(plan)
        return replace(plan, notes=tuple(self.notes(plan)))

    def with_buffers(self, plan: GpuPlan) -> GpuPlan:
        """Prefill buffers out of the pool that has room for the most, beyond the slots that steps between layers need;
        out of memory that is left where the common cache has no pool."""
        largest = max(self.slot_bytes[i] for c in plan.classes for i in c.layers) * self.spec.n_expert + _BUFFER_SLACK
        best = replace(plan, buffer_bytes=largest)
        for pool, (c, n) in enumerate(zip(plan.classes, plan.n_slots, strict=True)):
            if set(c.layers) <= set(plan.passing):
                continue
            slots = -(-largest // c.slot_bytes)
            n_buffers = min(N_BUFFERS, max(n - self.n_min, 0) // slots)
            if n_buffers > best.n_buffers:
                best = replace(best, n_buffers=n_buffers, buffer_pool=pool, buffer_slots=slots)
        if len(plan.classes) == 1 and plan.passing:
            left = self.budget - plan.used_bytes
            best = replace(best, n_buffers=min(N_BUFFERS, left // largest))
        return best

    def notes(self, plan: GpuPlan) -> list[str]:
        notes = []
        if plan.first_layer and self.options.n_gpu_layers == -1:
            notes.append(
                f"the GPU has room for {plan.n_gpu_layers} of {plan.n_layer} layers, the first {plan.first_layer} run "
                "on the CPU"
            )
        if plan.n_ctx < self.n_ctx:
            notes.append(
                f"the context is {plan.n_ctx} tokens of the model's {self.n_ctx}, to leave the GPU's memory to weights:"
                f" -c {self.n_ctx} takes it whole"
            )
        if plan.is_offloading and plan.n_buffers < N_BUFFERS:
            what = "is read without overlap of copy and computation" if plan.n_buffers else "fills experts one by one"
            notes.append(f"fewer than two layers' experts fit beside a step's: a long prompt {what}")
        return notes

    # --- what is missing ---------------------------------------------------------------------------------------------

    def shortfall(self, first: int) -> str:
        common, passing = self.classes(first)
        kv = self.context_bytes(first, self.floor_ctx)
        least = self.least_slots((*common, *passing))
        text = (
            f"{_mib(self.missing(first))} of GPU memory are missing: of {_mib(self.free_bytes)} free "
            f"{_mib(self.budget)} may be taken, but dense weights take {_mib(self.dense.on_gpu(first))}, a context of "
            f"{self.floor_ctx} tokens {_mib(kv)}, scratch {_mib(self.scratch_bytes)}"
        )
        text += f", the least slots for experts {_mib(least)}" if least else ""
        return f"{text}: {' or '.join(self.ways_out(first, kv))}"

    def ways_out(self, first: int, context: int) -> list[str]:
        ways = []
        fewer = next((f for f in range(first + 1, self.spec.n_layer) if self.missing(f) <= 0), None)
        if fewer is not None:
            ways.append(f"give -ngl {self.spec.n_layer + 1 - fewer}")
        shorter = self.longest_ctx(first, context - self.missing(first))
        if shorter >= PAGE and self.missing(first, shorter) <= 0:
            total = shorter * (self.n_sequences if self.options.n_parallel > 0 else 1)
            ways.append(f"a context of at most -c {total}")
        ways.append("free memory of the card, or give -ngl 0 to run on the CPU")
        return ways


def _mib(n_bytes: int) -> str:
    return f"{-(-n_bytes // _MIB)} MiB"
