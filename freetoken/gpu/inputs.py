"""What changes from step to step, at fixed addresses on the device: tokens, positions, page tables, what the sampler is
told, rope angles.

The host writes a pinned mirror and copies it in one piece; a captured step reads the device's side only. There are
several mirrors, so that a step can be prepared while the ones before it still run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetoken.batch import Batch
from freetoken.blocks import ROPE_BLOCK, RopeTable
from freetoken.kernels.activations import MAX_TOKENS
from freetoken.kernels.bias import N_BIASES
from freetoken.kernels.rope import Angles
from freetoken.kernels.sampler import N_FIELDS

__all__ = ["N_MIRRORS", "Draws", "Inputs"]

N_MIRRORS = 4
"""Steps whose inputs may be on their way at once, and one more."""


@dataclass(frozen=True)
class Draws:
    """What the sampler is told of n rows: `params` int32 [n, N_FIELDS], `biases` int32 [n, 2, N_BIASES], and `uniforms`
    fp64 [n]."""

    params: np.ndarray
    biases: np.ndarray
    uniforms: np.ndarray


class Inputs:
    """`uniforms` fp64 [8], `params` int32 [8, N_FIELDS] (kernels.sampler), `biases` int32 [8, 2, N_BIASES]
    (kernels.bias), `positions` and `tokens` int32 [8], `page_table` int32 [8, max_pages]."""

    def __init__(self, max_pages: int, spare_page: int, device: torch.device) -> None:
        self._max_pages = max_pages
        self._spare_page = spare_page
        self._device = device
        of_rows = [2, N_FIELDS, 2 * N_BIASES, 1, max_pages, 1]
        self._sizes = [MAX_TOKENS * size for size in of_rows]
        is_cuda = device.type == "cuda"
        self._on_device = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        uniforms, params, biases, self.positions, table, self.tokens = torch.split(self._on_device, self._sizes)
        self.biases = biases.view(MAX_TOKENS, 2, N_BIASES)
        self.uniforms = uniforms.view(torch.float64)
        self.params = params.view(MAX_TOKENS, N_FIELDS)
        self.page_table = table.view(MAX_TOKENS, max_pages)
        self._mirrors = [torch.zeros(sum(self._sizes), dtype=torch.int32, pin_memory=is_cuda) for _ in range(N_MIRRORS)]
        self._parts = [[part.numpy() for part in torch.split(mirror, self._sizes)] for mirror in self._mirrors]
        self._turn = 0
        self._hidden: torch.Tensor | None = None
        self._tables: dict[int, tuple[RopeTable, torch.Tensor, set[int]]] = {}
        self.n_processors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1

    def angles(self, table: RopeTable, n: int) -> Angles:
        """Cosines and sines of all positions, and which of them n tokens take."""
        if id(table) not in self._tables:
            n_positions = self._max_pages * ROPE_BLOCK
            values = torch.zeros((n_positions, 2, table.n_rot // 2), dtype=torch.float32, device=self._device)
            self._tables[id(table)] = table, values, set()
        return Angles(self._tables[id(table)][1], self.positions[:n], table.is_neox)

    def hidden(self, width: int) -> torch.Tensor:
        """Where hidden states of layers that ran elsewhere come to stand, fp32 [8, width]; not between steps under
        way."""
        if self._hidden is None:
            self._hidden = torch.zeros((MAX_TOKENS, width), dtype=torch.float32, device=self._device)
        return self._hidden

    def fill(
        self,
        batch: Batch,
        draws: Draws | None = None,
        *,
        keep_tokens: bool = False,
        hidden: np.ndarray | None = None,
    ) -> None:
        """Copy a batch in; with `keep_tokens` its tokens are those that stand on the device already. `hidden` fp32 [n,
        width] goes with a batch whose first layers ran elsewhere.

        At most N_MIRRORS - 1 batches may wait for the device when this is called.
        """
        n = batch.n
        self._turn = (self._turn + 1) % N_MIRRORS
        uniforms, params, biases, positions, page_table, tokens = self._parts[self._turn]
        if draws is not None:
            uniforms.view(np.float64)[:n] = draws.uniforms
            params[: n * N_FIELDS] = draws.params.reshape(-1)
            biases[: n * 2 * N_BIASES] = draws.biases.reshape(-1)
        positions[:n] = batch.positions
        rows = page_table.reshape(MAX_TOKENS, self._max_pages)
        for row, pages in enumerate(batch.page_tables):
            rows[row, : len(pages)] = pages
        tokens[:n] = batch.tokens
        size = len(self._on_device) - (MAX_TOKENS if keep_tokens else 0)
        self._on_device[:size].copy_(self._mirrors[self._turn][:size], non_blocking=True)
        if hidden is not None:
            self.hidden(hidden.shape[1])[:n].copy_(torch.from_numpy(hidden))
        for block in {int(p) // ROPE_BLOCK for p in batch.positions}:
            self._upload_angles(block)

    def fill_trial(self, n: int) -> None:
        """Inputs of a run whose results nobody wants: it writes to the spare page."""
        zeros = np.zeros(n, np.int32)
        self.fill(Batch(zeros, zeros, [self.spare_pages] * n, n))

    def use_spare(self, page: int) -> None:
        """From now on trial runs write to this page."""
        self._spare_page = page

    @property
    def spare_pages(self) -> np.ndarray:
        """A page table of the spare page alone, int32 [max_pages]."""
        return np.full(self._max_pages, self._spare_page, np.int32)

    def _upload_angles(self, block: int) -> None:
        for table, values, blocks in self._tables.values():
            if block not in blocks:
                positions = np.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK)
                part = torch.from_numpy(table.cos_sin(positions))
                values[block * ROPE_BLOCK : (block + 1) * ROPE_BLOCK].copy_(part)
                blocks.add(block)
