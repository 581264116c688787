"""Steps lowered to launches without running one: how many there are, and that no buffer is overwritten too early.

Buffers are checked by running the launches on labels instead of numbers: what a launch writes is labelled by its
function and by the labels of all that it reads. A program whose buffers are reused must end with the label of one whose
every buffer is its own.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken import arch, native
from freetoken.experts.bank import expert_banks
from freetoken.experts.memory import slot_sizes
from freetoken.experts.slots import size_classes
from freetoken.gguf import open_model
from freetoken.gpu import lower
from freetoken.gpu.arena import Arena, Lease
from freetoken.gpu.experts import GpuExperts, ProgramExperts
from freetoken.gpu.inputs import Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.lower import Lowering, Room
from freetoken.gpu.trace import Trace
from freetoken.gpu.weights import DeviceWeights
from freetoken.kernels.attention import Partials, max_splits
from freetoken.kernels.embed import EmbeddingTable
from freetoken.kvcache import KVShape
from freetoken.spec import read_spec
from tools import tiny_models

DEVICE = torch.device("cpu")
N_POSITIONS = 512
N_VOCAB = 264
OUTPUTS: dict[str, tuple[str, ...]] = {
    "embed": ("out",),
    "matvec": ("y",),
    "quantize": ("out",),
    "combine_rows": ("h", "y", "quantised"),
    "glu": ("h", "quantised"),
    "rotate_and_store": ("q_out",),
    "attend": ("y", "quantised"),
    "route": ("ids", "weights"),
    "scale": ("y",),
    "expert_glu": ("h",),
    "expert_down": ("y",),
}
"""Arguments that a launch writes, besides keys and values."""


class Counting(Arena):
    """Knows how many buffers there are."""

    n_made = 0

    def _take(self, key: tuple[object, ...], make: Callable[[], Any]) -> Lease[Any]:
        self.n_made += not self._free.get(key)
        return super()._take(key, make)


class NoReuse(Arena):
    """Every buffer is made for its one user."""

    def _take(self, key: tuple[object, ...], make: Callable[[], Any]) -> Lease[Any]:
        value = make()
        self._free.setdefault(key, []).append(value)  # kept, so that no address comes again
        return Lease(value, lambda _: None)


class Lowered:
    """An open tiny model that can be lowered again and again. `rate`: share of the experts in slots."""

    def __init__(self, path: Path, threads: native.Pool, rate: float = 1.0) -> None:
        self.file = open_model(path)
        spec = read_spec(self.file)
        self.model: Any = arch.build(self.file, spec)
        shapes = [KVShape(n_kv, spec.head_dim_k, spec.head_dim_v) for n_kv in spec.n_kv]
        self.kv = DeviceKV(shapes, 2, "f16", DEVICE)
        self.weights = DeviceWeights(DEVICE, threads)
        self.inputs = Inputs(2, 2, DEVICE)
        self.experts = None
        if spec.is_moe:
            layers = expert_banks(spec, self.file)
            classes = size_classes(slot_sizes(layers))
            n_slots = tuple(max(int(rate * spec.n_expert * len(c.layers)), 1) for c in classes)
            self.experts = GpuExperts(layers, classes, n_slots, spec.n_expert_used, DEVICE)
        self.arena = Counting(DEVICE)

    def lower(
        self, n: int, n_outputs: int, arena: Arena | None = None, build: Callable[[Trace, Any], Any] | None = None
    ) -> Lowering:
        """The launches of the model's step, or of what `build` makes of an embedding."""
        trace = Trace(n, n_outputs)
        if build is None:
            self.model.forward(trace)
        else:
            build(trace, trace.embed(self.model.token_embd))
        room = Room.empty(8, 8, max_splits(N_POSITIONS), 64, DEVICE)
        arena = arena or self.arena
        experts = None if self.experts is None else ProgramExperts(self.experts, frozenset())
        return Lowering(trace, self.weights, self.kv, self.inputs, experts, arena, room, N_POSITIONS, 2)


