"""A request body in HTTP's chunked coding, read as a stream: `listen` puts it in place of cheroot's reader.

Only what is asked for is read, whatever size a chunk claims to have. Knows nothing of connections.
"""

from __future__ import annotations

import io
import re
from typing import BinaryIO

from freetoken.errors import RequestError

__all__ = ["ChunkedBody"]

_SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(;.*)?\r\n", re.DOTALL)
_MAX_LINE = 4096
_MAX_TRAILERS = 100


class ChunkedBody(io.RawIOBase):
    """Reads RFC 9112's chunked coding from `source`. Raises RequestError where the coding is broken."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._n_left = 0
        self._has_begun = False
        self.is_complete = False
        """Whether the body was read to its end, so that the next request stands behind it."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._n_left and not self.is_complete:
            self._next_chunk()
        data = self._source.read(min(len(buffer), self._n_left)) if self._n_left else b""
        if self._n_left and not data:
            raise _broken("the connection ends inside a chunk")
        buffer[: len(data)] = data
        self._n_left -= len(data)
        return len(data)

    def _next_chunk(self) -> None:
        """Read the line before a chunk; behind the last one the trailers, which nobody asks for."""
        if self._has_begun and self._source.read(2) != b"\r\n":
            raise _broken("a chunk does not end where its size says")
        self._has_begun = True
        line = self._source.readline(_MAX_LINE)
        match = _SIZE.fullmatch(line)
        if match is None:
            raise _broken(f"{line[:20]!r} is no chunk size")
        self._n_left = int(match[1], 16)
        if self._n_left:
            return
        for _ in range(_MAX_TRAILERS):
            if self._source.readline(_MAX_LINE) in (b"\r\n", b""):
                self.is_complete = True
                return
        raise _broken("too many trailers")


def _broken(problem: str) -> RequestError:
    return RequestError(f"the request body's chunked coding is broken: {problem}")
