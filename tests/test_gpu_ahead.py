"""What a start on a GPU begins beside the import of torch, and how it is given up."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_verdict import CARD

from freetoken import quants
from freetoken import runner as runner_module
from freetoken.beside import beside
from freetoken.errors import EngineError
from freetoken.gguf import open_model
from freetoken.gpu import ahead
from freetoken.gpu.upload import Uploader, _pieces
from freetoken.kernels import layout
from freetoken.options import EngineOptions
from freetoken.quants import GgmlType
from freetoken.runner import Runner
from freetoken.spec import read_spec
from tools import tiny_models

Patch = pytest.MonkeyPatch


class Pinned:
    def __init__(self) -> None:
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


@dataclasses.dataclass
class Spec:
    is_moe: bool = True
    n_layer: int = 3


@dataclasses.dataclass
class File:
    """`begin` asks how large its tensors are."""

    n_bytes: int

    @property
    def tensors(self) -> dict[str, File]:
        return {"all": self}


FILE: Any = File(10 << 30)


@pytest.fixture
def events(monkeypatch: Patch) -> list[str]:
    """Every step of `begin` is noted, and needs no card."""
    found: list[str] = []

    def note(name: str, value: Any) -> Any:
        return lambda *_: (found.append(name), value)[1]

    monkeypatch.setattr(ahead, "modules", note("import", None))
    monkeypatch.setattr(ahead.driver, "free_bytes", note("memory", 123))
    monkeypatch.setattr(ahead, "expert_banks", note("banks", ["a", "b", "c"]))
    monkeypatch.setattr(ahead, "pin_experts", lambda layers, _: (found.append(f"pin {layers}"), Pinned())[1])
    return found


def test_the_import_comes_first_and_memory_before_it_is_locked(events: list[str]) -> None:
    start = ahead.begin(FILE, Spec(), CARD, EngineOptions())  # type: ignore[arg-type]
    assert start.free_bytes == 123
    pinned = start.take()
    assert events == ["import", "memory", "banks", "pin ['a', 'b', 'c']"]
    start.drop()
    assert pinned.n_closed == 0 and start.take() is None, "whoever took them closes them"  # type: ignore[union-attr]


def test_without_experts_nothing_is_locked(events: list[str]) -> None:
    assert ahead.begin(FILE, Spec(is_moe=False), CARD, EngineOptions()).take() is None  # type: ignore[arg-type]
    assert events == ["import", "memory"]


@pytest.mark.parametrize(
    ("free_gib", "wishes", "is_locked"),
    [
        (20, {}, False),
        (12, {}, True),
        (20, {"moe_backend": "offload"}, True),
        (20, {"moe_cache_rate": 0.5}, True),
        (20, {"n_cpu_moe": 1}, True),
        (20, {"n_gpu_layers": 1}, False),
    ],
)
def test_where_all_experts_fit_on_the_card_none_is_locked(
    free_gib: int, wishes: dict[str, Any], is_locked: bool, events: list[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(ahead.driver, "free_bytes", lambda _: free_gib << 30)
    start = ahead.begin(FILE, Spec(), CARD, EngineOptions(**wishes))  # type: ignore[arg-type]
    assert (start.take() is not None) == is_locked


def test_only_layers_on_the_card_are_locked(events: list[str]) -> None:
    start = ahead.begin(FILE, Spec(), CARD, EngineOptions(n_gpu_layers=2))  # type: ignore[arg-type]
    assert start.take(2) is not None
    assert events[-1] == "pin [None, None, 'c']"
    start = ahead.begin(FILE, Spec(), CARD, EngineOptions(n_gpu_layers=2))  # type: ignore[arg-type]
    assert start.take(1) is None, "others are wanted than were locked"


def test_what_nobody_takes_is_unlocked() -> None:
    pinned: Any = Pinned()
    start = ahead.Start(0, beside("pin", lambda: pinned))
    start.drop()
    start.drop()
    assert pinned.n_closed == 1


def test_a_refusal_comes_to_whoever_takes() -> None:
    def refuse() -> Any:
        raise EngineError("ulimit")

    with pytest.raises(EngineError, match="ulimit"):
        ahead.Start(0, beside("pin", refuse)).take()
    ahead.Start(0, beside("pin", refuse)).drop()


def test_a_plan_that_fails_gives_the_pages_back(tmp_path: Any, monkeypatch: Patch) -> None:

    pinned: Any = Pinned()
    monkeypatch.setattr(runner_module, "choose_device", lambda options: CARD)
    monkeypatch.setattr(ahead, "begin", lambda *_: ahead.Start(0, beside("pin", lambda: pinned)))

    def fails() -> Any:
        raise EngineError("no torch")

    monkeypatch.setattr(runner_module, "import_gpu", fails)
    path = tiny_models.write(tmp_path / "m.gguf", "olmoe", n_layer=1)
    with open_model(path) as file, pytest.raises(EngineError, match="no torch"):
        Runner(file, read_spec(file), EngineOptions(n_threads=1), n_ctx=64)
    assert pinned.n_closed == 1


def test_beside_runs_at_once_and_hands_errors_over() -> None:
    go = threading.Event()
    waiting: Future[bool] = beside("wait", lambda: go.wait(10))
    assert not waiting.done()
    go.set()
    assert waiting.result(10)
    with pytest.raises(ZeroDivisionError):
        beside("fail", lambda: 1 // 0).result(10)


def test_the_modules_come_with_triton_set_up() -> None:
    code = (
        "from freetoken.gpu import ahead; import sys; assert 'torch' not in sys.modules;"
        "m = ahead.modules().result(); assert m.__name__ == 'freetoken.gpu.model' and ahead.modules().result() is m;"
        "assert 'torch._meta_registrations' not in sys.modules; import torch._meta_registrations as metas;"
        "assert metas.meta_index_Tensor; import torch; assert (torch.zeros(3, device='meta') + 1).shape == (3,);"
        "import triton; assert triton.knobs.compilation.store_binary_only"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("type_id", [GgmlType.Q6_K, GgmlType.Q8_0, GgmlType.Q4_K])
def test_blocks_relayed_in_pieces_lie_as_at_once(type_id: GgmlType) -> None:
    unit, n = quants.TYPES[type_id].block_bytes, 24
    raw = torch.from_numpy(np.random.default_rng(3).integers(0, 256, unit * n, np.uint8))
    want, found = (torch.zeros(layout.plane_offsets(type_id, n)[-1], dtype=torch.uint8) for _ in range(2))
    layout.relay(type_id, raw, want)
    parts = [raw[: 5 * unit], raw[5 * unit :]]
    for first, piece in _pieces(parts, unit, 4 * unit + 1):
        assert len(piece) <= 4 * unit
        layout.relay(type_id, piece, found, first=first // unit, n_blocks=n)
    assert torch.equal(found, want)
    found.zero_()
    Uploader(torch.device("cpu")).send(
        parts, unit, lambda piece, at: layout.relay(type_id, piece, found, first=at // unit, n_blocks=n)
    )
    assert torch.equal(found, want)
