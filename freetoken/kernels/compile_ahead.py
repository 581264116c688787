"""Compiles and loads the kernels of a program before its first launch, several at once, and tells how far it is.

Triton compiles a kernel when it is launched, one after another: a minute for a model on the very first start, although
the compiler leaves Python's lock to others. With what it compiled on disk the same takes a fraction of a second.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # an older Triton: kernels are compiled one by one as they are launched
    AsyncCompileMode = active_mode = None

__all__ = ["compile_ahead", "listening"]

logger = logging.getLogger(__name__)

MAX_THREADS = 8
ALIGNMENT = 16
"""Of a pointer: what Triton compiles a kernel for."""
Launch = Callable[[], None]


class _Loading:
    """An executor whose jobs also load the kernel that they compiled, and count it."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device, on_kernel: Callable[[int, int], None]) -> None:
        self._pool, self._device, self._on_kernel = pool, device, on_kernel
        self._lock = threading.Lock()
        self._n, self._n_done = 0, 0
        self.n_compiled = 0

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:
        self._n += 1
        return self._pool.submit(self._work, compile_kernel)

    def _work(self, compile_kernel: Callable[[], Any]) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        kernel = compile_kernel()
        kernel._init_handles()
        with self._lock:
            self._n_done += 1
            self._on_kernel(self._n_done, self._n)
        return kernel

    def count(self) -> None:
        """One more kernel that was not on disk."""
        with self._lock:
            self.n_compiled += 1


@contextmanager
def listening(on_compiled: Callable[[], None]) -> Iterator[None]:
    """Within it `on_compiled` hears of each kernel that was not on disk, from whichever thread compiles it."""

    def hear(*, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            on_compiled()

    with knobs.compilation.scope():
        knobs.compilation.listener = hear
        yield


def first_of_each_kind(launches: Sequence[Launch]) -> Iterator[Launch]:
    """A step launches the same few kernels in every layer."""
    seen: set[Hashable] = set()
    for launch in launches:
        kind = kind_of(launch)
        if kind not in seen:
            seen.add(kind)
            yield launch


def kind_of(value: Any) -> Hashable:
    """Equal for what is compiled alike: tensors by type, shape and alignment, numbers by value, other objects by their
    fields or as themselves. Where two that differ are taken for one, the second is compiled at its launch."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % ALIGNMENT
    if isinstance(value, partial):
        return kind_of(value.func), kind_of(value.args), kind_of(value.keywords)
    if isinstance(value, MethodType):
        return value.__func__, id(value.__self__)
    if isinstance(value, dict):
        return tuple((key, kind_of(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(kind_of, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(kind_of(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value if value is None or isinstance(value, bool | int | float | str) else id(value)


def compile_ahead(
    launches: Sequence[Launch], device: torch.device, on_kernel: Callable[[int, int], None] = lambda done, n: None
) -> int:
    """Compile and load what the launches use and nothing has used before; launches no kernel, but what else the first
    of each kind does is done. `on_kernel` hears, from any thread, how many kernels are ready of those met so far.
    Returns how many were not on disk.

    Uses what Triton does not promise: where that is missing or fails, the first launch compiles as ever.
    """
    if AsyncCompileMode is None:
        return 0
    run = JITFunction.run
    n_compiled = 0

    mine = threading.get_ident()

    def meet(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == mine, **options)

    n_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1)))
    try:
        with ThreadPoolExecutor(n_threads, thread_name_prefix="compile") as pool:
            loading = _Loading(pool, device, on_kernel)
            with listening(loading.count), AsyncCompileMode(loading, ignore_errors=True):
                JITFunction.run = meet
                try:
                    for launch in first_of_each_kind(launches):
                        launch()
                finally:
                    JITFunction.run = run
            n_compiled = loading.n_compiled
    except Exception as error:
        logger.info("kernels are compiled one by one: %s: %s", type(error).__name__, error)
        active_mode.set(None)
    return n_compiled
