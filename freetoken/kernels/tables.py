"""Tables that some types' integers are looked up in, as int32 tensors on a device.

IQ4_NL and IQ4_XS: their 16 values. IQ2 and IQ3: the code words' magnitudes, four a word, those of the gguf package.
"""

from __future__ import annotations

import functools

import gguf.quants
import numpy as np
import torch

from freetoken.quants import GgmlType

__all__ = ["table"]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_GRIDS = (GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S, GgmlType.IQ3_XXS, GgmlType.IQ3_S)


@functools.lru_cache(maxsize=64)
def table(type_id: int, device: torch.device) -> torch.Tensor | None:
    """The table of a type, made on the first call; None for types that need none."""
    if type_id in (GgmlType.IQ4_NL, GgmlType.IQ4_XS):
        return torch.tensor(_IQ4, dtype=torch.int32, device=device)
    if type_id not in _GRIDS:
        return None
    quant = getattr(gguf.quants, GgmlType(type_id).name)
    quant.init_grid()
    words = quant.grid.reshape(-1).astype(np.uint8).view("<i4")
    return torch.from_numpy(words.copy()).to(device)
