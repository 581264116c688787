"""Hyper-parameters of a model, read from its metadata, each within bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from freetoken.errors import ModelFileError, UnsupportedModelError
from freetoken.gguf import Metadata, ModelFile
from freetoken.spec.rope import Rope, RopeValues, read_rope, rope_table

__all__ = ["SUPPORTED", "ModelSpec", "read_architecture", "read_spec"]

SUPPORTED = ("gemma3", "llama", "olmoe", "qwen2", "qwen2moe", "qwen3", "qwen3moe")
"""Architectures that we run, as `general.architecture` names them."""

_NEIGHBOUR_ROPE = frozenset({"llama"})
"""Architectures that rotate neighbours; the others rotate halves of a head."""
_NORMALISED = frozenset({"llama", "qwen3moe"})
"""Architectures that scale the chosen experts' weights to a sum of 1. llama.cpp fixes this by architecture and reads
no key for it."""
_ALWAYS_MOE = frozenset({"olmoe", "qwen2moe", "qwen3moe"})
_MAY_BE_MOE = _ALWAYS_MOE | {"llama"}

MAX_LAYERS = 512
MAX_EMBD = 1 << 17
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_FF = 1 << 22
MAX_EXPERTS = 1024
MAX_EXPERTS_USED = 64
"""Of one token and layer; the native router and experts take no more."""
MAX_CTX = 2**31 - 1
MAX_VOCAB = 1 << 23


@dataclass(frozen=True)
class ModelSpec:
    """What an architecture file needs to know. Tuples have one entry a layer.

    `n_layer` counts the trunk, without layers that predict further tokens. `window` is the sliding window of the
    layers whose `is_sliding` is true (0: there is none); a token sees the last `window` positions, itself included.
    `expert_gating` is "softmax"; `n_ff_exp` is one routed expert's width, `n_ff_shexp` the shared one's (0: none).
    """

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_kv: tuple[int, ...]
    head_dim_k: int
    head_dim_v: int
    n_ff: tuple[int, ...]
    n_ctx_train: int
    n_vocab: int
    eps: float
    attn_scale: float
    rope: Rope
    window: int = 0
    is_sliding: tuple[bool, ...] = ()
    final_softcap: float = 0.0
    attn_softcap: float = 0.0
    is_tied: bool = False
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    expert_gating: str = "softmax"
    expert_norm: bool = False
    expert_scale: float = 1.0

    @property
    def is_moe(self) -> bool:
        return self.n_expert > 0

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer, 0 for none."""
        return self.window if self.is_sliding[layer] else 0

    def rope_table(self, layer: int, freq_factors: np.ndarray | None = None) -> RopeValues:
        """Rotation of a layer; `freq_factors` are the values of `rope_freqs.weight` where the file has it."""
        return rope_table(self.rope, is_sliding=self.is_sliding[layer], freq_factors=freq_factors)


def read_architecture(metadata: Metadata) -> str:
    """The architecture's name. Raises UnsupportedModelError with the list of those that we run."""
    arch = metadata.get_str("general.architecture")
    if arch not in SUPPORTED:
        raise UnsupportedModelError(
            f"{metadata.where}: architecture {arch[:60]!r} is not supported, only {', '.join(SUPPORTED)}"
        )
    return arch


def read_spec(model: ModelFile) -> ModelSpec:
    """The hyper-parameters of an open model.

    Raises UnsupportedModelError for an architecture or feature that we lack, or a file with draft layers only, and
    ModelFileError for a number that is missing, of the wrong type, out of bounds, or at odds with another.
    """
    metadata = model.metadata
    arch = read_architecture(metadata)
    n_layer = _trunk_layers(model, arch)
    n_embd = metadata.get_int(f"{arch}.embedding_length", low=1, high=MAX_EMBD)
    n_ctx_train = metadata.get_int(f"{arch}.context_length", low=1, high=MAX_CTX)
    n_head, n_kv = _heads(metadata, arch, n_layer)
    head_dim_k, head_dim_v = _head_dims(metadata, arch, n_embd, n_head[0])
    spec = ModelSpec(
        architecture=arch,
        name=metadata.get_str("general.name", ""),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_kv=n_kv,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        n_ff=metadata.get_ints(f"{arch}.feed_forward_length", n_layer, 0, high=MAX_FF),
        n_ctx_train=n_ctx_train,
        n_vocab=_vocab_size(model, arch),
        eps=metadata.get_float(f"{arch}.attention.layer_norm_rms_epsilon", low=0.0, high=1.0),
        attn_scale=1.0 / math.sqrt(head_dim_k),
        rope=read_rope(metadata, arch, head_dim_k, n_ctx_train, is_neox=arch not in _NEIGHBOUR_ROPE),
        is_sliding=(False,) * n_layer,
        is_tied="output.weight" not in model.tensors,
    )
    if arch == "gemma3":
        spec = _with_gemma3(spec, metadata)
    n_expert = metadata.get_int(f"{arch}.expert_count", 0, high=MAX_EXPERTS)
    if n_expert or arch in _ALWAYS_MOE:
        return _with_experts(spec, metadata, n_expert)
    if not all(spec.n_ff):
        raise ModelFileError(f"{metadata.where}: key '{arch}.feed_forward_length' is missing or 0")
    return spec


