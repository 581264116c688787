"""docs/numerics.md as slow, plain numpy: what every kernel is compared with, bit for bit.

Nothing in the engine calls this module; tests and tools do. Arrays are binary32 unless said otherwise; numpy rounds
after every operation and fuses nothing. Sections of the page are named beside each function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from freetoken import quants
from freetoken.reference_grids import GRID_UNITS, grid_integers

__all__ = [
    "TYPE_CLASS",
    "Activation",
    "attention",
    "exp",
    "experts",
    "float_product",
    "gelu",
    "lanes8",
    "lanes32",
    "product",
    "quantize",
    "rms_norm",
    "rope",
    "router",
    "sigmoid",
    "silu",
    "softcap",
    "terms",
]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
U8 = NDArray[np.uint8]
f32 = np.float32

SPLIT = 256
"""Positions of one attention split."""

TYPE_CLASS: dict[int, int] = {
    **dict.fromkeys((Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.IQ4_NL, Type.MXFP4), 32),
    **dict.fromkeys((Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS), 256),
    **dict.fromkeys(GRID_UNITS, 256),
}
"""ggml type number -> class of activation; types that are not here take the float product."""

TABLE_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int64)
TABLE_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int64)


# --- section 1: sums in a named order ---------------------------------------------------------------------------


def _tree8(lanes: F32) -> F32:
    l0, l1, l2, l3, l4, l5, l6, l7 = np.moveaxis(lanes, -1, 0)
    return np.asarray(((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7)), dtype=f32)


def _lanes(terms: F32, width: int) -> F32:
    """Sums of every width-th term, in ascending order from +0: [..., n] -> [..., width]."""
    lanes = np.zeros((*terms.shape[:-1], width), dtype=f32)
    for start in range(0, terms.shape[-1], width):
        part = terms[..., start : start + width]
        lanes[..., : part.shape[-1]] += part
    return lanes


def lanes8(terms: F32) -> F32:
    """lanes8 over the last axis."""
    return _tree8(_lanes(terms, 8))


def lanes32(terms: F32) -> F32:
    """lanes32 over the last axis."""
    lanes = _lanes(terms, 32)
    return _tree8((lanes[..., 0:8] + lanes[..., 16:24]) + (lanes[..., 8:16] + lanes[..., 24:32]))


# --- section 2: activations -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activation:
    """A quantised row: planes `hi`, `lo` int64 [blocks, width] and `dx` [blocks]."""

    hi: I64
    lo: I64
    dx: F32
    planes: int

    @property
    def a(self) -> I64:
        """The carried integers."""
        return 256 * self.hi + self.lo if self.planes == 2 else self.hi


def quantize(x: F32, width: int, planes: int = 2) -> Activation:
    """Quantise a row [n], n a multiple of the block width (32 or 256)."""
    limit = f32(32512 if planes == 2 else 127)
    blocks = np.ascontiguousarray(x, dtype=f32).reshape(-1, width)
    top = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1)
    amax = top.view(f32)
    special = top >= 0x7F800000
    tiny = ~special & (amax < f32(2.0**-100))
    plain = ~special & ~tiny
    safe = np.where(plain, amax, f32(1))
    inv = limit / safe
    q = np.rint(np.where(plain[:, None], blocks, f32(0)) * inv[:, None]).astype(np.int64)
    dx = np.where(special, f32(np.nan), np.where(tiny, f32(0), safe / limit)).astype(f32)
    if planes == 1:
        return Activation(q, np.zeros_like(q), dx, 1)
    hi = (q + 128) >> 8
    lo = np.maximum(q - 256 * hi, -127)
    return Activation(hi, lo, dx, 2)


# --- section 3: integers of the weight types --------------------------------------------------------------------


@dataclass(frozen=True)
class _Form:
    """A row's blocks: integers [blocks, width], factors [blocks], scales and minimums [blocks, 16] of class 256."""

    n: I64
    d: F32
    m: F32 | None = None
    sc: I64 | None = None
    mn: I64 | None = None


def _half(raw: U8) -> F32:
    return np.ascontiguousarray(raw).view(np.float16)[:, 0].astype(f32)


def _nibbles(qs: U8) -> I64:
    return np.concatenate([qs & 15, qs >> 4], axis=1).astype(np.int64)


def _bits(raw: U8) -> I64:
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little").astype(np.int64)


def _q4_0(b: U8) -> _Form:
    return _Form(_nibbles(b[:, 2:]) - 8, _half(b[:, :2]))


