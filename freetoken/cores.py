"""The processor: its name, and how many cores this process may use by topology, affinity and the container's quota."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = [
    "cpu_name",
    "cpu_quota",
    "cpus_beside",
    "expert_threads",
    "last_level_cache_bytes",
    "memory_bytes",
    "memory_nodes",
    "numa_nodes",
    "physical_cores",
    "physical_cpus",
    "sleeping_openmp",
]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")
_NO_LIMIT = 1 << 60
"""v1 writes its lack of a limit as a number."""
_CACHE_GUESS = 32 << 20


def physical_cpus() -> list[int]:
    """One CPU number for each physical core that this process may run on, ascending."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(psutil.cpu_count(logical=False) or os.cpu_count() or 1))
    seen: set[str] = set()
    cpus = []
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _read(_TOPOLOGY / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu)
        if siblings not in seen:
            seen.add(siblings)
            cpus.append(cpu)
    return cpus


def cpu_quota() -> float | None:
    """CPUs' worth of time that the container grants (cgroup v2 `cpu.max`, v1 `cpu.cfs_quota_us`); None is no limit."""
    limits = []
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [_limit_v2(folder) for folder in _ancestors(_CGROUP_ROOT, path)]
        elif "cpu" in controllers.split(","):
            limits += [_limit_v1(folder) for folder in _ancestors(_CGROUP_ROOT / "cpu", path)]
    return min((limit for limit in limits if limit is not None), default=None)


def physical_cores() -> int:
    """Threads worth starting: physical cores within affinity, and not above the container's CPU quota; at least 1."""
    cores = max(1, len(physical_cpus()))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def expert_threads(n_cores: int) -> int:
    """Threads that compute experts beside a GPU: one core is left to the engine's own thread, which launches steps, and
    of many one more to everything else. A thread that finds its core taken holds up all the others."""
    return max(n_cores - (1 if n_cores <= 8 else 2), 1)


def numa_nodes() -> list[list[int]]:
    """CPUs of each memory node, one for each physical core that this process may use; empty nodes are left out."""
    usable = set(physical_cpus())
    files = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    nodes = [sorted(usable & _cpu_list(_read(file) or "")) for file in files]
    return [cpus for cpus in nodes if cpus] or [sorted(usable)]


def cpus_beside(cpu: int) -> list[int]:
    """CPUs of the memory node that a CPU belongs to, as `numa_nodes` has them."""
    usable = physical_cpus()
    for file in _NODES.glob("node[0-9]*/cpulist"):
        node = _cpu_list(_read(file) or "")
        if cpu in node and node & set(usable):
            return sorted(node & set(usable))
    return usable


def memory_nodes() -> list[int]:
    """Numbers of the nodes that have memory; [0] where the system does not tell."""
    return sorted(_cpu_list(_read(_NODES / "has_memory") or "")) or [0]


def last_level_cache_bytes() -> int:
    """Size of all last-level caches together, over every socket; a guess of 32 MiB where the system does not tell."""
    caches: dict[str, tuple[int, int]] = {}
    for folder in _TOPOLOGY.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size, shared = (_read(folder / name) or "" for name in ("level", "size", "shared_cpu_list"))
        if level.isdigit() and size.endswith("K") and size[:-1].isdigit():
            caches[f"{level}:{shared}"] = int(level), int(size[:-1]) << 10
    last = max((level for level, _ in caches.values()), default=0)
    return sum(size for level, size in caches.values() if level == last) or _CACHE_GUESS


def memory_bytes() -> tuple[int, str]:
    """Memory that this process may use, and what says so: the control group's limit where there is one (a virtual
    machine's own figure may grow while it is used), else the machine's."""
    limits = []
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            limits += [_read(folder / "memory.max") for folder in _ancestors(_CGROUP_ROOT, path)]
        elif "memory" in controllers.split(","):
            folders = _ancestors(_CGROUP_ROOT / "memory", path)
            limits += [_read(folder / "memory.limit_in_bytes") for folder in folders]
    found = [int(limit) for limit in limits if limit and limit.isdigit() and 0 < int(limit) < _NO_LIMIT]
    if found:
        return min(found), "the control group's limit"
    for line in (_read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10, "MemTotal"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "the system"


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@contextmanager
def sleeping_openmp() -> Iterator[None]:
    """Load a library that uses OpenMP so that its idle threads sleep.

    By default they spin, on the cores where the native pool's threads work, and on a machine that is busy with
    something else each of torch's small operations waits for a time slice: a prompt took 13 s instead of 1.7 s. OpenMP
    reads the policy once, when its own library is loaded, and llama.cpp and torch share that: whichever is loaded first
    decides. The environment is as before afterwards; a policy that stands there is kept.
    """
    name = "OMP_WAIT_POLICY"
    is_ours = name not in os.environ
    if is_ours:
        os.environ[name] = "passive"
    try:
        yield
    finally:
        if is_ours:
            del os.environ[name]


def _cpu_list(text: str) -> set[int]:
    """Numbers of a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _ancestors(root: Path, path: str) -> list[Path]:
    """Folders of a control group and of all above it; inside a container only the root may exist."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _limit_v2(folder: Path) -> float | None:
    fields = (_read(folder / "cpu.max") or "").split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields):
        return None
    return int(fields[0]) / max(1, int(fields[1]))


def _limit_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota is None or period is None or not quota.isdigit() or not period.isdigit():
        return None
    return int(quota) / max(1, int(period))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