def _trunk_layers(model: ModelFile, arch: str) -> int:
    """Layers of the trunk: block_count less the layers that predict further tokens (they come last)."""
    n_all = model.metadata.get_int(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    n_next = model.metadata.get_int(f"{arch}.nextn_predict_layers", 0, high=n_all)
    if n_next and (n_next == n_all or "blk.0.attn_norm.weight" not in model.tensors):
        raise UnsupportedModelError(
            f"{model.path}: the file holds only the {n_next} draft (MTP) layers of a model: name the main model's file"
        )
    return n_all - n_next


def _heads(metadata: Metadata, arch: str, n_layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    key = f"{arch}.attention.head_count"
    n_head = metadata.get_ints(key, n_layer, low=1, high=MAX_HEADS)
    n_kv = metadata.get_ints(key + "_kv", n_layer, low=1, high=MAX_HEADS) if key + "_kv" in metadata else n_head
    for layer, (q, kv) in enumerate(zip(n_head, n_kv, strict=True)):
        if q % kv:
            raise ModelFileError(f"{metadata.where}: layer {layer} has {q} heads, not a multiple of its {kv} KV heads")
    return n_head, n_kv


def _head_dims(metadata: Metadata, arch: str, n_embd: int, n_head: int) -> tuple[int, int]:
    """Widths of a head's keys and values."""
    dims = []
    for name in ("key_length", "value_length"):
        key = f"{arch}.attention.{name}"
        if key not in metadata and n_embd % n_head:
            raise ModelFileError(f"{metadata.where}: {n_embd} values do not divide into {n_head} heads, and no {key!r}")
        dims.append(metadata.get_int(key, n_embd // n_head, low=1, high=MAX_HEAD_DIM))
    return dims[0], dims[1]


def _vocab_size(model: ModelFile, arch: str) -> int:
    """Tokens of the vocabulary; without one, the key `vocab_size`, or the rows of the embedding."""
    if "tokenizer.ggml.tokens" in model.metadata:
        n = len(model.metadata.get_strings("tokenizer.ggml.tokens"))
    elif f"{arch}.vocab_size" in model.metadata:
        n = model.metadata.get_int(f"{arch}.vocab_size", high=MAX_VOCAB)
    else:
        n = model.tensor("token_embd.weight").rows
    if not 0 < n <= MAX_VOCAB:
        raise ModelFileError(f"{model.path}: a vocabulary of {n} tokens, expected 1 to {MAX_VOCAB}")
    return n


def _with_gemma3(spec: ModelSpec, metadata: Metadata) -> ModelSpec:
    """Sliding layers (by default five of six), the logits' soft cap, and the 27B model's scale."""
    window = metadata.get_int("gemma3.attention.sliding_window", 0, high=MAX_CTX)
    key = "gemma3.attention.sliding_window_pattern"
    if not window:
        is_sliding: tuple[bool, ...] = (False,) * spec.n_layer
    elif isinstance(metadata.get(key), np.ndarray):
        flags = metadata.get_numbers(key)
        if len(flags) < spec.n_layer:
            raise ModelFileError(f"{metadata.where}: key {key!r} has {len(flags)} values, expected {spec.n_layer}")
        is_sliding = tuple(bool(flag) for flag in flags[: spec.n_layer])
    else:
        period = metadata.get_int(key, 6, high=MAX_LAYERS)
        is_sliding = tuple(period == 0 or i % period < period - 1 for i in range(spec.n_layer))
    scale_dim = spec.n_embd // spec.n_head[0] if spec.n_layer == 62 else spec.head_dim_k
    return replace(
        spec,
        window=window,
        is_sliding=is_sliding,
        final_softcap=metadata.get_float("gemma3.final_logit_softcapping", 0.0, low=0.0, high=1e6),
        attn_scale=1.0 / math.sqrt(scale_dim),
    )


def _with_experts(spec: ModelSpec, metadata: Metadata, n_expert: int) -> ModelSpec:
    arch = spec.architecture
    if arch not in _MAY_BE_MOE:
        raise UnsupportedModelError(f"{metadata.where}: {arch} with {n_expert} experts is not supported")
    n_expert = metadata.get_int(f"{arch}.expert_count", low=1, high=MAX_EXPERTS)
    if metadata.get_int(f"{arch}.expert_group_count", 0) > 1:
        raise UnsupportedModelError(f"{metadata.where}: {arch} with expert groups is not supported")
    n_used = _same_for_all(metadata, f"{arch}.expert_used_count", spec.n_layer, min(n_expert, MAX_EXPERTS_USED))
    n_ff = max(spec.n_ff)
    n_ff_exp = n_ff
    if arch in ("qwen2moe", "qwen3moe"):
        key = f"{arch}.expert_feed_forward_length"
        n_ff_exp = _same_for_all(metadata, key, spec.n_layer, MAX_FF) if key in metadata else n_ff // n_used
    n_ff_shexp = 0
    if arch == "qwen2moe":
        n_ff_shexp = metadata.get_int(f"{arch}.expert_shared_feed_forward_length", 0, high=MAX_FF) or n_ff
    if not n_ff_exp or (arch == "qwen2moe" and not n_ff_shexp):
        raise ModelFileError(f"{metadata.where}: the width of an expert is 0: '{arch}.feed_forward_length' is missing")
    return replace(
        spec,
        n_expert=n_expert,
        n_expert_used=n_used,
        n_ff_exp=n_ff_exp,
        n_ff_shexp=n_ff_shexp,
        expert_norm=arch in _NORMALISED,
    )


def _same_for_all(metadata: Metadata, key: str, n_layer: int, high: int) -> int:
    """One number for all layers, also where it is written as an array."""
    values = metadata.get_ints(key, n_layer, low=1, high=high)
    if len(set(values)) > 1:
        raise UnsupportedModelError(f"{metadata.where}: key {key!r} differs between layers, which is not supported")
    return values[0]
