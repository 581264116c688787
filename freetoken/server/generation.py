"""One choice of a completion: engine events in, text and JSON-ready steps out. Belongs to one HTTP thread.

Tokens become whole characters, stop strings are cut out, and what could still become a stop string waits. A stop
string cancels the engine's request; what the engine sends after that is dropped.
"""

from __future__ import annotations

import codecs
import time
from dataclasses import dataclass, replace

from freetoken.request import (
    DoneEvent,
    ErrorEvent,
    Event,
    PromptEvent,
    Request,
    Timings,
    TokenEvent,
)
from freetoken.server.schema import TaskParams
from freetoken.stops import StopMatcher
from freetoken.tokenizer import StreamDecoder, Tokenizer

__all__ = ["Begin", "Choice", "Final", "Piece", "Prob", "Progress", "Step"]

NO_TIMINGS = Timings(0, 0, 0.0, 0, 0.0)
_DECODER = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True)
class Prob:
    """A token's probability (natural logarithm), its bytes, and those of the most likely alternatives."""

    token: int
    raw: bytes
    logprob: float
    top: tuple[Prob, ...] = ()

    @property
    def text(self) -> str:
        """The bytes as text; an unfinished character at the end is left out."""
        return _DECODER("replace").decode(self.raw)


@dataclass(frozen=True)
class Begin:
    """The engine has taken up the request."""


@dataclass(frozen=True)
class Progress:
    """Prompt progress, where the request asked for it."""

    total: int
    cache: int
    processed: int
    time_ms: int


@dataclass(frozen=True)
class Piece:
    """One token's step; `text` may be empty."""

    text: str
    tokens: tuple[int, ...]
    probs: tuple[Prob, ...]
    n_decoded: int
    timings: Timings | None = None


@dataclass(frozen=True)
class Final:
    """The end. `content`, `tokens` and `probs` are all of the choice's."""

    content: str
    tokens: tuple[int, ...]
    probs: tuple[Prob, ...]
    stop_type: str
    stopping_word: str
    n_decoded: int
    timings: Timings
    id_slot: int
    is_truncated: bool
    has_new_line: bool


Step = Begin | Progress | Piece | Final


class Choice:
    """The text of one engine request."""

    def __init__(self, index: int, request: Request, params: TaskParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.request = request
        self.params = params
        self.is_done = False
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopMatcher(params.stop)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._probs: list[Prob] = []
        self._n_decoded = 0
        self._n_cached = 0
        self._stop_type = ""
        self._stopping_word = ""
        self._has_new_line = False
        self._started = request.created
        self._first_token = 0.0
        self._has_begun = False

    @property
    def n_prompt(self) -> int:
        return len(self.request.prompt)

    def feed(self, event: Event) -> list[Step]:
        """What an event means for the client. Raises the error of an ErrorEvent."""
        if isinstance(event, TokenEvent):
            return [self._on_token(event)] if not self._stop_type else []
        if isinstance(event, PromptEvent):
            return self._on_prompt(event)
        self.is_done = True
        if isinstance(event, ErrorEvent):
            raise event.error
        return self._on_done(event)

    def _on_prompt(self, event: PromptEvent) -> list[Step]:
        is_first, self._has_begun = not self._has_begun, True
        if is_first:
            self._started = time.monotonic()
            self._n_cached = event.n_cached
        if self.params.return_progress and self.params.stream:
            elapsed_ms = int((time.monotonic() - self._started) * 1e3)
            return [Progress(event.n_total, event.n_cached, event.n_done, elapsed_ms)]
        return [Begin()] if is_first else []

    def _on_token(self, event: TokenEvent) -> Piece:
        if not self._n_decoded:
            self._first_token = time.monotonic()
        text = self._show(self._decoder.push(event.token))
        probs = self._prob(event)
        self._probs += probs
        return self._piece(text, (event.token,), probs)

    def _piece(self, text: str, tokens: tuple[int, ...], probs: tuple[Prob, ...]) -> Piece:
        self._n_decoded += len(tokens)
        if self.params.return_tokens:
            self._tokens += tokens
        self._check_time(text)
        wants_timings = self.params.timings_per_token or self._stop_type == "word"
        return Piece(text, tokens, probs, self._n_decoded, self._live_timings() if wants_timings else None)

    def _show(self, text: str) -> str:
        """Text that may be shown now; ends the request where a stop string is complete."""
        visible, word = self._stops.push(text)
        if word is not None:
            self._stop_type, self._stopping_word = "word", word
            self.request.cancelled.set()
        self._text.append(visible)
        return visible

    def _check_time(self, text: str) -> None:
        """`t_max_predict_ms`: after that time a new line ends the generation."""
        if "\n" not in text:
            return
        self._has_new_line = True
        elapsed_ms = (time.monotonic() - self._first_token) * 1e3
        if 0 < self.params.t_max_predict_ms < elapsed_ms and not self._stop_type:
            self._stop_type = "limit"
            self.request.cancelled.set()

    def _on_done(self, event: DoneEvent) -> list[Step]:
        steps: list[Step] = []
        if not self._stop_type:
            tail = self._show(self._decoder.flush())
            if not self._stop_type:
                rest = self._stops.flush()
                self._text.append(rest)
                tail += rest
                self._stop_type = event.reason if event.reason in ("eos", "limit") else "none"
            tokens = () if event.eos_token is None else (event.eos_token,)
            if tail or tokens:
                steps.append(self._piece(tail, tokens, ()))
        steps.append(self._final(event))
        return steps

    def _final(self, event: DoneEvent) -> Final:
        return Final(
            content="".join(self._text),
            tokens=tuple(self._tokens),
            probs=self._probs_before_stop(),
            stop_type=self._stop_type,
            stopping_word=self._stopping_word,
            n_decoded=self._n_decoded,
            timings=self._final_timings(event.timings),
            id_slot=event.id_slot,
            is_truncated=event.truncated,
            has_new_line=self._has_new_line,
        )

    def _final_timings(self, timings: Timings) -> Timings:
        """The engine's, without the tokens that it made after a stop string was complete."""
        made = timings.predicted_n
        share = self._n_decoded / made if made > self._n_decoded else 1.0
        return replace(timings, predicted_n=self._n_decoded, predicted_ms=timings.predicted_ms * share)

    def _live_timings(self) -> Timings:
        """Counts and times so far, by the clock of this thread."""
        now = time.monotonic()
        first = self._first_token or now
        return Timings(
            cache_n=self._n_cached,
            prompt_n=self.n_prompt - self._n_cached,
            prompt_ms=(first - self._started) * 1e3,
            predicted_n=self._n_decoded,
            predicted_ms=(now - first) * 1e3,
        )

    def _prob(self, event: TokenEvent) -> tuple[Prob, ...]:
        if not self.params.sampling.n_probs or event.logprob is None:
            return ()
        piece = self._tokenizer.piece
        top = tuple(Prob(t.token, piece(t.token, False), t.logprob) for t in event.top)
        return (Prob(event.token, piece(event.token, False), event.logprob, top),)

    def _probs_before_stop(self) -> tuple[Prob, ...]:
        """As llama-server: as many tokens as the stop string has are left out at the end."""
        if self._stop_type != "word" or not self._probs:
            return tuple(self._probs)
        n_stop = len(self._tokenizer.encode(self._stopping_word, False, False))
        return tuple(self._probs[: max(len(self._probs) - n_stop, 0)])
