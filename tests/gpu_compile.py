"""Compiles Triton kernels ahead of time, without a GPU, for the architectures that we support.

The work is done by two processes that stay: under TRITON_INTERPRET=1 a kernel cannot be compiled, and importing torch
and triton takes longer than most kernels.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from conftest import CACHE

ARCHITECTURES = (75, 80, 86, 89, 90, 120)
"""Compute capabilities, as major * 10 + minor."""
QUICK = (75, 90)
"""Those compiled in the default tests."""
MAX_SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
N_PROCESSES = 2


def compile_kernel(
    module: str,
    name: str,
    signature: dict[str, str],
    constexprs: dict[str, object],
    *,
    divisible: tuple[str, ...] = (),
    warps: int = 4,
    stages: int = 1,
    archs: tuple[int, ...] = QUICK,
) -> str:
    """PTX of a kernel for all of `archs`; raises where one does not compile or wants more shared memory than there is.

    `signature` has types as Triton writes them ("*i32", "i64"), `divisible` arguments that are multiples of 16. A
    kernel that may start before the one ahead has ended is compiled so for cards that can (`kernels.launch`).
    """
    pool = _processes()
    spec = module, name, signature, constexprs, divisible, warps, stages
    return "".join(each.result(timeout=170) for each in [pool.submit(_compile, arch, *spec) for arch in archs])


TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
Launched = tuple[Any, tuple[int, int, int], tuple[Any, ...], tuple[Any, ...], int, int]


class Launches:
    """Stands in for `fast_launch.launch`: keeps what would run, so that a launcher's own constants are compiled."""

    def __init__(self) -> None:
        self.kept: list[Launched] = []

    def __call__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...],
        warps: int, stages: int = 3,
    ) -> None:  # fmt: skip
        self.kept.append((kernel, grid, arguments, constants, warps, stages))

    def compile(self, archs: tuple[int, ...]) -> None:
        """Compile all that was launched."""
        for kernel, _, arguments, constants, warps, stages in self.kept:
            names = kernel.arg_names
            numbers: dict[str, object] = dict(zip(names[len(arguments) :], constants, strict=True))
            signature = {}
            for name, argument in zip(names, arguments, strict=False):
                if argument is None:
                    numbers[name] = None
                elif isinstance(argument, torch.Tensor):
                    signature[name] = TYPES[argument.dtype]
                else:
                    signature[name] = "i32" if isinstance(argument, int) else "fp32"
            pointers = tuple(name for name, kind in signature.items() if kind[0] == "*")
            place, name = kernel.fn.__module__, kernel.fn.__name__
            compile_kernel(place, name, signature, numbers, divisible=pointers, warps=warps, stages=stages, archs=archs)


@functools.cache
def _processes() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(N_PROCESSES, multiprocessing.get_context("spawn"), _leave_the_interpreter)


def _leave_the_interpreter() -> None:
    """Their cache is their own, and has PTX: the engine keeps none in the user's, and its wish is inherited."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("TRITON_STORE_BINARY_ONLY", None)
    os.environ["TRITON_CACHE_DIR"] = str(CACHE / "triton-ptx")


def _compile(
    arch: int,
    module: str,
    name: str,
    signature: dict[str, str],
    constexprs: dict[str, object],
    divisible: tuple[str, ...],
    warps: int,
    stages: int,
) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    options: dict[str, object] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    if "IS_CHAINED" in kernel.arg_names:
        constexprs = constexprs | {"IS_CHAINED": arch >= 90}
        options["launch_pdl"] = arch >= 90
    types = signature | dict.fromkeys(constexprs, "constexpr")
    at = {argument: (i,) for i, argument in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {argument: types[argument] for argument in at},
        {at[argument]: value for argument, value in constexprs.items()},
        {at[argument]: [["tt.divisibility", 16]] for argument in divisible},
    )
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert done.asm["cubin"], "no machine code"
    shared = done.metadata.shared / 1024
    assert shared <= MAX_SHARED_KIB[arch], f"{shared} KiB of shared memory on sm_{arch}"
    return str(done.asm["ptx"])
