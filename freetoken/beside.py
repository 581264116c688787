"""Work in a thread of its own, and its result when somebody asks: for what a start can do at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["beside"]

T = TypeVar("T")


def beside(name: str, work: Callable[[], T]) -> Future[T]:
    """Begin `work`; the future has its result or what it raised. The process does not end before it: an import that the
    interpreter's end interrupts can crash."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name).start()
    return future
