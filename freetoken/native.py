"""The one binding of the native library: threads, programs of operations, decoding of whole tensors.

Mirrors `native/include/freetoken.h`, where each operation's fields are described; called by `cpu/`. The library trusts
its caller, so addresses given here must stay valid: a `Program` keeps the arrays that it was given alive.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import freetoken
from freetoken.cores import cpu_quota, physical_cores, physical_cpus
from freetoken.errors import EngineError
from freetoken.quants import row_bytes, to_float_pointer

__all__ = [
    "ACTIVATIONS",
    "KV_PAGE",
    "MAX_TOKENS",
    "OP_ADD",
    "OP_ATTENTION",
    "OP_EMBED",
    "OP_EXPERTS",
    "OP_GATED_ADD",
    "OP_GLU",
    "OP_KV_STORE",
    "OP_MATVEC",
    "OP_NOP",
    "OP_QUANTIZE",
    "OP_RMS_NORM",
    "OP_ROPE",
    "OP_ROUTER",
    "OP_SCALE",
    "VARIANTS",
    "VARIANT_VARIABLE",
    "Op",
    "Pool",
    "Program",
    "act_bytes",
    "aligned",
    "aligned_zeros",
    "attn_scratch_bytes",
    "can_decode",
    "copy_runs",
    "cpu_features",
    "cpu_quota",
    "expert_stride",
    "experts_scratch_bytes",
    "has_many",
    "library",
    "physical_cores",
    "physical_cpus",
    "set_variant",
    "type_class",
    "variant",
]

ABI_VERSION = 2
MAX_TOKENS = 8
"""Token rows of one program (FT_MAX_TOKENS)."""
KV_PAGE = 256
"""Positions of one KV page (FT_KV_PAGE)."""
ALIGNMENT = 64
VARIANTS = ("auto", "avx512gather", "avx512vbmi", "avx512vnni", "avxvnni", "avx512", "avx2", "portable")
"""Names of sets of kernels; "auto" is the fastest that the processor can run."""
VARIANT_VARIABLE = "FREETOKEN_CPU_VARIANT"
"""Environment variable that forces a set in any command."""
SPIN_US = 200
"""How long idle workers spin before they sleep: longer than what lies between two decode steps."""

OP_NOP = 0
OP_EMBED = 1
OP_RMS_NORM = 2
OP_QUANTIZE = 3
OP_MATVEC = 4
OP_ADD = 5
OP_GLU = 6
OP_ROPE = 7
OP_KV_STORE = 8
OP_ATTENTION = 9
OP_ROUTER = 10
OP_EXPERTS = 11
OP_GATED_ADD = 12
OP_SCALE = 13
ACTIVATIONS = {"silu": 0, "gelu": 1}
"""Numbers of the activations of OP_GLU and OP_EXPERTS, by their names in `blocks.Ops`."""
OP_NAMES = [
    *("nop", "embed", "rms_norm", "quantize", "matvec", "add", "glu"),
    *("rope", "kv_store", "attention", "router", "experts", "gated_add", "scale"),
]

Address = np.ndarray | int | None
"""What a pointer field takes: an array (its first element), an address, or NULL."""


class Op(ctypes.Structure):
    """`ft_op`."""

    _fields_ = (
        ("code", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("i", ctypes.c_int64 * 14),
        ("f", ctypes.c_float * 6),
        ("p", ctypes.c_void_p * 14),
    )


# --- the library -----------------------------------------------------------------------------------------------------

_INT, _I64, _PTR, _STR = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ft_abi_version": (_INT, []),
    "ft_op_bytes": (_INT, []),
    "ft_variant": (_STR, []),
    "ft_set_variant": (_INT, [_STR]),
    "ft_cpu_features": (_STR, []),
    "ft_type_class": (_INT, [_INT]),
    "ft_set_to_float": (None, [_INT, _PTR]),
    "ft_can_decode": (_INT, [_INT]),
    "ft_act_bytes": (_I64, [_INT, _I64, _INT]),
    "ft_pool_create": (_PTR, [_INT, _PTR, _INT]),
    "ft_pool_destroy": (None, [_PTR]),
    "ft_pool_threads": (_INT, [_PTR]),
    "ft_meeting_create": (_PTR, [_PTR, _INT, _PTR]),
    "ft_meeting_destroy": (None, [_PTR]),
    "ft_meeting_set": (_INT, [_PTR, _INT, _PTR, _INT]),
    "ft_meeting_expect": (_INT, [_PTR, _PTR, _INT]),
    "ft_meeting_pending": (_INT, [_PTR]),
    "ft_meeting_failure": (_INT, [_PTR, _PTR]),
    "ft_meeting_release": (None, [_PTR]),
    "ft_meeting_reset": (_INT, [_PTR]),
    "ft_meeting_slow_down": (None, [_PTR, ctypes.c_double]),
    "ft_meeting_spent": (None, [_PTR, _PTR, _PTR, _PTR]),
    "ft_meeting_limit": (None, [_PTR, ctypes.c_double]),
    "ft_place_ask": (None, [_PTR]),
    "ft_place_wait": (None, [_PTR]),
    "ft_run": (_INT, [_PTR, _PTR, _INT]),
    "ft_attn_scratch_bytes": (_I64, [_INT, _INT, _INT, _I64, _INT]),
    "ft_experts_scratch_bytes": (_I64, [_INT, _INT, _I64, _I64, _INT]),
    "ft_many_has": (_INT, [_INT]),
    "ft_many_scratch_bytes": (_I64, [_PTR]),
    "ft_many_run": (_INT, [_PTR, _PTR]),
    "ft_read_bytes": (_INT, [_PTR, _PTR, _I64, _PTR]),
    "ft_copy_runs": (_INT, [_PTR, _PTR, _I64, _PTR]),
    "ft_copy_bytes": (_INT, [_PTR, _PTR, _PTR, _I64]),
    "ft_call_rows": (_INT, [_PTR, _PTR, _INT, _PTR, _I64, _I64, _PTR, _PTR]),
    "ft_dequantize": (_INT, [_PTR, _INT, _PTR, _I64, _I64, _I64, _PTR]),
}


def _file_name() -> str:
    if sys.platform == "win32":
        return "freetoken_native.dll"
    return "libfreetoken_native.dylib" if sys.platform == "darwin" else "libfreetoken_native.so"


def _find_library() -> Path:
    """The library beside the package, or, in an editable install, in the package's folder of site-packages."""
    name = _file_name()
    folders = [Path(folder) for folder in freetoken.__path__]
    folders += [Path(entry) / "freetoken" for entry in sys.path if entry]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise EngineError(
        f"the native library {name} was not found in {folders[0]} or on Python's path: build it with `make`, or with "
        "`pip install --no-deps --no-build-isolation -e .` in the project's folder"
    )


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded and checked library. Raises EngineError when it is missing or from another version."""
    path = _find_library()
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise EngineError(f"{path}: not a usable native library ({error}): build it again with `make`") from error
    found = library.ft_abi_version(), library.ft_op_bytes()
    expected = ABI_VERSION, ctypes.sizeof(Op)
    if found != expected:
        raise EngineError(
            f"{path}: interface version and operation size are {found}, expected {expected}: build it again with `make`"
        )
    wanted = os.environ.get(VARIANT_VARIABLE)
    if wanted:
        _force(library, wanted)
    return library


def _force(library: ctypes.CDLL, name: str) -> None:
    if library.ft_set_variant(name.encode()) != 0:
        usable = ", ".join(known for known in VARIANTS if _is_usable(library, known))
        raise EngineError(
            f"kernels {name!r} are unknown or not for this processor: it can run {usable} and has "
            f"{library.ft_cpu_features().decode() or 'no instruction set that matters here'}"
        )


def _is_usable(library: ctypes.CDLL, name: str) -> bool:
    """Whether a set of kernels runs here; the set in use stays."""
    before = library.ft_variant()
    is_usable = bool(library.ft_set_variant(name.encode()) == 0)
    library.ft_set_variant(before)
    return is_usable


def variant() -> str:
    """The kernels in use: "avx2", "portable", ..."""
    return str(library().ft_variant().decode())


def set_variant(name: str) -> None:
    """Force a set of kernels for the whole process; "auto" restores the choice. Raises EngineError where it cannot."""
    _force(library(), name)


def cpu_features() -> str:
    """Instruction sets of this processor that matter here, separated by spaces."""
    return str(library().ft_cpu_features().decode())


# --- types and sizes -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def type_class(type_id: int) -> int:
    """How a product with weights of this ggml type takes its activation: 32 or 256 quantised blocks, 0 fp32 rows."""
    return int(library().ft_type_class(type_id))


def can_decode(type_id: int) -> bool:
    """Whether weights of a type can be used; registers ggml's decoder for a type that the library has none for."""
    loaded = library()
    if not loaded.ft_can_decode(type_id):
        address = to_float_pointer(type_id)
        if address is not None:
            loaded.ft_set_to_float(type_id, address)
    return bool(loaded.ft_can_decode(type_id))


