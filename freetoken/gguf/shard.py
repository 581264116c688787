"""One GGUF file: mapped, its header read, every tensor's type, shape and place checked. Knows nothing of split models.
`ftw` opens FTW files as the same `Shard`.

Layout (GGUF 2 and 3): magic, version, counts; metadata; for each tensor its name, shape, type and offset; then, from
the next multiple of the alignment, the data.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from freetoken import quants
from freetoken.errors import ModelFileError, UnsupportedModelError
from freetoken.gguf.cursor import Cursor
from freetoken.gguf.ftw_header import Header
from freetoken.gguf.metadata import Metadata, read_metadata

__all__ = ["Shard", "Tensor", "TensorInfo", "map_file", "open_shard", "read_shard", "read_tensor_infos"]

MAX_DIMS = 4
MAX_NAME_BYTES = 63
"""ggml's GGML_MAX_NAME less its terminator."""
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 20
"""GGUF wants multiples of 8, and the kernels read fp32 in place."""
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
_DIM = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """A tensor in place. `shape` is in ggml's order: the row's length first.

    `data` is a read-only uint8 view of the mapping: [rows, row_bytes], or in an FTW file, where other matrices of an
    expert lie beside, [n_expert, rows of one, row_bytes] with gaps. `offset` counts from the start of the file that
    holds it, `shard` is that file's index, `n_bytes` are the tensor's own.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    data: np.ndarray = field(repr=False)
    shard: int
    offset: int
    n_bytes: int

    @property
    def rows(self) -> int:
        return self.n_bytes // self.row_bytes

    @property
    def row_bytes(self) -> int:
        return int(self.data.shape[-1])

    @property
    def n_values(self) -> int:
        return self.rows * self.shape[0]

    @property
    def type_name(self) -> str:
        return quants.type_name(self.type)

    def values(self) -> np.ndarray:
        """Decoded fp32, outermost dimension first: for norms, biases and tests, not for large weights."""
        rows = np.ascontiguousarray(self.data).reshape(self.rows, self.row_bytes)
        return quants.dequantize(self.type, rows).reshape(self.shape[::-1])

    def stacked(self, n: int) -> np.ndarray:
        """The matrices of n experts in place: uint8 [n, rows / n, row_bytes], each contiguous. ValueError where the
        tensor cannot be cut so."""
        if n < 1 or self.rows % n or (self.data.ndim == 3 and len(self.data) != n):
            raise ValueError(f"tensor {self.name!r} {list(self.shape)} is not {n} matrices")
        return self.data.reshape(n, self.rows // n, self.row_bytes)


@dataclass(frozen=True)
class Shard:
    """One mapped file. `mapping` is the whole file, uint8, read-only and shared with the page cache.

    `version` is GGUF's; `keys_offset` and `n_keys` say where the metadata lie. `ftw` is an FTW file's header.
    """

    path: Path
    mapping: np.ndarray = field(repr=False)
    metadata: Metadata = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)
    version: int
    alignment: int
    data_offset: int
    handle: mmap.mmap = field(repr=False)
    keys_offset: int
    n_keys: int
    ftw: Header | None = None

    @property
    def n_bytes(self) -> int:
        return len(self.mapping)

    def close(self) -> None:
        """Unmap, or leave that to the last view where some are still in use."""
        try:
            self.handle.close()
        except BufferError:
            return


def open_shard(path: Path, index: int = 0) -> Shard:
    """Map one file and read its header. Raises ModelFileError for anything that is not a sound GGUF file."""
    return read_shard(path, map_file(path), index)


def read_shard(path: Path, handle: mmap.mmap, index: int) -> Shard:
    """`open_shard` of a file that is mapped already."""
    cursor = Cursor(memoryview(handle), str(path))
    version = _read_version(cursor)
    cursor.need(16)
    n_tensors, n_keys = cursor.u64(), cursor.u64()
    keys_offset = cursor.pos
    metadata = read_metadata(cursor, n_keys)
    alignment = metadata.get_int("general.alignment", 32, low=MIN_ALIGNMENT, high=MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise ModelFileError(f"{path}: key 'general.alignment' is {alignment}, expected a power of two")
    infos = read_tensor_infos(cursor, n_tensors)
    data_offset = -(-cursor.pos // alignment) * alignment
    mapping = np.frombuffer(handle, dtype=np.uint8)
    tensors = {info.name: _place(info, cursor, mapping, data_offset, alignment, index) for info in infos}
    return Shard(path, mapping, metadata, tensors, version, alignment, data_offset, handle, keys_offset, n_keys)


def map_file(path: Path) -> mmap.mmap:
    """A shared, read-only mapping of a whole file (ACCESS_READ is MAP_SHARED with PROT_READ)."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelFileError(f"{path}: not a regular file, expected a GGUF file")
            if status.st_size == 0:
                raise ModelFileError(f"{path}: the file is empty, expected a GGUF file")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{path}: the file cannot be read: {reason}") from error


