"""Architectures: one short file a family, and the table that finds them by `general.architecture`."""

from __future__ import annotations

from collections.abc import Callable

from freetoken.arch import gemma3, llama, olmoe, qwen2, qwen3
from freetoken.blocks import Model
from freetoken.gguf import ModelFile
from freetoken.spec import ModelSpec, check_tensors

__all__ = ["ARCHITECTURES", "build"]

ARCHITECTURES: dict[str, Callable[[ModelFile, ModelSpec], Model]] = {
    "gemma3": gemma3.build,
    "llama": llama.build,
    "olmoe": olmoe.build,
    "qwen2": qwen2.build,
    "qwen2moe": qwen2.build,
    "qwen3": qwen3.build,
    "qwen3moe": qwen3.build,
}
"""Every name in `spec.SUPPORTED`."""


def build(file: ModelFile, spec: ModelSpec) -> Model:
    """The model of an open file. Raises ModelFileError where a tensor is missing or has another shape."""
    check_tensors(spec, file)
    return ARCHITECTURES[spec.architecture](file, spec)