def copy_runs(function: int, runs: np.ndarray, stream: int) -> int:
    """Call cuMemcpyHtoDAsync, whose address is `function`, for runs uint64 [n, 3] (device address, host address, bytes)
    on a stream. Returns 0, or its first other result."""
    if runs.dtype != np.uint64 or runs.ndim != 2 or runs.shape[1] != 3 or not runs.flags.c_contiguous:
        raise EngineError(f"runs to copy must be contiguous uint64 [n, 3], got {runs.dtype} {runs.shape}")
    return int(library().ft_copy_runs(function, runs.ctypes.data, len(runs), stream))


def has_many(type_id: int) -> bool:
    """Whether the kernels in use multiply many tokens by weights of a type: see `Pool.run_many`."""
    return bool(library().ft_many_has(type_id))


def act_bytes(cls: int, n_cols: int, n_tokens: int) -> int:
    """Bytes of the quantised activations of n_tokens rows of n_cols values, a multiple of the class (32 or 256)."""
    if cls not in (32, 256) or n_cols % cls:
        raise EngineError(f"activation rows of {n_cols} values cannot be cut into blocks of class {cls}")
    return int(library().ft_act_bytes(cls, n_cols, n_tokens))


def attn_scratch_bytes(n_tokens: int, n_head: int, head_dim_v: int, max_positions: int, n_threads: int) -> int:
    """Bytes of OP_ATTENTION's scratch."""
    return int(library().ft_attn_scratch_bytes(n_tokens, n_head, head_dim_v, max_positions, n_threads))


