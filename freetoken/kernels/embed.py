"""Rows of the token embedding for tokens that stand on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken import quants
from freetoken.kernels.checks import check
from freetoken.kernels.dequant import PLANES, dequantise
from freetoken.kernels.matvec import Matrix
from freetoken.kernels.scale import scale

__all__ = ["EmbeddingTable", "embed"]


@dataclass(frozen=True)
class EmbeddingTable:
    """The embedding, and for each of n tokens what `dequantise` asks: address, form and first unit of its row."""

    matrix: Matrix
    addresses: torch.Tensor
    forms: torch.Tensor
    first_units: torch.Tensor

    @staticmethod
    def of(matrix: Matrix, n: int) -> EmbeddingTable:
        """For up to n tokens. The matrix must stay where it is."""
        device = matrix.data.device
        return EmbeddingTable(
            matrix,
            torch.full((n,), matrix.data.data_ptr(), dtype=torch.int64, device=device),
            torch.full((n,), PLANES, dtype=torch.int32, device=device),
            torch.zeros(n, dtype=torch.int64, device=device),
        )


@triton.jit
def row_starts_kernel(tokens, starts, per_row, rows, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    token = tl.load(tokens + i, mask=i < n, other=0)
    token = tl.minimum(tl.maximum(token, 0), rows - 1)
    tl.store(starts + i, token.to(tl.int64) * per_row, mask=i < n)


def embed(table: EmbeddingTable, tokens: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
    """out fp32 [n, cols] = the rows of tokens int32 [n], times factor; docs/numerics.md, section 4."""
    n, matrix = len(tokens), table.matrix
    check("tokens", tokens, torch.int32, n)
    check("out", out, torch.float32, n, matrix.cols)
    per_row = matrix.cols // quants.TYPES[matrix.type].block_size
    row_starts_kernel[(1,)](tokens, table.first_units, per_row, matrix.rows, n, BLOCK=triton.next_power_of_2(n))
    dequantise(
        matrix.type,
        table.addresses[:n],
        table.forms[:n],
        out.view(n, 1, matrix.cols),
        matrix_rows=matrix.rows,
        first_units=table.first_units[:n],
    )
    if factor != 1.0:
        scale(out, out, factor)
