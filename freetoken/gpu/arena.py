"""Buffers of one recorded program. What nobody holds any more serves a later launch: they run one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from freetoken.kernels.activations import Activation, empty_activation

__all__ = ["Arena", "Lease"]

T = TypeVar("T")


class Lease(Generic[T]):
    """A buffer in use; it goes back with the last reference to this."""

    def __init__(self, value: T, give_back: Callable[[T], None]) -> None:
        self.value = value
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back(self.value)


class Arena:
    """Buffers on a device, by shape. The programs of one engine may share an arena, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[object, ...], list[object]] = {}

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Lease[torch.Tensor]:
        """A tensor of this shape, its values left over."""
        return self._take(("rows", dtype, *shape), lambda: torch.zeros(shape, dtype=dtype, device=self.device))

    def activation(self, width: int, n: int, cols: int) -> Lease[Activation]:
        """Room for n quantised rows."""
        return self._take((width, n, cols), lambda: empty_activation(width, n, cols, self.device))

    def _take(self, key: tuple[object, ...], make: Callable[[], T]) -> Lease[T]:
        spare = self._free.setdefault(key, [])
        value: T = spare.pop() if spare else make()  # type: ignore[assignment]
        return Lease(value, spare.append)
