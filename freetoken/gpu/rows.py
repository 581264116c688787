"""Memory of a prompt's activations: places by bytes a row, planned once for all lengths of a chunk.

A step of the prompt reads and writes `Ref`s, parts of `Value`s. What nobody reads any more gives its place to what
comes after. Since every value grows with the rows of the chunk alone, one plan serves all: n rows take n times
`Plan.row_bytes`, and the few rows that give logits n_outputs times `Plan.tail_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

__all__ = ["Plan", "Ref", "RowMemory", "Step", "Value", "plan_rows"]

ALIGNMENT = 16
"""Bytes of a row, so that what stands after n rows is aligned too."""


@dataclass(eq=False)
class Value:
    """Rows of `width` elements, for all tokens of a chunk or, `is_tail`, for those whose logits are wanted."""

    width: int
    is_tail: bool
    dtype: torch.dtype = torch.float32
    at: int = 0
    """Bytes a row before it; set by `plan_rows`."""

    @property
    def row_bytes(self) -> int:
        return -(-self.width * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    def ref(self) -> Ref:
        return Ref(self, 0, self.width)


@dataclass(eq=False)
class Ref:
    """Columns [first, first + width) of a value; with `is_last` only its rows whose logits are wanted."""

    value: Value
    first: int
    width: int
    is_last: bool = False

    @cached_property
    def key(self) -> tuple[object, ...]:
        """What tells its tensor from others, once its place is known."""
        v = self.value
        return v.at, v.width, v.dtype, v.is_tail, self.first, self.width, self.is_last


@dataclass(frozen=True)
class Step:
    """What is done to a chunk, and the values that it reads or writes."""

    run: Callable[[Any], None]
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Plan:
    """Bytes that a row of either kind takes."""

    row_bytes: int
    tail_bytes: int

    def n_bytes(self, n: int, n_outputs: int) -> int:
        return self.row_bytes * n + self.tail_bytes * n_outputs


def plan_rows(steps: Sequence[Step]) -> Plan:
    """Give every value of the steps its place, the lowest that is free from its first step to its last."""
    last: dict[int, int] = {id(v): i for i, step in enumerate(steps) for v in step.values}
    tops = [0, 0]
    live: list[Value] = []
    known: set[int] = set()
    for i, step in enumerate(steps):
        for value in step.values:
            if id(value) in known:
                continue
            known.add(id(value))
            value.at = _lowest(value, live)
            live.append(value)
            tops[value.is_tail] = max(tops[value.is_tail], value.at + value.row_bytes)
        live = [v for v in live if last[id(v)] > i]
    return Plan(tops[0], tops[1])


def _lowest(value: Value, live: Sequence[Value]) -> int:
    at = 0
    for other in sorted((v for v in live if v.is_tail == value.is_tail), key=lambda v: v.at):
        if at + value.row_bytes <= other.at:
            break
        at = max(at, other.at + other.row_bytes)
    return at


class RowMemory:
    """The values of one chunk in a buffer of `Plan.n_bytes`."""

    def __init__(self, buffer: torch.Tensor, plan: Plan, n: int, n_outputs: int) -> None:
        self._regions = buffer, buffer[plan.row_bytes * n :]
        self._counts = n, n_outputs
        self._found: dict[tuple[object, ...], torch.Tensor] = {}

    def __getitem__(self, ref: Ref) -> torch.Tensor:
        """[rows, width], rows as far apart as the value is wide."""
        found = self._found.get(ref.key)
        if found is None:
            found = self._found[ref.key] = self._view(ref)
        return found

    def _view(self, ref: Ref) -> torch.Tensor:
        value = ref.value
        n = self._counts[value.is_tail]
        start, n_bytes = value.at * n, value.width * value.dtype.itemsize * n
        rows = self._regions[value.is_tail][start : start + n_bytes].view(value.dtype).view(n, value.width)
        if ref.is_last and not value.is_tail:
            rows = rows[n - self._counts[1] :]
        return rows[:, ref.first : ref.first + ref.width] if ref.width < value.width else rows
