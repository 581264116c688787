"""How misses run on this machine: the candidates that the wishes leave, the choice among them after loading, and the
watch over it while requests are served.

`gpu.calibrate` and `gpu.watch` decide; here stand the profile, the real decode steps to time, and the switch from one
candidate to another, which the experts make between two steps.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from freetoken.cores import physical_cores
from freetoken.experts.bank import LayerBanks
from freetoken.experts.profile import Entry, ExpertFormat, store
from freetoken.experts.split import bounded_table
from freetoken.experts.tables import split_tables, unmeasured_table
from freetoken.gpu.calibrate import (
    Candidate,
    Choice,
    Sample,
    candidates,
    choose,
    effect_remembered,
    remembered,
    seconds_remembered,
    with_choice,
)
from freetoken.gpu.watch import OtherLoad, Watcher
from freetoken.options import EngineOptions

__all__ = ["Backends", "CountedStep", "OwnText", "WatchedStep", "Wishes", "what_for"]

logger = logging.getLogger(__name__)

BUDGET_S = 2.0
"""Of the choice after loading."""
FILL_S = 0.4
"""Of that, for steps that fill the slots."""
USUAL_HITS = 0.65
"""By which candidates are ordered before any was timed."""
MAX_AHEAD = 2
"""Steps of the model's own text under way at once, as the engine has them."""
SEED = 5


class CountedStep(Protocol):
    """`gpu.decode.Step` as it is used here."""

    def wait(self) -> tuple[list[int], list[int]]:
        """Tokens and their states."""

    def counts(self) -> tuple[int, int] | None:
        """Hits and misses of all layers since the counters began, once the step has ended; None for not known."""


@dataclass(frozen=True)
class Wishes:
    """What the options leave to choose from."""

    backends: tuple[str, ...]
    max_fetch: int
    min_fill: int
    cpu_layers: frozenset[int]
    calibrates: bool

    @classmethod
    def of(cls, options: EngineOptions, n_layer: int, passing: Collection[int] = ()) -> Wishes:
        """`passing` are layers whose experts take no slots. Raises OptionError for layers that are not there."""
        named = options.moe_backend
        backends = ("hybrid", "offload", "cpu") if named in ("auto", "fused") else (named,)
        cpu_layers = options.moe_cpu_layers.of(n_layer) | frozenset(passing)
        return cls(
            backends, options.moe_hybrid_max_fetch, options.moe_hybrid_min_fill, cpu_layers, options.moe_calibrate
        )

    def hybrid_table(self, entry: Entry | None, layers: Sequence[LayerBanks | None], n_max: int) -> np.ndarray:
        """What `hybrid` takes without a trial: int32 [n_layer, n_max + 1], or [n_max + 1] without a profile."""
        if entry is None:
            limit = None if self.max_fetch < 0 else self.max_fetch
            return bounded_table(unmeasured_table(n_max).tolist(), limit, self.min_fill)
        return split_tables(
            entry,
            formats_of(layers),
            n_max,
            max_fetch=self.max_fetch,
            min_fill=self.min_fill,
            cpu_layers=self.cpu_layers,
        )


class Backends:
    """The candidates of one model, and which of them runs. Used by the engine thread."""

    def __init__(
        self,
        entry: Entry | None,
        layers: Sequence[LayerBanks | None],
        n_max: int,
        wishes: Wishes,
        use: Callable[[Candidate], object],
        *,
        what_for: str = "",
        where: Path | None = None,
        is_stored: bool = True,
    ) -> None:
        """`use` switches to a candidate from the next step on. `what_for` names the model and its slots among the
        choices in the profile `entry`, which are stored in the folder `where` if they are."""
        found = candidates(
            entry,
            formats_of(layers),
            n_max,
            backends=wishes.backends,
            max_fetch=wishes.max_fetch,
            min_fill=wishes.min_fill,
            cpu_layers=wishes.cpu_layers,
        )
        self.tried = sorted(found, key=_expected) if all(c.per_miss_s > 0 for c in found) else found
        self._use, self._what_for, self._where, self._entry = use, what_for, where, entry
        self._calibrates, self._is_stored = wishes.calibrates, is_stored
        self._known = None if entry is None else remembered(entry, what_for, self.tried)
        self._effect = None if entry is None else effect_remembered(entry, what_for)
        self.load = OtherLoad()
        self.current = self._known or self.tried[0]
        self._watcher: Watcher | None = None
        self._last: tuple[float, tuple[int, int] | None] | None = None
        use(self.current)

    @property
    def is_undecided(self) -> bool:
        """Whether `choose` has something to do: a choice of an earlier start stands, and requests will check it."""
        return self._calibrates and self._known is None and len(self.tried) > 1

    def choose(self, text: OwnText) -> None:
        """Time the candidates by the model's own text and take the fastest."""
        began = time.monotonic()
        self.load.sample(began)

        def run(candidate: Candidate, n: int) -> Iterator[Sample]:
            self._switch(candidate)
            return text.run(n)

        # free slots are filled first: what fills them would look slow
        most = max(self.tried, key=lambda c: c.fill_share)
        while time.monotonic() - began < FILL_S:
            deque(run(most, 4), maxlen=0)
        left = BUDGET_S - (time.monotonic() - began)
        choice = choose(self.tried, run, budget_s=left, effect=1.0 if self._effect is None else self._effect)
        self._remember(choice, self.load.sample(time.monotonic()))
        self._switch(choice.best)

    def watched(self, step: CountedStep, n_rows: int, follows: bool) -> WatchedStep:
        """A step of requests that was launched under the current candidate; `follows` another one directly."""
        return WatchedStep(step, self, self.current.name, n_rows, follows)

    def ended(self, step: WatchedStep, counts: tuple[int, int] | None) -> None:
        """What the watcher makes of a step."""
        last, self._last = self._last, (time.perf_counter(), counts)
        if not self._calibrates or len(self.tried) < 2 or last is None or not step.follows:
            return
        if self._watcher is None:
            self._watcher = Watcher(
                self.tried,
                self.current,
                n_cores=physical_cores(),
                load=self.load.sample,
                clock=time.monotonic,
                effect=self._effect,
                known=None if self._entry is None else seconds_remembered(self._entry, self._what_for),
                on_choice=self._remember,
            )
        hits, misses = (-1, -1) if counts is None or last[1] is None else np.subtract(counts, last[1]).tolist()
        changed = self._watcher.on_step(step.ran, self._last[0] - last[0], misses, hits, step.n_rows)
        if changed is not None:
            self._switch(changed)

    def _switch(self, candidate: Candidate) -> None:
        if candidate is not self.current:
            self._use(candidate)
            self.current = candidate

    def _remember(self, choice: Choice, load: float | None) -> None:
        if self._watcher is not None:
            self._effect = self._watcher.effect
        if self._entry is not None:
            self._entry = with_choice(self._entry, self._what_for, choice, load=load, effect=self._effect)
            if self._is_stored:
                store(self._entry, self._where)


