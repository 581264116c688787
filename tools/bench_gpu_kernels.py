"""Times the decode kernels on a GPU at the geometry of Qwen3-30B-A3B: each kernel alone, and a whole step.

    python -m tools.bench_gpu_kernels [--tokens 1 8] [--only REGEX]

A kernel is captured 100 times in a CUDA graph, over rotating weights that exceed the second-level cache; a step is one
graph of 48 layers and the head. The table has microseconds of a launch (median of replays) and GB/s of weights, keys
and values, where a kernel reads any. Weights are random bytes with valid factors.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from gguf import GGMLQuantizationType as Type

from freetoken import quants
from freetoken.experts.device import SlotCache
from freetoken.experts.slots import SizeClass, SlotState
from freetoken.experts.split import bounded_table
from freetoken.kernels import layout
from freetoken.kernels.activations import Activation, empty_activation, quantize
from freetoken.kernels.attention import Mask, Partials, attend, heads_per_program, max_splits
from freetoken.kernels.fills import fill, fill_bank
from freetoken.kernels.matvec import TYPE_CLASS, Bank, Matrix, expert_down, expert_glu, matvec
from freetoken.kernels.norm import Norm, Rows, combine_rows
from freetoken.kernels.pages import PAGE, Pages
from freetoken.kernels.rope import Angles, Projection, rotate_and_store
from freetoken.kernels.router import route
from freetoken.kernels.sampler import N_FIELDS, Mode, SampleRoom, sample

DIM, N_HEAD, N_KV, HEAD_DIM = 2048, 32, 4, 128
N_EXPERT, N_USED, N_FF, N_VOCAB, N_LAYER = 128, 8, 768, 151936, 48
QKV = (N_HEAD + 2 * N_KV) * HEAD_DIM
LAUNCHES, REPLAYS = 100, 15
ROTATED_BYTES = 150_000_000
"""Three times the second-level cache of the largest card."""
DEVICE = "cuda"
FACTORS_AT = {Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.NVFP4: ()}
"""Where fp16 factors stand, if not at 0."""
Launch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A kernel to time: launches that take turns, and bytes that one reads."""

    name: str
    launches: Sequence[Launch]
    n_bytes: float = 0


