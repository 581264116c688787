"""Flags about the GPU: which card, what goes there, and llama-server's flags for it that we have no use for.

`gpu_fields` turns them into fields of EngineOptions. What needs several cards is refused with the reason; what makes no
difference here says so once.
"""

from __future__ import annotations

import argparse
import logging
import re
from typing import Any

from freetoken.cli.flag import Flag, real, whole, words
from freetoken.errors import OptionError
from freetoken.gpu import driver
from freetoken.options import MOE_BACKENDS, LayerSet

__all__ = ["GPU", "devices_text", "gpu_fields"]

log = logging.getLogger(__name__)

_ONE_GPU = "the model runs on one GPU for now"
_ON, _OFF, _AUTO = ("on", "enabled", "true", "1"), ("off", "disabled", "false", "0"), ("auto", "-1")
_DEVICE = re.compile(r"cuda(\d{1,3})", re.IGNORECASE)


def gpu_layers(text: str) -> int:
    """ "auto" -1, "all" -2, or a number."""
    return {"auto": -1, "all": -2}.get(text) or int(whole(-2)(text))


def moe_backend(text: str) -> str:
    """A backend that we have."""
    if text not in MOE_BACKENDS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(MOE_BACKENDS)}")
    return text


def layer_set(text: str) -> LayerSet:
    """A list such as "0,3-5" (one layer: "3-3"), a count, or a share with a point."""
    if re.fullmatch(r"\d{1,6}", text):
        return LayerSet(count=int(text))
    if "." in text:
        return LayerSet(share=real(0.0, 1.0)(text))
    layers: set[int] = set()
    for part in words(text):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise argparse.ArgumentTypeError(f"{part!r}, expected a layer or a range of them such as 3-5")
        layers.update(range(first, last + 1))
    if not layers:
        raise argparse.ArgumentTypeError(f"{text!r} names no layer")
    return LayerSet(tuple(sorted(layers)))


def device_names(text: str) -> tuple[int, ...]:
    """Numbers of the cards named, none for "none"."""
    names = words(text)
    if [name.lower() for name in names] == ["none"]:
        return ()
    numbers = []
    for name in names:
        match = _DEVICE.fullmatch(name)
        if match is None:
            raise argparse.ArgumentTypeError(f"{name!r} is no device, expected none or a name such as CUDA0")
        numbers.append(int(match[1]))
    if not numbers:
        raise argparse.ArgumentTypeError("no device is named")
    return tuple(numbers)


def overrides(text: str) -> tuple[tuple[str, str], ...]:
    """PATTERN=BUFFER pairs separated by commas."""
    pairs = []
    for part in words(text):
        pattern, sign, kind = part.partition("=")
        if not sign or (kind != "CPU" and not _DEVICE.fullmatch(kind)):
            raise argparse.ArgumentTypeError(f"{part!r}, expected PATTERN=CPU or PATTERN=CUDA0")
        try:
            re.compile(pattern)
        except re.error as error:
            raise argparse.ArgumentTypeError(f"{pattern!r} is no regular expression: {error}") from None
        pairs.append((pattern, kind.upper()))
    return tuple(pairs)


def split_mode(text: str) -> str:
    """A mode that one card can serve."""
    if text in ("row", "tensor"):
        raise argparse.ArgumentTypeError(f"{text!r} splits a model over several GPUs: {_ONE_GPU}")
    if text not in ("none", "layer"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of none, layer")
    return text


def tensor_split(text: str) -> int:
    """Which card gets everything, of proportions separated by commas or slashes."""
    shares = [real(0.0)(part) for part in re.split("[,/]+", text)]
    users = [i for i, share in enumerate(shares) if share > 0]
    if len(users) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} asks for {len(users)} GPUs: {_ONE_GPU}")
    return users[0] if users else 0


def on_off(text: str) -> bool:
    """llama.cpp's words for yes and no."""
    if text not in _ON + _OFF:
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text in _ON


def on_off_auto(text: str) -> bool:
    """The same, or auto: yes."""
    return text in _AUTO or on_off(text)


