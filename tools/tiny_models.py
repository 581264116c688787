"""Tiny random GGUFs of every architecture, for parity tests: real tensor names, odd but legal sizes.

`write(path, arch, file_type=...)` is what tests call. Logits have a standard deviation of about 3, every expert of
every layer differs, and routing is planted: each token carries one of a few topic directions which no layer writes to,
routers give each topic its own ranking of the experts with a wide gap below the last chosen one, and a small random
part makes the weights depend on the context. So rounding moves weights, never the choice.

    python tools/tiny_models.py OUT_FOLDER --arch qwen3moe --type Q4_K_M
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.ggml import is_float_type, quantise, type_by_name
from tools.tiny_vocab import add_vocabulary, make_vocabulary

__all__ = ["ARCHITECTURES", "MIXES", "Tiny", "geometry", "tensors", "write"]

MIXES = ("Q4_K_M", "mixed")
MIXED_CYCLE = ("Q4_K", "Q6_K", "Q8_0", "Q5_K", "Q4_1", "Q3_K", "IQ4_XS", "F16", "Q5_0", "Q2_K", "MXFP4")
N_TOPICS = 12
TOPIC_RMS = 0.6
LOGIT_STD = 3.0
NO_EXPERT_WIDTH = ("llama", "olmoe")
"""Architectures whose experts have the width of `feed_forward_length`; their files have no key of their own for it."""


@dataclass(frozen=True)
class Tiny:
    """Geometry of one tiny model; `arch` is GGUF's name, sizes in elements. n_expert 0 is a dense model."""

    arch: str
    n_layer: int = 3
    n_embd: int = 72
    n_head: int = 3
    n_kv: int = 1
    head_dim: int = 24
    n_ff: int = 104
    n_vocab: int = 389
    n_ctx: int = 2048
    n_expert: int = 0
    n_used: int = 0
    n_ff_exp: int = 0
    n_ff_shexp: int = 0
    qk_norm: str = ""
    """"" none, "head" one weight a head, "row" one weight over the whole projection."""
    qkv_bias: bool = False
    post_norms: bool = False
    tied: bool = False
    scaled_embedding: bool = False
    window: int = 0
    rope_base: float = 10000.0
    rope_freqs: bool = False
    rope_scaling: str = ""
    rope_factor: float = 4.0
    rope_orig_ctx: int = 64
    add_bos: bool = False


MOE = {"n_expert": 10, "n_used": 3, "n_ff_exp": 40}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {"arch": "llama"},
    "llama-rope": {"arch": "llama", "rope_freqs": True, "rope_base": 500000.0, "tied": True},
    "llama-linear": {"arch": "llama", "rope_scaling": "linear"},
    "llama-yarn": {"arch": "llama", "rope_scaling": "yarn"},
    "llama-moe": {"arch": "llama", "n_expert": 8, "n_used": 2, "n_ff_exp": 104},
    "llama-moe-rope": {"arch": "llama", "n_expert": 8, "n_used": 2, "n_ff_exp": 104, "rope_freqs": True},
    "qwen2": {"arch": "qwen2", "qkv_bias": True, "tied": True, "rope_base": 1e6},
    "qwen2-yarn": {"arch": "qwen2", "qkv_bias": True, "rope_scaling": "yarn", "rope_base": 1e6},
    "qwen2moe": {"arch": "qwen2moe", "qkv_bias": True, "rope_base": 1e6, "n_ff_shexp": 88, **MOE},
    "qwen3": {"arch": "qwen3", "qk_norm": "head", "n_head": 4, "n_kv": 2, "tied": True, "rope_base": 1e6},
    "qwen3moe": {"arch": "qwen3moe", "qk_norm": "head", "n_head": 4, "n_kv": 2, "rope_base": 1e6, **MOE},
    "qwen3moe-yarn": {"arch": "qwen3moe", "qk_norm": "head", "n_head": 4, "n_kv": 2, "rope_scaling": "yarn", **MOE},
    "gemma3": {
        "arch": "gemma3",
        "n_layer": 7,
        "qk_norm": "head",
        "n_head": 4,
        "n_kv": 2,
        "post_norms": True,
        "tied": True,
        "scaled_embedding": True,
        "window": 40,
        "rope_base": 1e6,
    },
    "olmoe": {"arch": "olmoe", "qk_norm": "row", "n_kv": 3, **MOE},
}
ARCHITECTURES["gemma3-linear"] = {**ARCHITECTURES["gemma3"], "rope_scaling": "linear", "rope_factor": 8.0}


