"""Which experts a token takes and with which weights (docs/numerics.md, section 7): one program a token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.fast_launch import launch
from freetoken.kernels.functions import exp
from freetoken.kernels.launch import options, wait
from freetoken.kernels.sums import fold8, sigmoid, sum_exp

__all__ = ["GATES", "route"]

GATES = {"softmax": 0, "sigmoid": 1, "softmax_chosen": 2}
MAX_USED = 64


@triton.jit
def order_of(x):
    """int32 that rise as floats do: zeros of both signs are equal, NaN is the least but for the most negative int."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, order, -0x7FFFFFFF)


@triton.jit
def softmax_of_chosen(x, USED: tl.constexpr):
    """softmax of the first USED of x [block], with the sum in lanes8 by rank."""
    rank = tl.arange(0, x.shape[0])
    is_there = rank < USED
    e = exp(x - tl.max(tl.where(is_there, x, float("-inf")), axis=0))
    lane = tl.arange(0, 8)
    lanes = tl.zeros([8], tl.float32)
    for i in tl.static_range(USED):
        term = tl.sum(tl.where(rank == i, e, 0.0), axis=0)  # of one number and zeros
        lanes = lanes + tl.where(lane == i % 8, term, 0.0)
    return tl.math.div_rn(e, fold8(tl.reshape(lanes, [1, 8])))


@triton.jit
def route_kernel(
    logits, bias, ids, weights, scale,
    N: tl.constexpr, BLOCK: tl.constexpr, USED: tl.constexpr, USED_BLOCK: tl.constexpr,
    GATE: tl.constexpr, NORMALISE: tl.constexpr, HAS_SCALE: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    wait(IS_CHAINED)
    token = tl.program_id(0)
    expert = tl.arange(0, BLOCK)
    mask = expert < N
    prob = tl.load(logits + token * N + expert, mask=mask, other=float("-inf"))
    if GATE == 0:
        top = tl.max(prob, axis=0)
        prob = tl.math.div_rn(exp(prob - top), sum_exp(logits + token * N, top, N))
    if GATE == 1:
        prob = sigmoid(prob)
    score = prob
    if bias is not None:
        score = prob + tl.load(bias + expert, mask=mask, other=0.0)
    order = tl.where(mask, order_of(score), -0x7FFFFFFF - 1)

    rank = tl.arange(0, USED_BLOCK)
    chosen = tl.zeros([USED_BLOCK], tl.int32)
    chosen_bits = tl.zeros([USED_BLOCK], tl.int32)
    for i in tl.static_range(USED):
        best = tl.max(order, axis=0)
        number = tl.min(tl.where(order == best, expert, BLOCK), axis=0)
        is_it = expert == number
        bits = tl.sum(tl.where(is_it, prob.to(tl.int32, bitcast=True), 0), axis=0)
        order = tl.where(is_it, -0x7FFFFFFF - 1, order)
        chosen = tl.where(rank == i, number, chosen)
        chosen_bits = tl.where(rank == i, bits, chosen_bits)
    weight = chosen_bits.to(tl.float32, bitcast=True)
    if GATE == 2:
        weight = softmax_of_chosen(weight, USED)
    if NORMALISE:
        total = 0.0
        for i in tl.static_range(USED):
            total = total + tl.sum(tl.where(rank == i, weight, 0.0), axis=0)  # of one number and zeros
        weight = tl.math.div_rn(weight, tl.where(total < 6.103515625e-5, 6.103515625e-5, total))
    if HAS_SCALE:
        weight = weight * scale
    tl.store(ids + token * USED + rank, chosen, mask=rank < USED)
    tl.store(weights + token * USED + rank, weight, mask=rank < USED)


def route(
    logits: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate: str = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    is_step: bool = True,
) -> None:
    """Ids int32 and weights fp32 [n, k] of the chosen experts in rank order, from logits fp32 [n, n_expert].
    Not `is_step`: in a prompt, where the host's time for a launch counts and nothing is captured."""
    n, n_expert = logits.shape
    k = ids.shape[1]
    check("logits", logits, torch.float32, n, n_expert)
    check("ids", ids, torch.int32, n, k)
    check("weights", weights, torch.float32, n, k)
    if bias is not None:
        check("bias", bias, torch.float32, n_expert)
    if not 0 < k <= min(n_expert, MAX_USED):
        raise ValueError(f"{k} of {n_expert} experts cannot be chosen, at most {MAX_USED}")
    block = max(next_power_of_2(n_expert), 32)
    warps = max(block // 512, 1)
    if not is_step:
        constants = (n_expert, block, k, max(next_power_of_2(k), 8), GATES[gate], normalise, scale != 1.0, False)
        launch(route_kernel, (n, 1, 1), (logits, bias, ids, weights, scale), constants, warps)
        return
    route_kernel[(n,)](
        logits,
        bias,
        ids,
        weights,
        scale,
        N=n_expert,
        BLOCK=block,
        USED=k,
        USED_BLOCK=max(next_power_of_2(k), 8),
        GATE=GATES[gate],
        NORMALISE=normalise,
        HAS_SCALE=scale != 1.0,
        num_warps=warps,
        **options(logits),
    )
