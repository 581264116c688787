"""One of the engine's places for running requests, and what a request that runs in it has come to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from freetoken import kvcache
from freetoken.errors import RequestError
from freetoken.request import Request, Timings
from freetoken.sampler import Sampler

__all__ = ["Slot", "leave_pages"]


@dataclass
class Slot:
    """One place for a running request. Written by the engine thread only; other threads read `info`."""

    id: int
    sequence: kvcache.Sequence
    request: Request | None = None
    sampler: Sampler | None = None
    todo: list[int] = field(default_factory=list)
    """Tokens not yet in the cache: the rest of the prompt, or the token sampled last."""
    has_room: bool = False
    """Whether the cache is reserved for the whole prompt; until then the request waits in its slot."""
    n_cached: int = 0
    n_prompt: int = 0
    n_decoded: int = 0
    started: float = 0.0
    first_token: float = 0.0
    last_used: float = 0.0

    @property
    def is_prefilling(self) -> bool:
        return self.request is not None and self.has_room and self.n_decoded == 0

    @property
    def is_waiting(self) -> bool:
        return self.request is not None and not self.has_room

    @property
    def is_decoding(self) -> bool:
        return self.request is not None and self.n_decoded > 0

    @property
    def is_cancelled(self) -> bool:
        return self.request is not None and self.request.cancelled.is_set()

    def timings(self) -> Timings:
        """Counts and times so far."""
        now = time.monotonic()
        prompt_end = self.first_token or now
        return Timings(
            cache_n=self.n_cached,
            prompt_n=len(self.sequence.tokens) - self.n_cached - max(self.n_decoded - 1, 0),
            prompt_ms=(prompt_end - self.started) * 1e3,
            predicted_n=self.n_decoded,
            predicted_ms=(now - self.first_token) * 1e3 if self.first_token else 0.0,
        )


def leave_pages(slots: Sequence[Slot], waiting: Iterable[Request], n_pages: int, n_ctx: int) -> None:
    """Let idle slots give pages up until no more than so many are held. Raises RequestError where what runs or waits
    needs more, or a longer context."""
    busy = [s for s in slots if s.request is not None]
    lengths = [max(s.n_prompt + s.n_decoded, len(s.sequence) + 1) for s in busy]
    longest = max([*lengths, *(len(r.prompt) + 1 for r in waiting)], default=0)
    n_held = sum(len(s.sequence.pages) for s in busy)
    if longest > n_ctx or n_held > n_pages:
        raise RequestError(
            f"requests that run or wait hold {n_held} pages and up to {longest} tokens each, more than {n_pages} "
            f"pages and {n_ctx} tokens"
        )
    for slot in sorted((s for s in slots if s.request is None), key=lambda s: s.last_used):
        if sum(len(s.sequence.pages) for s in slots) > n_pages:
            slot.sequence.truncate(0)
