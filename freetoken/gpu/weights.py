"""Dense weights in GPU memory, quantised as in the file and laid as `kernels.layout` says; uploaded once, on first use.

Matrices that share an input and a type can be joined, one under the other, so that one launch multiplies them.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from freetoken import native, quants
from freetoken.blocks import Weight
from freetoken.gpu.upload import Uploader
from freetoken.kernels import layout
from freetoken.kernels.embed import EmbeddingTable, embed
from freetoken.kernels.matvec import TYPE_CLASS, Matrix
from freetoken.quants import GgmlType

__all__ = ["DeviceWeights", "weight_class"]


def weight_class(type_id: int) -> int:
    """Class of the activation that a type's product takes on the GPU; a type without a kernel would be kept as fp32."""
    return TYPE_CLASS.get(type_id, 0)


class DeviceWeights:
    """Uploads weights of one open file to a device. `n_bytes` counts what stays there."""

    def __init__(self, device: torch.device | str, pool: native.Pool) -> None:
        self.device = torch.device(device)
        self.n_bytes = 0
        self._pool = pool
        self._uploader = Uploader(self.device)
        self._parts: dict[str, tuple[Matrix, int]] = {}
        self._vectors: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def matrix(self, weight: Weight) -> Matrix:
        """The matrix of its own; one that has been joined to others is an error."""
        matrix, first = self.part(weight)
        if first or matrix.rows != weight.rows:
            raise ValueError(f"{weight.name} is part of a joined matrix")
        return matrix

    def part(self, weight: Weight) -> tuple[Matrix, int]:
        """The matrix that holds a weight, and the row at which it starts there."""
        if weight.name not in self._parts:
            self.joined([weight])
        return self._parts[weight.name]

    def joined(self, weights: list[Weight]) -> Matrix:
        """Weights of one type and width as one matrix, in this order. Asked again it is the same one."""
        known = {id(self._parts[w.name][0]) for w in weights if w.name in self._parts}
        if len(known) == 1 and all(w.name in self._parts for w in weights):
            return self._parts[weights[0].name][0]
        if known:
            raise ValueError(f"{', '.join(w.name for w in weights)} are uploaded already, and not together")
        matrix = self._upload(weights)
        first = 0
        for weight in weights:
            self._parts[weight.name] = matrix, first
            first += weight.rows
        return matrix

    def vector(self, values: np.ndarray) -> torch.Tensor:
        """A norm's weight or a bias, fp32; the same array gives the same tensor."""
        if id(values) not in self._vectors:
            tensor = torch.empty(values.shape, dtype=torch.float32, device=self.device)
            raw = torch.from_numpy(np.ascontiguousarray(values, np.float32).copy().reshape(-1)).view(torch.uint8)
            there = tensor.view(-1).view(torch.uint8)
            self._uploader.send([raw], 1, lambda piece, at: _put(there[at : at + len(piece)], piece))
            self._vectors[id(values)] = values, tensor
            self.n_bytes += tensor.nbytes
        return self._vectors[id(values)][1]

    def embed(self, weight: Weight, tokens: np.ndarray, out: torch.Tensor) -> None:
        """Rows of the token embedding, to out fp32 [n, cols]."""
        table = EmbeddingTable.of(self.matrix(weight), len(tokens))
        embed(table, torch.from_numpy(tokens.astype(np.int32)).to(self.device), out)

    def _upload(self, weights: list[Weight]) -> Matrix:
        type_id, cols = weights[0].type, weights[0].cols
        rows = sum(weight.rows for weight in weights)
        is_known = type_id in TYPE_CLASS
        parts = [_bytes(weight.data) if is_known else self._decoded(weight) for weight in weights]
        type_id = type_id if is_known else int(GgmlType.F32)
        out = torch.empty(layout.slot_bytes(type_id, rows, cols), dtype=torch.uint8, device=self.device)
        self.n_bytes += out.nbytes
        unit = quants.TYPES[type_id].block_bytes
        n_blocks = sum(part.numel() for part in parts) // unit
        self._uploader.send(
            parts, unit, lambda piece, at: layout.relay(type_id, piece, out, first=at // unit, n_blocks=n_blocks)
        )
        return Matrix(type_id, rows, cols, out)

    def settle(self) -> None:
        """Free what uploads need; called when there are no more for now."""
        self._uploader.close()

    def _decoded(self, weight: Weight) -> torch.Tensor:
        """The bytes of fp32 rows, of a type that no kernel takes."""
        values = np.empty((weight.rows, weight.cols), np.float32)
        self._pool.dequantize(weight.type, weight.data, values)
        return torch.from_numpy(values).view(torch.uint8).reshape(-1)


def _put(there: torch.Tensor, piece: torch.Tensor) -> None:
    there.copy_(piece)


def _bytes(data: np.ndarray) -> torch.Tensor:
    """A view of the mapping, which torch only reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory cannot be written
        return torch.from_numpy(data.reshape(-1))
