"""The profile that the engine goes by: the stored one where it holds, else a measurement of two seconds, stored too.

Called once at start, after the experts' pages are locked; `ft bench bw` takes more time for the same figures.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks
from freetoken.experts.measure import SHORT_COUNTS, CpuSide, Side, alike, measure, n_figures, read_gbs
from freetoken.experts.profile import Conditions, Entry, ExpertFormat, Found, Times, look_up, store
from freetoken.gpu import driver
from freetoken.gpu.fill_bench import GpuFills, copy_gbs
from freetoken.gpu.link import conditions
from freetoken.native import Pool
from freetoken.options import EngineOptions

__all__ = ["OwnProfile", "find_or_measure", "own_profile", "slowed"]

logger = logging.getLogger(__name__)

MEASURE_S = 1.0
"""For all figures together; captures, copies and a first reading take the rest of two seconds."""
MAX_FORMATS = 4
"""Formats that a start measures, those of the most layers; others follow the rates of these."""
LEAST_BYTES = 512 << 20
"""Of a format's layers, that misses come from memory and not from caches."""
WAKE_S = 0.3
FILL_COUNTS = (max(SHORT_COUNTS), 2, 1)
"""Slots to fill into: fewer where the card has no room."""

MakeFills = Callable[[Sequence[LayerBanks], torch.device], Side]


def find_or_measure(
    layers: Sequence[LayerBanks | None],
    device: torch.device,
    pool: Pool,
    ask: Callable[[], Conditions],
    *,
    n_planes: int = 2,
    where: Path | None = None,
    make_fills: MakeFills | None = None,
    measure_s: float = MEASURE_S,
    edges: Sequence[int] = (),
) -> Entry:
    """What holds here and now for the formats of these layers. `ask` gives the conditions (`gpu.link`); `where` is the
    profile's folder; no copy may cross one of `edges` (`Pinned.edges`)."""
    groups = alike(layers, LEAST_BYTES)
    wanted = _commonest(layers)
    found = _find(ask, where, lambda: copy_gbs(groups[wanted[0]], device, edges))
    held = {} if found.entry is None else found.entry.formats
    missing = [kind for kind in wanted if kind not in held or not held[kind].fill]
    if found.entry is not None and not missing:
        logger.info("the split follows the profile of %s", found.entry.measured[:10])
        return found.entry
    reason = found.reason or f"the profile of {found.entry.measured[:10]} lacks {', '.join(map(str, missing))}"  # type: ignore[union-attr]
    logger.info("%s: measuring for two seconds (ft bench bw -m FILE takes more care)", reason)
    started = time.monotonic()
    make = _make_fills if make_fills is None else make_fills
    budget_s = measure_s / (n_figures(SHORT_COUNTS, with_fills=True) * len(missing))
    formats = {}
    b_h = 0.0
    for kind in missing:
        b_h = max(b_h, read_gbs(pool, groups[kind], 0.02))
        side = CpuSide(pool, groups[kind], n_planes)
        formats[kind] = measure(make(groups[kind], device), side, counts=SHORT_COUNTS, budget_s=budget_s)
    entry = Entry.new(ask(), copy_gbs=copy_gbs(groups[wanted[0]], device, edges), read_gbs=b_h, formats=formats)
    logger.info("fills and experts on the CPU measured in %.1f s", time.monotonic() - started)
    if found.entry is not None:
        entry = replace(found.entry.joined(entry), conditions=found.entry.conditions)
    store(entry, where)
    return entry


class OwnProfile:
    """The profile for a model's experts on a card, found or measured when it is first asked for."""

    def __init__(
        self,
        layers: Sequence[LayerBanks | None],
        device: torch.device,
        pool: Callable[[], Pool],
        options: EngineOptions,
        edges: Sequence[int] = (),
    ) -> None:
        """`edges` as in `find_or_measure`."""
        self._layers, self._device, self._pool, self._options = layers, device, pool, options
        self._edges = edges

    @property
    def is_stored(self) -> bool:
        """Whether what is learned may be kept: not of a machine that tests make slower."""
        return not self._options.slow_fills and self._options.slow_cpu <= 1.0

    @functools.cached_property
    def entry(self) -> Entry | None:
        """None where it cannot be measured, which is logged."""
        card = next(card for card in driver.find_devices() if card.index == (self._device.index or 0))
        pool, n_planes = self._pool(), self._options.n_planes
        try:
            found = find_or_measure(
                self._layers,
                self._device,
                pool,
                lambda: conditions(card, pool.n_threads, n_planes),
                n_planes=n_planes,
                edges=self._edges,
            )
        except EngineError as error:
            logger.warning("misses are split without a profile: %s", error)
            return None
        return found if self.is_stored else slowed(found, self._options.slow_fills, self._options.slow_cpu)


def own_profile(
    layers: Sequence[LayerBanks | None],
    device: torch.device,
    pool: Callable[[], Pool],
    options: EngineOptions,
    edges: Sequence[int] = (),
) -> OwnProfile | None:
    """None in Triton's interpreter, where nothing can be measured."""
    return OwnProfile(layers, device, pool, options, edges) if device.type == "cuda" else None


def slowed(entry: Entry, fills: float, cpu: float) -> Entry:
    """The profile of a machine whose fills and experts on the CPU take so many times as long, 0 for once; without what
    was chosen on the real one."""
    by = max(fills, 1.0), max(cpu, 1.0)

    def times(each: dict[int, float], factor: float) -> dict[int, float]:
        return {n: seconds * factor for n, seconds in each.items()}

    formats = {
        kind: Times(times(t.fill, by[0]), times(t.fill_beside, by[0]), times(t.cpu, by[1]), times(t.cpu_beside, by[1]))
        for kind, t in entry.formats.items()
    }
    rates = entry.copy_gbs / by[0], entry.read_gbs / by[1]
    return replace(entry, copy_gbs=rates[0], read_gbs=rates[1], formats=formats, choices={})


def _commonest(layers: Sequence[LayerBanks | None]) -> list[ExpertFormat]:
    """The formats to know, those of the most layers first."""
    kinds = [ExpertFormat.of(layer) for layer in layers if layer is not None]
    return sorted(set(kinds), key=lambda kind: (-kinds.count(kind), str(kind)))[:MAX_FORMATS]


def _find(ask: Callable[[], Conditions], where: Path | None, work: Callable[[], object]) -> Found:
    """What is stored. A card that idles runs its link slower, so it gets work before that counts as a difference."""
    now = ask()
    found = look_up(now, where)
    began = time.monotonic()
    while found.entry is None and found.is_link_only and time.monotonic() - began < WAKE_S:
        work()
        found = look_up(ask(), where)
    return found


def _make_fills(layers: Sequence[LayerBanks], device: torch.device) -> Side:
    for n in FILL_COUNTS[:-1]:
        try:
            return GpuFills(layers, device, n)
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
    return GpuFills(layers, device, FILL_COUNTS[-1])
