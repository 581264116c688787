"""Memory that each step of a prompt may use until the next: decoded matrices, hidden rows of feed-forward parts."""

from __future__ import annotations

import math

import numpy as np
import torch

__all__ = ["Room", "Scratch", "upload"]

SMALL_BYTES = 32 << 10
MIN_BYTES = 1 << 16


class Scratch:
    """A buffer of a fixed size whatever the model. Rows may take a share of it; the rest is for fp16 matrices."""

    def __init__(self, device: torch.device, n_bytes: int) -> None:
        self.buffer = torch.empty(max(n_bytes, MIN_BYTES) // 256 * 256, dtype=torch.uint8, device=device)
        self.halves = self.buffer.view(torch.float16)
        self.rows_bytes = self.buffer.numel() * 5 // 14

    def for_rows(self, row_bytes: int, n: int) -> tuple[Room, int]:
        """An empty room, and how many of n rows of so many bytes its share for rows holds."""
        return Room(self.buffer), max(min(n, (self.rows_bytes - 4 * 256) // (row_bytes + 4)), 1)


class Room:
    """Tensors one after another in one buffer, each from a multiple of 256 bytes."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        n_bytes = math.prod(shape) * dtype.itemsize
        part = self._buffer[self._at : self._at + n_bytes].view(dtype).view(shape)
        self._at += -(-n_bytes // 256) * 256
        return part

    def rest(self) -> torch.Tensor:
        """What is left, as fp16."""
        return self._buffer[self._at :].view(torch.float16)


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array on the device, without waiting: the driver takes a copy of small ones at once."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    return (tensor.pin_memory() if tensor.nbytes > SMALL_BYTES else tensor).to(device, non_blocking=True)
