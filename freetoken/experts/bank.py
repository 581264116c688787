"""Where the routed experts lie in the mapped file, and which pages of it to register for the GPU. No torch.

A bank is one matrix of all experts of a layer. In a GGUF file it is a tensor, its experts one after another, and banks
start at multiples of the file's alignment (32), so neighbours share pages; in an FTW file gate, up and down of an
expert lie side by side in a record, and the banks of a layer are interleaved (`Run` says which memory is one piece).

A page can be registered once only: `pin_plan` gives every page to one range. Ranges belong to layers, so that a system
which refuses some still serves the other layers from the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from freetoken.errors import EngineError, ModelFileError
from freetoken.gguf import ModelFile
from freetoken.native import expert_stride
from freetoken.spec import ModelSpec

__all__ = ["Bank", "LayerBanks", "PinPlan", "Run", "Span", "expert_banks", "pin_plan"]

_NAMES = ("gate", "up", "down")


@dataclass(frozen=True)
class Span:
    """Bytes [start, start + n_bytes) of file number `shard`."""

    shard: int
    start: int
    n_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.n_bytes


@dataclass(frozen=True)
class Bank:
    """One matrix of every expert of a layer: [rows, cols] of a type. `data` is a view of the mapping, uint8 [n_expert,
    expert_bytes], each expert contiguous; `span` its place in the file, from the first byte to the last."""

    name: str
    type: int
    rows: int
    cols: int
    data: np.ndarray = field(repr=False)
    span: Span

    @property
    def n_expert(self) -> int:
        return int(self.data.shape[0])

    @property
    def expert_bytes(self) -> int:
        return int(self.data.shape[1])

    @property
    def stride(self) -> int:
        """Bytes from one expert to the next."""
        return int(self.data.strides[0])

    @property
    def address(self) -> int:
        """Of expert 0; the same for the GPU once its pages are registered."""
        return int(self.data.ctypes.data)


@dataclass(frozen=True)
class Run:
    """Memory of a layer that is copied as one piece, whichever experts follow one another: a bank, or all banks that
    are interleaved. `data` uint8 [n_expert, n] is contiguous; `starts` says by the bank's number where a bank's matrix
    begins in an expert's part."""

    data: np.ndarray = field(repr=False)
    starts: dict[int, int]

    @property
    def stride(self) -> int:
        return int(self.data.shape[1])

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


@dataclass(frozen=True)
class LayerBanks:
    """The banks of one layer: gate, up, down. `expert_bytes` is what one fill copies."""

    layer: int
    banks: tuple[Bank, ...]

    @property
    def expert_bytes(self) -> int:
        return sum(bank.expert_bytes for bank in self.banks)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(bank.span for bank in self.banks)

    @property
    def stride(self) -> int:
        """As the native operation for experts takes it: see `native.expert_stride`."""
        return expert_stride([bank.data for bank in self.banks])

    @property
    def runs(self) -> tuple[Run, ...]:
        """All memory of the layer."""
        if not self.stride:
            return tuple(Run(bank.data, {i: 0}) for i, bank in enumerate(self.banks))
        first = min(self.banks, key=lambda bank: bank.address)
        starts = {i: bank.address - first.address for i, bank in enumerate(self.banks)}
        end = max(starts[i] + bank.expert_bytes for i, bank in enumerate(self.banks))
        if end > self.stride:
            raise EngineError(f"layer {self.layer}: its experts take {end} bytes, but lie {self.stride} bytes apart")
        shape = first.n_expert, self.stride  # a record ends where the next begins
        data = np.lib.stride_tricks.as_strided(first.data, shape, (self.stride, 1), writeable=False)
        return (Run(data, starts),)


