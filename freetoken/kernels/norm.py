"""What lies between two products of a layer: the sum of expert rows, shared expert, residual, RMS norm, quantisation.

One kernel, one program a token: `y` is a row or the weighted sum of a token's expert rows, plus a shared expert's row;
`y` may be normalised itself; `h = residual + y`; then `norm(h)` as binary32 and quantised in up to two classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken.kernels.activations import Activation, arguments, put
from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.launch import options, wait
from freetoken.kernels.sums import sigmoid, sum_squares

__all__ = ["Norm", "Rows", "Shared", "combine_rows"]


@dataclass(frozen=True)
class Norm:
    """An RMS norm: weight fp32 [width]."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Rows:
    """Rows of a token's experts in rank order, fp32 [n, k, width], and their weights fp32 [n, k]."""

    rows: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Shared:
    """A shared expert's row fp32 [n, width], and the logit of its sigmoid gate fp32 [n] where the model has one."""

    row: torch.Tensor
    gate: torch.Tensor | None = None


@triton.jit
def merge_rows(rows, weights, token, at, mask, N: tl.constexpr, K: tl.constexpr):
    """The weighted sum of a token's K expert rows at columns `at`, in rank order from +0."""
    y = tl.zeros([at.shape[0]], tl.float32)
    for rank in tl.static_range(K):
        pair = token * K + rank
        y = y + tl.load(weights + pair) * tl.load(rows + pair.to(tl.int64) * N + at, mask=mask, other=0.0)
    return y


@triton.jit
def rms_scale(x, eps, N: tl.constexpr):
    """1 / sqrt(mean square + eps) of the N values at x, as a tensor [1]. Other threads may just have written them."""
    tl.debug_barrier()
    mean = tl.math.div_rn(sum_squares(x, None, N), N * 1.0)
    return tl.math.div_rn(1.0, tl.math.sqrt_rn(mean + eps))


@triton.jit
def combine_rows_kernel(
    source, weights, shared, gate, post, residual, h, norm, y,
    q, dx, sums, q2, dx2, sums2, post_eps, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
    CLS: tl.constexpr, CLS2: tl.constexpr, PLANES: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Every pointer but `source` and `h` may be None: then its step is left out. K is 0 where source is plain rows."""
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < N
    row = token * N
    if post is not None:
        post_weight = tl.load(post + at, mask=mask, other=0.0)
    if norm is not None:
        norm_weight = tl.load(norm + at, mask=mask, other=0.0)
    wait(IS_CHAINED)
    if K > 0:
        value = merge_rows(source, weights, token, at, mask, N, K)
    else:
        value = tl.load(source + row + at, mask=mask, other=0.0)
    if shared is not None:
        part = tl.load(shared + row + at, mask=mask, other=0.0)
        if gate is not None:
            part = part * sigmoid(tl.load(gate + token))
        value = value + part
    if residual is not None:
        base = tl.load(residual + row + at, mask=mask, other=0.0)
    if post is not None:
        if K > 0 or shared is not None:
            tl.debug_barrier()  # h may be the residual
            tl.store(h + row + at, value, mask=mask)
            scale = rms_scale(h + row, post_eps, N)
        else:
            scale = rms_scale(source + row, post_eps, N)
        value = (value * scale) * post_weight
        tl.debug_barrier()
    if residual is not None:
        value = base + value
    if h is not None:
        tl.store(h + row + at, value, mask=mask)
    if norm is not None:
        scale = rms_scale(source + row if h is None else h + row, eps, N)
        value = (value * scale) * norm_weight
        if y is not None:
            tl.store(y + row + at, value, mask=mask)
    if CLS > 0:
        blocks = tl.reshape(value, [BLOCK // CLS, CLS])
        put(blocks, q, dx, sums, token, 0, N, PLANES)
    if CLS2 > 0:
        blocks = tl.reshape(value, [BLOCK // CLS2, CLS2])
        put(blocks, q2, dx2, sums2, token, 0, N, PLANES)


def combine_rows(
    source: torch.Tensor | Rows,
    h: torch.Tensor | None,
    *,
    shared: Shared | None = None,
    post: Norm | None = None,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    y: torch.Tensor | None = None,
    quantised: tuple[Activation, ...] = (),
    planes: int = 2,
) -> None:
    """h = residual + post(source + shared); y = norm(h); quantised = y, or h where there is no norm.

    Rows are fp32 [n, width]. `h` may be `residual` or `source`; it is None only where nothing changes the source before
    `norm`. `quantised` holds at most one of each class.
    """
    rows = source.rows if isinstance(source, Rows) else source
    n, width = rows.shape[0], rows.shape[-1]
    k = rows.shape[1] if isinstance(source, Rows) else 0
    check("source", rows, torch.float32, *((n, k, width) if isinstance(source, Rows) else (n, width)))
    weights = source.weights if isinstance(source, Rows) else None
    if weights is not None:
        check("weights", weights, torch.float32, n, k)
    _check_optional(n, width, h=h, residual=residual, y=y, shared=shared.row if shared else None)
    gate = shared.gate if shared else None
    if gate is not None:
        check("gate", gate, torch.float32, n)
    for each in (post, norm):
        if each is not None:
            check("norm weight", each.weight, torch.float32, width)
    if h is None and (k or shared or post or residual is not None or norm is None):
        raise ValueError("h is needed where the source changes before the norm, or without a norm")
    if len(quantised) > 2:
        raise ValueError("there are two classes of activations")
    first, cls = arguments(quantised[0] if quantised else None, n, width)
    second, cls2 = arguments(quantised[1] if len(quantised) > 1 else None, n, width)
    block = max(next_power_of_2(width), 32)
    combine_rows_kernel[(n,)](
        rows,
        weights,
        shared.row if shared else None,
        gate,
        post.weight if post else None,
        residual,
        h,
        norm.weight if norm else None,
        y,
        *first,
        *second,
        post.eps if post else 0.0,
        norm.eps if norm else 0.0,
        N=width,
        BLOCK=max(block, cls, cls2),
        K=k,
        CLS=cls,
        CLS2=cls2,
        PLANES=planes,
        num_warps=min(max(block // 256, 1), 8),
        **options(rows),
    )


def _check_optional(n: int, width: int, **rows: torch.Tensor | None) -> None:
    for name, each in rows.items():
        if each is not None:
            check(name, each, torch.float32, n, width)
