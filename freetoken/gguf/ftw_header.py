"""The first bytes of an FTW file (docs/ftw.md): whether a file is one, and what it says of the rest. No other module of
the format knows where a field stands.

The file begins as a GGUF file without tensors does, and its first metadata key holds these fields; so whatever reads
GGUF metadata, llama.cpp's vocabulary among them, reads those of an FTW file.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import astuple, dataclass, replace

from freetoken.errors import ModelFileError

__all__ = ["ALIGNMENT", "HEADER_BYTES", "VERSION", "Header", "is_ftw", "read_header"]

VERSION = 1
ALIGNMENT = 4096
"""Of records and of the file's size: a page, and what direct reads ask for."""
KEY = b"freetoken.ftw"
_GGUF_VERSION, _ARRAY, _U64 = 3, 9, 10
_PREFIX = struct.Struct(f"<4sIQQQ{len(KEY)}sIIQ")
_FIELDS = struct.Struct("<11Q")
_N_FIELDS = 11
HEADER_BYTES = _PREFIX.size + _FIELDS.size
_KEY_AT = 24
_KIND = struct.Struct("<IIQ")
_KIND_AT = _KEY_AT + 8 + len(KEY)


@dataclass(frozen=True)
class Header:
    """`n_keys` metadata keys follow the header; the index begins at `index_offset` and records at `data_offset`.

    `set_id` (two numbers) is the same in all `count` files of a conversion, `number` counts them from 0. `meta_crc` is
    that of the bytes between the header and `data_offset`.
    """

    n_keys: int
    version: int
    is_complete: int
    number: int
    count: int
    set_id: tuple[int, int]
    index_offset: int
    data_offset: int
    n_bytes: int
    meta_crc: int

    def unfinished(self) -> Header:
        """As it stands in a file that is being written."""
        return replace(self, is_complete=0, set_id=(0, 0), meta_crc=0)

    def pack(self) -> bytes:
        """The first HEADER_BYTES of a file."""
        n_keys, version, is_complete, number, count, set_id, *rest = astuple(self)
        prefix = _PREFIX.pack(b"GGUF", _GGUF_VERSION, 0, n_keys + 1, len(KEY), KEY, _ARRAY, _U64, _N_FIELDS)
        fields = version, is_complete, number, count, *set_id, *rest
        raw = prefix + _FIELDS.pack(*fields, 0)
        return raw[:-8] + struct.pack("<Q", zlib.crc32(raw[:-8]))


def is_ftw(start: bytes) -> bool:
    """Whether a file that starts so claims to be an FTW file. It bears two marks, and one of them will do: a damaged
    one must not pass for a GGUF file without tensors."""
    marks = struct.pack("<Q", len(KEY)) + KEY, _KIND.pack(_ARRAY, _U64, _N_FIELDS)
    found = start[_KEY_AT:_KIND_AT], start[_KIND_AT : _KIND_AT + _KIND.size]
    return start[:4] == b"GGUF" and any(a == b for a, b in zip(marks, found, strict=True))


def read_header(start: bytes, n_bytes: int, where: str) -> Header:
    """The header of an FTW file of n_bytes, given its first HEADER_BYTES. Raises ModelFileError."""
    if len(start) < HEADER_BYTES:
        raise ModelFileError(f"{where}: an FTW file of {n_bytes} bytes: it is truncated, convert the model again")
    *prefix, n_fields = _PREFIX.unpack_from(start)
    version, is_complete, number, count, a, b, *rest, crc = _FIELDS.unpack_from(start, _PREFIX.size)
    if crc != zlib.crc32(start[: HEADER_BYTES - 8]):
        raise ModelFileError(f"{where}: the checksum of the header is wrong: the file is damaged, convert again")
    if version != VERSION or n_fields != _N_FIELDS:
        raise ModelFileError(f"{where}: FTW version {version}, expected {VERSION}: convert the model again")
    if not is_complete:
        raise ModelFileError(f"{where}: its conversion has not ended: run the same `ft convert` again to finish it")
    header = Header(prefix[3] - 1, version, is_complete, number, count, (a, b), *rest)
    if n_bytes != header.n_bytes:
        raise ModelFileError(
            f"{where}: the file has {n_bytes} bytes, but its header says {header.n_bytes}: it is "
            f"{'truncated' if n_bytes < header.n_bytes else 'damaged'}, copy it again or convert again"
        )
    at = header.index_offset, header.data_offset
    if not HEADER_BYTES <= at[0] <= at[1] <= n_bytes or at[1] % ALIGNMENT or number >= count:
        raise ModelFileError(f"{where}: the header's places {at} cannot be: the file is damaged, convert again")
    return header
