"""Compiles Triton kernels ahead of time, without a GPU, for the architectures that we support."""

from __future__ import annotations

import os
import subprocess
import sys

ARCHITECTURES = (75, 80, 86, 89, 90, 120)
"""Compute capabilities, as major * 10 + minor."""
QUICK = (75, 90)
"""Those compiled in the default tests."""

_CODE = """
import importlib, sys, triton
MAX_SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
module, name, signature, constexprs, divisible, warps, stages, archs = eval(sys.argv[1])
kernel = getattr(importlib.import_module(module), name)
attrs = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in divisible}
for arch in archs:
    if "IS_CHAINED" in kernel.arg_names:
        constexprs = constexprs | {"IS_CHAINED": arch >= 90}
    signature = signature | dict.fromkeys(constexprs, "constexpr")
    signature = {n: signature[n] for n in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in constexprs.items()}, attrs)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    limit = MAX_SHARED[arch] * 1024
    done = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert done.asm["cubin"] and done.metadata.shared <= limit, done.metadata.shared
    print(done.asm["ptx"])
"""


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

    `signature` has types as Triton writes them ("*i32", "i64"), `divisible` arguments that are multiples of 16. In a
    process of its own: under TRITON_INTERPRET=1 a kernel cannot be compiled.
    """
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    spec = repr((module, name, signature, constexprs, divisible, warps, stages, archs))
    done = subprocess.run([sys.executable, "-c", _CODE, spec], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
