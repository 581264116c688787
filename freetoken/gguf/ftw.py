"""FTW files (docs/ftw.md), read: the same `Shard` as of a GGUF file, and the check of all data.

An expert's gate, up and down lie side by side in one record, so a tensor of experts is a view with gaps. Opening checks
header, metadata and index against their checksums; those of the records are `verify`'s, which reads the whole file.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freetoken.errors import ModelFileError
from freetoken.gguf.cursor import Cursor
from freetoken.gguf.ftw_header import ALIGNMENT, HEADER_BYTES, Header, read_header
from freetoken.gguf.metadata import read_metadata
from freetoken.gguf.shard import Shard, Tensor, TensorInfo, read_tensor_infos

__all__ = ["CHECKSUM_THREADS", "Records", "read_ftw", "verify"]

CHECKSUM_THREADS = 4
"""One does 1 to 3 GB/s with zlib's CRC-32, which a fast disk outruns."""
_MATRIX_ALIGNMENT = 8
"""What kernels ask of weights in place."""


@dataclass(frozen=True)
class Records:
    """Where the records of a file lie, one after another, uint64 [n], and their CRC-32, uint32 [n]."""

    offsets: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray


def read_ftw(path: Path, handle: mmap.mmap, index: int) -> Shard:
    """A mapped FTW file, the index-th of its model. Raises ModelFileError for anything that is not sound."""
    where = str(path)
    buffer = memoryview(handle)
    header = read_header(bytes(buffer[:HEADER_BYTES]), len(buffer), where)
    if zlib.crc32(buffer[HEADER_BYTES : header.data_offset]) != header.meta_crc:
        raise ModelFileError(
            f"{where}: the checksum of metadata and index is wrong: the file is damaged, copy it again or convert again"
        )
    cursor = Cursor(buffer[: header.index_offset], where)
    cursor.pos = HEADER_BYTES
    metadata = read_metadata(cursor, header.n_keys)
    cursor = Cursor(buffer[: header.data_offset], where)
    infos, parts, _ = _read_index(cursor, header)
    mapping = np.frombuffer(handle, dtype=np.uint8)
    tensors = {
        info.name: _place(info, int(n), int(stride), header, mapping, cursor, index)
        for info, (n, stride) in zip(infos, parts, strict=True)
    }
    at = header.data_offset, handle, HEADER_BYTES, header.n_keys
    return Shard(path, mapping, metadata, tensors, 3, ALIGNMENT, *at, header)


def _read_index(cursor: Cursor, header: Header) -> tuple[list[TensorInfo], np.ndarray, Records]:
    """Tensors, for each of them matrices and the distance between these, and the records."""
    cursor.pos, cursor.what = header.index_offset, "the index"
    infos = read_tensor_infos(cursor, cursor.u64())
    cursor.what = "the index"
    parts = _array(cursor, "<u8", 2 * len(infos)).reshape(-1, 2)
    n = cursor.u64()
    sizes, checksums = _array(cursor, "<u8", n), _array(cursor, "<u4", n)
    ends = header.data_offset + np.cumsum(sizes.astype(object))
    if (sizes % ALIGNMENT).any() or (len(ends) and ends[-1] != header.n_bytes):
        raise cursor.error("its records are not the file's data: damaged file")
    return infos, parts, Records((ends - sizes).astype(np.uint64), sizes, checksums)


def _array(cursor: Cursor, dtype: str, n: int) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    cursor.check_count(n, size, "entries")
    cursor.pos += n * size
    return np.frombuffer(cursor.buffer[cursor.pos - n * size : cursor.pos], dtype)


def _place(
    info: TensorInfo, n_parts: int, stride: int, header: Header, mapping: np.ndarray, cursor: Cursor, index: int
) -> Tensor:
    """A tensor's view of the mapping: contiguous, or matrices of n_parts experts with `stride` bytes from one to the
    next."""
    cursor.what = f"tensor {info.name!r}"
    rows = info.n_bytes // info.row_bytes
    if n_parts < 1 or rows % n_parts:
        raise cursor.error(f"{rows} rows are not those of {n_parts} matrices: damaged file")
    part_bytes = info.n_bytes // n_parts
    end = info.offset + (n_parts - 1) * stride + part_bytes
    if info.offset < header.data_offset or end > header.n_bytes or info.offset % _MATRIX_ALIGNMENT:
        raise cursor.error(f"its data cannot lie at bytes {info.offset} to {end}: damaged file")
    where = mapping[info.offset : end]
    if n_parts == 1:
        data = where.reshape(rows, info.row_bytes)
    else:
        if stride < part_bytes or stride % ALIGNMENT:
            raise cursor.error(f"matrices of {part_bytes} bytes cannot lie {stride} bytes apart: damaged file")
        shape, strides = (n_parts, rows // n_parts, info.row_bytes), (stride, info.row_bytes, 1)
        data = np.lib.stride_tricks.as_strided(where, shape, strides, writeable=False)
    return Tensor(info.name, info.type, info.shape, data, index, info.offset, info.n_bytes)


def verify(shard: Shard, on_bytes: Callable[[int], object] = lambda n: None) -> None:
    """Compare every record of an FTW file with its checksum; on_bytes is told of bytes that are right.

    Raises ModelFileError naming what is damaged, and for a file of another kind."""
    if shard.ftw is None:
        raise ModelFileError(f"{shard.path}: a GGUF file, which holds no checksums: only FTW files can be verified")
    infos, _, records = _read_index(Cursor(memoryview(shard.handle)[: shard.data_offset], str(shard.path)), shard.ftw)
    buffer = shard.mapping

    def check(i: int) -> int:
        at, n_bytes = int(records.offsets[i]), int(records.sizes[i])
        if zlib.crc32(buffer[at : at + n_bytes].data) != records.checksums[i]:
            first = max((info for info in infos if info.offset < at + n_bytes), key=lambda info: info.offset)
            raise ModelFileError(
                f"{shard.path}: the checksum of record {i} (bytes {at} to {at + n_bytes}, near tensor {first.name!r}) "
                "is wrong: the file is damaged, copy it again or convert again"
            )
        return n_bytes

    with ThreadPoolExecutor(CHECKSUM_THREADS, "checksum") as pool:
        try:
            for n_bytes in pool.map(check, range(len(records.sizes))):
                on_bytes(n_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
