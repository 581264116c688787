"""Rotary position embedding: the settings in a file's metadata, and the frequencies that follow from them.

Sources: ggml's rope (`rope_yarn`, `ggml_rope_yarn_corr_dims`) and the factor rules of llama-context.cpp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from freetoken.errors import ModelFileError, UnsupportedModelError
from freetoken.gguf import Metadata
from freetoken.spec.angles import log, powers

__all__ = ["Rope", "RopeValues", "read_rope", "rope_table"]

SCALINGS = ("none", "linear", "yarn")
MIN_FACTOR, MAX_FACTOR = 0.01, 1e6
MIN_BASE, MAX_BASE = 1.5, 1e12


@dataclass(frozen=True)
class Rope:
    """Settings of a model's rotation. Sliding layers use `freq_base_swa` and no scaling.

    `factor` is the context extension (1: none) and `n_ctx_orig` the context before it; `ext_factor` 1 mixes YaRN in,
    `attn_factor` multiplies cosines and sines.
    """

    n_rot: int
    is_neox: bool
    freq_base: float
    freq_base_swa: float
    scaling: str
    factor: float
    n_ctx_orig: int
    attn_factor: float
    ext_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class RopeValues(NamedTuple):
    """The fields of `blocks.RopeTable`, in its order. `inv_freq` is binary64 [n_rot / 2]."""

    n_rot: int
    inv_freq: np.ndarray
    mscale: float
    is_neox: bool


def read_rope(metadata: Metadata, arch: str, head_dim: int, n_ctx_train: int, *, is_neox: bool) -> Rope:
    """The settings from `<arch>.rope.*`. Raises UnsupportedModelError for a scaling that we do not have."""
    key = f"{arch}.rope."
    n_rot = metadata.get_int(key + "dimension_count", head_dim, low=2, high=head_dim)
    if n_rot % 2:
        raise ModelFileError(f"{metadata.where}: key '{key}dimension_count' is {n_rot}, expected an even number")
    scaling = metadata.get_str(key + "scaling.type", "linear")
    if scaling not in SCALINGS:
        known = ", ".join(SCALINGS)
        raise UnsupportedModelError(f"{metadata.where}: rope scaling {scaling!r} is not supported, only {known}")
    factor_key = key + "scaling.factor"
    if factor_key not in metadata:
        factor_key = key + "scale_linear"
    factor = metadata.get_float(factor_key, 0.0, low=0.0, high=MAX_FACTOR)
    if factor == 0.0 or scaling == "none":
        factor = 1.0
    if factor < MIN_FACTOR:
        raise ModelFileError(f"{metadata.where}: key {factor_key!r} is {factor}, expected 0 or at least {MIN_FACTOR}")
    return Rope(
        n_rot=n_rot,
        is_neox=is_neox,
        freq_base=metadata.get_float(key + "freq_base", 10000.0, low=MIN_BASE, high=MAX_BASE),
        freq_base_swa=metadata.get_float(key + "freq_base_swa", 10000.0, low=MIN_BASE, high=MAX_BASE),
        scaling=scaling if factor != 1.0 or scaling == "yarn" else "none",
        factor=factor,
        n_ctx_orig=metadata.get_int(key + "scaling.original_context_length", 0, high=2**31 - 1) or n_ctx_train,
        attn_factor=metadata.get_float(key + "scaling.attn_factor", 1.0, low=1e-6, high=MAX_FACTOR),
        ext_factor=1.0 if scaling == "yarn" else 0.0,
    )


def rope_table(rope: Rope, *, is_sliding: bool = False, freq_factors: np.ndarray | None = None) -> RopeValues:
    """Frequencies and magnitude for a layer, computed in binary64.

    `freq_factors` [n_rot / 2] (the tensor `rope_freqs.weight`, llama3's scaling) divides the frequencies.
    """
    half = rope.n_rot // 2
    base = rope.freq_base_swa if is_sliding else rope.freq_base
    freq_scale = 1.0 if is_sliding else 1.0 / rope.factor
    extrapolated = powers(base, -2.0 * np.arange(half, dtype=np.float64) / rope.n_rot)
    if freq_factors is not None:
        factors = freq_factors.astype(np.float64).ravel()
        if len(factors) != half or not np.all(np.isfinite(factors) & (factors > 0)):
            raise ModelFileError(f"tensor 'rope_freqs.weight' does not hold {half} positive numbers")
        extrapolated = extrapolated / factors
    mscale = rope.attn_factor
    if rope.ext_factor == 0.0:
        return RopeValues(rope.n_rot, extrapolated * freq_scale, mscale, rope.is_neox)
    low, high = _corrected_range(rope, base)
    ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
    mix = (1.0 - ramp) * rope.ext_factor
    mscale *= _yarn_magnitude(rope.factor) / (1.0 + 0.1 * log(rope.factor))
    mscale *= 1.0 + 0.1 * log(1.0 / freq_scale)
    return RopeValues(rope.n_rot, extrapolated * (freq_scale * (1.0 - mix) + mix), mscale, rope.is_neox)


def _yarn_magnitude(factor: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * log(factor) + 1.0


def _corrected_range(rope: Rope, base: float) -> tuple[float, float]:
    """The frequency numbers between which YaRN passes from extrapolation to interpolation."""

    def dimension(n_turns: float) -> float:
        return rope.n_rot * log(rope.n_ctx_orig / (n_turns * 2 * math.pi)) / (2 * log(base))

    low = math.floor(dimension(rope.beta_fast))
    high = math.ceil(dimension(rope.beta_slow))
    return max(0, low), min(rope.n_rot - 1, high)