def experts_scratch_bytes(n_tokens: int, k: int, d: int, ff: int, n_threads: int) -> int:
    """Bytes of OP_EXPERTS' scratch, 64-byte aligned."""
    return int(library().ft_experts_scratch_bytes(n_tokens, k, d, ff, n_threads))


def expert_stride(banks: Sequence[np.ndarray]) -> int:
    """The last field of OP_EXPERTS for banks uint8 [n_expert, ...], each expert contiguous: 0 where the experts of each
    bank follow one another, else the bytes from one to the next, the same in all. Raises EngineError."""
    strides = {bank.strides[0] for bank in banks}
    if all(bank.flags.c_contiguous for bank in banks):
        return 0
    if len(strides) > 1 or not all(bank[0].flags.c_contiguous for bank in banks):
        raise EngineError(f"experts' banks lie {sorted(strides)} bytes apart: expected one distance or none")
    return strides.pop()


def aligned(n_bytes: int) -> np.ndarray:
    """Zeroed uint8 [n_bytes], its address a multiple of 64."""
    raw = np.zeros(n_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes]


def aligned_zeros(n_values: int) -> np.ndarray:
    """Zeroed fp32 [n_values], its address a multiple of 64."""
    return aligned(4 * n_values).view(np.float32)


# --- threads ---------------------------------------------------------------------------------------------------------