def _read_version(cursor: Cursor) -> int:
    magic = bytes(cursor.buffer[:4])
    if magic != b"GGUF":
        raise ModelFileError(f"{cursor.where}: not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    cursor.pos = 4
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise cursor.error("the file is big-endian, expected little-endian: convert it (gguf_convert_endian.py)")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version}, expected 2 or 3: convert the model again")
    return version


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor, its type and shape checked, its place not yet."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    row_bytes: int

    @property
    def n_bytes(self) -> int:
        """Python's integers do not wrap, so sizes are compared as they are."""
        return math.prod(self.shape[1:]) * self.row_bytes


def read_tensor_infos(cursor: Cursor, n: int) -> list[TensorInfo]:
    """n entries at the cursor, in GGUF's form. Raises ModelFileError and UnsupportedModelError."""
    cursor.what = "the tensor list"
    cursor.check_count(n, _MIN_TENSOR_BYTES, "tensors")
    infos = []
    seen = set()
    for i in range(n):
        cursor.what = f"tensor {i} of {n}"
        name = cursor.name(MAX_NAME_BYTES)
        if name in seen:
            raise cursor.error(f"the name {name!r} occurs twice")
        seen.add(name)
        cursor.what = f"tensor {name!r}"
        infos.append(_read_tensor_info(cursor, name))
    return infos


def _read_tensor_info(cursor: Cursor, name: str) -> TensorInfo:
    n_dims = cursor.u32()
    if n_dims > MAX_DIMS:
        raise cursor.error(f"{n_dims} dimensions, at most {MAX_DIMS} are allowed")
    shape = tuple(int(cursor.unpack(_DIM)) for _ in range(n_dims)) or (1,)
    if 0 in shape:
        raise cursor.error(f"shape {list(shape)} has a dimension of 0")
    type_id = cursor.u32()
    if type_id not in quants.TYPES:
        raise UnsupportedModelError(f"{cursor.where}: {cursor.what} has {quants.describe(type_id)}")
    try:
        row_bytes = quants.row_bytes(type_id, shape[0])
    except ValueError as error:
        raise cursor.error(str(error)) from None
    return TensorInfo(name, type_id, shape, cursor.u64(), row_bytes)


def _place(info: TensorInfo, cursor: Cursor, mapping: np.ndarray, start: int, alignment: int, index: int) -> Tensor:
    """A tensor's view of the mapping."""
    n_bytes = info.n_bytes
    offset = start + info.offset
    cursor.what = f"tensor {info.name!r}"
    if n_bytes > cursor.size:
        shape = f"{quants.type_name(info.type)} {list(info.shape)}"
        raise cursor.error(f"{shape} takes {n_bytes} bytes, more than the file has ({cursor.size})")
    if info.offset % alignment:
        raise cursor.error(f"offset {info.offset} is not a multiple of the alignment {alignment}")
    if offset + n_bytes > cursor.size:
        raise cursor.error(
            f"its data lies at bytes {offset} to {offset + n_bytes}, but the file ends at {cursor.size}: "
            "it is truncated (download it again) or damaged"
        )
    data = mapping[offset : offset + n_bytes].reshape(-1, info.row_bytes)
    return Tensor(info.name, info.type, info.shape, data, index, offset, n_bytes)
