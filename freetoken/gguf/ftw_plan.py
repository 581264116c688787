"""What an FTW file of a model will look like, to the byte, before any of it is written (docs/ftw.md).

Dense tensors come first, then layer by layer the records of experts: so the experts of all layers are one range of the
file. Arithmetic only; called by `convert`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from freetoken.errors import OptionError
from freetoken.gguf.cursor import Cursor
from freetoken.gguf.ftw_header import ALIGNMENT, HEADER_BYTES, VERSION, Header
from freetoken.gguf.metadata import entry_bytes
from freetoken.gguf.model import ModelFile
from freetoken.gguf.shard import Tensor

__all__ = ["PIECE_BYTES", "FilePlan", "Group", "Piece", "plan_files"]

PIECE_BYTES = 16 << 20
"""What of a dense tensor has one checksum, and what is written at once."""
MATRIX_ALIGNMENT = 128
"""Of matrices within a record: two cache lines, and where the GPU's planes start."""
_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|gate_up|down)_(ch)?exps\.weight")
_ORDER = ("gate", "up", "gate_up", "down")
_INFO_BYTES = 8 + 4 + 4 + 8 + 16
"""Of a tensor in the index, without name and shape."""
_RECORD_BYTES = 8 + 4
_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
"""Of the source's files, not of the model; an FTW header has its own."""


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


@dataclass(frozen=True)
class Group:
    """Tensors whose matrices lie side by side: those of a layer's experts, or one dense tensor (n_parts 1).

    `starts`: where each tensor's matrix begins in a record of `stride` bytes.
    """

    tensors: tuple[Tensor, ...]
    n_parts: int
    starts: tuple[int, ...]
    stride: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor], n_parts: int) -> Group:
        starts, end = [], 0
        for tensor in tensors:
            starts.append(_round_up(end, MATRIX_ALIGNMENT))
            end = starts[-1] + tensor.n_bytes // n_parts
        return cls(tuple(tensors), n_parts, tuple(starts), _round_up(end, ALIGNMENT))

    @property
    def n_bytes(self) -> int:
        return self.n_parts * self.stride

    @property
    def record_sizes(self) -> list[int]:
        """What has a checksum each: an expert, or pieces of a dense tensor."""
        if self.n_parts > 1:
            return [self.stride] * self.n_parts
        return [min(PIECE_BYTES, self.stride - at) for at in range(0, self.stride, PIECE_BYTES)]

    @property
    def index_bytes(self) -> int:
        """What the index has of it."""
        texts = sum(len(tensor.name.encode()) + 8 * len(tensor.shape) for tensor in self.tensors)
        return texts + _INFO_BYTES * len(self.tensors) + _RECORD_BYTES * len(self.record_sizes)


