"""CUDA's driver library by ctypes: which cards there are, host memory that they may read, and operations of a stream on
such memory. No torch.

Everything works before torch is imported and beside it: calls run in the device's primary context, which torch takes
too, and leave the calling thread's context as it was. The driver's calls return their errors, so a refusal leaves none
behind for the next call of the runtime. Called by `verdict`, `ft info` and whoever pins experts; knows no tensors.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from freetoken.errors import EngineError, PinRefusedError

__all__ = [
    "Device",
    "DriverError",
    "find_devices",
    "free_bytes",
    "has_memory_operations",
    "launch_host_function",
    "memcpy_async_address",
    "pci_bus_id",
    "private_mappings",
    "register",
    "unregister",
    "wait_for_value",
    "why_no_device",
    "write_value",
]

_LIBRARIES = ("nvcuda.dll",) if os.name == "nt" else ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_N_SM, _CAN_MAP_HOST, _MAJOR, _MINOR = 16, 19, 75, 76
_HOST_POINTERS, _REGISTER_READ_ONLY = 91, 113
"""Of CUdevice_attribute; the last three lines of `Device` say what they mean."""
_PORTABLE, _DEVICE_MAP, _READ_ONLY = 0x01, 0x02, 0x08
_AT_LEAST, _NON_BLOCKING, _THREAD_LOCAL = 0, 1, 1
_INVALID_VALUE, _OUT_OF_MEMORY, _ALREADY_REGISTERED, _NOT_PERMITTED, _NOT_SUPPORTED = 1, 2, 712, 800, 801
_REFUSALS = (_INVALID_VALUE, _OUT_OF_MEMORY, _ALREADY_REGISTERED, _NOT_PERMITTED, _NOT_SUPPORTED)
_NO_DEVICE = 100
_INIT_HINTS = {
    _NO_DEVICE: "no CUDA card is visible (CUDA_VISIBLE_DEVICES={visible})",
    34: "the driver library is a stub: install NVIDIA's driver, not only the toolkit",
    803: "the driver library and the loaded kernel module are of different versions: restart, or install them again",
    804: "the driver is older than its compatibility library allows: update NVIDIA's driver",
}


class DriverError(EngineError):
    """A call of the driver failed. `code` is its CUresult."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Device:
    """One card as the driver numbers it (CUDA_VISIBLE_DEVICES counts). Memory is all there is, not what is free."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    n_sm: int
    total_bytes: int
    driver_version: int
    """The newest CUDA that the driver knows, 1000 * major + 10 * minor."""
    can_map_host: bool
    can_register_read_only: bool
    """Whether memory that this process may only read can be registered: a mapped file."""
    uses_host_pointers: bool
    """Whether registered memory has the same address for kernels."""

    @property
    def driver_cuda(self) -> str:
        """The driver's CUDA as people write it, such as "12.8"."""
        return f"{self.driver_version // 1000}.{self.driver_version % 1000 // 10}"

    def __str__(self) -> str:
        major, minor = self.capability
        return (
            f"CUDA{self.index}: {self.name}, compute capability {major}.{minor}, {self.n_sm} SMs, "
            f"{self.total_bytes / 2**20:.0f} MiB"
        )


def find_devices() -> list[Device]:
    """The cards; empty where there is no driver or no card (`why_no_device` then says why). Makes no context."""
    if why_no_device():
        return []
    return [_device(i) for i in range(_int_of("cuDeviceGetCount"))]