@pytest.fixture(scope="module")
def threads() -> Iterator[native.Pool]:
    pool = native.Pool(1)
    yield pool
    pool.close()


@pytest.fixture
def lowered(tmp_path: Path, threads: native.Pool) -> Iterator[Callable[..., Lowered]]:
    made: list[Lowered] = []

    def make(name: str, file_type: str, *, rate: float = 1.0, **sizes: int) -> Lowered:
        path = tmp_path / f"{name}-{file_type}.gguf"
        tiny_models.write(path, name, file_type=file_type, n_vocab=N_VOCAB, **sizes)  # type: ignore[arg-type]
        made.append(Lowered(path, threads, rate))
        return made[-1]

    yield make
    for each in made:
        each.file.close()


# --- launches run on labels ----------------------------------------------------------------------------------------


class Labels:
    """What stands in each storage: a label of how it came about."""

    def __init__(self) -> None:
        self._of: dict[int, object] = {}
        self._pairs_in: dict[int, object] = {}

    def read(self, value: object) -> object:
        """A label of a value and of all tensors in it."""
        if isinstance(value, torch.Tensor):
            at = value.untyped_storage().data_ptr()
            return self._of.get(at, at), tuple(value.shape), value.stride(), value.storage_offset()
        if isinstance(value, Partials):
            return "room"  # written and read within one launch
        if isinstance(value, EmbeddingTable):
            return self.read(value.matrix)
        if dataclasses.is_dataclass(value):
            return tuple(self.read(getattr(value, f.name)) for f in dataclasses.fields(value))
        if isinstance(value, tuple):
            return tuple(self.read(each) for each in value)
        return repr(value)

    def write(self, value: object, label: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            assert value.numel() * value.itemsize == storage.nbytes(), "part of a buffer is written"
            self._of[storage.data_ptr()] = label
        for i, each in enumerate(_parts(value)):
            self.write(each, (label, i))

    def run(self, launch: Callable[[], None]) -> None:
        if not isinstance(launch, partial):
            assert launch.__name__ == "_join"
            return
        name, owner = launch.func.__name__, getattr(launch.func, "__self__", None)
        if name == "_step":
            layer, ids = launch.args
            self.write(owner.cache.outputs(*ids.shape), hash(("step", layer, self.read(ids))))
            return
        if name == "_fill_beside":
            layer, step = launch.args
            pool = owner.memory.pools[layer]
            self.write(pool, hash(("fill", self.read(pool), self.read(step))))
            return
        given = inspect.signature(launch.func).bind(*launch.args, **launch.keywords).arguments
        read = [self.read(each) for key, each in given.items() if key not in OUTPUTS[name]]
        written = [given.get(key) for key in OUTPUTS[name]]
        if name == "rotate_and_store":
            written += [given["pages"].k, given["pages"].v]
        if name == "expert_down":  # adds to the pairs that another launch has written, of the same routes
            at, routes = given["y"].untyped_storage().data_ptr(), self.read(given["ids"])[0]  # type: ignore[index]
            if self._pairs_in.get(at) == routes:
                read.append(self.read(given["y"]))
            self._pairs_in[at] = routes
        self.write(tuple(written), hash((name, *read)))


def _parts(value: object) -> list[object]:
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return []


def label_of(lowering: Lowering) -> object:
    """What the logits of a program are made of."""
    labels = Labels()
    for launch in lowering.launches:
        labels.run(launch)
    return labels.read(lowering.logits)


OFFLOAD = {"rate": 0.5}
MODELS: list[tuple[str, str, dict[str, Any], int]] = [
    # architecture, type, share of the experts in slots, launches a layer
    ("llama", "Q8_0", {}, 9),
    ("llama", "F16", {}, 9),
    ("llama", "mixed", {}, 12),  # nothing can be joined
    ("qwen2", "Q5_1", {}, 9),
    ("qwen3", "Q4_0", {}, 9),
    ("gemma3", "Q4_0", {}, 9),
    ("llama-moe", "Q8_0", {}, 11),
    ("olmoe", "F16", {}, 10),  # hidden rows need not be quantised
    ("olmoe", "MXFP4", OFFLOAD, 17),
    ("qwen2moe", "Q5_0", {}, 15),
    ("qwen2moe", "Q8_0", OFFLOAD, 21),
    ("qwen3moe", "Q4_K", {"n_expert": 4}, 11),
    ("qwen3moe", "Q4_0", OFFLOAD, 17),  # a slot step, fills, hits, the wait for fills, what was filled
]
STEPS = ((1, 1), (3, 1), (8, 8))


@pytest.mark.parametrize(("name", "file_type", "more", "n_launches"), MODELS)
def test_steps_of_all_architectures(
    name: str, file_type: str, more: dict[str, Any], n_launches: int, lowered: Callable[..., Lowered]
) -> None:
    few, many = lowered(name, file_type, n_layer=2, **more), lowered(name, file_type, n_layer=3, **more)
    for n, n_outputs in STEPS:
        short, long = few.lower(n, n_outputs), many.lower(n, n_outputs)
        assert len(long.launches) - len(short.launches) == n_launches
        assert long.logits.shape == (n_outputs, N_VOCAB)
        assert few.arena.n_made == many.arena.n_made or file_type == "mixed", "layers share buffers"
        assert label_of(long) == label_of(many.lower(n, n_outputs, NoReuse(DEVICE))), "no buffer is reused too early"


def test_programs_share_buffers(lowered: Callable[..., Lowered]) -> None:
    m = lowered("qwen3moe", "Q8_0", n_layer=1)
    first = m.lower(2, 2)
    n_made = m.arena.n_made
    second = m.lower(2, 2)
    assert m.arena.n_made <= n_made + 1, "only what holds the logits is new"
    assert first.logits.data_ptr() != second.logits.data_ptr()


def test_labels_find_a_buffer_that_is_reused_too_early(
    lowered: Callable[..., Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = lowered("llama", "Q8_0", n_layer=2)
    want = label_of(m.lower(1, 1, NoReuse(DEVICE)))
    monkeypatch.setattr(lower, "_last_uses", lambda nodes: {id(node): i for i, node in enumerate(nodes)})
    assert label_of(m.lower(1, 1)) != want


def test_what_cannot_be_fused(lowered: Callable[..., Lowered]) -> None:
    m = lowered("llama", "Q8_0", n_layer=1)
    attention = m.model.layers[0].attention

    def rows(ops: Trace, x: Any) -> tuple[Any, Any, Any]:
        return tuple(ops.linear(x, w) for w in (attention.attn_q, attention.attn_k, attention.attn_v))

    def rotated_alone(ops: Trace, x: Any) -> Any:
        q, _, _ = rows(ops, x)
        return ops.linear(ops.rope(q, attention.n_head, attention.rope), attention.attn_output)

    def attend(ops: Trace, q: Any, k: Any, v: Any) -> Any:
        return ops.attention(0, q, k, v, n_head=attention.n_head, scale=1.0)

    def of_no_product(ops: Trace, x: Any) -> Any:
        q, k, v = rows(ops, x)
        return attend(ops, ops.rope(ops.add(q, q), attention.n_head, attention.rope), k, v)

    def not_rotated(ops: Trace, x: Any) -> Any:
        return attend(ops, *rows(ops, x))

    for build, error, message in (
        (rotated_alone, NotImplementedError, "Rotated outside the places"),
        (of_no_product, NotImplementedError, "attention of Sum rows"),
        (not_rotated, NotImplementedError, "without a rotation"),
    ):
        with pytest.raises(error, match=message):
            m.lower(1, 1, build=build)


def test_weights_are_joined_once(lowered: Callable[..., Lowered]) -> None:
    m = lowered("llama", "Q8_0", n_layer=1)
    gate, up = m.model.layers[0].ffn.ffn_gate, m.model.layers[0].ffn.ffn_up
    m.weights.matrix(gate)
    with pytest.raises(ValueError, match="uploaded already, and not together"):
        m.weights.joined([gate, up])
