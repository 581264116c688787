"""The driver's binding against a fake library, and on a machine without one."""

from __future__ import annotations

import ctypes
import mmap
import pathlib
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from gguf_files import tiny_keys, tiny_tensors, write

from freetoken.errors import PinRefusedError
from freetoken.gguf import open_model
from freetoken.gpu import driver

GIB = 2**30
ATTRIBUTES = {16: 30, 19: 1, 75: 8, 76: 6, 91: 1, 113: 1}


class FakeCuda:
    """Two cards; a registration is refused with `refusal`, and found at another address with `shift`."""

    def __init__(self, init: int = 0, n_devices: int = 2, refusal: int = 0, shift: int = 0) -> None:
        self.init, self.n_devices, self.refusal, self.shift = init, n_devices, refusal, shift
        self.registered: dict[int, tuple[int, int]] = {}
        self.contexts: list[int] = []
        self.retained: list[int] = []

    def cuInit(self, _flags: int) -> int:
        return self.init

    def cuGetErrorName(self, code: int, name: object) -> int:
        name._obj.value = b"CUDA_ERROR_TEST"  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetCount(self, n: object) -> int:
        n._obj.value = self.n_devices  # type: ignore[attr-defined]
        return 0

    def cuDriverGetVersion(self, version: object) -> int:
        version._obj.value = 12080  # type: ignore[attr-defined]
        return 0

    def cuDeviceGet(self, handle: object, index: int) -> int:
        handle._obj.value = 100 + index  # type: ignore[attr-defined]
        return 0 if index < self.n_devices else 101

    def cuDeviceGetName(self, name: ctypes.Array[ctypes.c_char], _size: int, handle: ctypes.c_int) -> int:
        name.value = f"Card {handle.value}".encode()
        return 0

    def cuDeviceGetUuid(self, identity: object, _handle: object) -> int:
        identity._obj[:] = list(range(16))  # type: ignore[attr-defined]
        return 0

    def cuDeviceTotalMem_v2(self, total: object, _handle: object) -> int:
        total._obj.value = 8 * GIB  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetAttribute(self, value: object, attribute: int, _handle: object) -> int:
        value._obj.value = ATTRIBUTES[attribute]  # type: ignore[attr-defined]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, handle: ctypes.c_int) -> int:
        context._obj.value = 1000 + handle.value  # type: ignore[attr-defined]
        self.retained.append(handle.value)
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        assert context.value is not None
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, before: object) -> int:
        before._obj.value = self.contexts.pop()  # type: ignore[attr-defined]
        return 0

    def cuMemGetInfo_v2(self, free: object, total: object) -> int:
        assert self.contexts
        free._obj.value, total._obj.value = 7 * GIB, 8 * GIB  # type: ignore[attr-defined]
        return 0

    def cuMemHostRegister_v2(self, address: ctypes.c_void_p, n_bytes: ctypes.c_size_t, flags: int) -> int:
        assert self.contexts and address.value is not None
        if not self.refusal:
            self.registered[address.value] = n_bytes.value, flags
        return self.refusal

    def cuMemHostGetDevicePointer_v2(self, pointer: object, address: ctypes.c_void_p, _flags: int) -> int:
        pointer._obj.value = (address.value or 0) + self.shift  # type: ignore[attr-defined]
        return 0

    def cuMemHostUnregister(self, address: ctypes.c_void_p) -> int:
        return 0 if self.registered.pop(address.value or 0, None) else 713


