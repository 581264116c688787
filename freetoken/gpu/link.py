"""How a card is connected, and the conditions under which a profile of it holds. No torch.

NVIDIA's management library tells the link and the driver's release where it is installed, else the system's files do.
Cards that idle run their link slower: `conditions` wants to be asked while, or right after, the card has work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from contextlib import suppress
from pathlib import Path

import psutil

from freetoken import native
from freetoken.cores import cpu_name, physical_cores
from freetoken.experts.profile import Conditions
from freetoken.gpu import driver
from freetoken.gpu.driver import Device

__all__ = ["conditions", "driver_release", "link"]

_LIBRARIES = ("libnvidia-ml.so.1", "libnvidia-ml.so", "nvml.dll")
_PCI = Path("/sys/bus/pci/devices")
_RELEASE = Path("/sys/module/nvidia/version")
_GENERATION_OF = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""PCIe generations by gigatransfers a second."""


def conditions(card: Device | None, n_threads: int, n_planes: int = 2) -> Conditions:
    """Those of now, for a card or for the CPU alone."""
    return Conditions(
        gpu="" if card is None else card.uuid,
        driver="" if card is None else driver_release() or card.driver_cuda,
        link="" if card is None else link(card.index),
        cpu=cpu_name(),
        cores=physical_cores(),
        threads=n_threads,
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        kernels=f"{native.variant()}, {n_planes} planes, {_kernels_hash()}",
    )


def link(index: int) -> str:
    """Generation and width of a card's PCIe link at this moment, such as "5 x16"; "" where nobody tells."""
    bus = driver.pci_bus_id(index)
    return _from_library(bus) or _from_files(bus) if bus else ""


def driver_release() -> str:
    """NVIDIA's number of the driver, such as "580.82.07"; "" where nobody tells."""
    text = ctypes.create_string_buffer(96)
    library = _library()
    if library is not None and library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
        return text.value.decode(errors="replace")
    return _read(_RELEASE)


def _from_library(bus: str) -> str:
    library, handle = _library(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByPciBusId_v2(bus.encode(), ctypes.byref(handle)):
        return ""
    generation, width = ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetCurrPcieLinkGeneration(handle, ctypes.byref(generation)):
        return ""
    if library.nvmlDeviceGetCurrPcieLinkWidth(handle, ctypes.byref(width)):
        return ""
    return f"{generation.value} x{width.value}"


def _from_files(bus: str) -> str:
    """The files say "16.0 GT/s PCIe" and "8"."""
    folder = _PCI / bus.lower()
    speed, width = _read(folder / "current_link_speed").split(" ")[0], _read(folder / "current_link_width")
    return f"{_GENERATION_OF[speed]} x{width}" if speed in _GENERATION_OF and width.isdigit() else ""


@functools.cache
def _library() -> ctypes.CDLL | None:
    """NVIDIA's management library, ready; None where it is missing, or too old to have what is asked here."""
    for name in _LIBRARIES:
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.nvmlDeviceGetHandleByPciBusId_v2.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
            if library.nvmlInit_v2() == 0:
                return library
    return None


@functools.cache
def _kernels_hash() -> str:
    """Of the native library and of the fills' source: a build of other code measures other times."""
    fills = Path(__file__).parent.parent / "kernels" / "fills.py"
    digest = hashlib.sha256()
    for path in (Path(native.library()._name), fills):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
