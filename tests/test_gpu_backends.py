"""The backends of a model on machines that are made up: the first choice, what is remembered of it, the watch."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
from machines import KIND, MACHINES, N_LAYER, N_MAX, NOW, Machine
from test_measure import make_layer

from freetoken.errors import OptionError
from freetoken.experts.profile import Entry, ExpertFormat, look_up, store
from freetoken.gpu import backends
from freetoken.gpu.backends import Backends, OwnText, Wishes
from freetoken.gpu.calibrate import Candidate, choose
from freetoken.options import EngineOptions, LayerSet

WISHES = Wishes.of(EngineOptions(), N_LAYER)


class Played:
    """An engine whose steps take a made-up machine's time, and end when they are waited for."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, *, counts: bool = True) -> None:
        self.machine, self.has_counts = machine, counts
        self.used: list[Candidate] = []
        self.hits = self.misses = 0
        self.launched: list[tuple[int, int, bool]] = []
        clock = types.SimpleNamespace(perf_counter=lambda: machine.now, monotonic=lambda: machine.now)
        monkeypatch.setattr(backends, "time", clock)
        monkeypatch.setattr(backends, "choose", self._choose)
        monkeypatch.setattr(backends, "ExpertFormat", types.SimpleNamespace(of=lambda layer: KIND))

    def _choose(self, tried: list[Candidate], run: object, *, budget_s: float, effect: float) -> object:
        return choose(tried, run, budget_s=budget_s, effect=effect, clock=lambda: self.machine.now)  # type: ignore[arg-type]

    def make(self, tmp_path: Path, wishes: Wishes = WISHES, what_for: str = "model") -> Backends:
        entry = look_up(NOW, tmp_path).entry or self.machine.entry
        return Backends(
            entry, [make_layer()] * N_LAYER, N_MAX, wishes, self.used.append, what_for=what_for, where=tmp_path
        )

    def launch(self, token: int, position: int, number: float, follows: bool) -> PlayedStep:
        self.launched.append((token, position, follows))
        return PlayedStep(self, self.used[-1])


class PlayedStep:
    def __init__(self, played: Played, candidate: Candidate) -> None:
        self._played, self._candidate = played, candidate
        self._counts: tuple[int, int] | None = None

    def wait(self) -> tuple[list[int], list[int]]:
        sample = self._played.machine.step(self._candidate)
        self._played.misses += sample.misses
        self._played.hits += sample.hits
        self._counts = self._played.hits, self._played.misses
        return [7], [0]

    def counts(self) -> tuple[int, int] | None:
        return self._counts if self._played.has_counts else None


def excess(machine: Machine, made: Backends) -> float:
    return machine.usual_s(made.current) / min(machine.usual_s(c) for c in made.tried) - 1.0


@pytest.mark.parametrize("name", MACHINES)
def test_the_choice_after_loading_is_stored_and_remembered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(*MACHINES[name], seed=1)
    played = Played(machine, monkeypatch)
    store(machine.entry, tmp_path)
    made = played.make(tmp_path)
    assert made.is_undecided and played.used == [made.tried[0]]
    assert machine.usual_s(made.current) < 1.3 * min(machine.usual_s(c) for c in made.tried)
    made.choose(OwnText(played.launch, 3, 50))
    assert excess(machine, made) < 0.1 and played.used[-1] is made.current and machine.now < 2.5
    entry = look_up(NOW, tmp_path).entry
    assert entry is not None and entry.choices["model"]["chosen"] == made.current.name
    again = played.make(tmp_path)
    assert not again.is_undecided and again.current.name == made.current.name
    assert played.make(tmp_path, what_for="another").is_undecided


def test_own_text_follows_itself_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(25.1, 63.2)
    played = Played(machine, monkeypatch)
    played.used.append(backends.candidates(machine.entry, [KIND] * N_LAYER, N_MAX)[0])
    text = OwnText(played.launch, 3, 5)
    samples = [*text.run(4), *text.run(3)]
    assert [p for _, p, _ in played.launched] == [0, 1, 2, 3, 4, 0, 1]
    assert [f for _, _, f in played.launched] == [False, True, True, True, False, False, True]
    assert [t for t, _, _ in played.launched] == [3, 3, 7, 7, 7, 7, 7]
    assert sum(sample.seconds for sample in samples) == pytest.approx(machine.now)
    assert samples[0].misses == -1 and all(s.misses + s.hits == 8 * N_LAYER for s in samples[1:])


