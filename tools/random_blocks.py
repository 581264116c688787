"""Random quantised tensors made as bytes, without quantising anything: payload bytes are noise, scales are valid.

A block's factors and sub-block scales come from a small table of ready headers, chosen so that the weights are zero on
average and have the standard deviation asked for. Speed: a few hundred MB/s, bounded by the generator of raw bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import gguf
import numpy as np

from tools.ggml import dequantise, is_float_type, quantise, row_bytes

__all__ = ["RANDOM_TYPES", "Header", "random_bytes", "random_rows"]

N_HEADERS = 1024
SCALE_BYTES = {"k2": 16, "k4": 12, "k6": 16}


@dataclass(frozen=True)
class Header:
    """Where a block of one type keeps what cannot be noise: byte offsets of its fp16 factors `d` and `dmin`.

    `mean` is the payload's mean integer: the minimum is `mean * d`, subtracted (K-quants) or added negative (`m`).
    `scales` names how the sub-block scales at `scales_at` are made: "k4" (6-bit pairs of Q4_K, Q5_K), "k2" (nibble
    pairs of Q2_K), "k6" (int8 of Q6_K), "" (noise will do). `exponent` marks a block led by an E8M0 byte.
    """

    d: int
    dmin: int = -1
    mean: float = 0.0
    is_m: bool = False
    scales: str = ""
    scales_at: int = 0
    exponent: bool = False


RANDOM_TYPES: dict[str, Header] = {
    "Q4_0": Header(0),
    "Q4_1": Header(0, 2, 7.5, is_m=True),
    "Q5_0": Header(0),
    "Q5_1": Header(0, 2, 15.5, is_m=True),
    "Q8_0": Header(0),
    "Q2_K": Header(80, 82, 1.5, scales="k2", scales_at=0),
    "Q3_K": Header(108),
    "Q4_K": Header(0, 2, 7.5, scales="k4", scales_at=4),
    "Q5_K": Header(0, 2, 15.5, scales="k4", scales_at=4),
    "Q6_K": Header(208, scales="k6", scales_at=192),
    "IQ2_XXS": Header(0),
    "IQ2_XS": Header(0),
    "IQ2_S": Header(0),
    "IQ3_XXS": Header(0),
    "IQ3_S": Header(0),
    "IQ1_S": Header(0),
    "TQ1_0": Header(52),
    "IQ4_NL": Header(0),
    "IQ4_XS": Header(0),
    "MXFP4": Header(0, exponent=True),
}


def random_bytes(rng: np.random.Generator, n: int) -> np.ndarray:
    """`n` random bytes as uint8, from the generator's raw 64-bit words."""
    raw = rng.bit_generator.random_raw((n + 7) // 8)
    return np.asarray(raw).view(np.uint8)[:n]


def scale_bytes(rng: np.random.Generator, kind: str, n: int) -> np.ndarray:
    """`n` rows of packed sub-block scales; minimum and scale of a sub-block carry the same integer."""
    if kind == "k2":
        scale = rng.integers(6, 16, (n, 16), dtype=np.uint8)
        return np.asarray(scale | scale << 4, dtype=np.uint8)
    if kind == "k6":
        signs = rng.choice(np.array([-1, 1], dtype=np.int8), (n, 16))
        return np.asarray(rng.integers(64, 128, (n, 16)).astype(np.int8) * signs).view(np.uint8)
    scale = rng.integers(32, 64, (n, 8), dtype=np.uint8)
    low, high = scale[:, :4], scale[:, 4:]
    packed = low | (high >> 4) << 6
    return np.concatenate([packed, packed, (high & 15) | (high & 15) << 4], axis=1).astype(np.uint8)


def header_spans(header: Header) -> list[tuple[int, int]]:
    """Byte ranges (start, stop) of a block that the header owns."""
    if header.exponent:
        return [(0, 1)]
    out = [(header.d, header.d + 2)]
    if header.dmin >= 0:
        out.append((header.dmin, header.dmin + 2))
    if header.scales:
        out.append((header.scales_at, header.scales_at + SCALE_BYTES[header.scales]))
    return out


def put_half(blocks: np.ndarray, at: int, values: np.ndarray) -> None:
    """Store fp16 values at byte `at` of each block."""
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def put_headers(blocks: np.ndarray, kind: gguf.GGMLQuantizationType, rng: np.random.Generator, factor: float) -> None:
    """Overwrite the factors (about `factor`, within 20%) and sub-block scales of every block [n, size] in place."""
    header = RANDOM_TYPES[kind.name]
    n = len(blocks)
    if header.exponent:
        blocks[:, 0] = np.clip(np.round(np.log2(factor)) + 128, 1, 250)
        return
    factors = factor * rng.uniform(0.8, 1.2, n)
    put_half(blocks, header.d, factors)
    if header.dmin >= 0:
        put_half(blocks, header.dmin, factors.astype(np.float16) * (-header.mean if header.is_m else header.mean))
    if header.scales:
        scales = scale_bytes(rng, header.scales, n)
        blocks[:, header.scales_at : header.scales_at + scales.shape[1]] = scales


@functools.cache
def unit_std(kind: gguf.GGMLQuantizationType) -> float:
    """Standard deviation of the weights of random blocks whose factor is 1/64, times 64."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    blocks = random_bytes(rng, N_HEADERS * size).reshape(N_HEADERS, size)
    put_headers(blocks, kind, rng, 1 / 64)
    return float(dequantise(blocks, kind, block).std()) * 64


def random_rows(
    rng: np.random.Generator, kind: gguf.GGMLQuantizationType, rows: int, cols: int, std: float
) -> np.ndarray:
    """uint8 [rows, row_bytes] of a random weight with standard deviation `std` (MXFP4: within a factor of 1.5).

    ValueError for a type that has no table entry, or a row that the type's blocks do not divide.
    """
    n_bytes = row_bytes(kind, cols)
    if is_float_type(kind):
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        values *= np.float32(std)
        return quantise(values, kind)
    if kind.name not in RANDOM_TYPES:
        raise ValueError(f"no random blocks of type {kind.name}; choose from F32, F16, BF16, {', '.join(RANDOM_TYPES)}")
    size = gguf.GGML_QUANT_SIZES[kind][1]
    out = random_bytes(rng, rows * n_bytes).reshape(-1, size)
    headers = np.zeros((N_HEADERS, size), dtype=np.uint8)
    put_headers(headers, kind, rng, std / unit_std(kind))
    pick = rng.integers(0, N_HEADERS, len(out), dtype=np.uint16)
    for start, stop in header_spans(RANDOM_TYPES[kind.name]):
        out[:, start:stop] = headers[:, start:stop][pick]
    return out.reshape(rows, n_bytes)
