"""Which operations of a recorded program may follow each other without a barrier. Called by the recorder.

A stage is what runs between two barriers. Row operations share their rows out in fixed parts, so that one can go on
with what its thread wrote in its own part of another (freetoken.h, i7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Parts", "Stage"]


@dataclass(frozen=True)
class Parts:
    """How a row operation shares out its work: by heads, or by pieces of rows (`n_heads` 0)."""

    n: int
    n_heads: int
    width: int
    """Of a row, or of a head."""


@dataclass
class Stage:
    """What row operations since the last barrier read and wrote, by address."""

    written: dict[int, Parts] = field(default_factory=dict)
    read_whole: set[int] = field(default_factory=set)
    """Read by threads beyond their own parts, or by operations with several kinds of parts."""
    read: dict[int, Parts] = field(default_factory=dict)
    is_open: bool = False

    def join(
        self, parts: Parts | None, reads: Sequence[int], writes: Sequence[int], reads_whole: Sequence[int]
    ) -> bool:
        """Whether an operation needs no barrier before it; it belongs to the stage, or begins one. `parts` None: not a
        row operation, no other can join it."""
        joins = self.is_open and parts is not None and self._fits(parts, reads, writes, reads_whole)
        if not joins:
            self.written, self.read, self.read_whole = {}, {}, set()
        self.is_open = parts is not None
        if parts is not None:
            for address in reads:
                if self.read.setdefault(address, parts) != parts:
                    self.read_whole.add(address)
            self.read_whole.update(reads_whole)
            self.written.update(dict.fromkeys(writes, parts))
        return joins

    def _fits(self, parts: Parts, reads: Sequence[int], writes: Sequence[int], reads_whole: Sequence[int]) -> bool:
        return (
            all(self.written.get(address, parts) == parts for address in (*reads, *writes))
            and not any(address in self.written for address in reads_whole)
            and not any(address in self.read_whole for address in writes)
            and all(self.read.get(address, parts) == parts for address in writes)
        )