def serve(played: Played, made: Backends, seconds: float, n_ahead: int = 2) -> int:
    """Steps of a request, two under way at once."""
    end, n = played.machine.now + seconds, 0
    under_way = [made.watched(played.launch(0, 0, 0.0, False), 1, follows=False)]
    while played.machine.now < end:
        if n_ahead == 2:
            under_way.append(made.watched(played.launch(0, 0, 0.0, True), 1, follows=True))
        under_way.pop(0).wait()
        if n_ahead == 1:
            under_way.append(made.watched(played.launch(0, 0, 0.0, False), 1, follows=False))
        n += 1
    for step in under_way:
        step.wait()
    return n


@pytest.mark.parametrize("counts", [True, False])
def test_requests_are_watched(counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(25.1, 63.2, seed=2, effect=1.0 if counts else 0.0)
    played = Played(machine, monkeypatch, counts=counts)
    made = played.make(tmp_path)
    made.load.sample = lambda now: None  # type: ignore[method-assign]
    serve(played, made, 45)
    assert excess(machine, made) < 0.1
    machine.cpu_slowdown = 5.0
    serve(played, made, 45)
    assert excess(machine, made) < 0.1
    assert played.used[-1] is made.current
    entry = look_up(NOW, tmp_path).entry
    assert entry is not None and entry.choices["model"]["chosen"] == made.current.name
    again = played.make(tmp_path)
    assert (again._effect is not None) == counts


def test_steps_that_do_not_follow_one_another_tell_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(Machine(25.1, 63.2), monkeypatch)
    made = played.make(tmp_path)
    serve(played, made, 20, n_ahead=1)
    assert len(played.used) == 1


def test_without_calibration_the_profile_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wishes = Wishes.of(EngineOptions(moe_calibrate=False), N_LAYER)
    for name, (b_p, b_h) in MACHINES.items():
        machine = Machine(b_p, b_h)
        played = Played(machine, monkeypatch)
        made = played.make(tmp_path / name, wishes)
        serve(played, made, 5)
        assert not made.is_undecided and len(played.used) == 1
        assert excess(machine, made) < 0.3


WISHED: list[tuple[dict[str, object], Callable[[Backends], bool]]] = [
    ({"moe_backend": "offload"}, lambda b: [c.name for c in b.tried] == ["offload"]),
    ({"moe_backend": "cpu"}, lambda b: [c.name for c in b.tried] == ["cpu"]),
    ({"moe_backend": "hybrid"}, lambda b: {c.backend for c in b.tried} == {"hybrid"}),
    ({"moe_hybrid_max_fetch": 1}, lambda b: all(c.table.max() <= 1 for c in b.tried if c.name.startswith("hybrid"))),
    ({"moe_hybrid_min_fill": 1}, lambda b: all(c.table[:, 1].all() for c in b.tried if c.name.startswith("hybrid"))),
    ({"moe_cpu_layers": LayerSet(count=2)}, lambda b: not any(c.table[:2].any() for c in b.tried)),
]


@pytest.mark.parametrize(("options", "holds"), WISHED, ids=[next(iter(case[0])) for case in WISHED])
def test_wishes_are_kept(
    options: dict[str, object], holds: Callable[[Backends], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(Machine(25.1, 63.2), monkeypatch)
    made = played.make(tmp_path, Wishes.of(EngineOptions(**options), N_LAYER))  # type: ignore[arg-type]
    assert holds(made)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(OptionError, match="names layer 24"):
        Wishes.of(EngineOptions(moe_cpu_layers=LayerSet(layers=(24,))), N_LAYER)


def test_without_a_profile_every_way_is_tried() -> None:
    used: list[Candidate] = []
    made = Backends(None, [None, make_layer()], N_MAX, WISHES, used.append)
    assert {c.name for c in made.tried} == {"hybrid", "offload", "cpu"} and made.is_undecided
    assert str(ExpertFormat.of(make_layer())) == "Q4_K 256x256" and Entry.new(NOW).choices == {}
