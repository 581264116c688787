"""Reads little-endian fields from a mapped file; nothing is read or allocated past the end. Knows no format."""

from __future__ import annotations

import struct
from typing import Any

from freetoken.errors import ModelFileError

__all__ = ["Cursor"]

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a buffer. `where` names the file and `what` the field being read, both for messages."""

    def __init__(self, buffer: memoryview, where: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.where = where
        self.what = "the header"
        self.pos = 0

    def error(self, problem: str) -> ModelFileError:
        """An error about the field being read."""
        return ModelFileError(f"{self.where}: {self.what}: {problem}")

    def need(self, n: int) -> None:
        """Raise ModelFileError unless n more bytes are there."""
        if n > self.size - self.pos:
            raise self.error(
                f"{n} bytes are needed at byte {self.pos}, but the file ends at {self.size}: it is truncated or damaged"
            )

    def unpack(self, layout: struct.Struct) -> Any:
        """The one value of a layout."""
        self.need(layout.size)
        (value,) = layout.unpack_from(self.buffer, self.pos)
        self.pos += layout.size
        return value

    def u32(self) -> int:
        return int(self.unpack(_U32))

    def u64(self) -> int:
        return int(self.unpack(_U64))

    def check_count(self, n: int, min_bytes: int, what: str) -> None:
        """Raise ModelFileError where n items of at least min_bytes each cannot be in the rest of the file."""
        if n * min_bytes > self.size - self.pos:
            raise self.error(f"{n} {what} do not fit in the {self.size - self.pos} bytes that follow: damaged file")

    def bytes(self, max_bytes: int) -> bytes:
        """A string as stored: its length, then its bytes."""
        n = self.u64()
        if n > max_bytes:
            raise self.error(f"a string of {n} bytes, at most {max_bytes} are allowed: damaged file")
        self.need(n)
        self.pos += n
        return bytes(self.buffer[self.pos - n : self.pos])

    def text(self, max_bytes: int) -> str:
        """A string; bytes that are not UTF-8 are replaced."""
        return self.bytes(max_bytes).decode("utf-8", "replace")

    def name(self, max_bytes: int) -> str:
        """A string that names something: not empty, valid UTF-8."""
        raw = self.bytes(max_bytes)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = ""
        if not name:
            raise self.error(f"{raw[:40]!r} is no name: expected UTF-8, not empty")
        return name

    def skip_strings(self, n: int) -> None:
        """Step over n strings; their lengths are checked, their bytes not touched."""
        self.check_count(n, 8, "strings")
        buffer, pos, last, unpack = self.buffer, self.pos, self.size - 8, _U64.unpack_from
        for _ in range(n):
            if pos > last:
                break
            pos += 8 + unpack(buffer, pos)[0]
        else:
            last = self.size
        if pos > last:
            raise self.error(f"an array of {n} strings runs past the end of the file: truncated or damaged")
        self.pos = pos