GPU = (
    Flag(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        "n_gpu_layers",
        "layers on the GPU: a number, auto or all; the first ones stay on the CPU",
        gpu_layers,
        env="LLAMA_ARG_N_GPU_LAYERS",
    ),
    Flag(
        ("-cmoe", "--cpu-moe"),
        "cpu_moe",
        "no layer's experts take slots of the GPU's cache: the CPU computes them",
        env="LLAMA_ARG_CPU_MOE",
    ),
    Flag(
        ("-ncmoe", "--n-cpu-moe"),
        "n_cpu_moe",
        "the same for the first N layers",
        whole(),
        env="LLAMA_ARG_N_CPU_MOE",
    ),
    Flag(
        ("-ot", "--override-tensor"),
        "override_tensor",
        "which experts take no slots (=CPU) or do (=CUDA0), by regular expressions on tensor names",
        overrides,
        "PATTERN=BUFFER,...",
        "LLAMA_ARG_OVERRIDE_TENSOR",
        is_list=True,
    ),
    Flag(("-dev", "--device"), "device", "the GPU, or none", device_names, "DEV", "LLAMA_ARG_DEVICE"),
    Flag(("--list-devices",), "list_devices", "print the GPUs and exit"),
    Flag(
        ("-mg", "--main-gpu"), "main_gpu", "which of several GPUs to use", whole(0, 999), "INDEX", "LLAMA_ARG_MAIN_GPU"
    ),
    Flag(
        ("-sm", "--split-mode"),
        "split_mode",
        "accepted: none or layer, on one GPU; row and tensor need several",
        split_mode,
        "MODE",
        "LLAMA_ARG_SPLIT_MODE",
    ),
    Flag(
        ("-ts", "--tensor-split"),
        "tensor_split",
        "shares of several GPUs, of which one may be above 0",
        tensor_split,
        "N0,N1,...",
        "LLAMA_ARG_TENSOR_SPLIT",
    ),
    Flag(
        ("--moe-backend",),
        "moe_backend",
        "experts that are in no slot of the GPU: offload (fetched), cpu (computed there), hybrid (both at once); fused "
        "keeps all in slots, auto does where they fit",
        moe_backend,
        "NAME",
        "FREETOKEN_ARG_MOE_BACKEND",
    ),
    Flag(
        ("--moe-cpu-threads",),
        "moe_cpu_threads",
        "threads for experts on the CPU beside a GPU (default: physical cores, less one or two)",
        whole(1),
        env="FREETOKEN_ARG_MOE_CPU_THREADS",
    ),
    Flag(
        ("--moe-cache-size",),
        "moe_cache_size",
        "slots for experts on the GPU, all layers together",
        whole(1),
        env="FREETOKEN_ARG_MOE_CACHE_SIZE",
    ),
    Flag(
        ("--moe-cache-rate",),
        "moe_cache_rate",
        "the same as a share of all experts, up to 1",
        real(1e-6, 1.0),
        "R",
        "FREETOKEN_ARG_MOE_CACHE_RATE",
    ),
    Flag(
        ("--moe-cache-auto",),
        "moe_cache_auto",
        "as many slots as the GPU has room for (default)",
        env="FREETOKEN_ARG_MOE_CACHE_AUTO",
    ),
    Flag(
        ("--moe-hybrid-max-fetch",),
        "moe_hybrid_max_fetch",
        "most misses of a layer that a step fetches to the GPU beside the CPU; -1 as many as pays, 0 none (-1)",
        whole(-1),
        env="FREETOKEN_ARG_MOE_HYBRID_MAX_FETCH",
    ),
    Flag(
        ("--moe-hybrid-min-fill",),
        "moe_hybrid_min_fill",
        "least misses of a layer that a step fetches, 0 or 1 (0)",
        whole(0, 1),
        env="FREETOKEN_ARG_MOE_HYBRID_MIN_FILL",
    ),
    Flag(
        ("--moe-cpu-layers",),
        "moe_cpu_layers",
        "layers whose misses all go to the CPU: a list such as 0,3-5, a count of the first ones, or a share (0.25)",
        layer_set,
        "LAYERS",
        "FREETOKEN_ARG_MOE_CPU_LAYERS",
    ),
    Flag(
        ("--moe-calibrate",),
        "moe_calibrate",
        "time the backends after loading and keep the fastest, again where conditions move (default)",
        env="FREETOKEN_ARG_MOE_CALIBRATE",
        negatives=("--no-moe-calibrate",),
    ),
    Flag(
        ("--memory-ratio",),
        "memory_ratio",
        "share of the GPU's free memory to use (0.9)",
        real(0.01, 1.0),
        "R",
        "FREETOKEN_ARG_MEMORY_RATIO",
    ),
    Flag(
        ("-fitt", "--fit-target"),
        "memory_margin_mib",
        "MiB of the GPU's free memory to leave at least",
        whole(0),
        "MiB",
        "LLAMA_ARG_FIT_TARGET",
    ),
    Flag(
        ("-fitc", "--fit-ctx", "--kv-reserve-tokens"),
        "kv_reserve_tokens",
        "without -c, the least context that experts leave room for (8192)",
        whole(1),
        env="LLAMA_ARG_FIT_CTX",
    ),
    Flag(
        ("-fit", "--fit"),
        "fit",
        "on or off: whether context and layers that were not given may shrink to fit the GPU (on)",
        on_off,
        "on|off",
        "LLAMA_ARG_FIT",
    ),
    Flag(
        ("-fa", "--flash-attn"),
        "flash_attn",
        "accepted: attention never stores its scores",
        on_off_auto,
        "on|off|auto",
        "LLAMA_ARG_FLASH_ATTN",
    ),
    Flag(
        ("-kvo", "--kv-offload"),
        "kv_offload",
        "keys and values lie where their layer runs (default)",
        env="LLAMA_ARG_KV_OFFLOAD",
        negatives=("-nkvo", "--no-kv-offload"),
    ),
    Flag(
        ("--op-offload",),
        "op_offload",
        "accepted: prompts of layers on the GPU always run there",
        negatives=("--no-op-offload",),
    ),
    Flag(
        ("--repack",),
        "repack",
        "accepted: weights are used as they lie in the file",
        env="LLAMA_ARG_REPACK",
        negatives=("-nr", "--no-repack"),
    ),
    Flag(("--no-host",), "no_host", "accepted: the same", env="LLAMA_ARG_NO_HOST"),
)


