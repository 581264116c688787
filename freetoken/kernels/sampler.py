"""Sampling on the GPU: the largest logit, or a draw from the common chain of samplers.

`sample` is two launches. The first finds a row's largest logit, and a bound that at least `top_k` entries reach and not
many more: it counts the largest logits of small groups in linear bins, which takes few atomics, and goes down from the
top bin until enough groups are met. The second gathers the entries that reach the bound (or sums weights, where all
tokens are candidates), and the last of its programs orders, cuts and draws. Which requests it serves is said in
`gpu/chain.py`, how exactly in docs/numerics.md (section 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import triton
import triton.language as tl

from freetoken.kernels.checks import check, next_power_of_2
from freetoken.kernels.functions import exp
from freetoken.kernels.launch import options, wait
from freetoken.kernels.router import order_of

__all__ = ["MAX_TOP_K", "N_FIELDS", "Mode", "SampleRoom", "sample"]

PART = 1024
"""Logits of one program of `sample`."""
BINS = 4096
BINS_A_UNIT = 16
"""Bins are 1/16 wide, from -128 to 128; the outermost ones hold what lies beyond."""
GROUP = 8
SMALL_VOCABULARY = 4096
"""Up to here each token is a group: else there might be fewer groups than candidates are wanted."""
LIST = 1024
"""Candidates that can be gathered; a row with more of them is left to the host."""
MAX_TOP_K = 256
"""So many candidates are sorted."""
TILE = 32
"""Candidates that the sort compares at a time with all others."""


class Mode(IntEnum):
    """How a row is sampled: field 0 of its parameters."""

    HOST = 0
    """Not here: its status is 1, its token 0."""
    GREEDY = 1
    """The largest logit."""
    LIST = 2
    """A draw from the `top_k` largest, 1 to MAX_TOP_K."""
    ALL = 3
    """A draw from all tokens in the order of their ids."""


N_FIELDS = 8
"""int32 of a row's parameters: mode, top_k, min_keep, then the bits of fp32 top_p (above 1 is off), log(min_p) (-inf is
off) and temperature (0 leaves only the largest); two are spare."""

HOST = tl.constexpr(Mode.HOST.value)
LISTED = tl.constexpr(Mode.LIST.value)
ALL = tl.constexpr(Mode.ALL.value)
FIELDS = tl.constexpr(N_FIELDS)
NOTHING = tl.constexpr(-(2**63))
"""A key below that of every logit."""
MINUS_INF = tl.constexpr(-0x7F800001)
PLUS_INF = tl.constexpr(0x7F800000)
"""Where `order_of` puts the infinities."""


@triton.jit
def key_of(x, token, mask):
    """int64 that rises with the logit and falls with the token; a NaN is above all, as in numpy."""
    order = tl.where(x == x, order_of(x), 0x7FFFFFFF)
    return tl.where(mask, (order.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64), NOTHING)


@triton.jit
def token_of(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def logit_of(order):
    """The inverse of `order_of`, but for the sign of zero."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def field(settings, NUMBER: tl.constexpr):
    """A parameter of fp32."""
    return tl.load(settings + NUMBER).to(tl.float32, bitcast=True)


@triton.jit
def bin_of(x, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr):
    """The number of a logit's bin: it never falls where the logit rises. NaN counts as 0, its row is not drawn from."""
    y = tl.where(x == x, x, 0.0) * BINS_A_UNIT
    return (tl.minimum(tl.maximum(y, -BINS / 2), BINS / 2 - 1.0) + BINS / 2).to(tl.int32)


