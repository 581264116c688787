"""Which way of running misses is the fastest here and now, by timing real decode steps of each. No torch.

A step's results have the same bits whichever way its misses run, so trying one costs nothing but time. `choose` spends
some seconds after loading; `gpu.watch` holds the same trial on the steps of requests. Candidates take turns in short
bursts, so that what the text and the machine do meets all of them; the slower half leaves after every stage.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from freetoken.experts.profile import Entry, ExpertFormat
from freetoken.experts.tables import USUAL_MISSES, fill_tables, miss_seconds, split_tables

__all__ = [
    "BURST",
    "Candidate",
    "Choice",
    "Sample",
    "Trial",
    "candidates",
    "choose",
    "contender",
    "remembered",
    "seconds_remembered",
    "with_choice",
]

log = logging.getLogger(__name__)

CPU_FACTORS = (1.0, 1.5, 2.5, 0.7)
"""Tables for a CPU that needs so many times what the profile says: other programs take their part of it."""
BURST = 8
"""Steps of one candidate at a time."""
SETTLE = 2
"""First ones of a burst that do not count: they were launched before, or find what the last candidate left."""
SCOUT = SETTLE + 2
"""Steps of a first burst: the hopeless are not to spend the time of the others."""
ROUNDS, LAST_ROUNDS = 2, 9
"""Bursts of each candidate in a stage, and in that of the last two."""
HOPELESS_AT_ONCE, HOPELESS = 2.0, 1.3
"""Candidates so many times slower than the best leave after the first burst and after a stage, whatever their rank."""
USUAL_SLOPE, SLOPE_SAMPLES = 0.7, 10
"""Share of a step's time that its misses take, as long as no more samples than these say otherwise."""
KEEP = 0.98
"""The incumbent goes for a candidate that takes less than this share of its time."""
OTHER_SHARE = 0.15
"""Candidates whose shares of fills differ by less have the same misses."""
LOST_HITS = 0.4
"""Share of the hits that go where no miss is ever filled: 72% become 43%."""
MAX_EFFECT, TELLING = 2.5, 0.2
"""Limit of what is measured of it, and from which difference in hits, by the guess, that is all believed."""
OUTLIER = 3.0
"""Steps so many times longer than the median say nothing about misses."""


@dataclass(frozen=True)
class Candidate:
    """One way: `backend` offload, hybrid or cpu, and its table int32 [n_layer, n_max + 1]. `per_miss_s` is what a miss
    costs by the profile, 0.0 where that is not known."""

    name: str
    backend: str
    table: np.ndarray = field(compare=False, repr=False)
    per_miss_s: float = field(default=0.0, compare=False)

    @functools.cached_property
    def fill_share(self) -> float:
        """How much of a few misses is filled, over all layers."""
        some = [m for m in USUAL_MISSES if m < self.table.shape[1]]
        return float(np.mean(self.table[:, some] / np.array(some))) if some else 1.0

    def kept_hits(self, effect: float = 1.0) -> float:
        """Share of the hits that remain in the long run, of those that come where every miss is filled: what is not
        filled will be missed again. A guess at effect 1, which long trials put right."""
        return max(1.0 - effect * LOST_HITS * (1.0 - self.fill_share) ** 2, 0.0)


@dataclass(frozen=True)
class Sample:
    """One step: how long it took, its rows, and the misses and hits of all its layers (-1: not known)."""

    seconds: float
    misses: int = -1
    n_rows: int = 1
    hits: int = -1


@dataclass(frozen=True)
class Choice:
    """What came of a trial: seconds a step by candidate, at equal misses."""

    best: Candidate
    seconds: dict[str, float]
    n_steps: int

    def __str__(self) -> str:
        best = self.seconds[self.best.name]
        others = sorted((s, name) for name, s in self.seconds.items() if name != self.best.name)
        rest = ", ".join(f"{name} {s * 1e3:.2f}" for s, name in others)
        return f"{self.best.name} is the fastest: {best * 1e3:.2f} ms a step ({rest}; {self.n_steps} steps)"


