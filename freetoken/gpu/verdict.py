"""Whether the GPU engine can run here, before any weight is read: one sentence for whatever is missing.

Looks at the driver, the card, torch's build, Triton, the compiler that Triton needs, and its cache, without importing
torch (seconds) and without making a context. `choose_device` is called once by the runner, `survey` by `ft info`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from freetoken.errors import EngineError, OptionError
from freetoken.gpu import driver
from freetoken.gpu.driver import Device
from freetoken.options import EngineOptions

__all__ = ["MIN_CAPABILITY", "Verdict", "cache_folder", "choose_device", "survey"]

log = logging.getLogger(__name__)

MIN_CAPABILITY = (7, 5)
"""The oldest card that the kernels are compiled for: Turing."""
_COMPILERS = ("gcc", "clang", "cc")
_MIB = 1 << 20


@dataclass(frozen=True)
class Verdict:
    """`problem` says what is missing and what to do about it, "" where the GPU engine can run on `device`. Without a
    device there is no card, or not the one that was meant."""

    device: Device | None
    problem: str = ""

    @property
    def is_usable(self) -> bool:
        return self.device is not None and not self.problem


def survey(gpu: int = 0, dense_bytes: int = 0) -> Verdict:
    """Judge card number `gpu`. With `dense_bytes`, what must lie there at least, also its memory."""
    reason = driver.why_no_device()
    if reason:
        return Verdict(None, reason)
    devices = driver.find_devices()
    if gpu >= len(devices):
        names = ", ".join(f"CUDA{device.index}" for device in devices)
        return Verdict(None, f"there is no CUDA{gpu}, only {names}")
    device = devices[gpu]
    checks: tuple[Callable[[], str], ...] = (
        lambda: _card_problem(device, dense_bytes),
        lambda: _torch_problem(device),
        _triton_problem,
        _compiler_problem,
        _cache_problem,
    )
    return Verdict(device, next((problem for check in checks if (problem := check())), ""))


def choose_device(options: EngineOptions, dense_bytes: int = 0) -> Device | None:
    """The card to run on, None for the CPU.

    Where no card is there, layers on the GPU are a wish that llama-server drops with a warning, and so do we, unless
    the card was named. Where there is one that cannot be used, asking for it is an EngineError, and leaving the choice
    to us a warning. Raises OptionError for a named card that is not there.
    """
    if options.is_gpu_off or options.gpu is None:
        return None
    verdict = survey(options.gpu, dense_bytes)
    if verdict.is_usable:
        _name_compiler()
        return verdict.device
    if verdict.device is None:
        if options.is_gpu_named:
            raise OptionError(f"-dev CUDA{options.gpu}: {verdict.problem}")
        level = logging.WARNING if options.is_gpu_asked else logging.INFO
        what = "no usable GPU, -ngl has no effect: all layers" if options.is_gpu_asked else "no usable GPU: all layers"
        log.log(level, "%s run on the CPU (%s)", what, verdict.problem)
        return None
    if options.is_gpu_asked:
        raise EngineError(f"{verdict.device.name} cannot be used: {verdict.problem}; or give -ngl 0 to run on the CPU")
    log.warning("%s is not used, all layers run on the CPU: %s", verdict.device.name, verdict.problem)
    return None


def _card_problem(device: Device, dense_bytes: int) -> str:
    if device.capability < MIN_CAPABILITY:
        had, need = (".".join(map(str, c)) for c in (device.capability, MIN_CAPABILITY))
        return f"the card has compute capability {had}, at least {need} is needed (RTX 20 series or newer)"
    if not device.can_map_host:
        return "the card cannot read host memory"
    if dense_bytes > device.total_bytes:
        return (
            f"the model's dense part takes {dense_bytes // _MIB} MiB, the card has {device.total_bytes // _MIB}: "
            "put fewer layers there with -ngl N"
        )
    return ""


def _torch_problem(device: Device) -> str:
    """Compares versions only: the first number decides, since CUDA's minor versions run on each other's drivers."""
    cuda = _torch_cuda()
    if cuda is None:
        return "the installed torch is built without CUDA: install PyTorch's CUDA build (see pytorch.org)"
    if device.driver_version // 1000 < int(cuda.split(".")[0]):
        return (
            f"the driver knows CUDA {device.driver_cuda}, torch is built for {cuda}: update NVIDIA's driver, or "
            f"install a torch built for CUDA {device.driver_version // 1000}"
        )
    return ""


def _torch_cuda() -> str | None:
    """The CUDA version of torch's build, read from its version file: importing torch takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    path = Path(next(iter(found.submodule_search_locations))) / "version.py"
    spec = importlib.util.spec_from_file_location("_torch_version", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except OSError:
        return None
    cuda = getattr(module, "cuda", None)
    return cuda if isinstance(cuda, str) else None


def _triton_problem() -> str:
    if importlib.util.find_spec("triton") is None:
        return "Triton, which compiles the kernels, is not installed: pip install triton"
    return ""


def _compiler_problem() -> str:
    """Triton builds a small launcher for each kernel."""
    compiler = _compiler()
    if compiler is None:
        named = os.environ.get("CC")
        what = f"the C compiler of CC={named} is not there" if named else "no C compiler is there"
        return f"{what}, which Triton needs: install gcc (apt install gcc), or name one in CC"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if not header.exists():
        return f"Python's headers, which Triton needs, are not there ({header}): apt install python3-dev"
    return ""


def _compiler() -> str | None:
    """The compiler named in CC, or the first that is found."""
    named = os.environ.get("CC")
    if named:
        return shutil.which(named.split()[0])
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _name_compiler() -> None:
    """Triton looks for gcc and clang only; tell it where the system has but a cc."""
    if "CC" not in os.environ and not any(map(shutil.which, _COMPILERS[:2])):
        compiler = _compiler()
        if compiler is not None:
            os.environ["CC"] = compiler


def _cache_problem() -> str:
    folder = cache_folder()
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return f"compiled kernels cannot be kept in {folder}: name a folder that you may write to in TRITON_CACHE_DIR"
    return ""


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    named = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(named).absolute() if named else Path(home).absolute() / ".triton" / "cache"
