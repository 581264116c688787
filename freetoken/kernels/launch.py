"""What every launch of a decode step shares: no fused multiply-add, and, on cards that can (sm_90 and later), a start
before the kernel ahead has ended.

A kernel calls `wait` before it touches anything but weights: it then goes on when the kernel ahead has ended and its
results are visible, and lets the next one start. So what is read before `wait` must not be written by the kernel right
ahead; all others have ended.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["options", "wait"]


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def options(x: torch.Tensor) -> dict[str, bool]:
    """Arguments of a launch on the device of x, for a kernel with a parameter IS_CHAINED."""
    if x.is_cuda and _can_overlap(x.device):
        return {"enable_fp_fusion": False, "IS_CHAINED": True, "launch_pdl": True}
    return {"enable_fp_fusion": False, "IS_CHAINED": False}


@triton.jit
def wait(IS_CHAINED: tl.constexpr):
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
