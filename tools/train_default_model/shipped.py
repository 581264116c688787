"""The types of the shipped file's tensors: what fits 24 MB."""

from __future__ import annotations

import re

__all__ = ["MAX_BYTES", "shipped_type"]

MAX_BYTES = 24_000_000
_RULES = (
    (r"ffn_(gate|up)_exps", "Q3_K"),
    (r"ffn_down_exps", "Q4_K"),
    (r"token_embd", "Q5_K"),
    (r"attn_v\.", "Q5_K"),
    (r"attn_(q|k|output)\.", "Q4_K"),
    (r"ffn_(gate|up|down)\.", "Q4_K"),
)
_BLOCK = 256


def shipped_type(name: str, n_dims: int, width: int) -> str:
    """The ggml type of a tensor by GGUF's name; vectors, routers and rows that no super-block fits stay F32."""
    if n_dims >= 2 and width % _BLOCK == 0:
        for pattern, kind in _RULES:
            if re.search(pattern, name):
                return kind
    return "F32"