def gpu_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineOptions that do not stand in `args` under their own names.

    Raises OptionError for wishes that exclude each other or need several GPUs.
    """
    ways = [name for name in ("size", "rate", "auto") if getattr(args, f"moe_cache_{name}", None)]
    if len(ways) > 1:
        raise OptionError(f"{' and '.join(f'--moe-cache-{name}' for name in ways)} exclude each other: give one")
    if getattr(args, "kv_offload", None) is False:
        raise OptionError(
            "-nkvo (--no-kv-offload): keys and values lie where their layer runs: to keep them in host memory run "
            "layers on the CPU (-ngl N), or give a smaller context (-c N)"
        )
    if getattr(args, "flash_attn", None) is False:
        log.warning("-fa off has no effect: attention never stores its scores here")
    if getattr(args, "op_offload", None) is False:
        log.warning("--no-op-offload has no effect: a layer's prompts run where the layer is")
    gpu = _gpu(args)
    rules = tuple(pair for group in getattr(args, "override_tensor", None) or [] for pair in group)
    for pattern, kind in rules:
        if kind not in ("CPU", f"CUDA{gpu}") and gpu is not None:
            raise OptionError(f"-ot {pattern}={kind}: {_ONE_GPU}, and that is CUDA{gpu}")
    is_named = bool(getattr(args, "device", None))
    return {"gpu": gpu, "is_gpu_named": is_named, "override_tensors": rules}


def _gpu(args: argparse.Namespace) -> int | None:
    """Which card: of those of -dev the one that -mg or -ts picks, None for none."""
    devices = getattr(args, "device", None)
    picks = {
        flag: value
        for flag, name in (("-mg", "main_gpu"), ("-ts", "tensor_split"))
        if (value := getattr(args, name, None)) is not None
    }
    if devices == ():
        return None
    if len(set(picks.values())) > 1:
        raise OptionError(f"-mg {picks['-mg']} and -ts name different GPUs: {_ONE_GPU}")
    pick = next(iter(picks.values()), 0)
    if devices is None:
        return int(pick)
    if len(devices) > 1 and not picks and getattr(args, "split_mode", None) != "none":
        raise OptionError(f"-dev names {len(devices)} GPUs: {_ONE_GPU}, name one")
    if pick >= len(devices):
        raise OptionError(f"{next(iter(picks))} picks GPU {pick} of the {len(devices)} that -dev names")
    return int(devices[pick])


def devices_text() -> str:
    """What --list-devices prints, in llama-server's form."""
    lines = ["Available devices:"]
    for device in driver.find_devices():
        free = driver.free_bytes(device.index)
        total = f"{device.total_bytes >> 20} MiB, {free >> 20} MiB free"
        lines.append(f"  CUDA{device.index}: {device.name} ({total})")
    if len(lines) == 1:
        lines.append(f"  (none: {driver.why_no_device()})")
    return "\n".join(lines)
