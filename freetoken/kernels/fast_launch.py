"""Launches without Triton's look-up of the compiled kernel, which takes longer than many kernels of a prompt run.

Triton's own launch compiles a kernel and answers with it; here it is kept under what its binary depends on: constants,
options, and for each argument what Triton makes special (a pointer's type and alignment, an integer's divisibility).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["launch"]

_compiled: dict[tuple[object, ...], Any] = {}


def launch(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...], warps: int,
    stages: int = 3,
) -> None:  # fmt: skip
    """Run a kernel whose parameters are `arguments` (the first a tensor) and after them the constants, on the current
    stream of their device, which is the current one."""
    kinds: list[object] = []
    for a in arguments:
        if isinstance(a, torch.Tensor):
            kinds.append((a.dtype, a.data_ptr() % 16 == 0))
        elif isinstance(a, int):
            kinds.append((a == 1, a % 16 == 0, -(2**31) <= a < 2**31))
        else:
            kinds.append(type(a))
    key = (id(kernel), arguments[0].get_device(), constants, warps, stages, *kinds)
    found = _compiled.get(key)
    if found is not None:
        found[grid](*arguments, *constants)
        return
    found = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)
    if found is not None and not hasattr(found, "result"):  # the interpreter answers nothing, `ahead` a future
        _compiled[key] = found