def graph_us(launches: Sequence[Launch], n: int) -> float:
    """Microseconds of one of n launches within a graph, the median of replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(n):
                launches[i % len(launches)]()
        times = []
        for _ in range(REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / n)
    return statistics.median(times[3:])


def random_rows(type_id: Type, rows: int, cols: int) -> torch.Tensor:
    """uint8 [rows, row_bytes] of noise with small factors."""
    if type_id == Type.F32:
        return (normal(rows, cols) * 0.02).view(torch.uint8)
    n_bytes = quants.TYPES[type_id].block_bytes
    blocks = torch.randint(0, 256, (rows * quants.row_bytes(type_id, cols) // n_bytes, n_bytes), device=DEVICE)
    blocks = blocks.to(torch.uint8)
    if type_id == Type.MXFP4:
        blocks[:, 0] = 120  # 2^-8
    else:
        for at in FACTORS_AT.get(type_id, (0,)):
            blocks[:, at] = 0
            blocks[:, at + 1] = 0x14  # 2^-10
    return blocks.reshape(rows, -1)


def laid_rows(type_id: Type, rows: int, cols: int) -> torch.Tensor:
    """A random matrix as it lies on the GPU; of many rows a few are repeated."""
    few = min(rows, 4096)
    out = torch.zeros(layout.slot_bytes(type_id, rows, cols), dtype=torch.uint8, device=DEVICE)
    layout.relay(type_id, random_rows(type_id, few, cols).repeat(-(-rows // few), 1)[:rows].contiguous(), out)
    return out


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def source(type_id: int, n: int, cols: int) -> Activation | torch.Tensor:
    x = normal(n, cols)
    width = TYPE_CLASS[type_id]
    if width == 0:
        return x
    out = empty_activation(width, n, cols, DEVICE)
    quantize(x, out)
    return out


class Greedy:
    """The sampler of n greedy rows, with what it keeps."""

    def __init__(self, n: int) -> None:
        self._room = SampleRoom.empty(n, N_VOCAB, DEVICE)
        self._params = torch.zeros((n, N_FIELDS), dtype=torch.int32, device=DEVICE)
        self._params[:, 0] = Mode.GREEDY
        self._uniforms = torch.zeros(n, dtype=torch.float64, device=DEVICE)
        self._tokens, self._status = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for _ in range(2))

    def __call__(self, logits: torch.Tensor) -> None:
        sample(logits, self._params, self._uniforms, self._tokens, self._status, self._room)


class Kernels:
    """All cases for a number of tokens. What is large is made when its case comes."""

    def __init__(self, tokens: int) -> None:
        self.n = tokens
        self.rng = np.random.default_rng(1)
        self.memory: torch.Tensor | None = None  # experts on the host; kernels know its address only

    def cases(self) -> Iterator[tuple[str, Callable[[str], Case]]]:
        yield "empty", lambda name: Case(name, [lambda: empty_kernel[(1,)](num_warps=1)])
        for type_id in (Type.Q4_K, Type.Q6_K, Type.Q5_K, Type.Q8_0, Type.MXFP4, Type.IQ4_XS, Type.IQ2_XXS, Type.IQ3_S):
            yield f"qkv {type_id.name}", lambda name, t=type_id: self.dense(name, t, QKV, DIM)
        yield "o Q4_K", lambda name: self.dense(name, Type.Q4_K, DIM, N_HEAD * HEAD_DIM)
        yield "head Q6_K", lambda name: self.dense(name, Type.Q6_K, N_VOCAB, DIM)
        yield "router F32", lambda name: self.dense(name, Type.F32, N_EXPERT, DIM)
        plain = (Type.Q4_K, Type.Q6_K, Type.MXFP4, Type.Q8_0, Type.Q5_K, Type.IQ4_XS)
        for type_id in (*plain, Type.IQ2_XXS, Type.IQ3_S, Type.IQ1_S, Type.NVFP4):
            yield f"expert_glu {type_id.name}", lambda name, t=type_id: self.experts(name, t, is_glu=True)
            yield f"expert_down {type_id.name}", lambda name, t=type_id: self.experts(name, t, is_glu=False)
        yield "quantize hidden", self.hidden
        yield "combine_rows experts", lambda name: self.combine(name, N_USED)
        yield "combine_rows attention", lambda name: self.combine(name, 0)
        yield "rotate_and_store", self.rotation
        for context in (512, 4096, 32768):
            yield f"attend {context}", lambda name, c=context: self.attention(name, c)
        yield "route", self.router
        for misses in (0, 3):
            yield f"slot_step {misses} misses", lambda name, m=misses: self.slot_step(name, m)
        for fills in (0, 1, 2, 4, 8):
            yield f"fill {fills} Q4_K", lambda name, f=fills: self.fills(name, f, Type.Q4_K)
        yield "fill 8 Q6_K", lambda name: self.fills(name, 8, Type.Q6_K)
        yield "sample greedily", self.sampler

    def dense(self, name: str, type_id: Type, rows: int, cols: int) -> Case:
        data = laid_rows(type_id, rows, cols)
        matrices = [Matrix(type_id, rows, cols, data.clone()) for _ in range(copies(len(data)))]
        x, y = source(type_id, self.n, cols), torch.empty(self.n, rows, device=DEVICE)
        return Case(name, [lambda w=w: matvec(w, x, y) for w in matrices], len(data))

    def experts(self, name: str, type_id: Type, *, is_glu: bool) -> Case:
        shape = (N_FF, DIM) if is_glu else (DIM, N_FF)
        data = laid_rows(type_id, *shape)
        banks = [Bank(type_id, *shape, i * len(data)) for i in range(2 if is_glu else 1)]
        slots = data.repeat(len(banks))[None].repeat(N_EXPERT, 1)
        pairs, turns = self.n * N_USED, []
        for _ in range(max(1, N_EXPERT // pairs) * 4):
            picks = [self.rng.permutation(N_EXPERT)[:N_USED] for _ in range(self.n)]
            turns.append(torch.from_numpy(np.array(picks, np.int32)).to(DEVICE))
        n_bytes = len(data) * len(banks) * statistics.mean(len(ids.unique()) for ids in turns)
        if is_glu:
            x, h = source(type_id, self.n, DIM), torch.empty(pairs, N_FF, device=DEVICE)
            return Case(
                name, [lambda i=i: expert_glu(slots, i, (banks[0], banks[1]), (x, x), h) for i in turns], n_bytes
            )
        x, y = source(type_id, pairs, N_FF), torch.empty(pairs, DIM, device=DEVICE)
        return Case(name, [lambda i=i: expert_down(slots, i, banks[0], x, y) for i in turns], n_bytes)

    def hidden(self, name: str) -> Case:
        x, out = normal(self.n * N_USED, N_FF), empty_activation(256, self.n * N_USED, N_FF, DEVICE)
        return Case(name, [lambda: quantize(x, out)])

    def combine(self, name: str, k: int) -> Case:
        rows = Rows(normal(self.n, k, DIM), normal(self.n, k)) if k else normal(self.n, DIM)
        h, y, out = normal(self.n, DIM), normal(self.n, DIM), empty_activation(256, self.n, DIM, DEVICE)
        norm = Norm(normal(DIM), 1e-6)
        return Case(name, [lambda: combine_rows(rows, h, residual=h, norm=norm, y=y, quantised=(out,))])

    def rotation(self, name: str) -> Case:
        step = Attention(self.n, 512)
        return Case(name, [step.rotate])

    def attention(self, name: str, context: int) -> Case:
        steps = [Attention(self.n, context) for _ in range(copies(Attention.kv_bytes(self.n, context)))]
        return Case(name, [step.attend for step in steps], Attention.kv_bytes(self.n, context))

    def router(self, name: str) -> Case:
        logits = normal(self.n, N_EXPERT)
        ids, weights = torch.zeros(self.n, N_USED, dtype=torch.int32, device=DEVICE), normal(self.n, N_USED)
        return Case(name, [lambda: route(logits, ids, weights)])

    def slot_step(self, name: str, misses: int) -> Case:
        n = self.n * N_USED
        if misses == 0:
            cache, turns = slot_cache(N_EXPERT), [np.arange(n) % N_EXPERT]
        else:  # in turns, experts that the least recently used slots do not hold
            cache, every = slot_cache(48), np.arange(N_EXPERT)
            turns = [np.r_[every[i * misses :][:misses], 100 + np.arange(n - misses) % 28] for i in range(32)]
        ids = [torch.from_numpy(t.astype(np.int32).reshape(self.n, N_USED)).to(DEVICE) for t in turns]
        return Case(name, [lambda i=i: ignore(cache.step(0, i)) for i in ids])

    def fills(self, name: str, n_fills: int, type_id: Type) -> Case:
        shapes = ((N_FF, DIM), (N_FF, DIM), (DIM, N_FF))
        sizes = [layout.slot_bytes(type_id, *shape) for shape in shapes]
        if self.memory is None:
            self.memory = torch.zeros((3, N_EXPERT, 1 << 21), dtype=torch.uint8, pin_memory=True)
        banks = [
            fill_bank(type_id, *shape, self.memory[i].data_ptr(), sum(sizes[:i]), DEVICE)
            for i, shape in enumerate(shapes)
        ]
        slots = torch.zeros((64, sum(sizes)), dtype=torch.uint8, device=DEVICE)
        counts = torch.tensor([8, 0, 8, n_fills, 0], dtype=torch.int32, device=DEVICE)
        lists = [torch.arange(8, dtype=torch.int32, device=DEVICE) + 8 * i for i in range(8)]
        return Case(name, [lambda x=x: fill(banks, slots, 2 * x, x, counts) for x in lists], n_fills * sum(sizes))

    def sampler(self, name: str) -> Case:
        logits = normal(self.n, N_VOCAB)
        greedy = Greedy(self.n)
        return Case(name, [lambda: greedy(logits)], logits.nbytes)


@triton.jit
def empty_kernel():
    tl.program_id(0)


def ignore(_: object) -> None:
    """So that a launcher's result is dropped."""


