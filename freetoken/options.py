"""The wishes: frozen dataclasses with every default, once. `plan` and the engine decide; they never change a wish."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["EngineOptions", "ModelOptions", "ServerOptions"]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it reads prompts."""

    path: Path
    alias: str | None = None
    chat_template: str | None = None
    """A Jinja source, or the name of a built-in template; None takes the file's."""


@dataclass(frozen=True)
class EngineOptions:
    """How the engine runs. Counts of 0 mean "decide from the model or the machine"."""

    n_ctx: int = 0
    """Context in tokens, of all slots together; 0 takes the model's training context."""
    n_parallel: int = 1
    n_batch: int = 2048
    n_ubatch: int = 512
    """Tokens of one prefill chunk."""
    n_threads: int = 0
    n_threads_batch: int = 0
    n_gpu_layers: int = 0
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_planes: int = 2
    """int8 planes of a quantised activation: 2 (16 bits) or 1 (8 bits, llama.cpp's precision)."""
    seed: int | None = None
    n_predict: int = -1


@dataclass(frozen=True)
class ServerOptions:
    """Where and how the HTTP server listens."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    timeout_s: int = 3600
    n_threads_http: int = 0
    cache_prompt: bool = True
    default_sampling: dict[str, object] = field(default_factory=dict)
    """Sampler fields given on the command line (--temp and so on); a request's own fields win."""
