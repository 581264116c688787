"""What crosses between the HTTP threads and the engine thread. No torch, no Flask.

A Flask thread builds a `Request`, hands it to a `Generator` (the engine) and reads `Event`s from `request.events`.
The engine writes events; the Flask thread may set `request.cancelled`. Nothing else crosses.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from freetoken.rebuild import CacheChange, CacheStatus

__all__ = [
    "DoneEvent",
    "EngineState",
    "ErrorEvent",
    "Event",
    "Generator",
    "PromptEvent",
    "Request",
    "SamplingParams",
    "SlotInfo",
    "Timings",
    "TokenEvent",
    "TokenProb",
]


@dataclass(frozen=True)
class SamplingParams:
    """Sampler settings of one request; names and defaults are llama-server's.

    `n_predict` -1 means until the context is full. `seed` None draws one. `logit_bias` maps token id to an added
    logit (-inf bans). `samplers` is the order of the chain by llama-server's names. `n_probs` asks for that many
    alternatives a token, `post_sampling_probs` for those after the chain instead of before it.
    """

    n_predict: int = -1
    temperature: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    min_keep: int = 0
    ignore_eos: bool = False
    logit_bias: dict[int, float] = field(default_factory=dict)
    n_probs: int = 0
    post_sampling_probs: bool = False
    samplers: tuple[str, ...] = (
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    )


@dataclass(frozen=True)
class TokenProb:
    """One alternative: token id and natural logarithm of its probability."""

    token: int
    logprob: float


@dataclass(frozen=True)
class PromptEvent:
    """Prompt progress: `n_done` of `n_total` tokens are in the cache, `n_cached` of them were reused."""

    n_total: int
    n_cached: int
    n_done: int


@dataclass(frozen=True)
class TokenEvent:
    """One generated token (end-of-generation tokens are not sent); probabilities where asked for."""

    token: int
    logprob: float | None = None
    top: tuple[TokenProb, ...] = ()


@dataclass(frozen=True)
class Timings:
    """Counts and wall times of a finished request, as llama-server's `timings` reports them."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


@dataclass(frozen=True)
class DoneEvent:
    """The last event. `reason`: "eos" (with the token), "limit" (n_predict or context), "cancelled".

    `truncated` is true when the context was full. `id_slot` is the slot that served it.
    """

    reason: str
    timings: Timings
    eos_token: int | None = None
    truncated: bool = False
    id_slot: int = 0


@dataclass(frozen=True)
class ErrorEvent:
    """The last event of a request that failed inside the engine."""

    error: Exception


Event = PromptEvent | TokenEvent | DoneEvent | ErrorEvent


@dataclass
class Request:
    """One generation. The Flask thread fills everything but `events`; `cancelled` is set by the Flask thread only."""

    id: int = field(default_factory=itertools.count().__next__, init=False)
    """Unique in this process."""
    prompt: tuple[int, ...]
    params: SamplingParams
    cache_prompt: bool = True
    id_slot: int = -1
    """A wished slot, -1 for any."""
    return_progress: bool = False
    """Whether PromptEvents are wanted: one when the request gets its slot, then one a chunk."""
    events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    created: float = field(default_factory=time.monotonic)


class EngineState(Enum):
    """Life of an engine."""

    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True)
class SlotInfo:
    """A snapshot of one slot for /slots, /health and /metrics."""

    id: int
    n_ctx: int
    is_processing: bool
    n_prompt_tokens: int = 0
    n_decoded: int = 0
    request_id: int | None = None
    """`Request.id` of what runs there."""


class Generator(Protocol):
    """What the server needs of an engine; tests give it a fake."""

    @property
    def state(self) -> EngineState: ...

    @property
    def failure(self) -> Exception | None:
        """Why `state` is FAILED."""

    @property
    def n_ctx(self) -> int:
        """Context of one slot, in tokens."""

    @property
    def n_slots(self) -> int: ...

    @property
    def load_progress(self) -> float:
        """0..1 while loading."""

    def submit(self, request: Request) -> None:
        """Queue a request. Raises NotReadyError while loading; ContextExceededError when the prompt does not fit."""

    def slots(self) -> list[SlotInfo]: ...

    def cache_status(self) -> CacheStatus:
        """Slots for experts, their statistics, pages of keys and values. Raises NotReadyError while loading."""

    def rebuild(self, change: CacheChange) -> CacheStatus:
        """Change the caches' size between two steps; returns when that is done. Raises RequestError, EngineError."""