def copies(n_bytes: int) -> int:
    return min(LAUNCHES, max(1, -(-ROTATED_BYTES // n_bytes)))


def slot_cache(n_slots: int, n_layer: int = 1) -> SlotCache:
    state = SlotState(N_EXPERT, [1] * n_layer, (SizeClass(1, tuple(range(n_layer))),), (n_slots,))
    return SlotCache(state, DEVICE, split=bounded_table(list(range(129))), fill_order="recent")


class Attention:
    """One layer's rotation and attention for tokens of different sequences at the end of a context."""

    def __init__(self, n: int, context: int, room: Partials | None = None) -> None:
        pages, n_pages = n * -(-context // PAGE), -(-context // PAGE)
        kv = torch.empty((2, pages, N_KV, PAGE, HEAD_DIM), dtype=torch.float16, device=DEVICE).normal_()
        self.positions = torch.full((n,), context - 1, dtype=torch.int32, device=DEVICE)
        table = torch.arange(pages, dtype=torch.int32, device=DEVICE).reshape(n, n_pages)
        self.pages = Pages(kv[0], kv[1], self.positions, table)
        self.qkv, self.q = normal(n, QKV), normal(n, N_HEAD * HEAD_DIM)
        parts = torch.split(self.qkv, [N_HEAD * HEAD_DIM, N_KV * HEAD_DIM, N_KV * HEAD_DIM], dim=1)
        norm = Norm(normal(HEAD_DIM), 1e-6)
        self.parts = Projection(parts[0], norm=norm), Projection(parts[1], norm=norm), Projection(parts[2])
        self.angles = Angles(normal(context, 2, HEAD_DIM // 2), self.positions, True)
        splits = max_splits(context)
        self.room = room or Partials.empty(n, N_HEAD, splits, HEAD_DIM, DEVICE)
        self.out = empty_activation(256, n, N_HEAD * HEAD_DIM, DEVICE)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.heads = heads_per_program(n, N_HEAD, N_KV, splits, processors)

    @staticmethod
    def kv_bytes(n: int, context: int) -> int:
        return n * context * N_KV * HEAD_DIM * 4

    def rotate(self) -> None:
        rotate_and_store(*self.parts, self.angles, self.pages, self.q)

    def attend(self) -> None:
        attend(self.q, self.pages, Mask(HEAD_DIM**-0.5), self.room, None, self.out, heads=self.heads)


class Step:
    """A decode step of 48 layers: Q4_K with Q6_K in half of the down banks and the head, as in a Q4_K_M file."""

    def __init__(self, n: int, context: int, *, has_cache: bool, n_layer: int = N_LAYER) -> None:
        self.n, self.has_cache, self.n_layer = n, has_cache, n_layer
        self.embedding, self.h, self.y = normal(n, DIM), normal(n, DIM), normal(n, DIM)
        self.x = empty_activation(256, n, DIM, DEVICE)
        self.logits, self.attended = normal(n, N_EXPERT), normal(n, DIM)
        self.ids = torch.zeros(n, N_USED, dtype=torch.int32, device=DEVICE)
        self.weights = normal(n, N_USED)
        self.hidden, self.rows = normal(n * N_USED, N_FF), normal(n * N_USED, DIM)
        self.hidden_q = empty_activation(256, n * N_USED, N_FF, DEVICE)
        self.norms = [Norm(torch.ones(DIM, device=DEVICE), 1e-6) for _ in range(2)]
        self.attention = [Attention(n, context) for _ in range(n_layer)]
        qkv, o = laid_rows(Type.Q4_K, QKV, DIM), laid_rows(Type.Q4_K, DIM, N_HEAD * HEAD_DIM)
        self.qkv = [Matrix(Type.Q4_K, QKV, DIM, qkv.clone()) for _ in range(n_layer)]
        self.o = [Matrix(Type.Q4_K, DIM, N_HEAD * HEAD_DIM, o.clone()) for _ in range(n_layer)]
        self.router = [Matrix(Type.F32, N_EXPERT, DIM, laid_rows(Type.F32, N_EXPERT, DIM)) for _ in range(n_layer)]
        gate = laid_rows(Type.Q4_K, N_FF, DIM)
        self.banks, self.slots = [], []
        for i in range(n_layer):
            kind = Type.Q6_K if i % 2 else Type.Q4_K
            down = laid_rows(kind, DIM, N_FF)
            starts = 0, len(gate), 2 * len(gate)
            self.banks.append(
                (*(Bank(Type.Q4_K, N_FF, DIM, at) for at in starts[:2]), Bank(kind, DIM, N_FF, starts[2]))
            )
            self.slots.append(torch.cat([gate, gate, down])[None].repeat(N_EXPERT, 1))
        self.head = Matrix(Type.Q6_K, N_VOCAB, DIM, laid_rows(Type.Q6_K, N_VOCAB, DIM))
        self.cache = slot_cache(N_EXPERT * n_layer, n_layer)
        self.vocab = torch.zeros(n, N_VOCAB, device=DEVICE)
        self.greedy = Greedy(n)
        everyone = torch.arange(N_EXPERT, dtype=torch.int32, device=DEVICE)
        for i in range(n_layer):
            self.cache.adopt(i, everyone, everyone)

    def layer(self, i: int) -> None:
        at, slots = self.attention[i], self.slots[i]
        matvec(self.qkv[i], self.x, at.qkv)
        at.rotate()
        at.attend()
        matvec(self.o[i], at.out, self.attended)
        combine_rows(self.attended, self.h, residual=self.h, norm=self.norms[0], y=self.y, quantised=(self.x,))
        matvec(self.router[i], self.y, self.logits)
        route(self.logits, self.ids, self.weights)
        places = self.cache.step(i, self.ids).routes[0] if self.has_cache else self.ids
        gate, up, down = self.banks[i]
        expert_glu(slots, places, (gate, up), (self.x, self.x), self.hidden)
        quantize(self.hidden, self.hidden_q)
        expert_down(slots, places, down, self.hidden_q, self.rows)
        rows = Rows(self.rows.view(self.n, N_USED, DIM), self.weights)
        combine_rows(rows, self.h, residual=self.h, norm=self.norms[1], quantised=(self.x,))

    def run(self) -> None:
        self.h.copy_(self.embedding)
        combine_rows(self.h, None, norm=self.norms[1], quantised=(self.x,))
        for i in range(self.n_layer):
            self.layer(i)
        matvec(self.head, self.x, self.vocab)
        self.greedy(self.vocab)


def step_us(n: int, context: int, *, has_cache: bool) -> float:
    return graph_us([Step(n, context, has_cache=has_cache).run], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--only", default="", help="kernels whose name this expression finds")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    for n in arguments.tokens:
        kernels = Kernels(n)
        for name, make in kernels.cases():
            if re.search(arguments.only, name):
                case = make(name)
                us = graph_us(case.launches, LAUNCHES)
                speed = f"{case.n_bytes / us / 1000:8.0f} GB/s" if case.n_bytes else ""
                print(f"{n} tokens  {name:26} {us:8.2f} us {speed}", flush=True)
        for context in (512, 4096):
            for has_cache in (False, True):
                name = f"step {context}" + (" with slot_step" if has_cache else "")
                if re.search(arguments.only, name):
                    print(f"{n} tokens  {name:26} {step_us(n, context, has_cache=has_cache):8.0f} us", flush=True)


if __name__ == "__main__":
    main()
