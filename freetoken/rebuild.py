"""What crosses between threads about the caches of a running server: wishes for another size, and their state.

`POST /v1/cache/rebuild` makes a `CacheChange`, the engine's thread carries it out between two steps (`Rebuilds` lets
one in at a time), `GET /v1/cache/status` reads a `CacheStatus`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

from freetoken.errors import RequestError

__all__ = [
    "CacheChange",
    "CacheStatus",
    "KvStatus",
    "LastRebuild",
    "Rebuild",
    "Rebuilds",
    "SlotClass",
    "SlotStatus",
    "Statistics",
]


@dataclass(frozen=True)
class CacheChange:
    """What shall be different; what is None stays. At most one of the first three is given."""

    moe_cache_size: int | None = None
    """Slots for experts of all layers together."""
    moe_cache_rate: float | None = None
    """The same as a share of all experts."""
    moe_cache_auto: bool = False
    """As many slots as the card has room for."""
    n_ctx: int | None = None
    """Context in tokens of all slots together, as -c."""
    kv_pages: int | None = None
    """The same as pages of keys and values."""

    @property
    def has_slots(self) -> bool:
        return self.moe_cache_size is not None or self.moe_cache_rate is not None or self.moe_cache_auto

    @property
    def has_kv(self) -> bool:
        return self.n_ctx is not None or self.kv_pages is not None

    def __str__(self) -> str:
        names = ("moe_cache_size", "moe_cache_rate", "n_ctx", "kv_pages")
        wishes = [f"{name} {value}" for name in names if (value := getattr(self, name)) is not None]
        return ", ".join(["moe_cache_auto"] * self.moe_cache_auto + wishes)


@dataclass(frozen=True)
class SlotClass:
    """Slots of one size; `is_passing`: for layers whose experts only pass through."""

    n_slots: int
    n_experts: int
    """Experts of the layers that share them."""
    n_layers: int
    slot_bytes: int
    is_passing: bool


@dataclass(frozen=True)
class SlotStatus:
    n_slots: int
    n_experts: int
    resident_share: float
    """Slots as a share of the experts."""
    n_bytes: int
    classes: tuple[SlotClass, ...]


@dataclass(frozen=True)
class Statistics:
    """Counts of routed experts, once a layer and step, since `since` (seconds of the epoch); `began_with` is "start" or
    "rebuild", which sets them back."""

    since: float
    began_with: str
    hits: int
    misses: int
    fills: int
    cpu_experts: int
    filled_bytes: int
    hit_rate: float | None


@dataclass(frozen=True)
class KvStatus:
    """Pages of keys and values of all sequences. `n_ctx` is the longest sequence, in tokens."""

    n_pages: int
    n_held: int
    n_free: int
    page_tokens: int
    n_ctx: int


@dataclass(frozen=True)
class LastRebuild:
    """`error` None: the change was made. `at` is when it ended, in seconds of the epoch."""

    asked: str
    at: float
    seconds: float
    error: str | None


@dataclass(frozen=True)
class CacheStatus:
    """`slots` and `statistics` are None where no experts take slots."""

    backend: str
    """How misses run: `GpuPlan.backend`, or the candidate in use; "cpu-only" without layers on a GPU."""
    reason: str
    slots: SlotStatus | None
    statistics: Statistics | None
    kv: KvStatus
    is_rebuilding: bool = False
    last_rebuild: LastRebuild | None = None


@dataclass(eq=False)
class Rebuild:
    """A change on its way to the engine's thread, and what becomes of it."""

    change: CacheChange
    done: Future[CacheStatus] = field(default_factory=Future)


class Rebuilds:
    """One rebuild at a time; used by all threads. `last` is written by the engine's."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self.last: LastRebuild | None = None

    @property
    def is_under_way(self) -> bool:
        return self._one.locked()

    @contextmanager
    def begin(self, change: CacheChange) -> Iterator[Rebuild]:
        """Raises RequestError with 409 while there is another."""
        if not self._one.acquire(blocking=False):
            raise RequestError("the cache is being rebuilt already: try again when that is done", http_status=409)
        try:
            yield Rebuild(change)
        finally:
            self._one.release()

    def note(self, change: CacheChange, started: float, error: Exception | None) -> None:
        """A rebuild that began at `started` (of time.monotonic) has ended."""
        seconds = time.monotonic() - started
        self.last = LastRebuild(str(change), time.time(), seconds, None if error is None else str(error))
