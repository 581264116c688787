"""The tensors of each architecture: names and shapes, as llama.cpp's loader asks for them, compared with a file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from freetoken import quants
from freetoken.errors import ModelFileError, UnsupportedModelError
from freetoken.gguf import ModelFile, Tensor
from freetoken.quants import GgmlType
from freetoken.spec.model import ModelSpec

__all__ = ["check_tensors", "required_tensors"]

_VECTOR_TYPES = frozenset({GgmlType.F32, GgmlType.F16, GgmlType.BF16})
_NOT_WEIGHTS = frozenset(
    {GgmlType.Q8_1, GgmlType.Q8_K, GgmlType.F64} | {t for t in GgmlType if t.name[0] == "I" and t.name[1].isdigit()}
)
_IGNORED = re.compile(r"rope_freqs\.weight|cls\..*|dense_[23]\..*|blk\.\d+\.attn_rot_embd")
"""Tensors that do not change a generated token; llama.cpp skips them too."""

Shape = tuple[int, ...]


def check_tensors(spec: ModelSpec, model: ModelFile) -> None:
    """Raise unless the file has every tensor that the architecture needs, each with the right shape and a type that
    can be decoded, and none that would be left unused (the answers would be wrong without it).
    """
    known = set()
    for name, shape in required_tensors(spec):
        tensor = model.tensor(name)
        _check(model, tensor, shape)
        known.add(name)
        bias = name.removesuffix(".weight") + ".bias"
        if len(shape) == 2 and bias in model.tensors:
            _check(model, model.tensors[bias], shape[1:])
            known.add(bias)
    if "rope_freqs.weight" in model.tensors:
        _check(model, model.tensors["rope_freqs.weight"], (spec.rope.n_rot // 2,))
    for name in model.tensors:
        if name not in known and not _IGNORED.fullmatch(name) and not _is_past_trunk(name, spec.n_layer):
            raise UnsupportedModelError(
                f"{model.path}: tensor {name!r} is not one of {spec.architecture}'s: answers would be wrong without it"
            )


def required_tensors(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Names and shapes (ggml's order: row length first) of all tensors that an architecture needs."""
    yield "token_embd.weight", (spec.n_embd, spec.n_vocab)
    yield "output_norm.weight", (spec.n_embd,)
    if not spec.is_tied:
        yield "output.weight", (spec.n_embd, spec.n_vocab)
    for layer in range(spec.n_layer):
        for name, shape in (*_attention(spec, layer), *_feed_forward(spec, layer)):
            yield f"blk.{layer}.{name}.weight", shape


def _attention(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    d, n_head, n_kv = spec.n_embd, spec.n_head[layer], spec.n_kv[layer]
    yield "attn_norm", (d,)
    yield "attn_q", (d, n_head * spec.head_dim_k)
    yield "attn_k", (d, n_kv * spec.head_dim_k)
    yield "attn_v", (d, n_kv * spec.head_dim_v)
    yield "attn_output", (n_head * spec.head_dim_v, d)
    if spec.architecture == "olmoe":
        yield "attn_q_norm", (n_head * spec.head_dim_k,)
        yield "attn_k_norm", (n_kv * spec.head_dim_k,)
    elif spec.architecture in ("gemma3", "qwen3", "qwen3moe"):
        yield "attn_q_norm", (spec.head_dim_k,)
        yield "attn_k_norm", (spec.head_dim_k,)
    if spec.architecture == "gemma3":
        yield "post_attention_norm", (d,)
        yield "post_ffw_norm", (d,)


def _feed_forward(spec: ModelSpec, layer: int) -> Iterator[tuple[str, Shape]]:
    d = spec.n_embd
    yield "ffn_norm", (d,)
    if not spec.is_moe:
        yield from _gated("", d, spec.n_ff[layer])
        return
    yield "ffn_gate_inp", (d, spec.n_expert)
    for name, shape in _gated("_exps", d, spec.n_ff_exp):
        yield name, (*shape, spec.n_expert)
    if spec.n_ff_shexp:
        yield "ffn_gate_inp_shexp", (d,)
        yield from _gated("_shexp", d, spec.n_ff_shexp)


def _gated(suffix: str, d: int, n_ff: int) -> tuple[tuple[str, Shape], ...]:
    return ("ffn_gate" + suffix, (d, n_ff)), ("ffn_up" + suffix, (d, n_ff)), ("ffn_down" + suffix, (n_ff, d))


def _check(model: ModelFile, tensor: Tensor, shape: Shape) -> None:
    where = f"{model.path}: tensor {tensor.name!r}"
    if _trimmed(tensor.shape) != _trimmed(shape):
        raise ModelFileError(f"{where} has shape {list(tensor.shape)}, expected {list(shape)} from the metadata")
    if tensor.type in _NOT_WEIGHTS or (len(shape) == 1 and tensor.type not in _VECTOR_TYPES):
        kind = "a vector" if len(shape) == 1 else "a matrix"
        raise UnsupportedModelError(f"{where} has type {quants.type_name(tensor.type)}, which is no type for {kind}")


def _trimmed(shape: Shape) -> Shape:
    """A shape without trailing ones, which files may write or leave out."""
    end = len(shape)
    while end > 1 and shape[end - 1] == 1:
        end -= 1
    return shape[:end]


def _is_past_trunk(name: str, n_layer: int) -> bool:
    match = re.match(r"blk\.(\d{1,6})\.", name)
    return match is not None and int(match[1]) >= n_layer
