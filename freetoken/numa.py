"""Memory nodes: what `--numa` does with threads and memory, and where a file's pages lie. Called by the runner.

Strategies (`options.NUMA_STRATEGIES`) as llama-server has them. A policy decides where a page goes when it is read for
the first time: pages of a file that the system has cached already stay where they are, so their places are told.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterable

import numpy as np

from freetoken.cores import cpus_beside, memory_nodes, numa_nodes, physical_cpus

__all__ = ["page_nodes", "place", "tell_places"]

log = logging.getLogger(__name__)

N_SAMPLES = 4096
LARGEST_SHARE = 0.75
"""Above this share of its pages on one node a file that was to be spread is not."""

_INTERLEAVE = 3  # MPOL_INTERLEAVE (linux/mempolicy.h)
_SYSCALLS = {"x86_64": (238, 279), "aarch64": (237, 239)}  # set_mempolicy, move_pages
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def place(strategy: str | None) -> list[int] | None:
    """CPUs for a pool's threads, in their order; None where nothing was asked for or there is one node only.

    Holds for the calling thread and those that it starts. `distribute`: neighbouring threads on different nodes, and
    memory that is touched from here on, a file's too, page by page on all of them. `isolate`: everything on the node
    where this thread runs. `numactl`: CPUs and policy are those that the process was started with.
    """
    if strategy is None:
        return None
    nodes = numa_nodes()
    if len(nodes) < 2 and strategy != "numactl":
        log.info("--numa %s: this process has one memory node only, so there is nothing to place", strategy)
        return None
    if strategy == "distribute":
        cpus = [cpu for turn in itertools.zip_longest(*nodes) for cpu in turn if cpu is not None]
        is_spread = _interleave(memory_nodes())
        log.info("--numa distribute: threads over %d nodes, memory %s", len(nodes), "too" if is_spread else "is not")
        return cpus
    if strategy == "isolate":
        cpus = cpus_beside(_current_cpu())
        os.sched_setaffinity(0, cpus)
        log.info("--numa isolate: threads on the %d cores of one node, of %d nodes", len(cpus), len(nodes))
        return cpus
    cpus = physical_cpus()
    log.info("--numa numactl: threads on the %d cores that this process was given", len(cpus))
    return cpus


def tell_places(strategy: str | None, mappings: Iterable[np.ndarray]) -> None:
    """Log on which nodes the pages lie that have been read of mapped files, and whether that is what was wanted."""
    if strategy is None or len(memory_nodes()) < 2:
        return
    found = page_nodes(mappings)
    total = sum(found.values())
    if not total:
        log.info("memory nodes: the system does not tell where the file's pages lie")
        return
    shares = ", ".join(f"{count / total:.0%} on node {node}" for node, count in sorted(found.items()))
    log.info("memory nodes: of %d sampled pages of the file, %s", total, shares)
    if strategy == "distribute" and max(found.values()) > LARGEST_SHARE * total:
        log.warning(
            "--numa distribute: the file's pages were cached on one node before and cannot be moved: stop the server, "
            "drop the page cache (as root: echo 3 > /proc/sys/vm/drop_caches) and start it again"
        )


def page_nodes(mappings: Iterable[np.ndarray], n_samples: int = N_SAMPLES) -> Counter[int]:
    """How many of evenly spaced pages lie on which node; pages that this process has not read are left out.

    `mappings` are uint8 arrays over whole files. Empty where the system does not tell.
    """
    spans = [(mapping.ctypes.data, len(mapping)) for mapping in mappings]
    step = max(_PAGE_BYTES, sum(size for _, size in spans) // n_samples // _PAGE_BYTES * _PAGE_BYTES)
    starts = [np.arange(address, address + size, step, dtype=np.uint64) for address, size in spans]
    pages = np.concatenate(starts) if starts else np.empty(0, np.uint64)
    nodes = np.full(len(pages), -1, np.int32)
    arguments = 0, ctypes.c_ulong(len(pages)), _pointer(pages), None, _pointer(nodes), 0
    if not len(pages) or not _call(1, *arguments):
        return Counter()
    return Counter(int(node) for node in nodes if node >= 0)


def _interleave(nodes: list[int]) -> bool:
    """Spread memory of this thread and its children over nodes; False, with a warning, where that is not allowed."""
    n_words = max(nodes) // 64 + 1
    mask = np.zeros(n_words, np.uint64)
    for node in nodes:
        mask[node // 64] |= np.uint64(1 << node % 64)
    is_done = _call(0, _INTERLEAVE, _pointer(mask), ctypes.c_ulong(64 * n_words + 1))
    if not is_done:
        log.warning(
            "--numa distribute: the system allows this process no memory policy (containers need CAP_SYS_NICE): start "
            "it with numactl --interleave=all"
        )
    return is_done


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _call(which: int, *arguments: object) -> bool:
    """A system call by its place in _SYSCALLS."""
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        return False
    return int(ctypes.CDLL(None).syscall(numbers[which], *arguments)) == 0


def _current_cpu() -> int:
    return int(ctypes.CDLL(None).sched_getcpu())