def expert_banks(spec: ModelSpec, model: ModelFile) -> tuple[LayerBanks | None, ...]:
    """The banks of every layer of the trunk, None for a layer without routed experts."""
    layers = []
    for layer in range(spec.n_layer):
        names = [f"blk.{layer}.ffn_{name}_exps.weight" for name in _NAMES]
        missing = [name for name in names if name not in model.tensors]
        if 0 < len(missing) < len(names):
            raise ModelFileError(f"{model.path}: layer {layer} has experts, but no tensor {', '.join(missing)}")
        banks = () if missing else tuple(_bank(model, name, spec.n_expert) for name in names)
        layers.append(LayerBanks(layer, banks) if banks else None)
    return tuple(layers)


def _bank(model: ModelFile, name: str, n_expert: int) -> Bank:
    tensor = model.tensor(name)
    try:
        data = tensor.stacked(n_expert).reshape(n_expert, -1)
    except ValueError as error:
        raise ModelFileError(f"{model.path}: {error}: expected {n_expert} experts") from None
    extent = (n_expert - 1) * int(data.strides[0]) + int(data.shape[1])
    span = Span(tensor.shard, tensor.offset, extent)
    return Bank(name, tensor.type, tensor.rows // n_expert, tensor.shape[0], data, span)


@dataclass(frozen=True)
class PinPlan:
    """`ranges`: disjoint spans of whole pages, in order; the last one of a file may end after it, within its page.
    `of_layer[i]`: which ranges hold the bytes of layer i of those given."""

    ranges: tuple[Span, ...]
    of_layer: tuple[tuple[int, ...], ...]

    def is_pinned(self, registered: set[int]) -> tuple[bool, ...]:
        """For each layer whether the registered ranges hold all of it."""
        return tuple(registered.issuperset(ranges) for ranges in self.of_layer)

    def pieces(self, span: Span) -> list[Span]:
        """A span cut where one range ends and the next begins: a copy must not cross two registrations."""
        cuts = {r.start for r in self.ranges if r.shard == span.shard and span.start < r.start < span.end}
        edges = [span.start, *sorted(cuts), span.end]
        return [Span(span.shard, a, b - a) for a, b in pairwise(edges)]


def pin_plan(layers: Sequence[Sequence[Span]], page_bytes: int, most_bytes: int = 1 << 62) -> PinPlan:
    """Ranges that cover the spans of all layers.

    A page that two layers share belongs to the one whose bytes come first, so the other needs that range too. Spans of
    one layer whose pages touch are one range, cut where it would be larger than `most_bytes`, a multiple of a page.
    """
    pages = sorted(
        (span.shard, span.start // page_bytes * page_bytes, -(-span.end // page_bytes) * page_bytes, layer)
        for layer, spans in enumerate(layers)
        for span in spans
        if span.n_bytes
    )
    ranges: list[Span] = []
    owner = -1
    for shard, first, end, layer in pages:
        last = ranges[-1] if ranges else None
        if last is not None and last.shard == shard:
            first = max(first, last.end)
            if end <= last.end:
                continue
            if layer == owner and first == last.end:
                ranges[-1] = Span(shard, last.start, end - last.start)
                continue
        ranges.append(Span(shard, first, end - first))
        owner = layer
    of_layer = tuple(
        tuple(i for i, r in enumerate(ranges) if any(_overlap(r, span) for span in spans)) for spans in layers
    )
    return _cut(PinPlan(tuple(ranges), of_layer), most_bytes)


def _cut(plan: PinPlan, most_bytes: int) -> PinPlan:
    pieces: list[Span] = []
    numbers: list[range] = []
    for r in plan.ranges:
        first = len(pieces)
        pieces += [Span(r.shard, at, min(most_bytes, r.end - at)) for at in range(r.start, r.end, most_bytes)]
        numbers.append(range(first, len(pieces)))
    return PinPlan(tuple(pieces), tuple(tuple(n for i in ranges for n in numbers[i]) for ranges in plan.of_layer))


def _overlap(a: Span, b: Span) -> bool:
    return a.shard == b.shard and a.start < b.end and b.start < a.end