def candidates(
    entry: Entry | None,
    layers: Sequence[ExpertFormat | None],
    n_max: int,
    *,
    backends: Collection[str] = ("hybrid", "offload", "cpu"),
    max_fetch: int = -1,
    min_fill: int = 0,
    cpu_layers: Collection[int] = (),
) -> list[Candidate]:
    """All ways that the wishes leave, each table once; the first is the profile's own. Misses of `cpu_layers` go to the
    CPU under all of them."""
    found: list[Candidate] = []

    def add(name: str, backend: str, table: np.ndarray) -> None:
        if not any(known.backend == backend and np.array_equal(known.table, table) for known in found):
            found.append(Candidate(name, backend, table, miss_seconds(entry, layers, table)))

    for factor in CPU_FACTORS if "hybrid" in backends else ():
        limits = {"max_fetch": max_fetch, "min_fill": min_fill, "cpu_layers": cpu_layers}
        table = split_tables(entry, layers, n_max, cpu_factor=factor, **limits)  # type: ignore[arg-type]
        add("hybrid" if factor == 1.0 else f"hybrid for a CPU of {1 / factor:.1f}", "hybrid", table)
    if "offload" in backends:
        add("offload", "offload", fill_tables(len(layers), n_max, cpu_layers))
    if "cpu" in backends:
        add("cpu", "cpu", np.zeros((len(layers), n_max + 1), np.int32))
    return found


