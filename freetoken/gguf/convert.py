"""Writes a model as FTW file(s) (docs/ftw.md): `ft convert` and tools/convert.py.

A file grows under a temporary name beside its own and gets that at the end, so that no half file bears it: first the
data, then metadata and index, then the header that says it is complete; each stage is on the disk before the next. An
interrupted conversion is continued by the next call, which compares what is there with the source, byte by byte, and
writes what differs. So the result is the same bytes, however often it was interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import local

import numpy as np

from freetoken.errors import ModelFileError, OptionError
from freetoken.gguf.ftw_header import ALIGNMENT, HEADER_BYTES
from freetoken.gguf.ftw_plan import PIECE_BYTES, FilePlan, Piece, plan_files
from freetoken.gguf.model import ModelFile

__all__ = ["SUFFIX", "Conversion"]

SUFFIX = ".ftw"
PART_SUFFIX = ".part"
N_THREADS = 3
"""Copy, check and write pieces side by side."""
OnBytes = Callable[[int], object]


class Conversion:
    """From an open model to `targets`, of `n_bytes` in all. Raises OptionError for targets that cannot be."""

    def __init__(self, model: ModelFile, target: Path, *, max_bytes: int = 0, is_forced: bool = False) -> None:
        if target.suffix != SUFFIX:
            raise OptionError(f"{target}: the name of an FTW file ends in {SUFFIX}")
        self._plans = plan_files(model, max_bytes)
        n = len(self._plans)
        names = [target.name] if n == 1 else [f"{target.stem}-{i + 1:05d}-of-{n:05d}{SUFFIX}" for i in range(n)]
        self.targets = [target.with_name(name) for name in names]
        self.n_bytes = sum(plan.header.n_bytes for plan in self._plans)
        sources = {shard.path.resolve() for shard in model.shards}
        for path in self.targets:
            if path.resolve() in sources:
                raise OptionError(f"{path}: the source and the target are the same file")
            if path.exists() and not is_forced:
                raise OptionError(f"{path}: there already: remove it, or give --force to replace it")
        if not target.parent.is_dir():
            raise OptionError(f"{target.parent}: no such folder")

    def run(self, on_bytes: OnBytes = lambda n: None) -> None:
        """Write, or go on where an earlier run ended; on_bytes hears of bytes that are there. Raises ModelFileError
        where the disk is full or fails, and for another conversion under way; what is written stays for the next."""
        parts = [path.with_name(path.name + PART_SUFFIX) for path in self.targets]
        with ExitStack() as stack, _disk_errors(self.targets[0].parent):
            files = [stack.enter_context(_open(path)) for path in parts]
            self._check_space(files)
            metas = []
            for plan, file in zip(self._plans, files, strict=True):
                os.pwrite(file, plan.header.unfinished().pack(), 0)
                metas.append(plan.meta(_write_data(plan, file, on_bytes)))
                _write(file, metas[-1], HEADER_BYTES)
                os.ftruncate(file, plan.header.n_bytes)
                os.fsync(file)
            set_id = struct.unpack("<2Q", hashlib.blake2b(b"".join(metas), digest_size=16).digest())
            for plan, file, meta in zip(self._plans, files, metas, strict=True):
                header = replace(plan.header, set_id=set_id, meta_crc=zlib.crc32(meta))
                _write(file, header.pack(), 0)
                os.fsync(file)
            for part, path in reversed(list(zip(parts, self.targets, strict=True))):
                os.replace(part, path)
            _sync_folder(self.targets[0].parent)

    def _check_space(self, files: Sequence[int]) -> None:
        """Before the start, not after an hour."""
        there = sum(os.fstat(file).st_blocks * 512 for file in files)
        free = shutil.disk_usage(self.targets[0].parent).free
        if self.n_bytes - there > free:
            raise ModelFileError(
                f"{self.targets[0].parent}: {self.n_bytes / 2**20:.0f} MiB are needed, "
                f"{(self.n_bytes - there - free) / 2**20:.0f} MiB more than are free: free them, or choose another disk"
            )


@contextmanager
def _open(path: Path) -> Iterator[int]:
    """A temporary file that nobody else writes."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelFileError(f"{path}: another conversion writes this file: wait for it, or end it") from None
        yield file
    finally:
        os.close(file)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelFileError(
                f"{folder}: the disk is full: free some space and run the same command again, it will go on from there"
            ) from error
        raise ModelFileError(f"{folder}: cannot be written: {error.strerror}") from error


def _write_data(plan: FilePlan, file: int, on_bytes: OnBytes) -> np.ndarray:
    """All records; returns their checksums, uint32 [n_records]."""
    checksums = np.zeros(plan.n_records, np.uint32)
    rooms = local()

    def work(piece: Piece) -> int:
        if getattr(rooms, "room", np.empty(0)).size < piece.n_bytes:
            rooms.room = np.empty(max(piece.n_bytes, PIECE_BYTES), np.uint8)
        data = rooms.room[: piece.n_bytes]
        _gather(piece, data)
        for i, record in enumerate(data.reshape(piece.n_records, -1)):
            checksums[piece.record + i] = zlib.crc32(record)
        if not _holds(file, data, piece.offset):
            _write(file, data.data, piece.offset)
        return piece.n_bytes

    with ThreadPoolExecutor(N_THREADS, "convert") as pool:
        try:
            for n_bytes in pool.map(work, plan.pieces()):
                on_bytes(n_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return checksums


def _gather(piece: Piece, out: np.ndarray) -> None:
    """A piece's bytes as they will lie, gaps filled with zeros."""
    group = piece.group
    if group.n_parts == 1:
        source = group.tensors[0].data.reshape(-1)[piece.first : piece.end]
        out[: len(source)] = source
        out[len(source) :] = 0
        return
    records = out.reshape(-1, group.stride)
    at = 0
    for tensor, start in zip(group.tensors, group.starts, strict=True):
        matrices = tensor.stacked(group.n_parts)[piece.first : piece.end]
        end = start + tensor.n_bytes // group.n_parts
        records[:, at:start] = 0
        records[:, start:end] = matrices.reshape(len(matrices), -1)
        at = end
    records[:, at:] = 0


def _holds(file: int, data: np.ndarray, offset: int) -> bool:
    """Whether the file has these bytes already."""
    for at in range(0, len(data), ALIGNMENT << 8):
        some = data[at : at + (ALIGNMENT << 8)]
        if not np.array_equal(np.frombuffer(os.pread(file, len(some), offset + at), np.uint8), some):
            return False
    return True


def _write(file: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        n = os.pwrite(file, view, offset)
        view, offset = view[n:], offset + n


def _sync_folder(folder: Path) -> None:
    """Make the new names last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