class FakeStreams(FakeCuda):
    """Also captures operations on memory and runs them; `refuses` names a call that fails."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__()
        self.refuses = refuses
        self.memory = np.zeros(32, np.uint64)
        self.work: list[tuple[str, int, int]] = []
        self.is_capturing = False
        self.n_freed = 0

    def _put(self, name: str, address: ctypes.c_uint64, value: ctypes.c_uint64, flags: int) -> int:
        assert self.is_capturing and flags == 0
        self.work.append((name, address.value, value.value))
        return 900 if self.refuses == name else 0

    def cuMemHostAlloc(self, memory: object, n_bytes: ctypes.c_size_t, _flags: int) -> int:
        assert n_bytes.value <= self.memory.nbytes
        memory._obj.value = self.memory.ctypes.data  # type: ignore[attr-defined]
        return 0

    def cuMemFreeHost(self, _memory: object) -> int:
        self.n_freed += 1
        return 0

    def cuStreamCreate(self, _stream: object, _flags: int) -> int:
        return 0

    def cuStreamDestroy_v2(self, _stream: object) -> int:
        return 0

    def cuStreamBeginCapture_v2(self, _stream: object, _mode: int) -> int:
        self.is_capturing = True
        return 0

    def cuStreamEndCapture(self, _stream: object, graph: object) -> int:
        self.is_capturing = False
        graph._obj.value = 1  # type: ignore[attr-defined]
        return 0

    def cuGraphInstantiateWithFlags(self, made: object, _graph: object, _flags: object) -> int:
        made._obj.value = 1  # type: ignore[attr-defined]
        return 0

    def cuGraphLaunch(self, _made: object, _stream: object) -> int:
        for name, address, value in self.work:
            word = ctypes.c_uint64.from_address(address)
            if name == "write":
                word.value = value
            else:
                assert word.value >= value, "it would wait for ever"
        return 0

    def cuStreamSynchronize(self, _stream: object) -> int:
        return 0

    def cuGraphExecDestroy(self, _made: object) -> int:
        return 0

    def cuGraphDestroy(self, _graph: object) -> int:
        return 0

    def cuStreamWriteValue64_v2(self, _stream: object, *rest: object) -> int:
        return self._put("write", *rest)  # type: ignore[arg-type]

    def cuStreamWaitValue64_v2(self, _stream: object, *rest: object) -> int:
        return self._put("wait", *rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(("refuses", "has"), [("", True), ("write", False), ("wait", False)])
def test_whether_graphs_may_wait_for_memory(refuses: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeStreams(refuses)
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver._primary_context.cache_clear()
    try:
        assert driver.has_memory_operations.__wrapped__(0) is has
    finally:
        driver._primary_context.cache_clear()
    assert library.n_freed == 1 and not library.contexts and not library.is_capturing


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    library = FakeCuda()
    monkeypatch.setattr(driver, "_library", lambda: library)
    driver._primary_context.cache_clear()
    yield library
    driver._primary_context.cache_clear()


@pytest.fixture
def shared(tmp_path: pathlib.Path) -> Iterator[np.ndarray]:
    """A shared read-only mapping of four pages."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    with open(path, "rb") as file:
        yield np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def test_facts_of_the_cards(fake: FakeCuda) -> None:
    first, second = driver.find_devices()
    assert (first.index, first.name, second.name) == (0, "Card 100", "Card 101")
    assert (first.capability, first.n_sm, first.total_bytes) == ((8, 6), 30, 8 * GIB)
    assert first.uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert first.driver_cuda == "12.8" and first.can_register_read_only and first.can_map_host
    assert str(first) == "CUDA0: Card 100, compute capability 8.6, 30 SMs, 8192 MiB"
    assert not fake.retained, "facts need no context"
    assert driver.free_bytes(1) == 7 * GIB and fake.retained == [101] and not fake.contexts


@pytest.mark.parametrize(
    ("init", "n_devices", "says"),
    [(100, 0, "no CUDA card is visible"), (0, 0, "no CUDA card is visible"), (803, 0, "restart"), (999, 0, "(999)")],
)
def test_why_there_is_no_card(fake: FakeCuda, init: int, n_devices: int, says: str) -> None:
    fake.init, fake.n_devices = init, n_devices
    assert driver.find_devices() == [] and says in driver.why_no_device()
    with pytest.raises(driver.DriverError, match=r".") as caught:
        driver.free_bytes()
    assert says in str(caught.value)


def test_no_driver_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LIBRARIES", ("libnone-such.so.1",))
    monkeypatch.setattr(driver, "_library", driver._library.__wrapped__)
    assert driver.find_devices() == []
    assert "driver is not installed" in driver.why_no_device() and "libnone-such" in driver.why_no_device()


def test_registering_a_shared_mapping(fake: FakeCuda, shared: np.ndarray) -> None:
    address = shared.ctypes.data
    driver.register(address, shared.nbytes)
    driver.register(address + mmap.PAGESIZE * 10**6, 1, read_only=False)
    assert fake.registered[address] == (shared.nbytes, 0x0B)
    assert fake.registered[address + mmap.PAGESIZE * 10**6] == (1, 0x03)
    driver.unregister(address)
    assert address not in fake.registered and not fake.contexts
    with pytest.raises(driver.DriverError, match="cuMemHostUnregister failed"):
        driver.unregister(address)


@pytest.mark.parametrize("code", [1, 2, 712, 800, 801])
def test_a_refusal_registers_nothing(fake: FakeCuda, shared: np.ndarray, code: int) -> None:
    fake.refusal = code
    with pytest.raises(PinRefusedError, match=rf"\({code}\)"):
        driver.register(shared.ctypes.data, shared.nbytes)
    assert not fake.registered and not fake.contexts


def test_a_broken_context_is_no_refusal(fake: FakeCuda, shared: np.ndarray) -> None:
    fake.refusal = 700
    with pytest.raises(driver.DriverError) as caught:
        driver.register(shared.ctypes.data, shared.nbytes)
    assert caught.value.code == 700 and not isinstance(caught.value, PinRefusedError)


def test_another_address_on_the_card_is_refused(fake: FakeCuda, shared: np.ndarray) -> None:
    fake.shift = 4096
    with pytest.raises(PinRefusedError, match="another address"):
        driver.register(shared.ctypes.data, shared.nbytes)
    assert not fake.registered


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_private_read_only_mapping_never_reaches_the_driver(fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    data = np.frombuffer(mapping, np.uint8)
    with pytest.raises(PinRefusedError, match="private read-only"):
        driver.register(data.ctypes.data, data.nbytes)
    assert not fake.registered


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_model_files_are_mapped_so_that_they_can_be_registered(fake: FakeCuda, tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_keys("qwen3moe"), tiny_tensors("qwen3moe"))
    with open_model(path) as model:
        mapping = model.shards[0].mapping
        driver.register(mapping.ctypes.data, mapping.nbytes)
        assert fake.registered
        del mapping
