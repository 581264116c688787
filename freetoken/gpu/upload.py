"""Host memory on its way to the device: through two pinned buffers in turn, on a stream of its own.

A copy from pageable memory waits for the device and for a hidden buffer; and CUDA copies nothing that begins in locked
pages and ends in others, as a weight next to experts may. So the host copies a piece into a pinned buffer while the
device takes the piece before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

__all__ = ["Uploader"]

BUFFER_BYTES = 32 << 20
N_BUFFERS = 2

Place = Callable[[torch.Tensor, int], None]
"""Put a piece (uint8, on the device) that begins at this byte where it belongs."""


class Uploader:
    """Used by one thread. `close` frees the buffers; they come again with the next upload."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._buffers: list[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]] = []
        self._turn = 0

    def send(self, parts: list[torch.Tensor], unit: int, place: Place) -> None:
        """Hand the bytes of `parts` (uint8, one after the other) to `place` in pieces of whole units. What is queued on
        the current stream from now on comes after them; `place` runs on the uploader's."""
        if self._stream is None:
            for first, piece in _pieces(parts, unit, BUFFER_BYTES):
                place(piece, first)
            return
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for first, piece in _pieces(parts, unit, BUFFER_BYTES):
                place(self._sent(piece), first)
        current.wait_stream(self._stream)

    def close(self) -> None:
        """Wait for the last pieces and free the buffers."""
        for _, _, event in self._buffers:
            event.synchronize()
        self._buffers = []

    def _sent(self, piece: torch.Tensor) -> torch.Tensor:
        """The piece on the device, until the turn comes to its buffer again."""
        if len(self._buffers) < N_BUFFERS:
            host = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=self._device)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._buffers.append((host, there, event))
            self._turn = len(self._buffers) - 1
        else:
            self._turn = (self._turn + 1) % N_BUFFERS
        host, there, event = self._buffers[self._turn]
        event.synchronize()  # returns at once where nothing was recorded
        n = piece.numel()
        host[:n].copy_(piece)
        there[:n].copy_(host[:n], non_blocking=True)
        event.record()
        return there[:n]


def _pieces(parts: list[torch.Tensor], unit: int, most: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(first byte, piece) of at most so many bytes, each of whole units, which no part splits."""
    step = max(most // unit, 1) * unit
    first = 0
    for part in parts:
        for at in range(0, part.numel(), step):
            piece = part[at : at + step]
            yield first + at, piece
        first += part.numel()
