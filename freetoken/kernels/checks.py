"""What launchers check before a kernel reads an address."""

from __future__ import annotations

import torch

__all__ = ["ceil_div", "check", "next_power_of_2"]


def check(name: str, x: torch.Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raise ValueError unless x is contiguous and has this type and shape."""
    if x.dtype != dtype or tuple(x.shape) != shape or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {dtype} {list(shape)}, got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up; triton.cdiv may be called by kernels too and takes ten microseconds for that."""
    return -(-a // b)