def geometry(arch: str, file_type: str, **overrides: object) -> Tiny:
    """The sizes of `arch` for `file_type`: odd for float types, multiples of 32 or 256 where blocks ask for them."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"unknown tiny architecture {arch!r}; known: {', '.join(ARCHITECTURES)}")
    fields = dict(ARCHITECTURES[arch])
    block = 256 if file_type in MIXES else gguf.GGML_QUANT_SIZES[type_by_name(file_type)][0]
    if block > 1:
        n_head = 8 if block > 32 else 4
        fields |= {"n_embd": 32 * n_head, "head_dim": 32, "n_head": n_head, "n_kv": n_head // 4}
        fields["n_ff"] = 512 if block > 32 else 160
        for name, size in (("n_ff_exp", 96), ("n_ff_shexp", 160)):
            if fields.get(name):
                fields[name] = -(-size // block) * block
        if fields["arch"] == "olmoe":
            fields["n_kv"] = n_head
        if fields["arch"] in ("qwen3", "qwen3moe", "gemma3"):
            fields["head_dim"] = 64
    tiny = dataclasses.replace(Tiny(**fields), **overrides)  # type: ignore[arg-type]
    if tiny.n_expert and tiny.arch in NO_EXPERT_WIDTH:
        tiny = dataclasses.replace(tiny, n_ff=tiny.n_ff_exp)
    return tiny


def unit_rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A weight [..., rows, cols] that keeps an input of rms 1 at rms 1."""
    return rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(shape[-1]))


def norm_weight(rng: np.random.Generator, n: int, scale: float = 1.0) -> np.ndarray:
    """A norm's weight around `scale`."""
    return (scale * rng.uniform(0.7, 1.3, n)).astype(np.float32)


def topic_directions(rng: np.random.Generator, n_embd: int) -> np.ndarray:
    """N_TOPICS orthogonal directions of rms 1: [topic, n_embd]."""
    q, _ = np.linalg.qr(rng.standard_normal((n_embd, N_TOPICS)))
    return np.ascontiguousarray(q.T * np.sqrt(n_embd), dtype=np.float32)


def without_topics(weight: np.ndarray, topics: np.ndarray) -> np.ndarray:
    """`weight` [..., n_embd, cols] with outputs orthogonal to every topic, so that layers leave the topic alone."""
    unit = topics / np.sqrt(topics.shape[1])
    return np.asarray(weight - unit.T @ (unit @ weight), dtype=np.float32)


def router_weight(rng: np.random.Generator, tiny: Tiny, topics: np.ndarray, norm: np.ndarray) -> np.ndarray:
    """[n_expert, n_embd]: each topic ranks the experts in an order of its own, with a gap below the last chosen."""
    ranks = np.arange(tiny.n_expert, dtype=np.float32)
    scores = -0.5 * ranks - 1.5 * (ranks >= tiny.n_used)
    scores -= scores.mean()
    planted = np.stack([rng.permutation(scores) for _ in range(N_TOPICS)])
    read = planted.T @ topics / (TOPIC_RMS * tiny.n_embd)
    return np.asarray((read + 0.1 * unit_rows(rng, tiny.n_expert, tiny.n_embd)) / norm * 1.5, dtype=np.float32)


def attention_tensors(rng: np.random.Generator, tiny: Tiny, topics: np.ndarray, blk: str) -> dict[str, np.ndarray]:
    """Attention of one layer, with scores of a standard deviation near 2."""
    d, n_q, n_k = tiny.n_embd, tiny.n_head * tiny.head_dim, tiny.n_kv * tiny.head_dim
    sharp = 1.4
    out = {
        f"{blk}.attn_norm.weight": norm_weight(rng, d),
        f"{blk}.attn_q.weight": sharp * unit_rows(rng, n_q, d),
        f"{blk}.attn_k.weight": sharp * unit_rows(rng, n_k, d),
        f"{blk}.attn_v.weight": unit_rows(rng, n_k, d),
        f"{blk}.attn_output.weight": without_topics(unit_rows(rng, d, n_q), topics),
    }
    if tiny.qkv_bias:
        for name, n in (("q", n_q), ("k", n_k), ("v", n_k)):
            out[f"{blk}.attn_{name}.bias"] = 0.5 * rng.standard_normal(n, dtype=np.float32)
    if tiny.qk_norm:
        for name, n in (("q", n_q), ("k", n_k)):
            width = n if tiny.qk_norm == "row" else tiny.head_dim
            out[f"{blk}.attn_{name}_norm.weight"] = norm_weight(rng, width, sharp)
    if tiny.post_norms:
        out[f"{blk}.post_attention_norm.weight"] = norm_weight(rng, d, 0.6)
    return out


