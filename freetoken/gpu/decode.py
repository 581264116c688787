"""Decode on the GPU: a forward pass of up to 8 tokens as one CUDA graph, captured on second use.

The first use launches one kernel after the other, which also loads those that are new: as fast as a capture, and a
shape that comes once needs none. There is a graph for each number of rows, of outputs, and for each size of context,
since the attention's grid covers the longest context of its graph. On other devices (Triton's interpreter) the same
launches run one by one. The arithmetic is docs/numerics.md's: logits have the bits of the CPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from freetoken.batch import Batch
from freetoken.blocks import Model, Weight
from freetoken.experts.slots import COUNTERS
from freetoken.gpu.ahead import timed
from freetoken.gpu.arena import Arena
from freetoken.gpu.experts import GpuExperts, ProgramExperts
from freetoken.gpu.failures import translated
from freetoken.gpu.inputs import N_MIRRORS, Draws, Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.lower import Launch, Lowering, Room
from freetoken.gpu.meet import Meetings, StreamCall
from freetoken.gpu.trace import Trace
from freetoken.gpu.weights import DeviceWeights, weight_class
from freetoken.kernels.activations import MAX_TOKENS, empty_activation, quantize
from freetoken.kernels.attention import max_splits
from freetoken.kernels.bias import add_biases
from freetoken.kernels.compile_ahead import compile_ahead
from freetoken.kernels.matvec import matvec
from freetoken.kernels.sampler import SampleRoom, sample
from freetoken.prompt_memory import CONTEXT_GROWTH, FIRST_CONTEXT

__all__ = ["GpuDecoder", "Step"]


@dataclass(frozen=True)
class Shape:
    """What a program is made for."""

    n: int
    n_outputs: int
    n_positions: int
    is_sampled: bool
    meets: frozenset[int]
    """Layers in which the CPU takes part."""


class Program:
    """Launches with what they point at. `replay` runs them all: one by one the first time, as a graph from the second
    on where `is_cuda`. With `meetings` they ask the CPU at `places`."""

    def __init__(
        self, lowered: Lowering, *, is_cuda: bool, meetings: Meetings | None = None, places: Sequence[int] = ()
    ) -> None:
        self.lowered = lowered
        self._is_cuda = is_cuda
        self._meetings, self._places = meetings, places
        self._has_run = False
        self._graph: torch.cuda.CUDAGraph | None = None

    def replay(self) -> None:
        """Raises EngineError where the CPU's part fails, now or before."""
        if self._graph is None and self._is_cuda and self._has_run:
            self._graph = capture(self.lowered.launches)
        if self._meetings is None:
            self._launch()
        else:
            self._meetings.run(self._places, self._launch)

    def _launch(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for launch in self.lowered.launches:
            launch()
        self._has_run = True


class Step:
    """A step that has been launched and samples its tokens itself."""

    def __init__(
        self,
        results: torch.Tensor,
        done: torch.cuda.Event | None,
        meetings: Meetings | None,
        counters: torch.Tensor | None = None,
    ) -> None:
        self._results = results
        self._done = done
        self._meetings = meetings
        self._counters = counters

    def counts(self) -> tuple[int, int] | None:
        """Hits and misses of all layers since the counters began, None where they are not told; after `wait`, and
        before two more steps have been launched."""
        if self._counters is None:
            return None
        hits, misses = self._counters[:, :2].sum(0).tolist()
        return hits, misses

    def wait(self) -> tuple[list[int], list[int]]:
        """Tokens, and for each 0, or 1 where the host must sample it. To be asked once, in the order of the steps.
        Raises EngineError where the CPU's part failed."""
        if self._done is not None:
            with translated(self._results.device):
                if self._meetings is None:
                    self._done.synchronize()
                else:
                    self._meetings.wait(self._done.query)
        tokens, status = self._results.tolist()
        return tokens, status


class GpuDecoder:
    """Runs forward passes of up to 8 rows of any sequences. Used by the engine thread only."""

    def __init__(
        self,
        model: Model,
        weights: DeviceWeights,
        kv: DeviceKV,
        inputs: Inputs,
        experts: GpuExperts | None,
        n_positions: int,
        n_planes: int,
        n_embd: int,
        first_layer: int = 0,
    ) -> None:
        """`n_positions` is the longest context of a sequence; layers before `first_layer` run elsewhere."""
        self._model = model
        self._first_layer = first_layer
        self._n_embd = n_embd
        self._weights = weights
        self._kv = kv
        self._inputs = inputs
        self._experts = experts
        self._n_positions = n_positions
        self._n_planes = n_planes
        self._arena = Arena(weights.device)
        self._programs: dict[Shape, Program] = {}
        self._rooms: dict[int, Room] = {}
        self._host: torch.Tensor | None = None
        self._is_cuda = weights.device.type == "cuda"
        self._sample_room: SampleRoom | None = None
        self._sampled = torch.zeros((2, MAX_TOKENS), dtype=torch.int32, device=weights.device)
        self._results = [
            torch.zeros((2, MAX_TOKENS), dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(N_MIRRORS)
        ]
        self._turn = 0
        self.tells_counts = False
        """Whether steps that sample tell their hits and misses."""
        n_layers = 0 if experts is None else len(experts.layers)
        self._counters = [
            torch.zeros((n_layers, len(COUNTERS)), dtype=torch.int64, pin_memory=self._is_cuda and n_layers > 0)
            for _ in range(N_MIRRORS)
        ]

    def use_experts(self, experts: GpuExperts | None) -> None:
        """Forget all programs, which point to the experts and pages of before; the next ones launch these experts, of
        as many layers. No step may be under way."""
        self._programs.clear()
        self._experts = experts

    def run(self, batch: Batch, hidden: np.ndarray | None = None) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab], the caller's own. `hidden` fp32 [n,
        n_embd] are the states behind the layers that ran elsewhere."""
        program = self.program(batch.n, batch.n_outputs, int(batch.positions.max()) + 1)
        self._inputs.fill(batch, hidden=hidden)
        self._replay(program)
        return self._read(program.lowered.logits)

    def launch(self, batch: Batch, draws: Draws, *, follows: bool) -> Step:
        """Start a step that samples a token for each row; does not wait. With `follows` its tokens are those that the
        step before sampled, whatever the batch says. At most N_MIRRORS - 1 steps may be under way."""
        program = self.program(batch.n, batch.n, int(batch.positions.max()) + 1, is_sampled=True)
        self._inputs.fill(batch, draws, keep_tokens=follows)
        self._replay(program)
        self._turn = (self._turn + 1) % N_MIRRORS
        results = self._results[self._turn][:, : batch.n]
        results.copy_(self._sampled[:, : batch.n], non_blocking=True)
        counters = None
        if self.tells_counts and self._experts is not None:
            counters = self._counters[self._turn]
            counters.copy_(self._experts.cache.tensors.counters, non_blocking=True)
        return Step(results, self._mark(), self._meetings, counters)

    def program(self, n: int, n_outputs: int, n_positions: int, *, is_sampled: bool = False) -> Program:
        """The program of a step whose longest context is n_positions."""
        meets = frozenset[int]() if self._experts is None else self._experts.meeting_layers()
        shape = Shape(n, n_outputs, self._context_size(n_positions), is_sampled, meets)
        if shape not in self._programs:
            self._programs[shape] = self._make(shape)
        return self._programs[shape]

    def try_out(self, n: int, *, is_sampled: bool = False, on_kernel: Callable[[int, int], None] | None = None) -> int:
        """Run the program of a step of n rows that nobody asked for, so that the next one finds it made, its kernels
        loaded and, the second time, its graph captured. `on_kernel` and what is returned are `compile_ahead`'s."""
        with timed("making a program"):
            program = self.program(n, n if is_sampled else 1, 1, is_sampled=is_sampled)
        n_compiled = 0
        if on_kernel is not None and self._is_cuda:
            kernels = [launch for launch in program.lowered.launches if not isinstance(launch, StreamCall)]
            with timed("loading its kernels"):
                n_compiled = compile_ahead(kernels, self._weights.device, on_kernel)
        self._inputs.fill_trial(n)
        with timed("running it"):
            self._replay(program)
        return n_compiled

    def head_logits(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Logits of states that came from elsewhere: fp32 [n, rows] of x [n, cols], by the same arithmetic."""
        out = torch.empty((len(x), weight.rows), dtype=torch.float32, device=x.device)
        matrix = self._weights.matrix(weight)
        cls = weight_class(weight.type)
        for first in range(0, len(x), MAX_TOKENS):
            some = x[first : first + MAX_TOKENS].contiguous()
            if cls:
                rows = empty_activation(cls, len(some), weight.cols, x.device)
                quantize(some, rows, self._n_planes)
            matvec(matrix, rows if cls else some, out[first : first + len(some)])
        return out

    def _replay(self, program: Program) -> None:
        if self._experts is not None:
            self._experts.settle()
        program.replay()

    def _context_size(self, n_positions: int) -> int:
        size = FIRST_CONTEXT
        while size < n_positions:
            size *= CONTEXT_GROWTH
        return min(size, self._n_positions)

    def _make(self, shape: Shape) -> Program:
        trace = Trace(shape.n, shape.n_outputs)
        self._write_down(trace)
        experts = None if self._experts is None else ProgramExperts(self._experts, shape.meets)
        lowered = Lowering(
            trace,
            self._weights,
            self._kv,
            self._inputs,
            experts,
            self._arena,
            self._room(trace, shape),
            shape.n_positions,
            self._n_planes,
        )
        self._weights.settle()  # only the first program uploads
        if shape.is_sampled:
            lowered.launches.append(partial(self._sample, lowered.logits))
        if experts is None or not experts.places:
            return Program(lowered, is_cuda=self._is_cuda)
        assert self._meetings is not None
        lowered.launches[:0] = self._meetings.clear(experts.places)
        return Program(lowered, is_cuda=self._is_cuda, meetings=self._meetings, places=experts.places)

    @property
    def _meetings(self) -> Meetings | None:
        return None if self._experts is None else self._experts.meetings

    def _mark(self) -> torch.cuda.Event | None:
        """What is over when all that has been launched is."""
        if not self._is_cuda:
            return None
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def _write_down(self, trace: Trace) -> None:
        if not self._first_layer:
            self._model.forward(trace)
            return
        n_layer = len(self._kv.k)
        x = self._model.run_layers(trace, trace.entry(self._n_embd), self._first_layer, n_layer)
        self._model.finish(trace, trace.outputs(x))

    def _sample(self, logits: torch.Tensor) -> None:
        """Sample the next tokens to where this step's stood, and to where the host reads them."""
        if self._sample_room is None:
            self._sample_room = SampleRoom.empty(MAX_TOKENS, logits.shape[1], logits.device)
        n, inputs = len(logits), self._inputs
        tokens, status = self._sampled[0, :n], self._sampled[1, :n]
        add_biases(logits, inputs.biases)
        sample(logits, inputs.params, inputs.uniforms, tokens, status, self._sample_room)
        inputs.tokens[:n].copy_(tokens)

    def _room(self, trace: Trace, shape: Shape) -> Room:
        """Room for attention of this shape; programs of one context share it."""
        if shape.n_positions not in self._rooms:
            n_head, dim_v = trace.widest_attention()
            n_splits = max_splits(shape.n_positions)
            self._rooms[shape.n_positions] = Room.empty(MAX_TOKENS, n_head, n_splits, dim_v, self._weights.device)
        return self._rooms[shape.n_positions]

    def _read(self, logits: torch.Tensor) -> np.ndarray:
        """A copy on the host, when the device has it."""
        if not self._is_cuda:
            return logits.numpy().copy()
        if self._host is None or self._host.numel() < logits.numel():
            self._host = torch.empty(MAX_TOKENS * logits.shape[1], dtype=torch.float32, pin_memory=True)
        host = self._host[: logits.numel()].view(logits.shape)
        host.copy_(logits, non_blocking=True)
        done = self._mark()
        assert done is not None
        if self._meetings is None:
            done.synchronize()
        else:
            self._meetings.wait(done.query)
        return host.numpy().copy()


def capture(launches: list[Launch]) -> torch.cuda.CUDAGraph:
    """All launches as one graph. They must have run before: a capture may not load a kernel. Waits for the device."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for launch in launches:
            launch()
    return graph
