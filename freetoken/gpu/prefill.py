"""Prefill on the GPU: a long chunk of one sequence, with fp16 operands and fp32 sums (docs/numerics.md, section 8).

Rows go into a product as fp16 with a power of two for each; quantised matrices are decoded to fp16 in a scratch of
fixed size; fp32 matrices (routers) are multiplied in fp32. Only the head has the arithmetic of a decode step. All work
is queued on the current stream; a layer of routed experts waits once for its counts (gpu.mixture). The caller runs
`Prefill.run`, which runs the model's `forward` over a `PrefillOps`; nothing here knows an architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from freetoken.batch import Batch, Stopped
from freetoken.blocks import ROPE_BLOCK, Experts, Model, Norm, RopeTable, Weight
from freetoken.experts.stream import ExpertPool, ExpertStream
from freetoken.gpu import driver
from freetoken.gpu.mixture import Keep, Mixture, Scratch, upload
from freetoken.kernels.dequant import PLANES, dequantise
from freetoken.kernels.grouped import Rows, product, tile_for
from freetoken.kernels.matvec import Matrix
from freetoken.kernels.pages import PAGE
from freetoken.kernels.prompt_attention import attend_chunk
from freetoken.kernels.prompt_rows import halve_rows, rms_norm, rotate
from freetoken.kernels.router import route
from freetoken.quants import GgmlType

__all__ = ["DenseWeights", "DevicePages", "Prefill", "PrefillOps"]

F = torch.nn.functional
Tensor = torch.Tensor

MAX_ROPE_BLOCKS = 128
"""Blocks of 256 positions whose angles stay on the device: 16 MiB at a rotation of 128 values."""

LogitsOfRows = Callable[[Tensor, Weight], Tensor]
"""Logits fp32 [n, n_vocab] of rows fp32 [n, n_embd], by the arithmetic of a decode step."""


class DenseWeights(Protocol):
    """Dense matrices and vectors on the device."""

    def part(self, weight: Weight) -> tuple[Matrix, int]:
        """The matrix that holds a weight, and the row at which it starts there."""

    def vector(self, values: np.ndarray) -> Tensor:
        """A norm's weight or a bias, fp32."""

    def embed(self, weight: Weight, tokens: np.ndarray) -> Tensor:
        """Rows of the token embedding, fp32 [n, cols]."""


class DevicePages(Protocol):
    """Pages of keys and values: for each layer [capacity, n_kv, 256, width]."""

    @property
    def k(self) -> Sequence[Tensor]: ...

    @property
    def v(self) -> Sequence[Tensor]: ...


class Prefill:
    """Runs chunks of one sequence. Used by the engine thread only."""

    def __init__(
        self,
        model: Model,
        weights: DenseWeights,
        pages: DevicePages,
        head_logits: LogitsOfRows,
        device: torch.device,
        pool: ExpertPool | None = None,
        *,
        scratch: Scratch | None = None,
        keep: Keep | None = None,
        first_layer: int = 0,
    ) -> None:
        """`pool` holds the routed experts of a model that has some; `keep` may take staged ones over. Layers before
        `first_layer` run elsewhere."""
        self._model = model
        self._first_layer, self._n_layer = first_layer, len(pages.k)
        self._ops = PrefillOps(weights, pages, head_logits, device, pool, scratch or Scratch(device), keep)

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
        plan: str | None = None,
        hidden: np.ndarray | None = None,
    ) -> Tensor:
        """Queue a chunk; logits fp32 [n_outputs, n_vocab] on the device. Raises Stopped. `hidden` fp32 [n, n_embd] are
        the states behind the first `first_layer` layers, which ran elsewhere.

        `between_layers` is called before each layer but the first and may run decode steps of others; it says whether
        experts may have changed slots. `plan` "stream" or "on_demand" overrides the cost model.
        """
        with torch.inference_mode():
            try:
                self._ops.begin(batch, should_stop, between_layers, plan)
                return self._forward(hidden)
            finally:
                self._ops.end()

    def _forward(self, hidden: np.ndarray | None) -> Tensor:
        ops, model = self._ops, self._model
        if hidden is None:
            x: Tensor = model.start(ops)
        else:
            x = upload(hidden, ops.device)
        n_outputs = ops.n_outputs
        x = model.run_layers(ops, x, self._first_layer, self._n_layer)
        logits: Tensor = model.finish(ops, x[len(x) - n_outputs :])
        return logits


