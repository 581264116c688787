"""Products of a prompt's rows with dense matrices: decoded on the way for few rows, through the scratch for many."""

from __future__ import annotations

import torch

from freetoken.blocks import Weight
from freetoken.gpu.scratch import Scratch
from freetoken.kernels.coded import CodedMatrices, can_be_coded, coded_product, coded_tile
from freetoken.kernels.dequant import PLANES, dequantise
from freetoken.kernels.glu import ACTIVATIONS
from freetoken.kernels.grouped import Rows, glu_product, product, tile_for
from freetoken.kernels.matvec import TYPE_CLASS, Matrix
from freetoken.kernels.prompt_float import float_product
from freetoken.kernels.prompt_rows import halve_rows
from freetoken.quants import GgmlType

__all__ = ["Dense", "Part", "takes_floats"]

F = torch.nn.functional

CODED_ROWS = 64
"""Up to so many rows are multiplied without a scratch: beyond, decoding each weight again for every tile costs more."""


def takes_floats(weight: Weight) -> bool:
    """Whether a weight's products take fp32 rows: types without a kernel are kept as fp32."""
    return weight.type == GgmlType.F32 or weight.type not in TYPE_CLASS


class Part:
    """Rows [first, first + rows) of a matrix, with the bias fp32 [rows] of its product."""

    def __init__(self, matrix: Matrix, first: int, rows: int, bias: torch.Tensor | None = None) -> None:
        self.matrix, self.first, self.rows, self.bias = matrix, first, rows, bias
        self.cols, self.type = matrix.cols, matrix.type

    @property
    def is_float(self) -> bool:
        """Whether products are with fp32 rows."""
        return self.type == GgmlType.F32

    def continues(self, other: Part) -> bool:
        """Whether these rows follow another part's."""
        return self.matrix is other.matrix and self.first == other.first + other.rows

    @property
    def floats(self) -> torch.Tensor:
        """The values of an fp32 matrix, [rows, cols]."""
        values = self.matrix.data.view(torch.float32)
        return values[self.first * self.cols : (self.first + self.rows) * self.cols].view(self.rows, self.cols)


class Dense:
    """Multiplies for one device. `capability` as in grouped.tile_for."""

    def __init__(self, scratch: Scratch, capability: int, device: torch.device) -> None:
        self._scratch, self._capability, self._device = scratch, capability, device
        self._planes = torch.full((1,), PLANES, dtype=torch.int32, device=device)
        self._coded: dict[int, CodedMatrices] = {}

    def product(self, x: Rows | torch.Tensor, part: Part, y: torch.Tensor, w: torch.Tensor | None = None) -> None:
        """y fp32 [n, rows] (rows may lie apart) = x times a part, plus its bias. `w`: fp16 room for decoded rows."""
        n = y.shape[0]
        if isinstance(x, torch.Tensor):
            float_product(x, part.floats, y, part.bias)
        elif self._is_coded(n, part):
            tile = coded_tile(n, self._capability)
            coded_product(self._matrices(part.matrix), x, y, tile, first_row=part.first, bias=part.bias)
        elif n:
            self._through_scratch(x, part, y, self._scratch.halves if w is None else w)

    def _is_coded(self, n: int, part: Part) -> bool:
        return n <= CODED_ROWS and can_be_coded(part.type, self._capability)

    def _through_scratch(self, x: Rows, part: Part, y: torch.Tensor, w: torch.Tensor) -> None:
        tile = tile_for(y.shape[0], self._capability)
        step = max(len(w) // part.cols // 256 * 256, 1)
        for row in range(0, part.rows, step):
            end = min(row + step, part.rows)
            rows = self._decode(part, row, end, w)
            product(x, rows, y[:, row:end], tile, None if part.bias is None else part.bias[row:end])

    def _decode(self, part: Part, row: int, end: int, w: torch.Tensor) -> torch.Tensor:
        rows = w[: (end - row) * part.cols].view(1, end - row, part.cols)
        matrices = self._matrices(part.matrix)
        dequantise(
            part.type,
            matrices.addresses,
            self._planes,
            rows,
            matrix_rows=part.matrix.rows,
            first_row=part.first + row,
        )
        return rows[0]

    def feed_forward(
        self, x: Rows | torch.Tensor, gate: Part, up: Part, down: Part, activation: str, y: torch.Tensor
    ) -> None:
        """y fp32 [n, n_embd] = down(act(gate x) * (up x)), as many rows at a time as the scratch has room for."""
        n, n_ff = y.shape[0], gate.rows
        if n == 0:
            return
        room, step = self._scratch.for_rows(12 * n_ff, n)  # two hidden rows, or one and its halves
        hidden, other = room.take(torch.float32, step, n_ff), room.take(torch.float32, step, n_ff)
        scale = room.take(torch.float32, step)
        w = room.rest()
        for at in range(0, n, step):
            end = min(at + step, n)
            some = x[at:end] if isinstance(x, torch.Tensor) else Rows(x.x[at:end], x.scale[at:end])
            h = hidden[: end - at]
            self._gated(some, gate, up, activation, h, other[: end - at], w)
            if down.is_float:
                self.product(h, down, y[at:end], w)
                continue
            half = Rows(other.view(torch.float16).view(-1)[: h.numel()].view(h.shape), scale[: end - at])
            halve_rows(h, half.x, half.scale)
            self.product(half, down, y[at:end], w)

    def _gated(
        self, x: Rows | torch.Tensor, gate: Part, up: Part, activation: str, h: torch.Tensor, other: torch.Tensor,
        w: torch.Tensor,
    ) -> None:  # fmt: skip
        """h = act(gate x) * (up x); `other` is room of the same shape."""
        n, fit = h.shape[0], len(w) // (2 * gate.cols) // 64 * 64
        is_plain = isinstance(x, torch.Tensor) or gate.bias is not None or up.bias is not None
        if is_plain or fit == 0 or (self._is_coded(n, gate) and self._is_coded(n, up)):
            self.product(x, gate, h, w)
            self.product(x, up, other, w)
            h = F.silu(h, inplace=True) if activation == "silu" else h.copy_(F.gelu(h, approximate="tanh"))
            h.mul_(other)
            return
        assert isinstance(x, Rows)
        tile = tile_for(n, self._capability, is_double=True)
        for row in range(0, gate.rows, fit):
            end = min(row + fit, gate.rows)
            size = (end - row) * gate.cols
            self._decode(gate, row, end, w)
            self._decode(up, row, end, w[size:])
            both = w[: 2 * size].view(2, end - row, gate.cols)
            glu_product(x, both, h[:, row:end], tile, ACTIVATIONS[activation])

    def _matrices(self, matrix: Matrix) -> CodedMatrices:
        start = matrix.data.data_ptr()
        found = self._coded.get(start)
        if found is None:
            address = torch.tensor([start], dtype=torch.int64).to(self._device, non_blocking=True)
            found = CodedMatrices(matrix.type, matrix.rows, matrix.cols, address, self._planes)
            self._coded[start] = found
        return found