def ffn_tensors(rng: np.random.Generator, tiny: Tiny, topics: np.ndarray, blk: str) -> dict[str, np.ndarray]:
    """Feed-forward of one layer: dense, or routed experts with an optional shared one."""
    d = tiny.n_embd
    norm = norm_weight(rng, d)
    out = {f"{blk}.ffn_norm.weight": norm}

    def add(kind: str, n_ff: int, *lead: int) -> None:
        out[f"{blk}.ffn_gate{kind}.weight"] = 1.5 * unit_rows(rng, *lead, n_ff, d)
        out[f"{blk}.ffn_up{kind}.weight"] = unit_rows(rng, *lead, n_ff, d)
        out[f"{blk}.ffn_down{kind}.weight"] = without_topics(unit_rows(rng, *lead, d, n_ff), topics)

    if not tiny.n_expert:
        add("", tiny.n_ff)
    else:
        out[f"{blk}.ffn_gate_inp.weight"] = router_weight(rng, tiny, topics, norm)
        add("_exps", tiny.n_ff_exp, tiny.n_expert)
    if tiny.n_ff_shexp:
        add("_shexp", tiny.n_ff_shexp)
        out[f"{blk}.ffn_gate_inp_shexp.weight"] = unit_rows(rng, d)
    if tiny.post_norms:
        out[f"{blk}.post_ffw_norm.weight"] = norm_weight(rng, d, 0.6)
    return out


def llama3_factors(tiny: Tiny) -> np.ndarray:
    """The divisors of llama3's rope scaling (factor 8, original context `rope_orig_ctx`) per frequency."""
    freqs = tiny.rope_base ** (-np.arange(0, tiny.head_dim, 2) / tiny.head_dim)
    waves = 2 * np.pi / freqs
    low, high = tiny.rope_orig_ctx / 1.0, tiny.rope_orig_ctx / 4.0
    smooth = np.clip((tiny.rope_orig_ctx / waves - 1.0) / 3.0, 0, 1)
    middle = 1 / ((1 - smooth) / 8.0 + smooth)
    return np.where(waves > low, 8.0, np.where(waves < high, 1.0, middle)).astype(np.float32)


def tensors(tiny: Tiny, seed: int = 0) -> dict[str, np.ndarray]:
    """All tensors of the model in fp32, numpy order (rows first), by GGUF name."""
    rng = np.random.default_rng([seed, *tiny.arch.encode()])
    d = tiny.n_embd
    topics = topic_directions(rng, d)
    embedding = without_topics(rng.standard_normal((d, tiny.n_vocab), dtype=np.float32), topics).T
    embedding = embedding + TOPIC_RMS * topics[rng.integers(N_TOPICS, size=tiny.n_vocab)]
    if tiny.scaled_embedding:
        embedding /= np.sqrt(d)
    signs = rng.choice([-1.0, 1.0], d)
    row_rms = float(np.sqrt((embedding**2).mean() * d)) if tiny.tied else 1.0
    out = {"token_embd.weight": embedding}
    out["output_norm.weight"] = (norm_weight(rng, d, LOGIT_STD / row_rms) * signs).astype(np.float32)
    if not tiny.tied:
        out["output.weight"] = unit_rows(rng, tiny.n_vocab, d)
    if tiny.rope_freqs:
        out["rope_freqs.weight"] = llama3_factors(tiny)
    for layer in range(tiny.n_layer):
        out |= attention_tensors(rng, tiny, topics, f"blk.{layer}")
        out |= ffn_tensors(rng, tiny, topics, f"blk.{layer}")
    return out


def use_more_bits(layer: int, n_layer: int) -> bool:
    """llama.cpp's choice of the layers whose attn_v and ffn_down get Q6_K in a Q4_K_M file (llama-quant.cpp)."""
    eighth = n_layer // 8
    return layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2


