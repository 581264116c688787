"""What a start on a GPU need not do one after another: torch and Triton are imported in a thread of their own (seconds)
while the file is opened, its vocabulary read and its experts' pages are locked.

Called by the runner, and by `ft serve` as soon as its port is open; imports no torch itself.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from freetoken.beside import beside
from freetoken.errors import EngineError
from freetoken.experts.bank import LayerBanks, expert_banks
from freetoken.experts.pin import Pinned, Rung, pin_banks
from freetoken.gguf import ModelFile
from freetoken.gpu import driver
from freetoken.gpu.driver import Device
from freetoken.gpu.verdict import survey
from freetoken.options import EngineOptions
from freetoken.plan import first_gpu_layer
from freetoken.spec import ModelSpec

__all__ = ["Start", "begin", "import_where_usable", "modules", "pin_experts", "pinned_memory", "timed"]

logger = logging.getLogger(__name__)

N_PIN_THREADS = 4
ROOM_BYTES = 4 << 30
"""For all that is no weight. A context that takes more leaves some experts to be locked later."""
_METAS = "torch._meta_registrations"


class Start:
    """What has begun for a file on a card. `free_bytes` of the card before it; `take` gives the locked experts, `drop`
    unlocks them where nobody took them."""

    def __init__(self, free_bytes: int, pinning: Future[Pinned] | None, first_layer: int = 0) -> None:
        """`pinning` locks the experts of the layers from `first_layer` on."""
        self.free_bytes = free_bytes
        self._pinning, self._first_layer = pinning, first_layer

    def take(self, first_layer: int = 0) -> Pinned | None:
        """The locked experts of the layers from this one on, once they are; None where others are or none were begun.
        The caller's to close. Raises EngineError."""
        if first_layer != self._first_layer:
            self.drop()
        pinning, self._pinning = self._pinning, None
        return None if pinning is None else pinning.result()

    def drop(self) -> None:
        """Give up what has begun; nothing after `take`."""
        pinning, self._pinning = self._pinning, None
        if pinning is not None and pinning.exception() is None:
            pinning.result().close()


def begin(file: ModelFile, spec: ModelSpec, card: Device, options: EngineOptions) -> Start:
    """Import, and lock the experts unless all of them will be on the card; returns when its memory is known."""
    modules()
    with timed("context"):
        free_bytes = driver.free_bytes(card.index)
    first = first_gpu_layer(options.n_gpu_layers, spec.n_layer)
    if not spec.is_moe or first >= spec.n_layer or _has_room_for_all(file, options, free_bytes):
        return Start(free_bytes, None)
    layers = [None if i < first else layer for i, layer in enumerate(expert_banks(spec, file))]
    return Start(free_bytes, beside("pin", lambda: pin_experts(layers, card.index)), first)


def _has_room_for_all(file: ModelFile, options: EngineOptions, free_bytes: int) -> bool:
    """Whether the plan will keep every expert on the card, as far as that can be told before torch is there."""
    is_free = options.moe_cache_auto and options.moe_backend in ("auto", "fused")
    has_rules = options.cpu_moe or options.n_cpu_moe or options.override_tensors
    n_bytes = sum(tensor.n_bytes for tensor in file.tensors.values())
    return is_free and not has_rules and n_bytes + ROOM_BYTES < free_bytes * options.memory_ratio


def import_where_usable(options: EngineOptions) -> None:
    """Begin the import if the engine will run on a card; returns at once, and says nothing: the runner does."""

    def look() -> None:
        if not options.is_gpu_off and options.gpu is not None and survey(options.gpu).is_usable:
            modules()

    beside("look-for-gpu", look)


@functools.cache
def modules() -> Future[Any]:
    """`freetoken.gpu.model`, with torch and Triton; begun by the first call."""
    return beside("import-gpu", _import)


def pin_experts(layers: Sequence[LayerBanks | None], device: int) -> Pinned:
    """Lock the experts' pages for a card. Raises EngineError where the system lets it read some of them not at all."""
    pinned = pin_banks(
        layers,
        partial(driver.register, device=device, private=driver.private_mappings()),
        partial(driver.unregister, device=device),
        allocate=pinned_memory,
        n_threads=N_PIN_THREADS,
    )
    if Rung.PAGEABLE in pinned.rungs:
        pinned.close()
        raise EngineError(
            f"{pinned.n_bytes(Rung.PAGEABLE) / 2**20:.0f} MiB of experts can be neither locked in place nor copied "
            "to locked memory: raise the limit on locked memory (ulimit -l), or run on the CPU with -ngl 0"
        )
    return pinned


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Within it a phase of the start runs, whose seconds go to the log at debug level."""
    started = time.monotonic()
    yield
    logger.debug("start: %s took %.3f s", phase, time.monotonic() - started)


def _import() -> Any:
    with timed("import of triton"):
        triton = importlib.import_module("triton")
        importlib.import_module("triton.language.extra.cuda")
    if "TRITON_STORE_BINARY_ONLY" not in os.environ:
        _keep_binaries_only(triton)
    beside("triton-key", _compute_key)
    with timed("import of torch"), _without_metas():
        importlib.import_module("torch")
    with timed("import of the GPU engine"):
        return importlib.import_module("freetoken.gpu.model")


@contextmanager
def _without_metas() -> Iterator[None]:
    """A third of torch's import registers shape functions for tensors without memory, which only its compiler and its
    `meta` device ask for; they import the module themselves when they come to it."""
    if "torch" in sys.modules or _METAS in sys.modules:
        yield
        return
    sys.modules[_METAS] = types.ModuleType(_METAS)
    try:
        yield
    finally:
        sys.modules.pop(_METAS, None)


def _keep_binaries_only(triton: Any) -> None:
    """Intermediate code of a kernel is ten times its binary, and would be read with it at every start."""
    knobs: Any = getattr(getattr(triton, "knobs", None), "compilation", None)
    if knobs is not None and hasattr(knobs, "store_binary_only"):
        knobs.store_binary_only = True


def _compute_key() -> None:
    """The part of Triton's cache keys that is a hash of its own library, hundreds of MB: computed once a process, so
    ahead of the first kernel. A wish, not a need."""
    with timed("Triton's key"):
        for module in ("triton.runtime.cache", "triton.compiler.compiler"):
            key: Callable[[], str] | None = getattr(importlib.import_module(module), "triton_key", None)
            if key is not None:
                key()
                return


def pinned_memory(n_bytes: int) -> np.ndarray | None:
    """Locked memory, uint8 [n_bytes]; None where there is none left."""
    torch = importlib.import_module("torch")
    try:
        found: np.ndarray = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError:
        return None
    return found