def _q4_1(b: U8) -> _Form:
    return _Form(_nibbles(b[:, 4:]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q5_0(b: U8) -> _Form:
    return _Form(_nibbles(b[:, 6:]) + 16 * _bits(b[:, 2:6]) - 16, _half(b[:, :2]))


def _q5_1(b: U8) -> _Form:
    return _Form(_nibbles(b[:, 8:]) + 16 * _bits(b[:, 4:8]), _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: U8) -> _Form:
    return _Form(np.ascontiguousarray(b[:, 2:]).view(np.int8).astype(np.int64), _half(b[:, :2]))


def _iq4_nl(b: U8) -> _Form:
    return _Form(TABLE_IQ4[_nibbles(b[:, 2:])], _half(b[:, :2]))


def _mxfp4(b: U8) -> _Form:
    return _Form(TABLE_MXFP4[_nibbles(b[:, 1:])], np.ldexp(f32(1), b[:, 0].astype(np.int32) - 128).astype(f32))


def _planes_of_bits(raw: U8, bits: int, run: int) -> I64:
    """Fields of `bits` bits: each run of bytes holds its first field for run values, then the second, and so on."""
    parts = [
        (raw[:, i : i + run] >> s) & ((1 << bits) - 1) for i in range(0, raw.shape[1], run) for s in range(0, 8, bits)
    ]
    return np.concatenate(parts, axis=1).astype(np.int64)


def _scales_k4(s: U8) -> tuple[I64, I64]:
    s64 = s.astype(np.int64)
    a, b, c = s64[:, 0:4], s64[:, 4:8], s64[:, 8:12]
    sc = np.concatenate([a & 63, (c & 15) | ((a >> 6) << 4)], axis=1)
    mn = np.concatenate([b & 63, (c >> 4) | ((b >> 6) << 4)], axis=1)
    return sc.repeat(2, axis=1), mn.repeat(2, axis=1)


def _q2_k(b: U8) -> _Form:
    scales = b[:, :16].astype(np.int64)
    return _Form(_planes_of_bits(b[:, 16:80], 2, 32), _half(b[:, 80:82]), _half(b[:, 82:84]), scales & 15, scales >> 4)


def _q3_k(b: U8) -> _Form:
    n = _planes_of_bits(b[:, 32:96], 2, 32) + 4 * _planes_of_bits(b[:, :32], 1, 32) - 4
    s = b[:, 96:108].astype(np.int64)
    low = np.concatenate([s[:, :8] & 15, s[:, :8] >> 4], axis=1)
    high = np.concatenate([(s[:, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _Form(n, _half(b[:, 108:110]), sc=(low | (high << 4)) - 32)


def _q4_k(b: U8) -> _Form:
    sc, mn = _scales_k4(b[:, 4:16])
    return _Form(_planes_of_bits(b[:, 16:], 4, 32), _half(b[:, :2]), _half(b[:, 2:4]), sc, mn)


def _q5_k(b: U8) -> _Form:
    sc, mn = _scales_k4(b[:, 4:16])
    n = _planes_of_bits(b[:, 48:], 4, 32) + 16 * _planes_of_bits(b[:, 16:48], 1, 32)
    return _Form(n, _half(b[:, :2]), _half(b[:, 2:4]), sc, mn)


def _q6_k(b: U8) -> _Form:
    n = _planes_of_bits(b[:, :128], 4, 64) + 16 * _planes_of_bits(b[:, 128:192], 2, 32) - 32
    sc = np.ascontiguousarray(b[:, 192:208]).view(np.int8).astype(np.int64)
    return _Form(n, _half(b[:, 208:210]), sc=sc)


def _iq4_xs(b: U8) -> _Form:
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16).astype(np.int64)
    low = b[:, 4:8].astype(np.int64)
    ls = [((low[:, j // 2] >> (4 * (j % 2))) & 15) | (((high[:, 0] >> (2 * j)) & 3) << 4) for j in range(8)]
    sc = (np.stack(ls, axis=1) - 32).repeat(2, axis=1)
    return _Form(TABLE_IQ4[_planes_of_bits(b[:, 8:], 4, 16)], _half(b[:, :2]), sc=sc)


def _grid(type_: Type) -> tuple[int, Callable[[U8], _Form]]:
    """Size and form of a type of code words."""

    def form(b: U8) -> _Form:
        n, sc = grid_integers(type_, b)
        return _Form(n, _half(b[:, :2]) * f32(GRID_UNITS[type_]), sc=sc)

    return quants.TYPES[type_].block_bytes, form


_FORMS: dict[int, tuple[int, Callable[[U8], _Form]]] = {
    Type.Q4_0: (18, _q4_0),
    Type.Q4_1: (20, _q4_1),
    Type.Q5_0: (22, _q5_0),
    Type.Q5_1: (24, _q5_1),
    Type.Q8_0: (34, _q8_0),
    Type.IQ4_NL: (18, _iq4_nl),
    Type.MXFP4: (17, _mxfp4),
    Type.Q2_K: (84, _q2_k),
    Type.Q3_K: (110, _q3_k),
    Type.Q4_K: (144, _q4_k),
    Type.Q5_K: (176, _q5_k),
    Type.Q6_K: (210, _q6_k),
    Type.IQ4_XS: (136, _iq4_xs),
    **{type_: _grid(type_) for type_ in GRID_UNITS},
}


def _to_f32(integers: I64) -> F32:
    """f(n), with the int32 bound of section 3 checked."""
    if np.abs(integers).max(initial=0) >= 2**31:
        raise OverflowError("an integer sum left int32: the bounds of docs/numerics.md are broken")
    return integers.astype(f32)


def _terms_32(w: _Form, x: Activation) -> F32:
    s_hi, s_lo = (w.n * x.hi).sum(axis=1), (w.n * x.lo).sum(axis=1)
    f = _to_f32(256 * s_hi + s_lo if x.planes == 2 else s_hi)
    term = (w.d * x.dx) * f
    return term if w.m is None else term + w.m * (x.dx * _to_f32(x.a.sum(axis=1)))


def _terms_256(w: _Form, x: Activation) -> F32:
    def plane(p: I64) -> F32:
        sums = (w.n * p).reshape(-1, 16, 16).sum(axis=2)
        return _to_f32((np.asarray(w.sc) * sums).sum(axis=1))

    f = (plane(x.hi) * f32(256)) + plane(x.lo) if x.planes == 2 else plane(x.hi)
    term = (w.d * x.dx) * f
    if w.m is None:
        return term
    a16 = x.a.reshape(-1, 16, 16).sum(axis=2)
    return np.asarray(term - (w.m * x.dx) * _to_f32((np.asarray(w.mn) * a16).sum(axis=1)), dtype=f32)


def terms(row: U8, x: Activation, type_: int) -> F32:
    """The terms [blocks] of one weight row (its bytes) with a quantised activation."""
    size, form = _FORMS[type_]
    w = form(np.ascontiguousarray(row, dtype=np.uint8).reshape(-1, size))
    with np.errstate(all="ignore"):
        return (_terms_32 if TYPE_CLASS[type_] == 32 else _terms_256)(w, x)


def product(rows: U8, x: Activation, type_: int) -> F32:
    """Products [r] of weight rows [r, row_bytes] of an integer form with a quantised activation."""
    with np.errstate(all="ignore"):
        return np.array([lanes8(terms(row, x, type_)) for row in rows], dtype=f32)


# --- section 4 ---------------------------------------------------------------------------------------------------


def float_product(rows: F32, x: F32) -> F32:
    """Products [r] of binary32 rows [r, n] with an unquantised activation [n]."""
    with np.errstate(all="ignore"):
        return lanes32(np.asarray(rows, dtype=f32) * np.asarray(x, dtype=f32))


# --- section 5 ---------------------------------------------------------------------------------------------------


def exp(x: F32) -> F32:
    """The page's exp, elementwise."""
    x = np.asarray(x, dtype=f32)
    with np.errstate(all="ignore"):
        top = np.where(x > f32(88), f32(88), x)
        k = np.rint(top * f32(1.44269504088896341))
        r = (top - k * f32(0.693359375)) - k * f32(-2.12194440e-4)
        p: F32 = np.full(x.shape, 1.9875691500e-4, dtype=f32)
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = np.asarray(p * r + f32(c), dtype=f32)
        y = ((p * (r * r)) + r) + f32(1)
        scaled = np.ldexp(y, np.nan_to_num(np.clip(k, -126, 127)).astype(np.int32)).astype(f32)
    return np.where(x < f32(-87), f32(0), scaled).astype(f32)


def sigmoid(x: F32) -> F32:
    """1 / (1 + exp(-x))."""
    return np.asarray(f32(1) / (f32(1) + exp(-x)), dtype=f32)


def silu(x: F32) -> F32:
    """x / (1 + exp(-x))."""
    return np.asarray(x / (f32(1) + exp(-x)), dtype=f32)


def gelu(x: F32) -> F32:
    """The tanh form, through the sigmoid."""
    u = x * (f32(1.5957691216057308) + f32(0.07135481627159992) * (x * x))
    return np.asarray(x / (f32(1) + exp(-u)), dtype=f32)


def softcap(x: F32, c: float) -> F32:
    """c * tanh(x / c)."""
    tanh = f32(1) - (f32(2) / (exp(f32(2) * (x / f32(c))) + f32(1)))
    return np.asarray(f32(c) * tanh, dtype=f32)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    """RMS norm over the last axis."""
    s = lanes32(x * x)
    scale = f32(1) / np.sqrt((s / f32(x.shape[-1])) + f32(eps))
    return np.asarray((x * scale[..., None]) * weight, dtype=f32)


def rope(x: F32, cos: F32, sin: F32, *, is_neox: bool) -> F32:
    """Rotate heads [..., head_dim] by the pairs' cosines and sines [rot / 2]; values past rot stay."""
    half = cos.shape[-1]
    y = np.array(x, dtype=f32)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    x0, x1 = x[..., first], x[..., second]
    y[..., first] = (x0 * cos) - (x1 * sin)
    y[..., second] = (x0 * sin) + (x1 * cos)
    return y


# --- section 6 ---------------------------------------------------------------------------------------------------


def attention(
    q: F32,
    k: NDArray[np.floating],
    v: NDArray[np.floating],
    *,
    scale: float,
    first: int = 0,
    softcap_: float = 0.0,
    sink: float | None = None,
) -> F32:
    """One query head [d] over keys [pos + 1, d] and values [pos + 1, dv] (fp16 or binary32): [dv].

    Keys and values before `first` are not looked at; `sink` is a score without a value.
    """
    n = len(k)
    parts: list[tuple[np.float32, np.float32, F32]] = []
    for start in range(first // SPLIT * SPLIT, n, SPLIT):
        at = np.arange(max(start, first), min(start + SPLIT, n))
        s = np.asarray(lanes32(k[at].astype(f32) * q) * f32(scale), dtype=f32)
        if softcap_:
            s = softcap(s, softcap_)
        m = f32(s.max())
        p = exp(s - m)
        padded = np.zeros(SPLIT, dtype=f32)
        padded[at - start] = p
        o = np.zeros(v.shape[1], dtype=f32)
        for weight, row in zip(p, v[at].astype(f32), strict=True):
            o = o + weight * row
        parts.append((m, f32(lanes8(padded)), o))
    return _merge_splits(parts, sink)


def _merge_splits(parts: Sequence[tuple[np.float32, np.float32, F32]], sink: float | None) -> F32:
    tops = [m for m, _, _ in parts] + ([] if sink is None else [f32(sink)])
    top = max(tops)
    total, out = f32(0), np.zeros_like(parts[0][2])
    for m, l_sum, o in parts:
        w = f32(exp(np.asarray(m - top, dtype=f32)))
        total = f32(total + w * l_sum)
        out = out + w * o
    if sink is not None:
        total = f32(total + f32(exp(np.asarray(f32(sink) - top, dtype=f32))))
    return np.asarray(out * (f32(1) / total), dtype=f32)


# --- section 7 ---------------------------------------------------------------------------------------------------


def _softmax(x: F32) -> F32:
    e = exp(x - x.max())
    return np.asarray(e / lanes8(e), dtype=f32)


def router(
    logits: F32,
    n_used: int,
    *,
    gate: str = "softmax",
    normalise: bool = True,
    scale: float = 1.0,
    bias: F32 | None = None,
) -> tuple[NDArray[np.int32], F32]:
    """Ids and weights [n_used] of one token's experts, in rank order; `gate` as in blocks.Ops.route."""
    gates: dict[str, Callable[[F32], F32]] = {"softmax": _softmax, "sigmoid": sigmoid, "softmax_chosen": np.copy}
    prob = gates[gate](logits)
    score = prob if bias is None else prob + bias
    ids = np.argsort(-score, kind="stable")[:n_used].astype(np.int32)
    chosen = np.asarray(prob[ids], dtype=f32)
    if gate == "softmax_chosen":
        chosen = _softmax(chosen)
    if normalise:
        total = f32(0)
        for value in chosen:
            total = f32(total + value)
        chosen = np.asarray(chosen / max(total, f32(6.103515625e-5)), dtype=f32)
    return ids, chosen if scale == 1.0 else np.asarray(chosen * f32(scale), dtype=f32)


def experts(
    x: F32,
    ids: Sequence[int],
    weights: F32,
    matrices: Callable[[int, str, F32], F32],
    activation: Callable[[F32], F32] = silu,
) -> tuple[F32, F32]:
    """Rows [k, d] of the chosen experts and their merged sum [d].

    `matrices(expert, name, x)` is the product of that expert's "gate", "up" or "down" with x, by section 3 or 4.
    """
    rows = np.zeros((len(ids), len(x)), dtype=f32)
    y = np.zeros(len(x), dtype=f32)
    for rank, expert in enumerate(ids):
        h = activation(matrices(expert, "gate", x)) * matrices(expert, "up", x)
        rows[rank] = matrices(expert, "down", np.asarray(h, dtype=f32))
        y = y + weights[rank] * rows[rank]
    return rows, y
