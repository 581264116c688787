"""Ranges of the sampling parameters: what a client sent wrong is said by field, before anything runs."""

from __future__ import annotations

import math
from typing import Final

from freetoken.errors import RequestError
from freetoken.request import SamplingParams

__all__ = ["SAMPLERS", "check_params"]

SAMPLERS: Final = SamplingParams().samplers
"""Names that `samplers` may hold, in the default order."""

_FINITE = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_p",
    "min_p",
    "top_n_sigma",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
)
_LOWEST: Final = {"repeat_last_n": -1, "dry_penalty_last_n": -1, "min_keep": 0, "n_probs": 0}


def check_params(params: SamplingParams, n_vocab: int = 0) -> None:
    """Raise RequestError naming the field. With n_vocab, token ids of `logit_bias` are checked too."""
    for name in _FINITE:
        value = getattr(params, name)
        if not math.isfinite(value):
            raise RequestError(f"{name} is {value}: expected a finite number")
    for name, low in _LOWEST.items():
        if getattr(params, name) < low:
            raise RequestError(f"{name} is {getattr(params, name)}: expected at least {low}")
    if params.repeat_penalty <= 0.0 or not math.isfinite(1.0 / params.repeat_penalty):
        raise RequestError(f"repeat_penalty is {params.repeat_penalty}: expected a number above 0 (1 switches it off)")
    if params.mirostat not in (0, 1, 2):
        raise RequestError(f"mirostat is {params.mirostat}: expected 0 (off), 1 or 2")
    for name in params.samplers:
        if name not in SAMPLERS:
            raise RequestError(f"samplers: {name!r} is not a known sampler, expected some of {', '.join(SAMPLERS)}")
    for token, bias in params.logit_bias.items():
        if math.isnan(bias) or bias == math.inf:
            raise RequestError(f"logit_bias of token {token} is {bias}: expected a number or -inf")
        if n_vocab and not 0 <= token < n_vocab:
            raise RequestError(f"logit_bias: token {token} is outside the vocabulary of {n_vocab} tokens")
