"""Writes small GGUF files for tests, good ones and, by overriding any field, broken ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freetoken import quants

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with a GGUF type of its own choice; `item` is the type of an array's items."""

    type: int
    value: object
    item: int = STRING


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as the file states it; `offset` None places it after the one before."""

    name: str
    shape: Sequence[int]
    type: int = 0
    data: bytes | None = None
    offset: int | None = None
    n_dims: int | None = None

    def content(self) -> bytes:
        """The given data, or zeros of the right length."""
        if self.data is not None:
            return self.data
        rows = int(np.prod(self.shape[1:], dtype=object)) if len(self.shape) > 1 else 1
        return bytes(rows * quants.row_bytes(self.type, self.shape[0]))


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: object) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, int):
        return Typed(U32, value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, str | bytes):
        return Typed(STRING, value)
    assert isinstance(value, list)
    return Typed(ARRAY, value, _typed(value[0]).type if value else STRING)


def _payload(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return text(value)
    return struct.pack("<" + _CODES[kind], value)


def entry(key: str | bytes, value: object) -> bytes:
    """One metadata entry."""
    typed = _typed(value)
    head = text(key) + struct.pack("<I", typed.type)
    if typed.type != ARRAY:
        return head + _payload(typed.type, typed.value)
    assert isinstance(typed.value, list)
    items = b"".join(_payload(typed.item, item) for item in typed.value)
    return head + struct.pack("<IQ", typed.item, len(typed.value)) + items


def build(
    metadata: Mapping[str, object] | Iterable[tuple[str | bytes, object]],
    tensors: Sequence[TensorBytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    cut: int | None = None,
) -> bytes:
    """The bytes of a file. Counts can be overridden with lies; `cut` drops everything from that byte on."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entry(k, v) for k, v in pairs)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.shape) if tensor.n_dims is None else tensor.n_dims
        head += text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", n_dims, *tensor.shape)
        head += struct.pack("<IQ", tensor.type, offset)
        data += tensor.content()
    whole = head + bytes(-len(head) % alignment) + data
    return whole if cut is None else whole[:cut]


def write(path: Path, *args: object, **kwargs: object) -> Path:
    """`build` into a file."""
    path.write_bytes(build(*args, **kwargs))  # type: ignore[arg-type]
    return path
