"""The hidden rows of a feed-forward block: act(gate) * up, quantised for the down product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.activations import Activation, arguments, put
from freetoken.kernels.checks import check
from freetoken.kernels.functions import activate
from freetoken.kernels.launch import options, wait

__all__ = ["ACTIVATIONS", "glu"]

ACTIVATIONS = {"silu": 0, "gelu": 1}
BLOCK = 256


@triton.jit
def glu_kernel(
    gate, up, h, q, dx, sums,
    N: tl.constexpr, GATE_STRIDE: tl.constexpr, UP_STRIDE: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, CLS: tl.constexpr, PLANES: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    row = tl.program_id(1)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    wait(IS_CHAINED)
    g = tl.load(gate + row.to(tl.int64) * GATE_STRIDE + at, mask=mask, other=0.0)
    value = activate(g, ACTIVATION) * tl.load(up + row.to(tl.int64) * UP_STRIDE + at, mask=mask, other=0.0)
    if h is not None:
        tl.store(h + row.to(tl.int64) * N + at, value, mask=mask)
    if CLS > 0:
        put(tl.reshape(value, [BLOCK // CLS, CLS]), q, dx, sums, row, piece * (BLOCK // CLS), N, PLANES)


def glu(
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor | None,
    quantised: Activation | None = None,
    *,
    activation: str = "silu",
    planes: int = 2,
) -> None:
    """h = act(gate) * up, fp32 [rows, width], and the same quantised. gate and up may be parts of wider rows."""
    n, width = gate.shape
    for name, part in (("gate", gate), ("up", up)):
        if part.dtype != torch.float32 or tuple(part.shape) != (n, width) or part.stride(1) != 1:
            raise ValueError(f"{name} must be fp32 [{n}, {width}] in dense rows, got {part.dtype} {list(part.shape)}")
    if h is not None:
        check("h", h, torch.float32, n, width)
    out, cls = arguments(quantised, n, width)
    glu_kernel[(-(-width // BLOCK), n)](
        gate,
        up,
        h,
        *out,
        N=width,
        GATE_STRIDE=gate.stride(0),
        UP_STRIDE=up.stride(0),
        ACTIVATION=ACTIVATIONS[activation],
        BLOCK=BLOCK,
        CLS=cls,
        PLANES=planes,
        num_warps=2,
        **options(gate),
    )
