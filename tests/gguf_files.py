"""Writes small GGUF files for tests, good ones and, by overriding any field, broken ones."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freetoken import quants

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value with a GGUF type of its own choice; `item` is the type of an array's items."""

    type: int
    value: object
    item: int = STRING


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as the file states it; `offset` None places it after the one before."""

    name: str
    shape: Sequence[int]
    type: int = 0
    data: bytes | None = None
    offset: int | None = None
    n_dims: int | None = None

    def content(self) -> bytes:
        """The given data, or zeros of the right length."""
        if self.data is not None:
            return self.data
        rows = int(np.prod(self.shape[1:], dtype=object)) if len(self.shape) > 1 else 1
        return bytes(rows * quants.row_bytes(self.type, self.shape[0]))


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: object) -> Typed:
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, int):
        return Typed(U32, value)
    if isinstance(value, float):
        return Typed(F32, value)
    if isinstance(value, str | bytes):
        return Typed(STRING, value)
    assert isinstance(value, list)
    return Typed(ARRAY, value, _typed(value[0]).type if value else STRING)


def _payload(kind: int, value: object) -> bytes:
    if kind == STRING:
        assert isinstance(value, str | bytes)
        return text(value)
    return struct.pack("<" + _CODES[kind], value)


def entry(key: str | bytes, value: object) -> bytes:
    """One metadata entry."""
    typed = _typed(value)
    head = text(key) + struct.pack("<I", typed.type)
    if typed.type != ARRAY:
        return head + _payload(typed.type, typed.value)
    assert isinstance(typed.value, list)
    items = b"".join(_payload(typed.item, item) for item in typed.value)
    return head + struct.pack("<IQ", typed.item, len(typed.value)) + items


def build(
    metadata: Mapping[str, object] | Iterable[tuple[str | bytes, object]],
    tensors: Sequence[TensorBytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    alignment: int = 32,
    n_keys: int | None = None,
    n_tensors: int | None = None,
    cut: int | None = None,
) -> bytes:
    """The bytes of a file. Counts can be overridden with lies; `cut` drops everything from that byte on."""
    pairs = list(metadata.items() if isinstance(metadata, Mapping) else metadata)
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_keys is None else n_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(entry(k, v) for k, v in pairs)
    data = b""
    for tensor in tensors:
        data += bytes(-len(data) % alignment)
        offset = len(data) if tensor.offset is None else tensor.offset
        n_dims = len(tensor.shape) if tensor.n_dims is None else tensor.n_dims
        head += text(tensor.name) + struct.pack(f"<I{len(tensor.shape)}Q", n_dims, *tensor.shape)
        head += struct.pack("<IQ", tensor.type, offset)
        data += tensor.content()
    whole = head + bytes(-len(head) % alignment) + data
    return whole if cut is None else whole[:cut]


def write(path: Path, *args: object, **kwargs: object) -> Path:
    """`build` into a file."""
    path.write_bytes(build(*args, **kwargs))  # type: ignore[arg-type]
    return path


N_EMBD, N_HEAD, N_KV, HEAD_DIM, N_FF, N_EXPERT, N_FF_EXP, N_VOCAB, N_LAYER = 64, 4, 2, 16, 96, 4, 32, 10, 2


def tiny_keys(arch: str) -> dict[str, object]:
    """Metadata of a tiny model of an architecture; tokens, but no real vocabulary."""
    keys: dict[str, object] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": N_LAYER,
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": N_EMBD,
        f"{arch}.feed_forward_length": N_FF,
        f"{arch}.attention.head_count": N_HEAD,
        f"{arch}.attention.head_count_kv": N_KV,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(N_VOCAB)],
    }
    if arch in ("olmoe", "qwen2moe", "qwen3moe"):
        keys |= {f"{arch}.expert_count": N_EXPERT, f"{arch}.expert_used_count": 2}
    if arch in ("qwen2moe", "qwen3moe"):
        keys[f"{arch}.expert_feed_forward_length"] = N_FF_EXP
    if arch == "qwen2moe":
        keys["qwen2moe.expert_shared_feed_forward_length"] = N_FF
    return keys


def tiny_tensors(arch: str, types: Mapping[str, int] | None = None, n_layer: int = N_LAYER) -> list[TensorBytes]:
    """The tensors of `tiny_keys`, all zero and F32 but for those in `types`; a tied model has no output."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (N_EMBD, N_VOCAB), "output_norm.weight": (N_EMBD,)}
    if arch in ("olmoe", "qwen2moe"):
        shapes["output.weight"] = (N_EMBD, N_VOCAB)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (N_EMBD,),
        "attn_q.weight": (N_EMBD, N_HEAD * HEAD_DIM),
        "attn_k.weight": (N_EMBD, N_KV * HEAD_DIM),
        "attn_v.weight": (N_EMBD, N_KV * HEAD_DIM),
        "attn_output.weight": (N_HEAD * HEAD_DIM, N_EMBD),
        "ffn_norm.weight": (N_EMBD,),
    }
    if arch in ("qwen2", "qwen2moe"):
        layer |= {"attn_q.bias": (N_EMBD,), "attn_k.bias": (N_KV * HEAD_DIM,), "attn_v.bias": (N_KV * HEAD_DIM,)}
    if arch == "olmoe":
        layer |= {"attn_q_norm.weight": (N_EMBD,), "attn_k_norm.weight": (N_KV * HEAD_DIM,)}
    if arch in ("gemma3", "qwen3", "qwen3moe"):
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch == "gemma3":
        layer |= {"post_attention_norm.weight": (N_EMBD,), "post_ffw_norm.weight": (N_EMBD,)}
    if arch in ("olmoe", "qwen2moe", "qwen3moe"):
        ff = N_FF if arch == "olmoe" else N_FF_EXP
        layer |= {f"ffn_{name}_exps.weight": (N_EMBD, ff, N_EXPERT) for name in ("gate", "up")}
        layer |= {"ffn_down_exps.weight": (ff, N_EMBD, N_EXPERT), "ffn_gate_inp.weight": (N_EMBD, N_EXPERT)}
    else:
        layer |= {"ffn_gate.weight": (N_EMBD, N_FF), "ffn_up.weight": (N_EMBD, N_FF), "ffn_down.weight": (N_FF, N_EMBD)}
    if arch == "qwen2moe":
        layer |= {f"ffn_{name}_shexp.weight": (N_EMBD, N_FF) for name in ("gate", "up")}
        layer |= {"ffn_down_shexp.weight": (N_FF, N_EMBD), "ffn_gate_inp_shexp.weight": (N_EMBD,)}
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return [TensorBytes(name, shape, (types or {}).get(name, 0)) for name, shape in shapes.items()]