def tensor_type(name: str, n_dims: int, file_type: str, tiny: Tiny) -> gguf.GGMLQuantizationType:
    """The type that tensor `name` gets in a file of `file_type`; vectors and routers stay F32."""
    if n_dims < 2 or "ffn_gate_inp" in name:
        return gguf.GGMLQuantizationType.F32
    if file_type not in MIXES:
        return type_by_name(file_type)
    parts = name.split(".")
    layer = int(parts[1]) if parts[0] == "blk" else 0
    role = parts[2] if parts[0] == "blk" else parts[0]
    if file_type == "mixed":
        order = ("ffn_gate", "ffn_up", "ffn_down", "attn_q", "attn_k", "attn_v", "attn_output", "token_embd", "output")
        index = next(i for i, prefix in enumerate(order) if role.startswith(prefix))
        return type_by_name(MIXED_CYCLE[(3 * layer + index) % len(MIXED_CYCLE)])
    if role == "output" or (role == "token_embd" and tiny.tied):
        return type_by_name("Q6_K")
    if tiny.n_expert == 8 and role in ("attn_k", "attn_v"):
        return type_by_name("Q8_0")
    more = role in ("attn_v", "ffn_down", "ffn_down_exps", "ffn_down_shexp") and use_more_bits(layer, tiny.n_layer)
    return type_by_name("Q6_K" if more else "Q4_K")


def add_metadata(writer: gguf.GGUFWriter, tiny: Tiny, name: str) -> None:
    """The model's name, and hyper-parameters under the architecture's keys."""
    writer.add_name(name)
    writer.add_context_length(tiny.n_ctx)
    writer.add_embedding_length(tiny.n_embd)
    writer.add_block_count(tiny.n_layer)
    writer.add_feed_forward_length(tiny.n_ff)
    writer.add_head_count(tiny.n_head)
    writer.add_head_count_kv(tiny.n_kv)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_rope_dimension_count(tiny.head_dim)
    writer.add_rope_freq_base(tiny.rope_base)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(tiny.n_vocab)
    if tiny.n_expert:
        writer.add_expert_count(tiny.n_expert)
        writer.add_expert_used_count(tiny.n_used)
        if tiny.arch not in NO_EXPERT_WIDTH:
            writer.add_expert_feed_forward_length(tiny.n_ff_exp)
    if tiny.n_ff_shexp:
        writer.add_expert_shared_feed_forward_length(tiny.n_ff_shexp)
    if tiny.window:
        writer.add_sliding_window(tiny.window)
    if tiny.rope_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(tiny.rope_scaling))
        writer.add_rope_scaling_factor(tiny.rope_factor)
        if tiny.rope_scaling == "yarn":
            writer.add_rope_scaling_orig_ctx_len(tiny.rope_orig_ctx)


def write(
    path: str | Path,
    arch: str,
    *,
    file_type: str = "F32",
    seed: int = 0,
    n_layer: int | None = None,
    **overrides: object,
) -> Path:
    """Write a tiny model of `arch` (a key of ARCHITECTURES) and return its path.

    `file_type` is a ggml type, "Q4_K_M" (llama.cpp's mix) or "mixed" (gate, up and down of three types that vary by
    layer). `overrides` replace fields of `Tiny`. ValueError for an unknown name or a size that its type cannot hold.
    """
    if n_layer is not None:
        overrides["n_layer"] = n_layer
    file_type = file_type if file_type in MIXES else type_by_name(file_type).name
    tiny = geometry(arch, file_type, **overrides)
    writer = gguf.GGUFWriter(Path(path), tiny.arch)
    add_metadata(writer, tiny, f"tiny-{arch}")
    add_vocabulary(writer, make_vocabulary(tiny.n_vocab), add_bos=tiny.add_bos)
    for name, values in tensors(tiny, seed).items():
        kind = tensor_type(name, values.ndim, file_type, tiny)
        if is_float_type(kind) and kind.name == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        else:
            writer.add_tensor(name, quantise(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def main() -> None:
    """Write the asked architectures into a folder."""
    parser = argparse.ArgumentParser(description="Write tiny random GGUFs for parity tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arch", choices=[*ARCHITECTURES, "all"], default="all")
    parser.add_argument("--type", default="F32", help="a ggml type, Q4_K_M or mixed (default F32)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for arch in ARCHITECTURES if args.arch == "all" else [args.arch]:
        path = write(args.folder / f"{arch}-{args.type}.gguf", arch, file_type=args.type, seed=args.seed)
        print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