class Trial:
    """Says which candidate the next steps shall run (`current`) and takes their times (`add`) until it `is_over`."""

    def __init__(
        self,
        tried: Sequence[Candidate],
        burst: int = BURST,
        incumbent: str = "",
        *,
        settle: int = SETTLE,
        is_long: bool = False,
        effect: float = 1.0,
    ) -> None:
        """The incumbent, if any, wins against what is hardly faster; else the first wins ties. In a long trial bursts
        are so long that each candidate has the misses that come of its own fills, so these count; else all are judged
        at the hits of all, less those that `Candidate.kept_hits` takes under an effect of fills."""
        if not tried:
            raise ValueError("a trial of no candidates")
        self._incumbent = incumbent
        self._alive = list(tried)
        self._tried = list(tried)
        self._effect = effect
        self._samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in tried}
        self._settle, self._full_burst = settle, max(burst, settle + 1)
        self._is_long = is_long
        self._stage = 1 if is_long or len(tried) <= 2 else 0
        self._order = list(tried)
        self._round = 0
        self._n_in_burst = 0
        self.n_steps = 0
        self.is_over = len(tried) == 1

    @property
    def current(self) -> Candidate:
        return self.best if self.is_over else self._order[0]

    @property
    def n_left(self) -> int:
        """Steps of `current` until it changes."""
        return self._burst - self._n_in_burst

    @property
    def best(self) -> Candidate:
        """The fastest by what is known."""
        known = self.seconds()
        alive = [candidate for candidate in self._alive if candidate.name in known] or self._alive

        def cost(candidate: Candidate) -> float:
            return known.get(candidate.name, math.inf) * (KEEP if candidate.name == self._incumbent else 1.0)

        return min(alive, key=cost)

    def add(self, ran: str, sample: Sample) -> None:
        """A step of the candidate of that name; those that still come from the one before are passed over."""
        if self.is_over or ran != self._order[0].name:
            return
        self.n_steps += 1
        self._n_in_burst += 1
        if self._n_in_burst > self._settle:
            self._samples[ran].append(sample)
        if self._n_in_burst >= self._burst:
            self._n_in_burst = 0
            del self._order[0]
            if not self._order:
                self._end_round()

    def seconds(self, effect: float | None = None) -> dict[str, float]:
        """Of each candidate that has run: seconds a step, under the trial's effect of fills or another."""
        everything = [sample for samples in self._samples.values() for sample in samples]
        if self._is_long or not all(sample.misses >= 0 for sample in everything):
            return {name: _middle(samples) for name, samples in self._samples.items() if samples}
        effect = self._effect if effect is None else effect
        ran = [(candidate, self._samples[candidate.name]) for candidate in self._tried]
        kept = {c.name: c.kept_hits(effect) for c, _ in ran}
        # the hits that came are those of all candidates' fills in turn
        hits = sum(max(sample.hits, 0) for sample in everything)
        whole = hits / max(sum(kept[c.name] * len(samples) for c, samples in ran), 1e-9)
        routed = (sum(sample.misses for sample in everything) + hits) / max(len(everything), 1)
        return {
            c.name: _at_misses(samples, max(routed - min(whole * kept[c.name], routed), 0.0))
            for c, samples in ran
            if samples
        }

    def hits(self, name: str) -> float:
        """Mean hits a step of a candidate that has run, below 0 where they are not known."""
        return statistics.fmean(sample.hits for sample in self._samples[name])

    def choice(self) -> Choice:
        return Choice(self.best, self.seconds() or {self.best.name: 0.0}, self.n_steps)

    @property
    def _burst(self) -> int:
        return self._full_burst if self._stage else min(SCOUT, self._full_burst)

    def _end_round(self) -> None:
        self._round += 1
        n_rounds = LAST_ROUNDS if len(self._alive) <= 2 and not self._is_long else ROUNDS
        if self._stage == 0:
            self._drop_hopeless()
        elif self._round >= n_rounds:
            if len(self._alive) <= 2:
                self.is_over = True
            else:
                self._keep(-(-len(self._alive) // 2), HOPELESS)
        # there and back, so that a drift of the machine meets all alike
        self._order = list(self._alive) if self._round % 2 == 0 else list(reversed(self._alive))

    def _drop_hopeless(self) -> None:
        """After the first bursts, by the quickest step of each."""
        least = {c.name: min(sample.seconds for sample in self._samples[c.name]) for c in self._alive}
        limit = HOPELESS_AT_ONCE * min(least.values())
        self._go_on([c for c in self._alive if least[c.name] <= limit])

    def _keep(self, n: int, limit: float) -> None:
        """Begin the next stage with the n fastest, of those within the limit."""
        seconds = self.seconds()
        ranked = sorted(self._alive, key=lambda candidate: seconds[candidate.name])
        kept = [c for c in ranked[:n] if seconds[c.name] <= limit * seconds[ranked[0].name]]
        self._go_on([candidate for candidate in self._alive if candidate in kept])

    def _go_on(self, alive: list[Candidate]) -> None:
        self._alive = alive
        self._stage, self._round = self._stage + 1, 0
        self.is_over = len(alive) == 1


def _middle(samples: Sequence[Sample]) -> float:
    """Mean seconds without those that something interrupted."""
    seconds = np.array([sample.seconds for sample in samples])
    return float(seconds[seconds <= OUTLIER * np.median(seconds)].mean())


def _at_misses(samples: Sequence[Sample], misses: float) -> float:
    """Median seconds, each step's moved along the line of seconds over misses."""
    seconds = np.array([sample.seconds for sample in samples])
    counts = np.array([sample.misses for sample in samples], np.float64)
    usual = seconds <= OUTLIER * np.median(seconds)
    x, y = counts[usual] - counts[usual].mean(), seconds[usual]
    spread = float(x @ x)
    # without misses a step takes no less than nothing
    most = float(y.mean()) / max(float(counts[usual].mean()), 1.0)
    # few samples say little of the slope: they are joined by some that say the usual
    weight = SLOPE_SAMPLES * max(spread / len(x), 1.0)
    slope = min(max((float(x @ y) + weight * USUAL_SLOPE * most) / (spread + weight), 0.0), most)
    return float(np.median(seconds - slope * (counts - misses)))


def contender(trial: Trial, tried: Sequence[Candidate]) -> Candidate | None:
    """Who might be faster than the best after all, since what is guessed of the misses to come may be wrong: one that
    fills clearly more, or less, and would win if fills had no effect, or twice the one guessed."""
    best = trial.best
    for effect in (0.0, 2.0):
        known = trial.seconds(effect)
        others = [c for c in tried if c.name in known and abs(c.fill_share - best.fill_share) > OTHER_SHARE]
        if others and best.name in known:
            other = min(others, key=lambda c: known[c.name])
            if known[other.name] < KEEP * known[best.name]:
                return other
    return None


def effect_of(trial: Trial, one: Candidate, other: Candidate) -> float:
    """The effect of fills on later hits, by a long trial of two candidates; the guess where hits are not known."""
    few, many = sorted((one, other), key=lambda c: c.fill_share)
    if trial.hits(few.name) <= 0 or trial.hits(many.name) <= 0:
        return 1.0
    ratio = trial.hits(few.name) / trial.hits(many.name)
    weight = (1.0 - few.kept_hits()) - ratio * (1.0 - many.kept_hits())
    found = min(max((1.0 - ratio) / weight, 0.0), MAX_EFFECT) if weight > 0 else MAX_EFFECT
    # candidates that hardly differ in their fills say little of what fills do
    return 1.0 + (found - 1.0) * min(1.0, (many.kept_hits() - few.kept_hits()) / TELLING)


def choose(
    tried: Sequence[Candidate],
    run: Callable[[Candidate, int], Iterable[Sample]],
    *,
    budget_s: float = 2.0,
    effect: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
    """Time the candidates for at most so many seconds; `run` makes some decode steps under one of them."""
    trial = Trial(tried, incumbent=tried[0].name, effect=effect)
    began = clock()
    step_s = budget_s / (2 * len(tried))
    while not trial.is_over and clock() - began + step_s < budget_s:
        candidate = trial.current
        n = max(1, min(trial.n_left, int((budget_s - (clock() - began)) / step_s)))
        for sample in run(candidate, n):
            trial.add(candidate.name, sample)
            step_s = sample.seconds
    choice = trial.choice()
    log.info("experts: %s", choice)
    return choice


def with_choice(
    entry: Entry, what_for: str, choice: Choice, *, load: float | None = None, effect: float | None = None
) -> Entry:
    """The profile with a choice in it; `load` is how many cores other programs took meanwhile, `effect` what is known
    of that of fills on later hits."""
    record: dict[str, Any] = {
        "chosen": choice.best.name,
        "milliseconds": {name: round(seconds * 1e3, 4) for name, seconds in choice.seconds.items()},
        "steps": choice.n_steps,
        "load_of_others": None if load is None else round(load, 2),
        "effect_of_fills": None if effect is None else round(effect, 3),
        "when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return replace(entry, choices=entry.choices | {what_for: record})


def remembered(entry: Entry, what_for: str, tried: Sequence[Candidate]) -> Candidate | None:
    """The candidate that was chosen last time, if it is there."""
    name = entry.choices.get(what_for, {}).get("chosen")
    return next((candidate for candidate in tried if candidate.name == name), None)


def effect_remembered(entry: Entry, what_for: str) -> float | None:
    """The effect of fills that a long trial once found; a file may hold anything."""
    found = entry.choices.get(what_for, {}).get("effect_of_fills")
    return float(found) if isinstance(found, int | float) and 0.0 <= found <= MAX_EFFECT else None


def seconds_remembered(entry: Entry, what_for: str) -> dict[str, float]:
    """Seconds a step of the candidates when that choice was made."""
    found = entry.choices.get(what_for, {}).get("milliseconds")
    known = found.items() if isinstance(found, dict) else ()
    return {name: ms / 1e3 for name, ms in known if isinstance(ms, int | float) and ms > 0}
