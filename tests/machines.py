"""Machines that are made up: how long decode steps take on them, for tests of the decision between backends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from freetoken.experts.profile import Conditions, Entry, ExpertFormat, Times
from freetoken.experts.split import makespan
from freetoken.gpu.calibrate import Candidate, Sample

KIND = ExpertFormat.parse("Q4_K/Q4_K/Q6_K 2048x768")
COUNTS = (1, 2, 4, 8, 16)
N_LAYER = 24
N_MAX = 16
NOW = Conditions("GPU-1", "580.82", "5 x16", "Some CPU", 16, 14, 128, "avx512vbmi, 2 planes, 0123")
MACHINES = {
    # B_P and B_H in GB/s (arXiv 2608.16157, Table 1)
    "5090 server": (52.7, 77.3),
    "4090": (25.1, 63.2),
    "3090": (25.3, 56.7),
    "5090 desktop": (49.0, 53.8),
    "4060 laptop": (11.8, 47.5),
    "PRO 6000": (51.5, 178.0),
}


def straight(b_p: float, b_h: float, kind: ExpertFormat = KIND, least_share: float = 0.2) -> Times:
    """Fills and experts take time by their bytes, and a fill takes its bytes from the CPU's bandwidth, of which some
    share is always left."""
    s = kind.expert_bytes / 1e9
    left = max(b_h - b_p, least_share * b_h, 1e-3)
    alone = {n: n * s / b_p for n in COUNTS}, {n: n * s / b_h for n in COUNTS}
    return Times(alone[0], alone[0], alone[1], {n: n * s / left for n in COUNTS})


@dataclass
class Machine:
    """`cpu_slowdown` and `link_slowdown` are conditions that a test moves; the profile does not know of them."""

    b_p: float
    b_h: float
    base_s: float = 2e-3
    noise: float = 0.05
    miss_rate: float = 0.3
    seed: int = 0
    cpu_slowdown: float = 1.0
    link_slowdown: float = 1.0
    meeting_s: float = 5e-6
    """What a layer's meeting with the CPU costs."""
    effect: float = 1.0
    """Of fills on later hits, as `Candidate.kept_hits` takes it."""
    now: float = 0.0
    _rng: np.random.Generator = field(init=False)
    _rate: float = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._rate = self.miss_rate

    @property
    def entry(self) -> Entry:
        """What `ft bench bw` would have stored."""
        return Entry.new(NOW, copy_gbs=self.b_p, read_gbs=self.b_h, formats={KIND: straight(self.b_p, self.b_h)})

    def layer_s(self, q: int, n_cpu: int) -> float:
        s = KIND.expert_bytes / 1e9
        b_p, b_h = self.b_p / self.link_slowdown, self.b_h / self.cpu_slowdown
        left = max(b_h - b_p, 0.2 * b_h)
        return makespan(q * s / b_p, n_cpu * s / left, q * s / b_p, n_cpu * s / b_h)

    def step_s(self, candidate: Candidate, misses: np.ndarray) -> float:
        meeting = 0.0 if candidate.backend == "offload" else self.meeting_s * N_LAYER
        found = [int(row[m]) for row, m in zip(candidate.table, misses, strict=True)]
        each = [self.layer_s(q, int(m) - q) for q, m in zip(found, misses, strict=True)]
        return self.base_s + meeting + sum(each)

    def usual_s(self, candidate: Candidate) -> float:
        """The mean over many steps without noise."""
        rng = np.random.default_rng(99)
        steps = rng.binomial(8, self._usual_rate(candidate), (200, N_LAYER))
        return float(np.mean([self.step_s(candidate, misses) for misses in steps]))

    def _usual_rate(self, candidate: Candidate) -> float:
        return 1.0 - (1.0 - self.miss_rate) * candidate.kept_hits(self.effect)

    def step(self, candidate: Candidate, *, knows_misses: bool = True) -> Sample:
        """One step of a text whose misses come and go slowly, with noise, and now and then an interruption."""
        self._rate += 0.04 * (self._usual_rate(candidate) - self._rate) + self._rng.normal(0, 0.012)
        misses = self._rng.binomial(8, min(max(self._rate, 0.02), 0.95), N_LAYER)
        seconds = self.step_s(candidate, misses) * float(self._rng.lognormal(0, self.noise))
        if self._rng.random() < 0.01:
            seconds *= 4
        self.now += seconds
        if not knows_misses:
            return Sample(seconds)
        return Sample(seconds, int(misses.sum()), hits=8 * N_LAYER - int(misses.sum()))