class Pool:
    """A team of n_threads threads, the caller among them; a context manager. Programs on one pool take turns."""

    def __init__(self, n_threads: int, cpus: Sequence[int] | None = None, spin_us: int = SPIN_US) -> None:
        """`cpus` are n_threads CPU numbers to pin the workers to (the first, the caller's, is not used)."""
        if cpus is not None and len(cpus) != n_threads:
            raise EngineError(f"{len(cpus)} CPUs were given for {n_threads} threads: give one for each, or none")
        numbers = None if cpus is None else (ctypes.c_int * n_threads)(*cpus)
        self._handle: int | None = library().ft_pool_create(n_threads, numbers, spin_us)
        if self._handle is None:
            raise EngineError(f"a pool of {n_threads} threads could not be started (CPUs: {cpus}, spin: {spin_us} us)")
        self.n_threads = n_threads
        self._scratch = np.empty(0, np.uint8)

    @property
    def handle(self) -> int:
        """The native pool. Raises EngineError once it is closed."""
        if self._handle is None:
            raise EngineError("the thread pool is closed")
        return self._handle

    def close(self) -> None:
        """End the threads; harmless when repeated. No program may be running."""
        handle, self._handle = self._handle, None
        if handle is not None:
            library().ft_pool_destroy(handle)

    def dequantize(self, type_id: int, data: np.ndarray, out: np.ndarray) -> None:
        """Decode rows: uint8 data [rows, row_bytes] of a ggml type to fp32 out [rows, cols], both contiguous.

        Raises EngineError when shapes do not fit or the type has no decoder.
        """
        fits = data.ndim == out.ndim == 2 and len(data) == len(out) and _fits(type_id, data.shape[1], out.shape[1])
        if not fits or out.dtype != np.float32 or not (data.flags.c_contiguous and out.flags.c_contiguous):
            raise EngineError(
                f"decoding ggml type {type_id} needs contiguous data [rows, row_bytes] and fp32 out [rows, cols], got "
                f"{data.shape} and {out.dtype} {out.shape}"
            )
        if out.size == 0:
            return
        rows, cols = out.shape
        arguments = self.handle, type_id, data.ctypes.data, rows, cols, data.shape[1], out.ctypes.data
        if not can_decode(type_id) or library().ft_dequantize(*arguments) != 0:
            raise EngineError(f"weights of ggml type {type_id} cannot be decoded to {rows} x {cols} values")

    def run_many(
        self, code: int, n: int, arrays: Sequence[np.ndarray | None], fields: Sequence[int], scratch_at: int
    ) -> None:
        """Run an OP_MATVEC or OP_EXPERTS over n tokens, any number up to 2^24, outside a program.

        Contiguous arrays and fields in the order of freetoken.h; the scratch, pointer `scratch_at`, is the pool's and
        kept for the next call, so one thread calls this at a time. Raises EngineError naming a malformed operation.
        """
        op = Op(code=code, n=n)
        op.i[: len(fields)] = fields
        for index, array in enumerate(arrays):
            op.p[index] = None if array is None else array.ctypes.data
        loaded = library()
        n_bytes = loaded.ft_many_scratch_bytes(ctypes.byref(op))
        if n_bytes > self._scratch.size:
            self._scratch = aligned(n_bytes)
        op.p[scratch_at] = self._scratch.ctypes.data
        if n_bytes < 0 or loaded.ft_many_run(self.handle, ctypes.byref(op)) != 0:
            raise EngineError(
                f"operation {OP_NAMES[code]} over {n} tokens is malformed or lacks memory: fields {list(fields)}"
            )

    def read(self, data: np.ndarray) -> int:
        """Read an array's bytes by all threads; their sum as 64-bit words, modulo 2^64."""
        total = ctypes.c_uint64()
        if not data.flags.c_contiguous:
            raise EngineError("only contiguous bytes can be read")
        if data.nbytes and library().ft_read_bytes(self.handle, data.ctypes.data, data.nbytes, ctypes.byref(total)):
            raise EngineError(f"{data.nbytes} bytes could not be read by the native threads")
        return total.value

    def copy(self, data: np.ndarray, to: np.ndarray) -> None:
        """Copy an array's bytes by all threads to `to`, uint8 of as many."""
        if not (data.flags.c_contiguous and to.flags.c_contiguous) or data.nbytes != to.nbytes:
            raise EngineError(f"{data.nbytes} bytes do not fit {to.nbytes}, or one of them is not contiguous")
        if data.nbytes and library().ft_copy_bytes(self.handle, to.ctypes.data, data.ctypes.data, data.nbytes):
            raise EngineError(f"{data.nbytes} bytes could not be copied by the native threads")

    def call_rows(self, dot: int, data: np.ndarray, n_cols: int, act: np.ndarray, y: np.ndarray) -> None:
        """fp32 y [rows] of uint8 data [rows, row_bytes] by ggml's `vec_dot` at address `dot`; act is in its form."""
        rows, size = data.shape
        if not (data.flags.c_contiguous and y.flags.c_contiguous) or y.shape != (rows,) or y.dtype != np.float32:
            raise EngineError(
                f"rows {data.shape} need contiguous fp32 results of as many values, got {y.dtype} {y.shape}"
            )
        arguments = self.handle, dot, n_cols, data.ctypes.data, size, rows, act.ctypes.data, y.ctypes.data
        if library().ft_call_rows(*arguments) != 0:
            raise EngineError(f"rows of {n_cols} values could not be handed to ggml")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()


