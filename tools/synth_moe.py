"""A mixture-of-experts GGUF of a real geometry, with random quantised weights and planted routing.

For speed and hit rates where no weights can be had; every figure taken with such a file is "synthetic".

The plant: the first quarter of the hidden dimensions carries a token's topic (one of 64 patterns), the rest a part of
its own. Routers read both: half of the chosen experts follow the topic, the others the token and the context. The head
prefers tokens of the same topic, so that text sampled at temperature 1 keeps its topic for some twenty tokens.
Weights are made as bytes (tools/random_blocks.py), so a file is written about as fast as the disk takes it.

    python tools/synth_moe.py OUT.gguf --preset qwen3-30b-a3b --layers 4 --vocab 32000 --types Q4_K_M --check
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.ggml import dequantise, quantise, row_bytes, type_by_name
from tools.random_blocks import random_rows
from tools.synth_check import check
from tools.tiny_models import MIXES, Tiny, add_metadata, tensor_type
from tools.tiny_vocab import CONTROL, add_vocabulary, make_vocabulary

__all__ = ["PRESETS", "Plan", "expert_share", "plan_tensors", "write"]

N_TOPICS = 64
TOPIC_BOOST = 4.0
ROUTER_SCALE = 0.6
HEAD_STD = 1.5
HEAD_TOPIC = 7.5

QWEN_MOE = {"rope_base": 1e6, "n_vocab": 151936, "n_ctx": 40960, "n_expert": 128, "n_used": 8, "head_dim": 128}
PRESETS: dict[str, Tiny] = {
    "qwen3-30b-a3b": Tiny(
        "qwen3moe",
        48,
        2048,
        32,
        4,
        n_ff=6144,
        n_ff_exp=768,
        qk_norm="head",
        **QWEN_MOE,  # type: ignore[arg-type]
    ),
    "qwen3-235b-a22b": Tiny(
        "qwen3moe",
        94,
        4096,
        64,
        4,
        n_ff=12288,
        n_ff_exp=1536,
        qk_norm="head",
        **QWEN_MOE,  # type: ignore[arg-type]
    ),
    "qwen2-57b-a14b": Tiny(
        "qwen2moe", 28, 3584, 28, 4, 128, 18944, 151936, 32768, 64, 8, 2560, 20480, qkv_bias=True, rope_base=1e6
    ),
    "olmoe-1b-7b": Tiny("olmoe", 16, 2048, 16, 16, 128, 1024, 50304, 4096, 64, 8, 1024, qk_norm="row"),
    "mixtral-8x7b": Tiny("llama", 32, 4096, 32, 8, 128, 14336, 32000, 32768, 8, 2, 14336, rope_base=1e6),
}


@dataclass(frozen=True)
class Plan:
    """One tensor to be written: GGUF name, numpy shape (rows first), type, and the maker of its bytes or values.

    `bank` names what may be repeated between layers ("ffn_gate_exps" of one type), "" for all else.
    """

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    make: Callable[[np.random.Generator], np.ndarray]
    bank: str = ""

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * row_bytes(self.kind, self.shape[-1])


class Topics:
    """The plant that embedding, routers and head share: topic of each token, patterns as bytes and as values."""

    def __init__(self, model: Tiny, kind: gguf.GGMLQuantizationType, seed: int) -> None:
        rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(b"topics")]))
        self.n_dims = max(256, model.n_embd // 4 // 256 * 256)
        self.of_token = rng.integers(N_TOPICS, size=model.n_vocab)
        self.data = random_rows(rng, kind, N_TOPICS, self.n_dims, 1.0)
        self.values = dequantise(self.data, kind, self.n_dims)
        self.readers = np.linalg.pinv(self.values).T.astype(np.float32)
        """[topic, n_dims]: readers[c] . values[c'] is 1 for c = c', else 0."""


def topic_scores(rng: np.random.Generator, model: Tiny) -> np.ndarray:
    """[n_expert, topic]: what a topic adds to each expert's router logit; half of n_used experts are its core."""
    scores = np.zeros((model.n_expert, N_TOPICS))
    for topic in range(N_TOPICS):
        scores[rng.permutation(model.n_expert)[: max(1, model.n_used // 2)], topic] += TOPIC_BOOST
    return scores


def mixing_rms(model: Tiny) -> float:
    """Rms of the sum of the chosen experts' rows of rms 1, each with its weight, under the planted routing."""
    rng = np.random.default_rng(0)
    logits = topic_scores(rng, model).T.repeat(8, axis=0)
    logits = ROUTER_SCALE * (logits + rng.standard_normal(logits.shape))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    chosen = np.sort(weights, axis=1)[:, -model.n_used :]
    total = chosen.sum(axis=1) if model.arch in ("llama", "qwen3moe") else weights.sum(axis=1)
    return float(np.sqrt(((chosen / total[:, None]) ** 2).sum(axis=1).mean()))


def router(model: Tiny, topics: Topics, layer: int) -> Callable[[np.random.Generator], np.ndarray]:
    """Maker of a router [n_expert, n_embd], scaled for the rms that the hidden state has in that layer."""

    def make(rng: np.random.Generator) -> np.ndarray:
        own = model.n_embd - topics.n_dims
        growth = np.sqrt(1 + layer / model.n_layer)
        read = growth * topic_scores(rng, model) @ topics.readers
        rest = rng.standard_normal((model.n_expert, own)) / np.sqrt(own)
        return np.concatenate([read, rest], axis=1).astype(np.float32) * np.float32(ROUTER_SCALE)

    return make


def embedding(model: Tiny, topics: Topics, kind: gguf.GGMLQuantizationType) -> Callable[..., np.ndarray]:
    """Maker of the token embedding: the topic's bytes, then random ones, both of rms 1."""

    def make(rng: np.random.Generator) -> np.ndarray:
        own = random_rows(rng, kind, model.n_vocab, model.n_embd - topics.n_dims, 1.0)
        return np.concatenate([topics.data[topics.of_token], own], axis=1)

    return make


def head(model: Tiny, topics: Topics, kind: gguf.GGMLQuantizationType) -> Callable[[np.random.Generator], np.ndarray]:
    """Maker of the output matrix: HEAD_TOPIC more for tokens of the same topic, less than all for control tokens."""

    def make(rng: np.random.Generator) -> np.ndarray:
        own = model.n_embd - topics.n_dims
        rest = random_rows(rng, kind, model.n_vocab, own, HEAD_STD / np.sqrt(own))
        gain = HEAD_TOPIC * np.sqrt(2)
        rows = quantise(np.concatenate([topics.readers, -topics.readers.sum(axis=0)[None]]) * gain, kind)
        topic = topics.of_token.copy()
        topic[-len(CONTROL) :] = N_TOPICS
        return np.concatenate([rows[topic], rest], axis=1)

    return make


def layer_shapes(model: Tiny) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's matrices by role, numpy order."""
    d, n_q, n_k = model.n_embd, model.n_head * model.head_dim, model.n_kv * model.head_dim
    ff, e = model.n_ff_exp, model.n_expert
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (n_q, d),
        "attn_k": (n_k, d),
        "attn_v": (n_k, d),
        "attn_output": (d, n_q),
        "ffn_gate_inp": (e, d),
        "ffn_gate_exps": (e, ff, d),
        "ffn_up_exps": (e, ff, d),
        "ffn_down_exps": (e, d, ff),
    }
    if model.n_ff_shexp:
        shapes |= {"ffn_gate_shexp": (model.n_ff_shexp, d), "ffn_up_shexp": (model.n_ff_shexp, d)}
        shapes["ffn_down_shexp"] = (d, model.n_ff_shexp)
    return shapes


def layer_vectors(model: Tiny) -> dict[str, tuple[int, float]]:
    """Widths and kinds of one layer's vectors: 1.0 for a norm, a smaller number for the spread of random values."""
    d, n_q, n_k = model.n_embd, model.n_head * model.head_dim, model.n_kv * model.head_dim
    out = {"attn_norm.weight": (d, 1.0), "ffn_norm.weight": (d, 1.0)}
    if model.qk_norm:
        row = model.qk_norm == "row"
        out["attn_q_norm.weight"] = (n_q if row else model.head_dim, 1.0)
        out["attn_k_norm.weight"] = (n_k if row else model.head_dim, 1.0)
    if model.qkv_bias:
        out |= {"attn_q.bias": (n_q, 0.1), "attn_k.bias": (n_k, 0.1), "attn_v.bias": (n_k, 0.1)}
    if model.n_ff_shexp:
        out["ffn_gate_inp_shexp.weight"] = (d, 0.02)
    return out


def gains(model: Tiny) -> dict[str, float]:
    """Output rms of each role for an input of rms 1; together the layers add as much as the embedding holds."""
    write_rms = 1 / np.sqrt(2 * model.n_layer)
    act_rms = 0.6
    return {
        "attn_output": 1.5 * write_rms,
        "ffn_down_exps": write_rms / (act_rms * mixing_rms(model)),
        "ffn_down_shexp": write_rms / (act_rms * 0.5),
    }


def random_matrix(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, gain: float) -> Callable[..., np.ndarray]:
    """Maker of random blocks in `shape` that turn an input of rms 1 into an output of rms `gain`."""

    def make(rng: np.random.Generator) -> np.ndarray:
        rows = random_rows(rng, kind, int(np.prod(shape[:-1])), shape[-1], gain / np.sqrt(shape[-1]))
        return rows.reshape(*shape[:-1], rows.shape[-1])

    return make


def vector(n: int, spread: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Maker of an F32 vector: all ones for spread 1.0 (norms), else normal values of that spread."""
    if spread == 1.0:
        return lambda rng: np.ones(n, dtype=np.float32)
    return lambda rng: np.float32(spread) * rng.standard_normal(n, dtype=np.float32)


def choose_type(name: str, n_dims: int, types: str, model: Tiny) -> gguf.GGMLQuantizationType:
    """Type of a tensor under `types`: "Q4_K_M", or "Q4_K,attn_v=Q8_0,ffn_down_exps=Q6_K" (regular expressions)."""
    base, *rules = types.split(",")
    if n_dims >= 2 and "ffn_gate_inp" not in name:
        for rule in reversed(rules):
            pattern, _, kind = rule.partition("=")
            if re.search(rf"(^|\.)({pattern})\.weight$", name):
                return type_by_name(kind)
    return tensor_type(name, n_dims, base if base in MIXES else type_by_name(base).name, model)


def plan_tensors(model: Tiny, types: str, seed: int) -> list[Plan]:
    """Every tensor of the file, in writing order."""
    f32 = gguf.GGMLQuantizationType.F32
    embed_kind = choose_type("token_embd.weight", 2, types, model)
    head_kind = choose_type("output.weight", 2, types, model)
    topics = Topics(model, embed_kind, seed)
    table = (model.n_vocab, model.n_embd)
    out = [
        Plan("token_embd.weight", table, embed_kind, embedding(model, topics, embed_kind)),
        Plan("output_norm.weight", (model.n_embd,), f32, vector(model.n_embd, 1.0)),
        Plan("output.weight", table, head_kind, head(model, topics, head_kind)),
    ]
    gain = gains(model)
    for layer in range(model.n_layer):
        for role, (width, spread) in layer_vectors(model).items():
            out.append(Plan(f"blk.{layer}.{role}", (width,), f32, vector(width, spread)))
        for role, shape in layer_shapes(model).items():
            name = f"blk.{layer}.{role}.weight"
            if role == "ffn_gate_inp":
                out.append(Plan(name, shape, f32, router(model, topics, layer)))
                continue
            kind = choose_type(name, len(shape), types, model)
            bank = f"{role} {kind.name}" if role.endswith("_exps") else ""
            out.append(Plan(name, shape, kind, random_matrix(shape, kind, gain.get(role, 1.0)), bank))
    return out


def expert_share(model: Tiny, plans: list[Plan]) -> tuple[int, int]:
    """(expert bytes, all bytes) of the weights that one decoded token reads; of the embedding it reads one row."""
    experts = sum(p.n_bytes for p in plans if p.bank) * model.n_used // model.n_expert
    rest = sum(p.n_bytes for p in plans if not p.bank and p.name != "token_embd.weight")
    return experts, experts + rest


def write(
    path: str | Path,
    preset: str | Tiny = "qwen3-30b-a3b",
    *,
    n_layer: int | None = None,
    n_vocab: int | None = None,
    types: str = "Q4_K_M",
    seed: int = 0,
    repeat_banks: bool = False,
    progress: bool = False,
) -> tuple[Path, Tiny, list[Plan]]:
    """Write the file and return its path, geometry and tensors. The same arguments give the same bytes.

    `preset` is a key of PRESETS or a geometry of your own.

    `repeat_banks` makes one bank of each role and type and writes it for every layer: speed files only. ValueError for
    an unknown preset, a type without random blocks, or a size that the types cannot hold.
    """
    if isinstance(preset, str) and preset not in PRESETS:
        raise ValueError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
    model = PRESETS[preset] if isinstance(preset, str) else preset
    model = dataclasses.replace(model, n_layer=n_layer or model.n_layer, n_vocab=n_vocab or model.n_vocab)
    plans = plan_tensors(model, types, seed)
    writer = gguf.GGUFWriter(Path(path), model.arch)
    add_metadata(writer, model, f"synthetic {preset if isinstance(preset, str) else preset.arch}")
    writer.add_description("random weights, planted routing")
    add_vocabulary(writer, make_vocabulary(model.n_vocab))
    for plan in plans:
        shape = (*plan.shape[:-1], row_bytes(plan.kind, plan.shape[-1]))
        writer.add_tensor_info(plan.name, shape, np.dtype(np.uint8), plan.n_bytes, raw_dtype=plan.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    banks: dict[str, np.ndarray] = {}
    with tqdm(total=sum(p.n_bytes for p in plans), unit="B", unit_scale=True, disable=not progress) as bar:
        for plan in plans:
            data = banks.get(plan.bank)
            if data is None:
                rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(plan.name.encode())]))
                data = plan.make(rng)
            if repeat_banks and plan.bank:
                banks[plan.bank] = data
            writer.write_tensor_data(data)
            bar.update(plan.n_bytes)
    writer.close()
    return Path(path), model, plans


def main() -> None:
    """Write a file, say what a token reads, and check it on request."""
    parser = argparse.ArgumentParser(description="Write a synthetic mixture-of-experts GGUF.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--preset", choices=list(PRESETS), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's)")
    parser.add_argument("--vocab", type=int, help="number of tokens (default: the model's)")
    parser.add_argument(
        "--types", default="Q4_K_M", help="a type or mix, then rules by role: Q4_K,attn_v=Q8_0,ffn_down_exps=Q6_K"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat-banks", action="store_true", help="the same experts in every layer (speed files)")
    parser.add_argument("--check", action="store_true", help="run it in llama.cpp: hidden rms, overlap, LRU hit rate")
    args = parser.parse_args()
    path, model, plans = write(
        args.path,
        args.preset,
        n_layer=args.layers,
        n_vocab=args.vocab,
        types=args.types,
        seed=args.seed,
        repeat_banks=args.repeat_banks,
        progress=True,
    )
    experts, total = expert_share(model, plans)
    print(f"{path}: {path.stat().st_size / 1e9:.2f} GB, synthetic {args.preset}, {model.n_layer} layers")
    print(f"a token reads {total / 1e6:.0f} MB of weights, {experts / total:.0%} of them experts")
    if args.check:
        check(path, model.n_layer, model.n_expert)


if __name__ == "__main__":
    main()