def formats_of(layers: Sequence[LayerBanks | None]) -> list[ExpertFormat | None]:
    """The format of each layer's experts."""
    return [None if layer is None else ExpertFormat.of(layer) for layer in layers]


def what_for(layers: Sequence[LayerBanks | None], n_slots: int, wishes: Wishes) -> str:
    """The name of a choice in the profile: what it depends on besides the profile's own conditions."""
    known = [ExpertFormat.of(layer) for layer in layers if layer is not None]
    n_experts = sum(layer.banks[0].n_expert for layer in layers if layer is not None)
    kinds = ", ".join(f"{known.count(kind)} of {kind}" for kind in sorted(set(known), key=str))
    limits = f"{wishes.max_fetch}, {wishes.min_fill}, {sorted(wishes.cpu_layers)}"
    return f"{kinds}; {n_slots} of {n_experts} in slots; {'/'.join(wishes.backends)}; {limits}"


def _expected(candidate: Candidate) -> float:
    """What misses are expected to cost, as the profile has it."""
    return candidate.per_miss_s * (1.0 - USUAL_HITS * candidate.kept_hits())


class WatchedStep:
    """A step whose end the watcher hears of."""

    def __init__(self, step: CountedStep, backends: Backends, ran: str, n_rows: int, follows: bool) -> None:
        self._step, self._backends = step, backends
        self.ran, self.n_rows, self.follows = ran, n_rows, follows

    def wait(self) -> tuple[list[int], list[int]]:
        """As `gpu.decode.Step.wait`."""
        results = self._step.wait()
        self._backends.ended(self, self._step.counts())
        return results


Launch = Callable[[int, int, float, bool], CountedStep]
"""Starts a sampled step: its token, its position, the sampler's number, whether the token is the step's before."""


class OwnText:
    """Decode steps of text that the model makes up, from one token on; at the end of its room it starts again."""

    def __init__(self, launch: Launch, token: int, n_positions: int) -> None:
        self._launch, self._token, self._n_positions = launch, token, n_positions
        self._position = 0
        self._rng = np.random.default_rng(SEED)
        self._counts: tuple[int, int] | None = None

    def run(self, n: int) -> Iterator[Sample]:
        """So many steps, each launched before the one before has ended."""
        under_way: deque[CountedStep] = deque()
        self._began = time.perf_counter()
        for _ in range(n):
            if self._position == self._n_positions:
                while under_way:
                    yield self._take(under_way.popleft())
                self._position = 0
            number = float(self._rng.random())
            under_way.append(self._launch(self._token, self._position, number, bool(under_way)))
            self._position += 1
            if len(under_way) == MAX_AHEAD:
                yield self._take(under_way.popleft())
        while under_way:
            yield self._take(under_way.popleft())

    def _take(self, step: CountedStep) -> Sample:
        self._token = step.wait()[0][0]
        ended, began = time.perf_counter(), self._began
        self._began = ended
        counts, last = step.counts(), self._counts
        self._counts = counts
        if counts is None or last is None:
            return Sample(ended - began)
        hits, misses = np.subtract(counts, last).tolist()
        return Sample(ended - began, misses, hits=hits)
