"""Whether what was chosen at start is still the fastest while requests are served. No torch.

The engine tells the watcher of every decode step. Where steps take longer or shorter than the same misses took before,
where other programs begin or end to use the processor, or after some minutes in any case, it holds a trial on the steps
of requests, which costs a second or two of slower tokens, and names the candidate that shall run from then on.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from freetoken.gpu.calibrate import BURST, SETTLE, Candidate, Choice, Sample, Trial, contender, effect_of

__all__ = ["OtherLoad", "Watcher"]

log = logging.getLogger(__name__)

WINDOW = 16
"""Steps that are judged together."""
LEAST_WINDOW = 4
WINDOW_S = 2.0
"""Slow steps are judged in shorter windows."""
DEVIATION = 0.15
N_DEVIATING = 3
"""Windows in a row that deviate before a trial is held."""
DRIFT = 0.05
"""How fast what is expected follows what is seen: contexts grow."""
FIRST_CHECK = 128
"""Steps of requests after which what a start chose, by text of its own, is checked."""
NEAR, MOST_NEAR = 1.3, 3
"""Where nothing has moved, only so many candidates are tried, and none that took so many times the best's time."""
GAP_S = 10.0
"""Least time between trials because of slower or quicker steps; doubled after each one that changed nothing, up to:"""
MAX_GAP_S = 300.0
QUIET_S = 30.0
"""Steps that were as expected for so long end that growth."""
LOAD_GAP_S = 15.0
"""Most time after a trial before the load is heeded."""
RECHECK_S = 120.0
"""After so much time a trial is held for no reason; doubled after each one that changed nothing, up to:"""
MAX_RECHECK_S = 960.0
TRIAL_S = 8.0
"""Most time of steps that a trial takes."""
LONG_BURST, LONG_SETTLE = 128, 48
"""Of a trial between two that fill differently: so long that their misses are those of their own fills."""
LONG_S = 40.0
"""Most time of steps that it takes."""
MAX_RESTARTS = 3
LOAD_EVERY_S = 1.0
LOAD_CORES = 0.75
LOAD_SHARE = 0.1
"""Other programs' load has moved when it has by so many cores, and by this share of all, twice in a row."""
N_LOADED = 2


