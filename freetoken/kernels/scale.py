"""x * factor, and a soft cap: the last step of some heads (docs/numerics.md, section 5)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check
from freetoken.kernels.sums import softcap

__all__ = ["scale"]

BLOCK = 1024


@triton.jit
def scale_kernel(x, y, factor, cap, n, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0.0) * factor
    if HAS_CAP:
        value = softcap(value, cap)
    tl.store(y + at, value, mask=at < n)


def scale(x: torch.Tensor, y: torch.Tensor, factor: float, cap: float = 0.0) -> None:
    """y = x * factor, then cap * tanh(y / cap) where cap is not 0; fp32, any shape."""
    check("x", x, torch.float32, *x.shape)
    check("y", y, torch.float32, *x.shape)
    n = x.numel()
    scale_kernel[(triton.cdiv(n, BLOCK),)](
        x, y, factor, cap, n, HAS_CAP=cap != 0.0, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
    )