def why_no_device() -> str:
    """Why there is no card, empty where there is one."""
    try:
        library = _library()
    except OSError as error:
        return f"NVIDIA's driver is not installed ({error})"
    code = library.cuInit(0)
    if code:
        hint = _INIT_HINTS.get(code, "the driver does not start ({name})")
        return hint.format(visible=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"), name=_name_of(code))
    if _int_of("cuDeviceGetCount") == 0:
        return _INIT_HINTS[_NO_DEVICE].format(visible=os.environ.get("CUDA_VISIBLE_DEVICES", "not set"))
    return ""


def pci_bus_id(device: int) -> str:
    """Where a card sits, such as "0000:01:00.0"; "" where the driver does not tell."""
    text = ctypes.create_string_buffer(32)
    handle = ctypes.c_int(_int_of("cuDeviceGet", device))
    code = _library().cuDeviceGetPCIBusId(text, len(text), handle)
    return "" if code else text.value.decode(errors="replace")


def free_bytes(device: int = 0) -> int:
    """Free memory of a card, less what the context takes that this call makes where there was none."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with _context(device):
        _check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value


def private_mappings() -> list[tuple[int, int]]:
    """Where this process has private read-only memory: [start, end) of each mapping. Registering it can hang inside the
    driver, so it is never tried."""
    if sys.platform != "linux":
        return []
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        if permissions[1] != "w" and permissions[3] != "s":
            start, end = span.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def register(
    address: int,
    n_bytes: int,
    read_only: bool = True,
    device: int = 0,
    private: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Lock whole pages of host memory and let every card read them at the same address.

    `read_only` is for memory that this process may only read; that must be a shared mapping. `private` are
    `private_mappings` read since it was mapped, by default read now. Raises PinRefusedError where the system does not
    lock this memory, DriverError for a broken context; after either nothing is registered.
    """
    if read_only:
        _check_shared(address, n_bytes, private_mappings() if private is None else private)
    flags = _PORTABLE | _DEVICE_MAP | (_READ_ONLY if read_only else 0)
    with _context(device):
        code = _library().cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), flags)
        if code in _REFUSALS:
            raise PinRefusedError(f"{n_bytes} bytes at {address:#x} cannot be registered: {_name_of(code)}")
        if code:
            raise _error("cuMemHostRegister", code)
        on_device = ctypes.c_uint64()
        code = _library().cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), ctypes.c_void_p(address), 0)
        if code or on_device.value != address:
            _library().cuMemHostUnregister(ctypes.c_void_p(address))
            raise PinRefusedError(f"memory at {address:#x} has another address for the card ({on_device.value:#x})")


def unregister(address: int, device: int = 0) -> None:
    """Undo `register`; work of the card on that memory must have ended. Raises DriverError."""
    with _context(device):
        _check("cuMemHostUnregister", ctypes.c_void_p(address))


def memcpy_async_address() -> int:
    """The address of cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream) for native code."""
    address = ctypes.cast(_library().cuMemcpyHtoDAsync_v2, ctypes.c_void_p).value
    assert address is not None
    return address


def write_value(stream: int, address: int, value: int) -> None:
    """When the stream comes to it, all before is visible everywhere and a uint64 in host memory becomes `value`."""
    _check("cuStreamWriteValue64_v2", _pointer(stream), ctypes.c_uint64(address), ctypes.c_uint64(value), 0)


def wait_for_value(stream: int, address: int, value: int) -> None:
    """What follows in the stream waits until a uint64 in host memory is at least `value`."""
    _check("cuStreamWaitValue64_v2", _pointer(stream), ctypes.c_uint64(address), ctypes.c_uint64(value), _AT_LEAST)


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """When the stream comes to it, the driver calls void (*function)(void *) and goes on when it returns."""
    _check("cuLaunchHostFunc", _pointer(stream), _pointer(function), _pointer(argument))