@dataclass(frozen=True)
class Piece:
    """Records written at once: n_records from number `record` on, at byte `offset`.

    They are the group's matrices [first, end), or of a dense tensor its bytes [first, end).
    """

    group: Group
    first: int
    end: int
    record: int
    n_records: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class FilePlan:
    """One file: `keys` are its metadata as stored, `offsets` where each group begins."""

    keys: tuple[bytes, ...]
    groups: tuple[Group, ...]
    offsets: tuple[int, ...]
    n_records: int
    header: Header

    def pieces(self) -> Iterator[Piece]:
        """All data, in the order in which it lies."""
        record = 0
        for group, offset in zip(self.groups, self.offsets, strict=True):
            sizes = group.record_sizes
            is_dense = group.n_parts == 1
            step = 1 if is_dense else max(PIECE_BYTES // group.stride, 1)
            for first in range(0, len(sizes), step):
                end = min(first + step, len(sizes))
                n_bytes, at = sum(sizes[first:end]), sum(sizes[:1]) * first
                span = (at, at + n_bytes) if is_dense else (first, end)
                yield Piece(group, *span, record + first, end - first, offset + at, n_bytes)
            record += len(sizes)

    def meta(self, checksums: np.ndarray) -> bytes:
        """What stands between the header and the data, given the records' checksums, uint32 [n_records]."""
        head = b"".join(self.keys)
        index = _index(self.groups, self.offsets, checksums)
        gap = self.header.index_offset - HEADER_BYTES - len(head)
        rest = self.header.data_offset - self.header.index_offset - len(index)
        return head + bytes(gap) + index + bytes(rest)


def plan_files(model: ModelFile, max_bytes: int = 0) -> tuple[FilePlan, ...]:
    """The files of a model, none larger than max_bytes (0: one file). Raises OptionError where that cannot be."""
    groups = _groups(model)
    first = model.shards[0]
    cursor = Cursor(memoryview(first.handle), str(first.path))
    cursor.pos = first.keys_offset
    stored = entry_bytes(cursor, first.n_keys)
    keys = tuple(raw for key, raw in stored.items() if key not in _SPLIT_KEYS)
    lists = _pack(groups, keys, max_bytes)
    return tuple(_plan_file(keys if i == 0 else (), some, i, len(lists)) for i, some in enumerate(lists))


def _pack(groups: Sequence[Group], keys: tuple[bytes, ...], max_bytes: int) -> list[list[Group]]:
    """The groups of each file; the first bears the keys."""
    if not max_bytes:
        return [list(groups)]
    lists: list[list[Group]] = [[]]
    data, index, start = 0, 0, _index_offset(keys)
    for group in groups:
        data, index = data + group.n_bytes, index + group.index_bytes
        if lists[-1] and start + _index_end(index) + data > max_bytes:
            lists.append([])
            data, index, start = group.n_bytes, group.index_bytes, _index_offset(())
        lists[-1].append(group)
        least = start + _index_end(index) + data
        if least > max_bytes:
            what = f"tensor {group.tensors[0].name!r}"
            what = f"the experts of {what}" if group.n_parts > 1 else what
            raise OptionError(
                f"--split-max-size: {what}, which stay together, need a file of {least} bytes, more than {max_bytes}"
            )
    return lists


def _groups(model: ModelFile) -> list[Group]:
    """Dense tensors in the source's order, then experts by layer."""
    dense: list[Group] = []
    experts: dict[tuple[int, bool, int], list[Tensor]] = {}
    for tensor in model.tensors.values():
        match = _EXPERTS.fullmatch(tensor.name)
        if match is not None and len(tensor.shape) == 3 and tensor.shape[2] > 1:
            experts.setdefault((int(match[1]), bool(match[3]), tensor.shape[2]), []).append(tensor)
        else:
            dense.append(Group.of([tensor], 1))
    routed = [Group.of(sorted(some, key=_place_of), n) for (*_, n), some in sorted(experts.items())]
    return dense + routed


def _place_of(tensor: Tensor) -> int:
    match = _EXPERTS.fullmatch(tensor.name)
    return 0 if match is None else _ORDER.index(match[2])


def _index_offset(keys: tuple[bytes, ...]) -> int:
    return _round_up(HEADER_BYTES + sum(map(len, keys)), ALIGNMENT)


def _index_end(n_bytes: int) -> int:
    """Of an index whose groups take n_bytes, counted from its start."""
    return _round_up(8 + n_bytes + 8, ALIGNMENT)


def _plan_file(keys: tuple[bytes, ...], groups: Sequence[Group], number: int, count: int) -> FilePlan:
    n_records = sum(len(group.record_sizes) for group in groups)
    index_offset = _index_offset(keys)
    data_offset = at = index_offset + _index_end(sum(group.index_bytes for group in groups))
    offsets = []
    for group in groups:
        offsets.append(at)
        at += group.n_bytes
    header = Header(len(keys), VERSION, 1, number, count, (0, 0), index_offset, data_offset, at, 0)
    return FilePlan(keys, tuple(groups), tuple(offsets), n_records, header)


def _index(groups: Sequence[Group], offsets: Sequence[int], checksums: np.ndarray) -> bytes:
    infos, parts, sizes = [], [], []
    for group, offset in zip(groups, offsets, strict=True):
        sizes += group.record_sizes
        for tensor, start in zip(group.tensors, group.starts, strict=True):
            name = tensor.name.encode()
            info = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
            info += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.type, offset + start)
            infos.append(info)
            parts += [group.n_parts, group.stride]
    return b"".join(
        (
            struct.pack("<Q", len(infos)),
            *infos,
            np.array(parts, "<u8").tobytes(),
            struct.pack("<Q", len(sizes)),
            np.array(sizes, "<u8").tobytes(),
            checksums.astype("<u4").tobytes(),
        )
    )
