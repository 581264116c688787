"""What changes from step to step, at fixed addresses on the device: positions, page tables, embeddings, rope angles.

The host writes a pinned mirror and copies it in one piece; a captured step reads the device's side only.
"""

from __future__ import annotations

import numpy as np
import torch

from freetoken import native
from freetoken.batch import Batch
from freetoken.blocks import ROPE_BLOCK, RopeTable, Weight
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.rope import Angles

__all__ = ["Inputs"]


class Inputs:
    """`positions` int32 [8], `page_table` int32 [8, max_pages], and embeddings fp32 [8, width]."""

    def __init__(self, pool: native.Pool, max_pages: int, n_embd: int, spare_page: int, device: torch.device) -> None:
        self._pool = pool
        self._max_pages = max_pages
        self._spare_page = spare_page
        self._device = device
        n_table = MAX_TOKENS * max_pages
        sizes = (MAX_TOKENS, n_table, MAX_TOKENS * n_embd)
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=is_cuda)
        self._device_side = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._mirror = _parts(self._host, sizes, max_pages)
        self.positions, self.page_table, self._embedding = _parts(self._device_side, sizes, max_pages)
        self._embedded: tuple[Weight, float] | None = None
        self._tables: dict[int, tuple[RopeTable, torch.Tensor, set[int]]] = {}
        self.n_processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1

    def embedding(self, weight: Weight, scale: float) -> torch.Tensor:
        """Where the rows of the batch's tokens come to stand, fp32 [8, width]."""
        self._embedded = weight, scale
        return self._embedding

    def angles(self, table: RopeTable, n: int) -> Angles:
        """Cosines and sines of all positions, and which of them n tokens take."""
        if id(table) not in self._tables:
            n_positions = self._max_pages * ROPE_BLOCK
            values = torch.zeros((n_positions, 2, table.n_rot // 2), dtype=torch.float32, device=self._device)
            self._tables[id(table)] = table, values, set()
        return Angles(self._tables[id(table)][1], self.positions[:n], table.is_neox)

    def fill(self, batch: Batch) -> None:
        """Copy a batch in. The copy before must be over: its reader has answered."""
        n = batch.n
        positions, page_table, embedding = (part.numpy() for part in self._mirror)
        positions[:n] = batch.positions
        for row, pages in enumerate(batch.page_tables):
            page_table[row, : len(pages)] = pages
        if self._embedded is not None:
            weight, scale = self._embedded
            rows = np.ascontiguousarray(weight.data[batch.tokens])
            self._pool.dequantize(weight.type, rows, embedding[:n])
            embedding[:n] *= np.float32(scale)
        self._device_side.copy_(self._host, non_blocking=True)
        for block in {int(p) // ROPE_BLOCK for p in batch.positions}:
            self._upload_angles(block)

    def fill_trial(self, n: int) -> None:
        """Inputs of a run whose results nobody wants: it writes to the spare page."""
        pages = np.full(self._max_pages, self._spare_page, np.int32)
        zeros = np.zeros(n, np.int32)
        self.fill(Batch(zeros, zeros, [pages] * n, n))

    def _upload_angles(self, block: int) -> None:
        for table, values, blocks in self._tables.values():
            if block not in blocks:
                positions = np.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK)
                part = torch.from_numpy(table.cos_sin(positions))
                values[block * ROPE_BLOCK : (block + 1) * ROPE_BLOCK].copy_(part)
                blocks.add(block)


def _parts(all_of_it: torch.Tensor, sizes: tuple[int, ...], max_pages: int) -> tuple[torch.Tensor, ...]:
    positions, table, embedding = all_of_it.split(sizes)
    return positions, table.view(MAX_TOKENS, max_pages), embedding.view(torch.float32).view(MAX_TOKENS, -1)
