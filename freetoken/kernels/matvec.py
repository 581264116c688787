"""Matrix-vector products of a decode step: dense matrices for up to 8 tokens, and experts in slots, one row a pair.

Bits are those of docs/numerics.md, sections 3 and 4, for every type of ggml that weights have. Matrices lie as `layout`
says, activations as `activations` says (float weights and types without an integer form take plain fp32 rows). A row
belongs to lanes of one warp, so no sum crosses a barrier; a thread loads the activation once for all of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from freetoken import quants
from freetoken.kernels import matvec_32, matvec_iq, matvec_k
from freetoken.kernels.activations import MAX_TOKENS, Activation
from freetoken.kernels.functions import activate, tree8
from freetoken.kernels.launch import options, wait
from freetoken.kernels.layout import ALIGNMENT, slot_bytes
from freetoken.kernels.matvec_decoded import ROWS, decoded_products
from freetoken.kernels.matvec_float import float_products
from freetoken.kernels.matvec_tiles import inside
from freetoken.kernels.tables import table
from freetoken.quants import GgmlType

__all__ = ["TYPE_CLASS", "Bank", "Matrix", "expert_down", "expert_glu", "matvec"]

F32 = tl.constexpr(int(GgmlType.F32))
F16 = tl.constexpr(int(GgmlType.F16))
BF16 = tl.constexpr(int(GgmlType.BF16))
Q4_0 = tl.constexpr(int(GgmlType.Q4_0))
Q4_1 = tl.constexpr(int(GgmlType.Q4_1))
Q5_0 = tl.constexpr(int(GgmlType.Q5_0))
Q5_1 = tl.constexpr(int(GgmlType.Q5_1))
Q8_0 = tl.constexpr(int(GgmlType.Q8_0))
IQ4_NL = tl.constexpr(int(GgmlType.IQ4_NL))
MXFP4 = tl.constexpr(int(GgmlType.MXFP4))
Q2_K = tl.constexpr(int(GgmlType.Q2_K))
Q3_K = tl.constexpr(int(GgmlType.Q3_K))
Q4_K = tl.constexpr(int(GgmlType.Q4_K))
Q5_K = tl.constexpr(int(GgmlType.Q5_K))
Q6_K = tl.constexpr(int(GgmlType.Q6_K))
IQ4_XS = tl.constexpr(int(GgmlType.IQ4_XS))
IQ2_XXS = tl.constexpr(int(GgmlType.IQ2_XXS))
IQ2_XS = tl.constexpr(int(GgmlType.IQ2_XS))
IQ2_S = tl.constexpr(int(GgmlType.IQ2_S))
IQ3_XXS = tl.constexpr(int(GgmlType.IQ3_XXS))
IQ3_S = tl.constexpr(int(GgmlType.IQ3_S))

_DECODED = (
    *(GgmlType.IQ1_S, GgmlType.IQ1_M, GgmlType.TQ1_0, GgmlType.TQ2_0, GgmlType.NVFP4, GgmlType.Q1_0, GgmlType.Q2_0),
)
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)
_CLASS_32 = (
    *(GgmlType.Q4_0, GgmlType.Q4_1, GgmlType.Q5_0, GgmlType.Q5_1, GgmlType.Q8_0, GgmlType.IQ4_NL, GgmlType.MXFP4),
)
_GRIDS = (GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S, GgmlType.IQ3_XXS, GgmlType.IQ3_S)
_CLASS_256 = (*(GgmlType.Q2_K, GgmlType.Q3_K, GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q6_K, GgmlType.IQ4_XS, *_GRIDS),)
TYPE_CLASS: dict[int, int] = {
    **dict.fromkeys(map(int, (*_FLOATS, *_DECODED)), 0),
    **dict.fromkeys(map(int, _CLASS_32), 32),
    **dict.fromkeys(map(int, _CLASS_256), 256),
}
"""Type -> class of its activation (0: plain fp32 rows); types that are not here (ggml's own for activations, integers)
have no kernel."""


PARTS: dict[int, int] = {
    **dict.fromkeys(map(int, (*_FLOATS, *_DECODED, *_CLASS_32)), 1),
    **dict.fromkeys(map(int, _CLASS_256), 4),
    **dict.fromkeys((int(GgmlType.Q2_K), int(GgmlType.Q3_K)), 2),
}
"""Into how many parts a type's terms cut a block."""


@triton.constexpr_function
def parts_of(type_id):
    return PARTS[type_id]


@triton.constexpr_function
def is_decoded(type_id):
    return type_id in _DECODED


@triton.constexpr_function
def lanes_of(n):
    """Lanes of the law that a row of n blocks uses, as a power of 2."""
    return min(8, triton.next_power_of_2(n))


@triton.jit
def terms(TYPE: tl.constexpr, w, first, n_blocks, block, piece, live, q, dx, extra, WAITS: tl.constexpr):
    """Terms of a tile; `extra` is the activation's sums, or the type's table."""
    if TYPE == Q4_0:
        return matvec_32.terms_q4_0(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q4_1:
        return matvec_32.terms_q4_1(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q5_0:
        return matvec_32.terms_q5_0(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q5_1:
        return matvec_32.terms_q5_1(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q8_0:
        return matvec_32.terms_q8_0(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ4_NL:
        return matvec_32.terms_iq4_nl(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == MXFP4:
        return matvec_32.terms_mxfp4(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q2_K:
        return matvec_k.terms_q2_k(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q3_K:
        return matvec_k.terms_q3_k(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q4_K:
        return matvec_k.terms_q4_k(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q5_K:
        return matvec_k.terms_q5_k(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == Q6_K:
        return matvec_k.terms_q6_k(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ4_XS:
        return matvec_k.terms_iq4_xs(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ2_XXS:
        return matvec_iq.terms_iq2_xxs(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ2_XS:
        return matvec_iq.terms_iq2_xs(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ2_S:
        return matvec_iq.terms_iq2_s(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    elif TYPE == IQ3_XXS:
        return matvec_iq.terms_iq3_xxs(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)
    else:
        tl.static_assert(TYPE == IQ3_S)
        return matvec_iq.terms_iq3_s(w, first, n_blocks, block, piece, live, q, dx, extra, WAITS)


@triton.jit
def row_products(TYPE: tl.constexpr, w, n_blocks, row0, rows, q, dx, extra, stride, token0, tokens, N: tl.constexpr,
                 T: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr, WAITS: tl.constexpr):  # fmt: skip
    """Products [P, G, R, T], equal along P, of G times R rows from row0 on with rows of the activation from token0 on.

    A row has N blocks (float weights: values), a row of the activation `stride`; fp32 rows come as `q`. C blocks of
    each lane are taken at a time. WAITS: the activation may be read once `launch.wait` has returned.
    """
    if TYPE == F32:
        total = float_products(w, row0, rows, q, stride, token0, tokens, N, 4, False, T, R, WAITS)[None, None, :, :]
    elif TYPE == F16 or TYPE == BF16:  # noqa: SIM109
        total = float_products(w, row0, rows, q, stride, token0, tokens, N, 2, TYPE == F16, T, R, WAITS)[
            None, None, :, :
        ]
    elif is_decoded(TYPE):
        total = decoded_products(TYPE, w, n_blocks, row0, rows, q, extra, stride, token0, tokens, N, T, R, WAITS)[
            None, None, :, :
        ]
    else:
        total = block_products(
            TYPE, w, n_blocks, row0, rows, q, dx, extra, stride, token0, tokens, N, C, G, R, T, WAITS
        )
    return total


@triton.jit
def block_products(TYPE: tl.constexpr, w, n_blocks, row0, rows, q, dx, extra, stride, token0, tokens, N: tl.constexpr,
                   C: tl.constexpr, G: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
                   WAITS: tl.constexpr):  # fmt: skip
    """`row_products` of quantised types: C times L blocks of each row at a time, and their terms added in order."""
    P: tl.constexpr = parts_of(TYPE)
    L: tl.constexpr = lanes_of(N)
    first = row0.to(tl.int64) * N
    group = tl.arange(0, G)[None, None, :, None, None, None]
    row = group * R + tl.arange(0, R)[None, None, None, :, None, None]
    row = tl.minimum(row, rows - 1 - row0)
    token = (token0 + tl.minimum(tl.arange(0, T), tokens - 1))[None, None, None, None, :, None]
    round = tl.arange(0, C)[None, None, None, None, None, :]
    lanes = tl.zeros([P, L, G, R, T], tl.float32)
    for k0 in range(0, N, L * C):
        number = k0 + L * round + tl.arange(0, L)[None, :, None, None, None, None]
        at = inside(number, N)
        live = number < N if N % (L * C) else tl.full([1, L, 1, 1, 1, C], True, tl.int1)
        piece = token * stride + at + 0 * group  # in the lanes and warps of its rows, so that nothing changes place
        term = terms(TYPE, w, first, n_blocks, row * N + at, piece, live, q, dx, extra, WAITS)
        bits = term.to(tl.int32, bitcast=True)
        for c in tl.static_range(C):  # sums of one number and zeros; as integers they cost nothing within a thread
            lanes += tl.sum(tl.where(round == c, bits, 0), axis=5).to(tl.float32, bitcast=True)
    return tree8(lanes)


@triton.jit
def matvec_kernel(w, q, dx, extra, y, bias, n_blocks, rows, stride, tokens, y_stride, HAS_BIAS: tl.constexpr,
                  TYPE: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr, T: tl.constexpr, G: tl.constexpr,
                  R: tl.constexpr, C: tl.constexpr, IS_CHAINED: tl.constexpr):  # fmt: skip
    """G times R rows of a dense matrix for T of ALL tokens; neighbours take the same rows."""
    row0 = tl.program_id(0) // (ALL // T) * (G * R)
    token0 = tl.program_id(0) % (ALL // T) * T
    total = row_products(TYPE, w, n_blocks, row0, rows, q, dx, extra, stride, token0, tokens - token0, N, T, G, R, C,
                         IS_CHAINED)  # fmt: skip
    row = row0 + rows_of(G, R)
    token = token0 + tl.arange(0, T)[None, None, None, :]
    if HAS_BIAS:
        total += tl.load(bias + tl.minimum(row, rows - 1))
    put_first(y + token.to(tl.int64) * y_stride + row, total, (row < rows) & (token < tokens))


@triton.jit
def rows_of(G: tl.constexpr, R: tl.constexpr):
    """Numbers of a program's rows: [1, G, R, 1]."""
    return tl.arange(0, G)[None, :, None, None] * R + tl.arange(0, R)[None, None, :, None]


@triton.jit
def put_first(at, total, mask):
    """Store values [P, G, R, T], equal along P, once."""
    part = tl.arange(0, total.shape[0])[:, None, None, None]
    tl.store(at + 0 * part, total, mask=mask & (part == 0))


@triton.jit
def without_parts(x):
    """Values [P, G, R, T], equal along P, as [1, G, R, T]; zeros are added to the one kept."""
    part = tl.arange(0, x.shape[0])[:, None, None, None]
    return tl.sum(tl.where(part == 0, x, 0.0), axis=0, keep_dims=True)


@triton.jit
def glu_kernel(slots, ids, h, slot_bytes, rows, n_used,
               gate, gate_q, gate_dx, gate_extra, gate_blocks, gate_stride,
               up, up_q, up_dx, up_extra, up_blocks, up_stride, ACTIVATION: tl.constexpr,
               GATE: tl.constexpr, GATE_N: tl.constexpr, GATE_G: tl.constexpr, GATE_C: tl.constexpr,
               UP: tl.constexpr, UP_N: tl.constexpr, UP_G: tl.constexpr, UP_C: tl.constexpr, ROWS: tl.constexpr,
               IS_CHAINED: tl.constexpr):  # fmt: skip
    """ROWS values of one routed pair's hidden row; `gate` and `up` are offsets in its slot."""
    row0 = tl.program_id(0) * ROWS
    pair = tl.program_id(1)
    wait(IS_CHAINED)
    slot = tl.load(ids + pair)
    if slot >= 0:
        token = pair // n_used
        w = slots + slot.to(tl.int64) * slot_bytes
        g = row_products(GATE, w + gate, gate_blocks, row0, rows, gate_q, gate_dx, gate_extra, gate_stride,
                         token, 1, GATE_N, 1, GATE_G, ROWS // GATE_G, GATE_C, False)  # fmt: skip
        u = row_products(UP, w + up, up_blocks, row0, rows, up_q, up_dx, up_extra, up_stride,
                         token, 1, UP_N, 1, UP_G, ROWS // UP_G, UP_C, False)  # fmt: skip
        if GATE_G != UP_G or parts_of(GATE) != parts_of(UP):
            g = tl.reshape(without_parts(g), [1, 1, ROWS, 1])
            u = tl.reshape(without_parts(u), [1, 1, ROWS, 1])
            row = row0 + rows_of(1, ROWS)
        else:
            row = row0 + rows_of(GATE_G, ROWS // GATE_G)
        put_first(h + pair.to(tl.int64) * rows + row, activate(g, ACTIVATION) * u, row < rows)


@triton.jit
def down_kernel(slots, ids, y, slot_bytes, rows, down, q, dx, extra, n_blocks, stride,
                TYPE: tl.constexpr, N: tl.constexpr, G: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
                IS_CHAINED: tl.constexpr):  # fmt: skip
    """G times R values of one routed pair's output row."""
    row0 = tl.program_id(0) * (G * R)
    pair = tl.program_id(1)
    wait(IS_CHAINED)
    slot = tl.load(ids + pair)
    if slot >= 0:
        w = slots + slot.to(tl.int64) * slot_bytes + down
        total = row_products(TYPE, w, n_blocks, row0, rows, q, dx, extra, stride, pair, 1, N, 1, G, R, C, False)
        row = row0 + rows_of(G, R)
        put_first(y + pair.to(tl.int64) * rows + row, total, row < rows)


@dataclass(frozen=True)
class Matrix:
    """A dense matrix on a device: `data` uint8 [slot_bytes] as `layout` has it."""

    type: int
    rows: int
    cols: int
    data: torch.Tensor


@dataclass(frozen=True)
class Bank:
    """Where one matrix of an expert lies in every slot: `offset` bytes from the slot's start."""

    type: int
    rows: int
    cols: int
    offset: int


@dataclass(frozen=True)
class _Rows:
    """Kernel arguments of a matrix with its activation."""

    q: torch.Tensor
    dx: torch.Tensor
    extra: torch.Tensor
    n_blocks: int
    n: int
    stride: int
    rounds: int


Source = Activation | torch.Tensor
"""What a matrix is multiplied with: fp32 rows [n, cols] for float weights, else an Activation of the type's class."""


def _rows(w: Matrix | Bank, x: Source, count: int) -> _Rows:
    """Checks that `x` has `count` rows as the matrix wants them."""
    name, width = quants.type_name(w.type), TYPE_CLASS.get(w.type)
    if width is None:
        raise ValueError(f"{name} has no kernel")
    if width == 0:
        if isinstance(x, Activation) or x.dtype != torch.float32 or x.stride(1) != 1:
            raise ValueError(f"{name} takes contiguous fp32 rows")
        if x.shape[0] < count or x.shape[1] != w.cols:
            raise ValueError(f"{name} [{w.rows}, {w.cols}] with {count} of {tuple(x.shape)} rows")
        n = w.cols // quants.TYPES[w.type].block_size
        found = table(w.type, x.device)
        return _Rows(x, x, x if found is None else found, w.rows * n, n, x.stride(0), 1)
    if not isinstance(x, Activation) or x.width != width:
        raise ValueError(f"{name} takes an activation of class {width}")
    if x.q.shape[0] < count or x.pieces != -(-w.cols // 256):
        raise ValueError(f"{name} [{w.rows}, {w.cols}] with {count} rows of {tuple(x.q.shape)}")
    n = w.cols // width
    rounds = min(4 if width == 32 else 2, triton.next_power_of_2(-(-n // 8)))
    found = table(w.type, x.q.device)
    return _Rows(x.q, x.dx, x.sums if found is None else found, w.rows * n, n, x.dx.shape[1], rounds)


@dataclass(frozen=True)
class _Shape:
    """Of a program: rows that share a thread, warps, tokens at a time."""

    rows: int
    warps: int
    tokens: int = 1


def _shape(kernel: str, type_id: int, tokens: int) -> _Shape:
    """What was fastest on an H200 for "dense" matrices and experts ("glu", "down"). Rows of float weights are lanes."""
    width = TYPE_CLASS[type_id]
    is_grid = type_id in _GRIDS
    if type_id in _DECODED:
        return _Shape(ROWS, 1, min(tokens, 4) if kernel == "dense" else 1)
    if width == 0:
        return _Shape(1, 1)
    if kernel == "dense" and tokens > 1:
        return _Shape(2 if width == 32 or is_grid else 4, 4, 2)
    if width == 32:
        return _Shape(2, 2) if kernel == "down" else _Shape(1, 1)
    if kernel == "glu":
        return _Shape(2 if type_id in (GgmlType.IQ3_XXS, GgmlType.IQ3_S) else 4, 1)
    if is_grid:
        return _Shape(4, 1)
    return _Shape(4, 4 if kernel == "dense" else 2)


def _groups(type_id: int, n: int, warps: int) -> int:
    """Groups of rows in the lanes and warps that a row of n blocks leaves free."""
    return 1 if TYPE_CLASS[type_id] == 0 else warps * (32 // (PARTS[type_id] * lanes_of(n)))


def matvec(w: Matrix, x: Source, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """y [tokens, rows] = products of every row of `w` with up to 8 rows of x, plus `bias` fp32 [rows]."""
    tokens = y.shape[0]
    at = _rows(w, x, tokens)
    if not 1 <= tokens <= MAX_TOKENS or y.shape[1] != w.rows or y.dtype != torch.float32 or y.stride(1) != 1:
        raise ValueError(f"need contiguous fp32 rows [1..{MAX_TOKENS}, {w.rows}] for the result, got {tuple(y.shape)}")
    if w.data.dtype != torch.uint8 or w.data.numel() < slot_bytes(w.type, w.rows, w.cols):
        raise ValueError(f"{quants.type_name(w.type)} [{w.rows}, {w.cols}] in {w.data.numel()} bytes")
    padded = triton.next_power_of_2(tokens)
    shape = _shape("dense", w.type, padded)
    groups = _groups(w.type, at.n, shape.warps)
    matvec_kernel[(triton.cdiv(w.rows, groups * shape.rows) * (padded // shape.tokens),)](
        *(w.data, at.q, at.dx, at.extra, y, y if bias is None else bias),
        *(at.n_blocks, w.rows, at.stride, tokens, y.stride(0), bias is not None),
        *(w.type, at.n, padded, shape.tokens, groups, shape.rows, at.rounds),
        num_warps=shape.warps,
        **options(y),
    )


def _check_pairs(slots: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, banks: tuple[Bank, ...]) -> None:
    if slots.dtype != torch.uint8 or not slots.is_contiguous() or slots.shape[1] % ALIGNMENT:
        raise ValueError(f"slots are contiguous uint8 rows of whole {ALIGNMENT} bytes, got {tuple(slots.shape)}")
    if ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"slot numbers are contiguous int32, got {ids.dtype}")
    if out.shape != (ids.numel(), banks[0].rows) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(
            f"need contiguous fp32 [{ids.numel()}, {banks[0].rows}] for the result, got {tuple(out.shape)}"
        )
    for bank in banks:
        end = bank.offset + slot_bytes(bank.type, bank.rows, bank.cols)
        if bank.offset % ALIGNMENT or end > slots.shape[1] or bank.rows != banks[0].rows:
            raise ValueError(f"a bank at {bank.offset} to {end} does not fit slots of {slots.shape[1]} bytes")


def expert_glu(
    slots: torch.Tensor,
    ids: torch.Tensor,
    banks: tuple[Bank, Bank],
    x: tuple[Source, Source],
    h: torch.Tensor,
    activation: int = 0,
) -> None:
    """h [pairs, n_ff] = act(gate x) * (up x) for every routed pair whose slot is there.

    `slots` uint8 [n_slots, slot_bytes]; `ids` int32 [tokens, n_used], the pairs' slots, -1 to leave a pair's row as it
    is. `banks` and `x` are those of gate and up, x with one row a token. `activation` 0 is silu, 1 is gelu.
    """
    gate, up = banks
    _check_pairs(slots, ids, h, banks)
    tokens, n_used = ids.shape
    g, u = _rows(gate, x[0], tokens), _rows(up, x[1], tokens)
    shapes = [_shape("glu", bank.type, tokens) for bank in banks]
    warps = min(shape.warps for shape in shapes)
    groups = [_groups(bank.type, each.n, warps) for bank, each in ((gate, g), (up, u))]
    rows = max(*groups, min(n * shape.rows for n, shape in zip(groups, shapes, strict=True)))
    glu_kernel[(triton.cdiv(gate.rows, rows), tokens * n_used)](
        *(slots, ids, h, slots.shape[1], gate.rows, n_used),
        *(gate.offset, g.q, g.dx, g.extra, g.n_blocks, g.stride),
        *(up.offset, u.q, u.dx, u.extra, u.n_blocks, u.stride),
        *(activation, gate.type, g.n, groups[0], g.rounds, up.type, u.n, groups[1], u.rounds, rows),
        num_warps=warps,
        **options(ids),
    )


def expert_down(slots: torch.Tensor, ids: torch.Tensor, bank: Bank, h: Source, y: torch.Tensor) -> None:
    """y [pairs, rows] = down h for every routed pair whose slot is there; h has one row a pair."""
    _check_pairs(slots, ids, y, (bank,))
    at = _rows(bank, h, ids.numel())
    shape = _shape("down", bank.type, ids.shape[0])
    groups = _groups(bank.type, at.n, shape.warps)
    down_kernel[(triton.cdiv(bank.rows, groups * shape.rows), ids.numel())](
        *(slots, ids, y, slots.shape[1], bank.rows, bank.offset),
        *(at.q, at.dx, at.extra, at.n_blocks, at.stride),
        *(bank.type, at.n, groups, shape.rows, at.rounds),
        num_warps=shape.warps,
        **options(ids),
    )