def _fits(type_id: int, n_bytes: int, n_cols: int) -> bool:
    """Whether a row of n_cols values of a type takes n_bytes."""
    try:
        return row_bytes(type_id, n_cols) == n_bytes
    except ValueError:
        return False


# --- programs --------------------------------------------------------------------------------------------------------


_JOINED = 7
"""Index of the field that says so."""
_MAX_JOINED = 8


def _output(op: Op) -> tuple[int, int]:
    """First and last address of what an OP_MATVEC writes."""
    start = op.p[2] or 0
    return start, start + 4 * op.n * op.i[6]


class Program:
    """Operations recorded once and run in order by all threads of a pool, any number of times, with one call each."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._ops: list[Op] = []
        self._array: ctypes.Array[Op] | None = None
        self._alive: list[np.ndarray] = []

    @property
    def n_threads(self) -> int:
        return self._pool.n_threads

    def __len__(self) -> int:
        return len(self._ops)

    def add(
        self,
        code: int,
        n: int,
        *,
        p: Sequence[Address] = (),
        i: Sequence[int] = (),
        f: Sequence[float] = (),
        joined: bool = False,
    ) -> bool:
        """Append an operation over n token rows with its fields in the order of freetoken.h. Arrays are kept alive.

        `joined`: it needs no barrier before it, where freetoken.h allows that; products find that out themselves.
        Returns whether no barrier stands before it.
        """
        op = Op(code=code, n=n)
        for index, value in enumerate(p):
            if isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise EngineError(f"operation {OP_NAMES[code]}: array {index} is not contiguous")
                self._alive.append(value)
                op.p[index] = value.ctypes.data
            else:
                op.p[index] = value
        op.i[: len(i)] = i
        op.f[: len(f)] = f
        joined = self._may_join(op) if code == OP_MATVEC else joined
        if joined:
            op.i[_JOINED] = 1
        self._ops.append(op)
        self._array = None
        return joined

    def _may_join(self, op: Op) -> bool:
        """Whether a product can run beside those before it: all read one activation and their outputs are apart."""
        first = len(self._ops)
        while first > 0 and self._ops[first - 1].code == OP_MATVEC and len(self._ops) - first < _MAX_JOINED - 1:
            first -= 1
            before = self._ops[first]
            (start, end), (start_before, end_before) = _output(op), _output(before)
            if before.p[0] != op.p[0] or max(start, start_before) < min(end, end_before):
                return False
            if not before.i[_JOINED]:
                return True
        return False

    @property
    def operations(self) -> ctypes.Array[Op]:
        """The operations as an array of `ft_op`."""
        if self._array is None:
            self._array = (Op * len(self._ops))(*self._ops)
        return self._array

    def run(self) -> None:
        """Run all operations; the GIL is free meanwhile. Raises EngineError naming a malformed one (none ran then)."""
        result = library().ft_run(self._pool.handle, self.operations, len(self._ops))
        if result == 0:
            return
        index = -1 - result
        if index >= len(self._ops):
            raise EngineError("no memory for the scratch of the native threads")
        op = self._ops[index]
        name = OP_NAMES[op.code] if 0 <= op.code < len(OP_NAMES) else str(op.code)
        raise EngineError(
            f"operation {index} ({name}) of a native program is malformed: n {op.n}, i {list(op.i)}, "
            f"f {[float(value) for value in op.f]}, p {[hex(value or 0) for value in op.p]}"
        )
