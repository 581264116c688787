"""Tables that some types' integers are looked up in.

IQ4_NL, IQ4_XS and MXFP4: their 16 values as four words. As tensors on a device, from the gguf package: of IQ2 and IQ3
the code words' magnitudes, four a word; of IQ1 the eight values of a code word, each plus 1, as 2 bits from the lowest.
"""

from __future__ import annotations

import functools

import gguf.quants
import numpy as np
import torch
import triton.language as tl

from freetoken.quants import GgmlType

__all__ = ["IQ4", "MXFP4", "table"]


def _words(*values: int) -> tuple[int, ...]:
    """Signed bytes, four an int32."""
    return tuple(np.array(values, np.int8).view("<i4").tolist())


IQ4 = tl.constexpr(_words(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
MXFP4 = tl.constexpr(_words(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))
_GRIDS = (GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S, GgmlType.IQ3_XXS, GgmlType.IQ3_S)
_TERNARY = (GgmlType.IQ1_S, GgmlType.IQ1_M)


@functools.lru_cache(maxsize=64)
def table(type_id: int, device: torch.device) -> torch.Tensor | None:
    """The table of a type, made on the first call; None for types that need none."""
    if type_id in _TERNARY:
        return _ternary(device)
    if type_id not in _GRIDS:
        return None
    quant = getattr(gguf.quants, GgmlType(type_id).name)
    quant.init_grid()
    words = quant.grid.reshape(-1).astype(np.uint8).view("<i4")
    return torch.from_numpy(words.copy()).to(device)


def _ternary(device: torch.device) -> torch.Tensor:
    """int32 [2048]."""
    quant = gguf.quants.IQ1_S
    quant.init_grid()
    values = quant.grid.reshape(-1, 8).astype(np.int64) + 1
    return torch.from_numpy((values << (2 * np.arange(8))).sum(axis=1).astype(np.int32)).to(device)
