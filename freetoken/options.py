"""The wishes: frozen dataclasses with every default, once. `plan` and the engine decide; they never change a wish."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from freetoken.errors import OptionError

__all__ = ["MOE_BACKENDS", "NUMA_STRATEGIES", "SPLITS", "EngineOptions", "LayerSet", "ModelOptions", "ServerOptions"]

SPLITS = ("offload", "cpu", "hybrid")
"""How experts run that are in no slot: fetched over PCIe, computed on the CPU, or some so and some so."""
MOE_BACKENDS = ("auto", "fused", *SPLITS)
"""How routed experts run on a GPU: all in slots, or one of SPLITS; auto takes fused where all fit."""
NUMA_STRATEGIES = ("distribute", "isolate", "numactl")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it reads prompts."""

    path: Path
    alias: str | None = None
    chat_template: str | None = None
    """A Jinja source, or the name of a built-in template; None takes the file's."""


@dataclass(frozen=True)
class LayerSet:
    """Some layers: those named, or the first `count`, or the first of all by a share."""

    layers: tuple[int, ...] = ()
    count: int = 0
    share: float = 0.0

    def of(self, n_layer: int) -> frozenset[int]:
        """The layers of a model with n_layer. Raises OptionError for one that it does not have."""
        most = max(self.layers, default=0)
        if most >= n_layer:
            raise OptionError(f"--moe-cpu-layers names layer {most}: the model has layers 0 to {n_layer - 1}")
        first = max(self.count, round(self.share * n_layer))
        return frozenset(self.layers) | frozenset(range(min(first, n_layer)))


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs. Counts of 0 mean "decide from the model or the machine"."""

    n_ctx: int = 0
    """Context in tokens, of all slots together; 0 takes the model's training context."""
    n_parallel: int = 0
    """Requests served at once; 0 lets the engine choose, all sharing one context."""
    n_batch: int = 2048
    n_ubatch: int = 512
    n_threads: int = 0
    n_threads_batch: int = 0
    n_gpu_layers: int = -1
    """Layers on the GPU, -1 for as many as are useful, -2 for all."""
    gpu: int | None = 0
    """The card, as the driver numbers it; None for no GPU."""
    is_gpu_named: bool = False
    """Whether the card was asked for by name, so that it is an error not to have it."""
    moe_backend: str = "auto"
    """One of MOE_BACKENDS."""
    moe_cache_size: int = 0
    """Slots for experts of all layers together; 0 leaves it to moe_cache_rate."""
    moe_cache_rate: float = 0.0
    """The same as a share of all experts; 0 fills the card."""
    moe_cpu_threads: int = 0
    """Threads for experts on the CPU beside a GPU."""
    cpu_moe: bool = False
    """No layer's experts take slots of the cache: the CPU computes them."""
    n_cpu_moe: int = 0
    """The same for the first so many layers."""
    override_tensors: tuple[tuple[str, str], ...] = ()
    """(regular expression, "CPU" or "CUDA0"): where tensors whose name it finds shall lie. The first that fits counts,
    before cpu_moe and n_cpu_moe."""
    moe_hybrid_max_fetch: int = -1
    """Most misses of a layer and step that are filled where the CPU computes the others; -1 fills as many as pays."""
    moe_hybrid_min_fill: int = 0
    """Least misses of a layer and step that are filled, 0 or 1."""
    moe_cpu_layers: LayerSet = LayerSet()
    """Layers whose misses all go to the CPU."""
    moe_calibrate: bool = True
    """Whether backends are timed after loading, and again while serving where conditions move."""
    memory_ratio: float = 0.9
    """Share of the card's free memory that we may take."""
    memory_margin_mib: int = 0
    """MiB of the card's free memory that we leave, where that is more than memory_ratio leaves."""
    kv_reserve_tokens: int = 8192
    """Tokens of context that experts never take room from, where n_ctx is 0."""
    fit: bool = True
    """Whether what was not given (context, layers on the GPU) may shrink until the model fits on the card."""
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    numa: str | None = None
    """With several memory nodes: one of NUMA_STRATEGIES; None leaves placement to the system."""
    slow_fills: float = 0.0
    """Of tests: fills move so many times their bytes, another machine's link; 0 leaves the possibility out."""
    slow_cpu: float = 1.0
    """Of tests: experts on the CPU take so many times as long."""
    n_planes: int = 2
    """int8 planes of a quantised activation: 2 (16 bits) or 1 (8 bits, llama.cpp's precision)."""

    @property
    def moe_cache_auto(self) -> bool:
        """Whether the experts' cache takes what the card has left."""
        return not self.moe_cache_size and not self.moe_cache_rate

    @property
    def is_gpu_asked(self) -> bool:
        """Whether layers on a GPU were asked for, not only left to us."""
        return self.gpu is not None and (self.is_gpu_named or self.n_gpu_layers > 0 or self.n_gpu_layers == -2)

    @property
    def is_gpu_off(self) -> bool:
        return self.gpu is None or self.n_gpu_layers == 0

    @property
    def n_chunk(self) -> int:
        """Tokens of one prefill chunk."""
        return min(self.n_batch, self.n_ubatch)


@dataclass(frozen=True)
class ServerOptions:
    """Where and how the HTTP server listens."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    timeout_s: int = 3600
    """Of one read or write, and of an idle connection."""
    n_threads_http: int = 0
    """Threads kept ready; more start when all are busy. 0 takes 4."""
    max_body_bytes: int = 100 * 2**20
    sse_ping_interval_s: int = 30
    """Seconds of silence after which a stream gets a comment line, -1 for never."""
    cache_prompt: bool = True
    is_slots_endpoint_on: bool = True
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    """Variables for the chat template; a request's own win."""
    default_sampling: dict[str, object] = field(default_factory=dict)
    """Fields of `request.SamplingParams` given on the command line; a request's own fields win."""
