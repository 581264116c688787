"""Rounding of weights as the shipped types do, for the last part of training; the gradient passes straight through.

Close to ggml's types, not equal to them: block scales by the largest value, kept as 6-bit fractions of the row's
super-block of 256 as Q3_K and Q4_K keep them.
"""

from __future__ import annotations

import torch

__all__ = ["round_weight"]

SUPER = 256


def _fraction(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Scales [..., blocks of a super-block] as whole fractions of the largest one."""
    top = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / steps
    return (x / top).round() * top


def round_q3(weight: torch.Tensor) -> torch.Tensor:
    """3 bits in blocks of 16, symmetric, -4..3 times a signed scale."""
    blocks = weight.reshape(*weight.shape[:-1], -1, SUPER // 16, 16)
    low, high = blocks.amin(-1), blocks.amax(-1)
    scale = _fraction(torch.where(-low >= high, low, high) / -4, 31)
    scale = torch.where(scale.abs() < 1e-12, 1e-12, scale)[..., None]
    return ((blocks / scale).round().clamp(-4, 3) * scale).reshape(weight.shape)


def round_k(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """4 or 5 bits in blocks of 32 with a scale and a minimum of at most 0, as Q4_K and Q5_K."""
    top = (1 << bits) - 1
    blocks = weight.reshape(*weight.shape[:-1], -1, SUPER // 32, 32)
    least = blocks.amin(-1).clamp(max=0)
    scale = _fraction((blocks.amax(-1) - least) / top, 63).clamp_min(1e-12)[..., None]
    least = _fraction(least, 63)[..., None]
    return (((blocks - least) / scale).round().clamp(0, top) * scale + least).reshape(weight.shape)


def round_q6(weight: torch.Tensor) -> torch.Tensor:
    """6 bits in blocks of 16, symmetric, as Q6_K."""
    blocks = weight.reshape(*weight.shape[:-1], -1, SUPER // 16, 16)
    scale = _fraction(blocks.abs().amax(-1) / 31.5, 127).clamp_min(1e-12)[..., None]
    return ((blocks / scale).round().clamp(-32, 31) * scale).reshape(weight.shape)


def round_weight(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """`weight` as the type `kind` ("Q3_K", "Q4_K", "Q5_K", "Q6_K") would hold it; others and short rows unchanged."""
    if weight.shape[-1] % SUPER:
        return weight
    if kind == "Q3_K":
        return round_q3(weight)
    if kind in ("Q4_K", "Q5_K"):
        return round_k(weight, int(kind[1]))
    return round_q6(weight) if kind == "Q6_K" else weight