class PrefillOps:
    """`blocks.Ops` over fp32 tensors [n, width] on the device. One object serves all chunks."""

    def __init__(
        self,
        weights: DenseWeights,
        pages: DevicePages,
        head_logits: LogitsOfRows,
        device: torch.device,
        pool: ExpertPool | None,
        scratch: Scratch,
        keep: Keep | None = None,
    ) -> None:
        self._weights, self._pages, self._head_logits, self._device = weights, pages, head_logits, device
        self._scratch = scratch
        self._capability = 0
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            self._capability = 10 * major + minor
        copy_function = driver.memcpy_async_address() if device.type == "cuda" else 0
        self._stream = None if pool is None else ExpertStream(pool, device, copy_function)
        self._mixture = None if self._stream is None else Mixture(self._stream, scratch, self._capability, keep)
        banks = [] if pool is None else [layer for layer in pool.layers if layer is not None]
        self._layer_of = {layer.banks[0].name: layer.layer for layer in banks}
        self._addresses: dict[int, Tensor] = {}
        self._planes = torch.full((1,), PLANES, dtype=torch.int32, device=device)
        self._angles: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[int, RopeTable] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def n_outputs(self) -> int:
        """Rows of the chunk whose logits are wanted."""
        return self._batch.n_outputs

    def begin(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
        plan: str | None = None,
    ) -> None:
        """Take the chunk of the next `forward`; `should_stop` is asked once a layer, and then Stopped is raised."""
        self._batch = batch
        self._start = int(batch.positions[0])
        self._should_stop, self._between_layers = should_stop, between_layers
        table = np.ascontiguousarray(batch.page_tables[0], np.int32)
        self._table = upload(table, self._device)
        positions = self._start + np.arange(batch.n)
        pages = np.stack([table[positions // PAGE], positions % PAGE]).astype(np.int64)
        self._places = upload(pages, self._device)
        self._halved: tuple[Tensor, Rows] | None = None
        self._chunk_angles: dict[int, Tensor] = {}
        if self._stream is not None:
            self._stream.begin(batch.n, batch.n_outputs, plan)

    def end(self) -> None:
        """End a chunk, also one that was given up."""
        self._halved = None
        if self._stream is not None:
            self._stream.end()

    # --- products ------------------------------------------------------------------------------------------------

    def embed(self, weight: Weight, scale: float = 1.0) -> Tensor:
        x = self._weights.embed(weight, self._batch.tokens)
        return x if scale == 1.0 else x * scale

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        matrix, first = self._weights.part(weight)
        bias = None if weight.bias is None else self._weights.vector(weight.bias)
        if matrix.type == GgmlType.F32:
            values = matrix.data[: 4 * matrix.rows * matrix.cols].view(torch.float32).view(matrix.rows, matrix.cols)
            y = torch.mm(x, values[first : first + weight.rows].t())
            return y if bias is None else y.add_(bias)
        rows = self._halve(x)
        y = torch.empty((x.shape[0], weight.rows), dtype=torch.float32, device=self._device)
        tile = tile_for(x.shape[0], self._capability)
        step = max(self._scratch.halves.numel() // weight.cols // 256 * 256, 1)
        address = self._address(matrix)
        for row in range(0, weight.rows, step):
            end = min(row + step, weight.rows)
            w = self._scratch.matrices(1, end - row, weight.cols)
            dequantise(matrix.type, address, self._planes, w, matrix_rows=matrix.rows, first_row=first + row)
            product(rows, w[0], y[:, row:end], tile, None if bias is None else bias[row:end])
        return y

    def head(self, x: Tensor, weight: Weight) -> Tensor:
        return self._head_logits(x.contiguous(), weight)

    def _address(self, matrix: Matrix) -> Tensor:
        """int64 [1] on the device."""
        start = matrix.data.data_ptr()
        if start not in self._addresses:
            self._addresses[start] = upload(np.array([start]), self._device)
        return self._addresses[start]

    def _halve(self, x: Tensor) -> Rows:
        """x in fp16 with scales; the same tensor, asked again, is not converted again."""
        if self._halved is None or self._halved[0] is not x:
            n, width = x.shape
            rows = Rows(
                torch.empty((n, width), dtype=torch.float16, device=self._device),
                torch.empty(n, dtype=torch.float32, device=self._device),
            )
            halve_rows(x.contiguous(), rows.x, rows.scale)
            self._halved = x, rows
        return self._halved[1]

    # --- row by row ----------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        width = norm.weight.shape[0]
        out = torch.empty_like(x)
        rms_norm(x.view(-1, width), self._weights.vector(norm.weight), norm.eps, out.view(-1, width))
        return out

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def scale(self, x: Tensor, factor: float, softcap: float = 0.0) -> Tensor:
        x = x * factor
        return softcap * torch.tanh(x / softcap) if softcap else x

    def glu(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        if activation == "gelu":
            return F.gelu(gate, approximate="tanh").mul_(up)
        return F.silu(gate, inplace=True).mul_(up)

    def gated_add(self, x: Tensor, gate: Tensor, base: Tensor) -> Tensor:
        return torch.addcmul(base, x, torch.sigmoid(gate))

    def outputs(self, x: Tensor) -> Tensor:
        return x[x.shape[0] - self._batch.n_outputs :]

    def rope(self, x: Tensor, n_head: int, table: RopeTable) -> Tensor:
        if id(table) not in self._chunk_angles:
            self._chunk_angles[id(table)] = self._angles_of(table)
        rotate(x, self._chunk_angles[id(table)], n_head, is_neox=table.is_neox)
        return x

    def _angles_of(self, table: RopeTable) -> Tensor:
        """Cosines and sines of the chunk's positions, fp32 [n, 2, n_rot / 2]."""
        self._tables[id(table)] = table  # so that no other takes its number
        first, last = self._start // ROPE_BLOCK, (self._start + self._batch.n - 1) // ROPE_BLOCK
        blocks = []
        for block in range(first, last + 1):
            key = id(table), block
            if key not in self._angles:
                if len(self._angles) >= MAX_ROPE_BLOCKS:
                    del self._angles[next(iter(self._angles))]
                positions = np.arange(block * ROPE_BLOCK, (block + 1) * ROPE_BLOCK)
                self._angles[key] = upload(table.cos_sin(positions), self._device)
            blocks.append(self._angles[key])
        at = self._start - first * ROPE_BLOCK
        return torch.cat(blocks)[at : at + self._batch.n]

    # --- attention -----------------------------------------------------------------------------------------------

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        n_head: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        self._between(layer)
        for pages, x in ((self._pages.k[layer], k), (self._pages.v[layer], v)):
            heads = x.view(x.shape[0], pages.shape[1], -1)
            pages[self._places[0], :, self._places[1]] = heads.to(pages.dtype)
        out = torch.empty(
            (q.shape[0], n_head * self._pages.v[layer].shape[3]), dtype=torch.float32, device=self._device
        )
        attend_chunk(
            q, self._pages.k[layer], self._pages.v[layer], self._table, out, start=self._start, n_head=n_head,
            scale=scale, window=window, softcap=softcap, capability=self._capability,
        )  # fmt: skip
        return out

    def _between(self, layer: int) -> None:
        """Between two layers: give up, or let others run."""
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        if layer and self._between_layers is not None and self._between_layers() and self._stream is not None:
            self._stream.refresh()

    # --- experts -------------------------------------------------------------------------------------------------

    def route(
        self,
        logits: Tensor,
        n_used: int,
        *,
        gate: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        n = logits.shape[0]
        ids = torch.empty((n, n_used), dtype=torch.int32, device=self._device)
        weights = torch.empty((n, n_used), dtype=torch.float32, device=self._device)
        extra = None if bias is None else self._weights.vector(bias)
        route(logits, ids, weights, gate=gate, normalise=normalise, scale=scale, bias=extra)
        return ids, weights

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, bank: Experts, activation: str = "silu") -> Tensor:
        assert self._mixture is not None, "a model with experts needs their pool"
        layer = self._layer_of[bank.gate.name]
        return self._mixture.run(layer, self._halve(x), ids, weights, bank, activation)