class OtherLoad:
    """How many cores other programs use, from the system's and our own counts of processor time."""

    def __init__(self, proc: Path = Path("/proc"), ticks_per_s: int = 0) -> None:
        self._proc = proc
        self._ticks_per_s = ticks_per_s or (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
        self._last = self._counts(time.monotonic())

    def sample(self, now: float) -> float | None:
        """Cores since the last call; None where the system does not tell."""
        last, self._last = self._last, self._counts(now)
        if last is None or self._last is None or self._last[0] <= last[0]:
            return None
        return max(0.0, (self._last[1] - last[1]) / self._ticks_per_s / (self._last[0] - last[0]))

    def _counts(self, now: float) -> tuple[float, int] | None:
        """The time, and ticks that others have used."""
        try:
            total = [int(field) for field in (self._proc / "stat").read_text().splitlines()[0].split()[1:9]]
            own = (self._proc / "self" / "stat").read_text().rsplit(")", 1)[1].split()
            idle = total[3] + total[4]
            return now, sum(total) - idle - int(own[11]) - int(own[12])
        except (OSError, ValueError, IndexError):
            return None


class Watcher:
    """Used by the engine's thread only. `current` is what the engine shall run; `on_step` tells when that changes."""

    def __init__(
        self,
        tried: Sequence[Candidate],
        current: Candidate,
        *,
        n_cores: int = 1,
        load: Callable[[float], float | None] = lambda now: None,
        clock: Callable[[], float] = time.monotonic,
        effect: float | None = None,
        known: Mapping[str, float] | None = None,
        on_choice: Callable[[Choice, float | None], object] = lambda choice, load: None,
    ) -> None:
        """`load` gives the cores that others use; `effect` of fills on later hits is what a long trial once found;
        `known` are seconds a step of an earlier choice; `on_choice` hears of every trial's outcome."""
        self.current = current
        self.effect = effect
        self._tried = list(tried)
        self._known = dict(known or {})
        self._chosen = current
        self._load, self._clock, self._on_choice = load, clock, on_choice
        self._least_load = max(LOAD_CORES, LOAD_SHARE * n_cores)
        self._trial: Trial | None = None
        self._long: tuple[Candidate, Candidate] | tuple[()] = ()
        self._now_tried: list[Candidate] = []
        self._n_restarts = 0
        self._n_rows = 0
        self._in_trial_s = 0.0
        self._window: list[Sample] = []
        self._bases: dict[int, float] = {}
        self._n_deviating = 0
        self._n_steps = 0
        self._gap_s, self._recheck_s = GAP_S, RECHECK_S
        self._last_trial = clock()
        self._has_checked = False
        self._load_now: float | None = None
        self._load_then: float | None = None
        self._n_loaded = 0
        self._load_asked = clock()

    @property
    def is_trying(self) -> bool:
        return self._trial is not None

    def on_step(self, ran: str, seconds: float, misses: int, hits: int, n_rows: int) -> Candidate | None:
        """A step of the candidate named has ended, with the misses and hits of all its layers (-1: not known). Returns
        what shall run from now on, None where that stays."""
        if len(self._tried) < 2 or seconds <= 0:
            return None
        before = self.current
        sample = Sample(seconds, misses, n_rows, hits)
        self._n_steps += 1
        self._look_at_load()
        if self._trial is not None:
            self._try(ran, sample)
        elif ran == self._chosen.name:
            self._judge(sample)
        self.current = self._chosen if self._trial is None else self._trial.current
        return None if self.current == before else self.current

    # --- between trials ----------------------------------------------------------------------------------------------

    def _judge(self, sample: Sample) -> None:
        if self._window and sample.n_rows != self._window[0].n_rows:
            self._window.clear()
        self._window.append(sample)
        if len(self._window) < self._window_size(sample.seconds):
            return
        excess = statistics.median(s.seconds - self._missed_s(s) for s in self._window)
        middle = statistics.median(s.seconds for s in self._window)
        base = self._bases.get(sample.n_rows)
        self._window.clear()
        if base is None:
            self._bases[sample.n_rows] = excess
        else:
            is_off = abs(excess - base) > DEVIATION * max(middle - (excess - base), 1e-9)
            self._n_deviating = self._n_deviating + 1 if is_off else 0
            if self._n_deviating == 1 and self._clock() - self._last_trial > QUIET_S:
                self._gap_s = GAP_S
            self._bases[sample.n_rows] = base + DRIFT * (excess - base)
        moved = self._what_moved()
        if moved:
            self._begin(moved, middle, self._tried)
        elif self._is_due:
            self._begin("to check the choice", middle, self._near())

    def _what_moved(self) -> str:
        """Which condition has, "" for none."""
        since = self._clock() - self._last_trial
        if self._n_loaded >= N_LOADED and since >= min(self._gap_s, LOAD_GAP_S):
            return f"other programs use {self._load_now:.1f} cores, and used {self._load_then:.1f}"
        if self._n_deviating >= N_DEVIATING and since >= self._gap_s:
            return "steps take another time than the same misses took"
        return ""

    @property
    def _is_due(self) -> bool:
        is_first = not self._has_checked and self._n_steps >= FIRST_CHECK
        return is_first or self._clock() - self._last_trial >= self._recheck_s

    def _near(self) -> list[Candidate]:
        """Candidates that were hardly slower when all were tried."""
        if not self._known:
            return self._tried
        limit = NEAR * min(self._known.values())
        near = [c for c in self._tried if self._known.get(c.name, 0.0) <= limit and c != self._chosen]
        return [self._chosen, *sorted(near, key=lambda c: self._known.get(c.name, 0.0))[: MOST_NEAR - 1]]

    def _missed_s(self, sample: Sample) -> float:
        return max(sample.misses, 0) * self._chosen.per_miss_s

    def _window_size(self, seconds: float) -> int:
        return max(LEAST_WINDOW, min(WINDOW, round(WINDOW_S / seconds)))

    def _look_at_load(self) -> None:
        now = self._clock()
        if now - self._load_asked < LOAD_EVERY_S:
            return
        self._load_asked = now
        self._load_now = self._load(now)
        if self._load_now is None:
            return
        if self._load_then is None:
            self._load_then = self._load_now
        has_moved = abs(self._load_now - self._load_then) > self._least_load
        self._n_loaded = self._n_loaded + 1 if has_moved else 0

    # --- a trial -----------------------------------------------------------------------------------------------------

    def _begin(self, reason: str, step_s: float, tried: Sequence[Candidate]) -> None:
        self._has_checked = True
        if len(tried) < 2:
            self._last_trial = self._clock()
            return
        log.debug("experts: trying %d ways: %s", len(tried), reason)
        self._now_tried = [self._chosen, *(c for c in tried if c != self._chosen)]
        tried = self._now_tried
        # all candidates have one burst and more in the time there is
        burst = round(TRIAL_S / (3 * len(tried) * max(step_s, 1e-6)))
        self._trial = Trial(
            tried,
            min(BURST, max(burst, SETTLE + 1)),
            self._chosen.name,
            effect=1.0 if self.effect is None else self.effect,
        )
        self._n_rows, self._in_trial_s = 0, 0.0

    def _try(self, ran: str, sample: Sample) -> None:
        assert self._trial is not None
        self._in_trial_s += sample.seconds
        if ran == self._trial.current.name:
            if self._n_rows not in (0, sample.n_rows):
                self._n_restarts += 1
                if self._n_restarts > MAX_RESTARTS or self._long:
                    self._end(None)
                    return
                self._begin("the number of rows has changed", sample.seconds, self._now_tried)
            self._n_rows = sample.n_rows
            self._trial.add(ran, sample)
        if self._trial.is_over or self._in_trial_s > (LONG_S if self._long else TRIAL_S):
            self._conclude(self._trial)

    def _conclude(self, trial: Trial) -> None:
        """A short trial that leaves a doubt is followed by a long one."""
        choice = trial.choice()
        other = None
        if self._long and trial.is_over:
            self.effect = effect_of(trial, *self._long)
        elif trial.is_over and self.effect is None:
            other = contender(trial, self._now_tried)
        self._end(choice)
        if other is not None:
            self._long = choice.best, other
            self._trial = Trial(self._long, LONG_BURST, choice.best.name, settle=LONG_SETTLE, is_long=True)
            self._n_rows, self._in_trial_s = 0, 0.0

    def _end(self, choice: Choice | None) -> None:
        """Go by a choice, or go on as before where none could be made."""
        has_changed = choice is not None and choice.best != self._chosen
        if choice is not None:
            log.log(logging.INFO if has_changed else logging.DEBUG, "experts: %s", choice)
            self._on_choice(choice, self._load_now)
            self._known |= choice.seconds if not self._long else {}
            self._chosen = choice.best
        self._gap_s = GAP_S if has_changed else min(2 * self._gap_s, MAX_GAP_S)
        self._recheck_s = RECHECK_S if has_changed else min(2 * self._recheck_s, MAX_RECHECK_S)
        self._trial, self._long = None, ()
        self._n_restarts = self._n_deviating = self._n_loaded = 0
        self._load_then = self._load_now
        self._window.clear()
        self._bases.clear()
        self._last_trial = self._clock()