@functools.cache
def has_memory_operations(device: int) -> bool:
    """Whether `write_value` and `wait_for_value` work inside a captured graph: one is captured and run. It waits for a
    value that is there already, so it ends whatever the answer."""
    memory = ctypes.c_void_p()
    with _context(device):
        _check("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(128), _PORTABLE | _DEVICE_MAP)
        assert memory.value is not None
        words = (ctypes.c_uint64 * 16).from_address(memory.value)
        words[0], words[8] = 0, 2
        try:
            with _captured(lambda stream: _write_and_wait(stream, memory.value or 0)) as run:
                run()
            return words[0] == 1
        except (DriverError, AttributeError):  # a driver that is too old, or a system that does not allow it
            return False
        finally:
            _check("cuMemFreeHost", memory)


def _write_and_wait(stream: int, address: int) -> None:
    write_value(stream, address, 1)
    wait_for_value(stream, address + 64, 1)


@contextmanager
def _captured(work: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """What runs, to its end, the graph of what `work` puts into a stream. Raises DriverError."""
    stream, graph, made = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    try:
        _check("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL)
        try:
            work(stream.value or 0)
        finally:
            code = _library().cuStreamEndCapture(stream, ctypes.byref(graph))
        if code:
            raise _error("cuStreamEndCapture", code)
        _check("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_uint64(0))

        def run() -> None:
            _check("cuGraphLaunch", made, stream)
            _check("cuStreamSynchronize", stream)

        yield run
    finally:
        if made:
            _library().cuGraphExecDestroy(made)
        if graph:
            _library().cuGraphDestroy(graph)
        _library().cuStreamDestroy_v2(stream)


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _check_shared(address: int, n_bytes: int, private: Sequence[tuple[int, int]]) -> None:
    for start, end in private:
        if start < address + n_bytes and address < end:
            raise PinRefusedError(f"memory at {start:#x} is a private read-only mapping, expected a shared one")


def _device(index: int) -> Device:
    handle = ctypes.c_int(_int_of("cuDeviceGet", index))
    name, identity, total = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    _check("cuDeviceGetName", name, len(name), handle)
    _check("cuDeviceGetUuid", ctypes.byref(identity), handle)
    _check("cuDeviceTotalMem_v2", ctypes.byref(total), handle)
    has = {a: _attribute(a, handle) for a in (_CAN_MAP_HOST, _REGISTER_READ_ONLY, _HOST_POINTERS)}
    return Device(
        index=index,
        name=name.value.decode(errors="replace"),
        uuid=f"GPU-{uuid.UUID(bytes=bytes(identity))}",
        capability=(_attribute(_MAJOR, handle), _attribute(_MINOR, handle)),
        n_sm=_attribute(_N_SM, handle),
        total_bytes=total.value,
        driver_version=_int_of("cuDriverGetVersion"),
        can_map_host=bool(has[_CAN_MAP_HOST]),
        can_register_read_only=bool(has[_REGISTER_READ_ONLY]),
        uses_host_pointers=bool(has[_HOST_POINTERS]),
    )


def _attribute(attribute: int, handle: ctypes.c_int) -> int:
    """0 for an attribute that an old driver does not know."""
    value = ctypes.c_int()
    code = _library().cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return 0 if code else value.value


def _int_of(function: str, *arguments: int) -> int:
    value = ctypes.c_int()
    _check(function, ctypes.byref(value), *arguments)
    return value.value


@contextmanager
def _context(device: int) -> Iterator[None]:
    """The device's primary context is the thread's within, and the one before afterwards."""
    _check("cuCtxPushCurrent_v2", _primary_context(device))
    try:
        yield
    finally:
        before = ctypes.c_void_p()
        _check("cuCtxPopCurrent_v2", ctypes.byref(before))


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Held until the process ends: registered memory and the card's work of other threads live in it."""
    reason = why_no_device()
    if reason:
        raise DriverError(reason, _NO_DEVICE)
    context = ctypes.c_void_p()
    _check("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(_int_of("cuDeviceGet", device)))
    return context


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises OSError where no driver is installed."""
    failure = OSError("no library is known for this system")
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            failure = failure if name != _LIBRARIES[0] else error
    raise OSError(str(failure))


def _check(function: str, *arguments: object) -> None:
    code = getattr(_library(), function)(*arguments)
    if code:
        raise _error(function, code)


def _error(function: str, code: int) -> DriverError:
    return DriverError(f"the CUDA driver's {function.removesuffix('_v2')} failed: {_name_of(code)}", code)


def _name_of(code: int) -> str:
    """The error's name and number."""
    name = ctypes.c_char_p()
    if _library().cuGetErrorName(code, ctypes.byref(name)) or name.value is None:
        return f"error {code}"
    return f"{name.value.decode()} ({code})"