@triton.jit
def top_kernel(
    logits, settings, best, arrived, top, reached, counts, tokens, status,
    N: tl.constexpr, N_PARTS: tl.constexpr, PART: tl.constexpr,
    GROUP: tl.constexpr, BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """The largest of PART logits, groups counted by bin; the program that comes last of a row looks at all parts."""
    wait(IS_CHAINED)
    part = tl.program_id(0)
    row = tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row.to(tl.int64) * N + token, mask=token < N, other=float("-inf"))
    mode = tl.load(settings + row * FIELDS)
    k = tl.load(settings + row * FIELDS + 1)
    counts += row * BINS
    if mode == HOST:
        if part == 0:
            tl.store(tokens + row, 0)
            tl.store(status + row, 1)
    else:
        if mode == LISTED:
            number = bin_of(x, BINS, BINS_A_UNIT)
            if GROUP > 1:
                number = tl.max(tl.reshape(number, [PART // GROUP, GROUP]), axis=1)
            tl.atomic_add(counts + number, 1, mask=number > 0, sem="relaxed")
        tl.atomic_max(best + row, tl.max(key_of(x, token, token < N), axis=0), sem="relaxed")
        tl.debug_barrier()  # all threads have counted
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == N_PARTS - 1:
            of_row = tl.atomic_max(best + row, NOTHING, sem="relaxed")
            order = (of_row >> 32).to(tl.int32)
            is_finite = (order > MINUS_INF) & (order < PLUS_INF)
            tl.store(top + row, of_row)
            tl.store(tokens + row, token_of(of_row))
            tl.store(status + row, tl.where(is_finite, 0, 1))
            tl.store(best + row, NOTHING)
            tl.store(arrived + row, 0)
            if mode == LISTED:
                i = tl.arange(0, BINS)
                upto = tl.cumsum(tl.load(counts + BINS - 1 - i), axis=0)
                tl.store(reached + row, BINS - 1 - tl.min(tl.where(upto >= k, i, BINS - 1), axis=0))
                tl.store(counts + i, 0)


@triton.jit
def scale_top(top, temperature):
    """The largest logit divided by the temperature; infinite where nothing but that logit stays."""
    return tl.where(temperature > 0.0, tl.math.div_rn(top, tl.where(temperature > 0.0, temperature, 1.0)), float("inf"))


@triton.jit
def weights_of(x, scaled_top, temperature):
    """exp of scaled logits less the largest of them."""
    return exp(tl.maximum(tl.math.div_rn(x, temperature) - scaled_top, -100.0))


@triton.jit
def sort_list(listed, ordered, n, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Write the SIZE greatest of n keys, all different, to `ordered`, the greatest first: a key's place is its rank."""
    first = 0
    while first < n:  # Triton's interpreter has no range over numbers of the device
        i = first + tl.arange(0, SIZE)
        keys = tl.load(listed + i, mask=i < n, other=NOTHING)
        rank = tl.zeros([SIZE], tl.int32)
        start = 0
        while start < n:
            at = start + tl.arange(0, TILE)
            others = tl.load(listed + at, mask=at < n, other=NOTHING)
            rank += tl.sum((others[:, None] > keys[None, :]).to(tl.int32), axis=0)
            start += TILE
        tl.store(ordered + rank, keys, mask=(i < n) & (rank < SIZE))
        first += SIZE
    tl.debug_barrier()  # all keys are in place


@triton.jit
def draw_of_list(ordered, n, settings, u, SIZE: tl.constexpr):
    """A token of the first of n sorted keys by top_k, top_p, min_p and temperature."""
    min_keep = tl.load(settings + 2)
    temperature = field(settings, 5)
    n = tl.minimum(n, tl.load(settings + 1))
    i = tl.arange(0, SIZE)
    first = tl.load(ordered)
    top = logit_of((first >> 32).to(tl.int32))
    keys = tl.load(ordered + i, mask=i < n, other=NOTHING)
    x = tl.where(i < n, logit_of((keys >> 32).to(tl.int32)), top)

    weight = tl.where(i < n, exp(tl.maximum(x - top, -100.0)), 0.0).to(tl.float64)
    wanted = field(settings, 3).to(tl.float64) * tl.sum(weight, axis=0)
    is_enough = (tl.cumsum(weight, axis=0) >= wanted) & (i + 1 >= min_keep) & (i < n)
    n = tl.minimum(tl.min(tl.where(is_enough, i, SIZE), axis=0) + 1, n)

    passed = tl.sum(((x >= top + field(settings, 4)) & (i < n)).to(tl.int32), axis=0)
    n = tl.minimum(tl.maximum(passed, tl.maximum(min_keep, 1)), n)

    place = 0
    scaled_top = scale_top(top, temperature)
    if tl.abs(scaled_top) < float("inf"):
        weight = tl.where(i < n, weights_of(x, scaled_top, temperature), 0.0).to(tl.float64)
        sums = tl.cumsum(weight, axis=0)
        border = u * tl.sum(tl.where(i == n - 1, sums, 0.0), axis=0)
        place = tl.minimum(tl.sum(((sums <= border) & (i < n)).to(tl.int32), axis=0), n - 1)
    return token_of(tl.load(ordered + place))


@triton.jit
def weights_of_part(x, top, scaled_top, settings):
    """fp64 weights of these tokens in a draw of all; 0 of those that min_p cuts."""
    weight = weights_of(x, scaled_top, field(settings, 5))
    return tl.where(x >= top + field(settings, 4), weight, 0.0).to(tl.float64)


@triton.jit
def draw_of_parts(
    logits, sums, top, scaled_top, settings, u,
    N: tl.constexpr, N_PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The token in which the sum of weights passes u times their total: first its part, then within the part."""
    part = tl.arange(0, PARTS_BLOCK)
    weights = tl.load(sums + part, mask=part < N_PARTS, other=0.0)
    upto = tl.cumsum(weights, axis=0)
    border = u * tl.sum(tl.where(part == N_PARTS - 1, upto, 0.0), axis=0)
    is_past = (upto > border) & (weights > 0.0)
    last = tl.max(tl.where(weights > 0.0, part, 0), axis=0)
    number = tl.minimum(tl.min(tl.where(is_past, part, PARTS_BLOCK), axis=0), last)
    before = tl.sum(tl.where(part == number - 1, upto, 0.0), axis=0)

    i = tl.arange(0, PART)
    token = number * PART + i
    x = tl.load(logits + token, mask=token < N, other=float("-inf"))
    weight = weights_of_part(x, top, scaled_top, settings)
    is_past = (before + tl.cumsum(weight, axis=0) > border) & (weight > 0.0)
    last = tl.max(tl.where(weight > 0.0, i, 0), axis=0)
    return number * PART + tl.minimum(tl.min(tl.where(is_past, i, PART), axis=0), last)


@triton.jit
def choose_kernel(
    logits, settings, uniforms, top, reached, arrived, n_listed, listed, ordered, sums, tokens, status,
    N: tl.constexpr, N_PARTS: tl.constexpr, PARTS_BLOCK: tl.constexpr, PART: tl.constexpr,
    BINS: tl.constexpr, BINS_A_UNIT: tl.constexpr, LIST: tl.constexpr, SORTED: tl.constexpr, TILE: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Each program gathers or sums PART logits; the one that comes last of a row draws."""
    wait(IS_CHAINED)
    part = tl.program_id(0)
    row = tl.program_id(1)
    settings += row * FIELDS
    mode = tl.load(settings)
    logits += row.to(tl.int64) * N
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits + token, mask=token < N, other=float("-inf"))
    bound = tl.load(reached + row)
    u = tl.load(uniforms + row)
    largest = logit_of((tl.load(top + row) >> 32).to(tl.int32))
    is_open = tl.load(status + row) == 0
    if is_open & (mode == LISTED):
        is_in = (bin_of(x, BINS, BINS_A_UNIT) >= bound) & (x > float("-inf"))
        n_in = tl.sum(is_in.to(tl.int32), axis=0)
        if n_in > 0:
            place = tl.atomic_add(n_listed + row, n_in, sem="relaxed") + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            tl.store(listed + row * LIST + place, key_of(x, token, is_in), mask=is_in & (place < LIST))
        tl.debug_barrier()  # the keys are written
        if tl.atomic_add(arrived + row, 1, sem="acq_rel") == N_PARTS - 1:
            n = tl.atomic_xchg(n_listed + row, 0, sem="relaxed")
            tl.store(arrived + row, 0)
            if n > LIST:
                tl.store(status + row, 1)
            else:
                sort_list(listed + row * LIST, ordered + row * SORTED, n, SORTED, TILE)
                tl.store(tokens + row, draw_of_list(ordered + row * SORTED, n, settings, u, SORTED))
    if is_open & (mode == ALL):
        scaled_top = scale_top(largest, field(settings, 5))
        if tl.abs(scaled_top) < float("inf"):  # else the largest stays
            weight = weights_of_part(x, largest, scaled_top, settings)
            tl.store(sums + row * N_PARTS + part, tl.sum(weight, axis=0))
            tl.debug_barrier()  # the sum is written
            if tl.atomic_add(arrived + row, 1, sem="acq_rel") == N_PARTS - 1:
                tl.store(arrived + row, 0)
                drawn = draw_of_parts(
                    logits, sums + row * N_PARTS, largest, scaled_top, settings, u, N, N_PARTS, PARTS_BLOCK, PART
                )
                tl.store(tokens + row, drawn)


@dataclass(frozen=True)
class SampleRoom:
    """What `sample` keeps between its launches, for up to n rows of one vocabulary. A call leaves it as it was."""

    n_vocab: int
    best: torch.Tensor
    """int64 [n], the least int64."""
    counts: torch.Tensor
    """int32 [3, n], zeros: programs that came in either launch, candidates listed."""
    top: torch.Tensor
    """int64 [n]: the key of the largest logit."""
    reached: torch.Tensor
    """int32 [n]: the highest bin that, with those above, holds top_k groups; 0 where there are fewer."""
    in_bins: torch.Tensor
    """int32 [n, BINS], zeros: groups by the bin of their largest logit."""
    listed: torch.Tensor
    """int64 [n, LIST]: candidates as they came."""
    ordered: torch.Tensor
    """int64 [n, MAX_TOP_K]: the greatest of them."""
    sums: torch.Tensor
    """fp64 [n, parts]"""

    @classmethod
    def empty(cls, n: int, n_vocab: int, device: torch.device | str = "cpu") -> SampleRoom:
        """Room for n rows."""

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            n_vocab=n_vocab,
            best=torch.full((n,), -(2**63), dtype=torch.int64, device=device),
            counts=zeros(torch.int32, 3, n),
            top=zeros(torch.int64, n),
            reached=zeros(torch.int32, n),
            in_bins=zeros(torch.int32, n, BINS),
            listed=zeros(torch.int64, n, LIST),
            ordered=zeros(torch.int64, n, MAX_TOP_K),
            sums=zeros(torch.float64, n, -(-n_vocab // PART)),
        )


def sample(
    logits: torch.Tensor,
    params: torch.Tensor,
    uniforms: torch.Tensor,
    tokens: torch.Tensor,
    status: torch.Tensor,
    room: SampleRoom,
) -> None:
    """tokens int32 [n] drawn from logits fp32 [n, n_vocab], each row by its own parameters.

    `params` int32 [at least n, N_FIELDS] and `uniforms` fp64 in [0, 1) [at least n] are the rows' parameters and random
    numbers. `status` int32 [n] becomes 0, or 1 where the host must sample: no finite logit, a NaN or +inf, more than
    LIST candidates (many equal ones, say), or Mode.HOST. The token of such a row is some token of the vocabulary.
    """
    n, n_vocab = logits.shape
    check("logits", logits, torch.float32, n, n_vocab)
    check("params", params, torch.int32, params.shape[0], N_FIELDS)
    check("uniforms", uniforms, torch.float64, uniforms.shape[0])
    check("tokens", tokens, torch.int32, n)
    check("status", status, torch.int32, n)
    if n > min(len(params), len(uniforms), len(room.best)) or n_vocab != room.n_vocab:
        raise ValueError(
            f"{n} rows of {n_vocab} logits, but {len(params)} rows of parameters, {len(uniforms)} random numbers and "
            f"room for {len(room.best)} rows of {room.n_vocab}"
        )
    n_parts = room.sums.shape[1]
    top_kernel[(n_parts, n)](
        logits, params, room.best, room.counts[0], room.top, room.reached, room.in_bins, tokens, status,
        N=n_vocab, N_PARTS=n_parts, PART=PART,
        GROUP=1 if n_vocab <= SMALL_VOCABULARY else GROUP, BINS=BINS, BINS_A_UNIT=BINS_A_UNIT,
        num_warps=8, **options(logits),
    )  # fmt: skip
    choose_kernel[(n_parts, n)](
        logits, params, uniforms, room.top, room.reached, room.counts[1], room.counts[2], room.listed, room.ordered,
        room.sums, tokens, status,
        N=n_vocab, N_PARTS=n_parts, PARTS_BLOCK=next_power_of_2(n_parts), PART=PART,
        BINS=BINS, BINS_A_UNIT=BINS_A_UNIT, LIST=LIST, SORTED=MAX_TOP_K, TILE=TILE,
        num_warps=8, **options(logits),
    )  # fmt: skip
