"""The work folder and the clock: files appear whole or not at all, and every stage ends by itself in time."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Clock", "load_json", "save_arrays", "save_json", "say"]

STARTED = time.monotonic()


def say(stage: str, text: str) -> None:
    """One line of progress with the seconds since the program started."""
    print(f"[{time.monotonic() - STARTED:7.1f} s] {stage}: {text}", flush=True)


class Clock:
    """A stage's time: `is_over` after `budget_s` seconds, `is_due` once in `every_s` seconds."""

    def __init__(self, budget_s: float, every_s: float = 10.0) -> None:
        self.started = time.monotonic()
        self.budget_s = budget_s
        self._every_s = every_s
        self._last = self.started

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def is_over(self) -> bool:
        return self.elapsed_s >= self.budget_s

    def is_due(self) -> bool:
        """True at most once in `every_s` seconds."""
        now = time.monotonic()
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an uncompressed .npz beside its place, then move it there."""
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        np.savez(file, **{name: np.asarray(array) for name, array in arrays.items()})  # type: ignore[arg-type]
    os.replace(partial, path)


def save_json(path: Path, value: object) -> None:
    """Write JSON beside its place, then move it there."""
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=1), encoding="utf-8")
    os.replace(partial, path)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is no file."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
