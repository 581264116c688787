"""Convert a llama2.c model (weights `.bin` of version 0, tokenizer `.bin`) to GGUF, F32.

Format of the weights (llama2.c, run.c): seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size,
seq_len; a negative vocab_size means a separate output matrix), then fp32 arrays. Of the tokenizer: int32 longest
token, then float score, int32 length and bytes of each token. llama2.c rotates neighbouring pairs, as GGUF's
architecture `llama` does, so no rows are permuted.

    python tools/llama2c_to_gguf.py stories260K.bin tok512.bin OUT.gguf
"""

from __future__ import annotations

import argparse
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

__all__ = ["Config", "convert", "read_tokens", "read_weights"]

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
SPECIAL = {0: ("<unk>", UNKNOWN), 1: ("<s>", CONTROL), 2: ("</s>", CONTROL)}
HEADER = struct.Struct("<7i")
MAX_TOKEN_BYTES = 1 << 16


@dataclass(frozen=True)
class Config:
    """The header of a weights file."""

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    vocab_size: int
    seq_len: int
    is_tied: bool

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.n_heads


def read_config(data: bytes, where: Path) -> Config:
    """The header, checked; ValueError says what is wrong with it."""
    if len(data) < HEADER.size:
        raise ValueError(f"{where}: {len(data)} bytes, too short for a llama2.c header of {HEADER.size}")
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab, seq_len = HEADER.unpack_from(data)
    config = Config(dim, hidden_dim, n_layers, n_heads, n_kv_heads, abs(vocab), seq_len, vocab > 0)
    smallest = min(dim, hidden_dim, n_layers, n_heads, n_kv_heads, abs(vocab), seq_len)
    if smallest <= 0 or config.dim % config.n_heads or config.n_heads % config.n_kv_heads:
        raise ValueError(f"{where}: not a llama2.c model of version 0, its header reads {config}")
    return config


def weight_shapes(config: Config) -> list[tuple[str, tuple[int, ...]]]:
    """Arrays of the file in their order; GGUF names, "" for the rope tables that nobody needs."""
    n, d, ff = config.n_layers, config.dim, config.hidden_dim
    kv = config.n_kv_heads * config.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd", (config.vocab_size, d)),
        ("attn_norm", (n, d)),
        ("attn_q", (n, d, d)),
        ("attn_k", (n, kv, d)),
        ("attn_v", (n, kv, d)),
        ("attn_output", (n, d, d)),
        ("ffn_norm", (n, d)),
        ("ffn_gate", (n, ff, d)),
        ("ffn_down", (n, d, ff)),
        ("ffn_up", (n, ff, d)),
        ("output_norm", (d,)),
        ("", (2, config.seq_len, config.head_dim // 2)),
    ]
    return shapes if config.is_tied else [*shapes, ("output", (config.vocab_size, d))]


def read_weights(path: Path) -> tuple[Config, dict[str, np.ndarray]]:
    """The header and all tensors by GGUF name; ValueError when the file's length does not fit its header."""
    data = path.read_bytes()
    config = read_config(data, path)
    shapes = weight_shapes(config)
    expected = HEADER.size + 4 * sum(int(np.prod(shape, dtype=object)) for _, shape in shapes)
    if len(data) != expected:
        raise ValueError(f"{path}: {len(data)} bytes, but its header asks for {expected}")
    out: dict[str, np.ndarray] = {}
    offset = HEADER.size
    for name, shape in shapes:
        values = np.frombuffer(data, dtype="<f4", count=int(np.prod(shape)), offset=offset).reshape(shape)
        offset += values.nbytes
        if name in ("token_embd", "output_norm", "output"):
            out[f"{name}.weight"] = values
        elif name:
            out |= {f"blk.{layer}.{name}.weight": values[layer] for layer in range(config.n_layers)}
    return config, out


def read_tokens(path: Path, n_vocab: int) -> tuple[list[bytes], list[float], list[int]]:
    """Texts (spaces as U+2581), scores and ggml types of `n_vocab` tokens; ValueError for a short file."""
    data = path.read_bytes()
    texts, scores, types = [], [], []
    offset = 4
    for token in range(n_vocab):
        if offset + 8 > len(data):
            raise ValueError(f"{path}: ends in token {token} of {n_vocab}")
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        if not 0 <= length <= min(MAX_TOKEN_BYTES, len(data) - offset):
            raise ValueError(f"{path}: token {token} claims {length} bytes, {len(data) - offset} are left")
        text = data[offset : offset + length]
        offset += length
        kind = BYTE if re.fullmatch(rb"<0x[0-9A-F]{2}>", text) else NORMAL
        if token in SPECIAL:
            name, kind = SPECIAL[token]
            text = name.encode()
        texts.append(text if kind == BYTE else text.replace(b" ", "\u2581".encode()))
        scores.append(score)
        types.append(kind)
    return texts, scores, types


def convert(weights: Path, tokenizer: Path, target: Path) -> Path:
    """Write `target` and return it. ValueError for files that are not what they should be."""
    config, tensors = read_weights(weights)
    texts, scores, types = read_tokens(tokenizer, config.vocab_size)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(weights.stem)
    writer.add_context_length(config.seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(True)
    for name, values in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def main() -> None:
    """Convert one model."""
    parser = argparse.ArgumentParser(description="Convert a llama2.c model to GGUF.")
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    path = convert(args.weights, args.tokenizer, args.target)
    print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
