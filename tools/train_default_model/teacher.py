"""SmolLM2-135M-Instruct in plain torch, from its GGUF: weights, tokenizer, and the whole-sequence forward pass.

The pieces of a layer are free functions of tensors, so that the generator can compile and capture them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from freetoken import quants
from freetoken.gguf import ModelFile, open_model
from tools.train_default_model.tokens import token_bytes, tokenizer_of

__all__ = ["Teacher", "layer_in", "layer_out", "rms_norm", "rotate"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm over the last axis, in fp32."""
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rope on [..., head, dim] with halves as pairs; cos and sin are [..., 1, dim/2] in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@dataclass(frozen=True)
class TeacherLayer:
    """Weights of one layer: norms, [q; k; v] and [gate; up] stacked by rows."""

    attn_norm: torch.Tensor
    qkv: torch.Tensor
    attn_output: torch.Tensor
    ffn_norm: torch.Tensor
    gate_up: torch.Tensor
    ffn_down: torch.Tensor


def layer_in(
    x: torch.Tensor,
    norm: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    n_head: int,
    n_kv: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [..., n_head, dim], keys and values [..., n_kv, dim] of a layer's input [..., n_embd]."""
    y = F.linear(rms_norm(x, norm, eps), qkv)
    y = y.view(*y.shape[:-1], n_head + 2 * n_kv, -1)
    q, k, v = y.split([n_head, n_kv, n_kv], dim=-2)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def layer_out(
    x: torch.Tensor,
    attention: torch.Tensor,
    attn_output: torch.Tensor,
    norm: torch.Tensor,
    gate_up: torch.Tensor,
    ffn_down: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The layer's output: x + attention, then + feed-forward."""
    x = x + F.linear(attention, attn_output)
    gate, up = F.linear(rms_norm(x, norm, eps), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, ffn_down)


class Teacher:
    """The model on one device in one dtype."""

    def __init__(self, path: Path, device: str, dtype: torch.dtype, n_ctx: int = 2048) -> None:
        with open_model(path) as file:
            meta = file.metadata
            self.n_layer = meta.get_int("llama.block_count", 0)
            self.n_head = meta.get_int("llama.attention.head_count", 0)
            self.n_kv = meta.get_int("llama.attention.head_count_kv", 0)
            self.n_embd = meta.get_int("llama.embedding_length", 0)
            self.eps = float(meta["llama.attention.layer_norm_rms_epsilon"])
            base = float(meta["llama.rope.freq_base"])
            self.tokenizer = tokenizer_of(file)
            self.pieces = token_bytes(list(meta["tokenizer.ggml.tokens"]))
            self.head_dim = self.n_embd // self.n_head
            read = _Reader(file, device, dtype, self.head_dim)
            self.embedding = read.matrix("token_embd")
            self.norm = read.matrix("output_norm")
            self.layers = [read.layer(i) for i in range(self.n_layer)]
        frequencies = base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angles = torch.arange(n_ctx, dtype=torch.float64)[:, None] * frequencies
        self.cos = angles.cos().float().to(device)[:, None]
        self.sin = angles.sin().float().to(device)[:, None]

    def hidden(self, tokens: torch.Tensor, keep: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> torch.Tensor:
        """Normed states [batch, n, n_embd] of [batch, n] tokens from position 0; `keep` gets keys and values."""
        n = tokens.shape[1]
        cos, sin = self.cos[:n], self.sin[:n]
        x = self.embedding[tokens]
        for layer in self.layers:
            q, k, v = layer_in(x, layer.attn_norm, layer.qkv, cos, sin, self.n_head, self.n_kv, self.eps)
            if keep is not None:
                keep.append((k, v))
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
            y = y.transpose(1, 2).flatten(2)
            x = layer_out(x, y, layer.attn_output, layer.ffn_norm, layer.gate_up, layer.ffn_down, self.eps)
        return rms_norm(x, self.norm, self.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of normed states."""
        return F.linear(hidden, self.embedding)


class _Reader:
    """Tensors of the file as torch tensors; queries and keys with halves as rotation pairs instead of neighbours."""

    def __init__(self, file: ModelFile, device: str, dtype: torch.dtype, head_dim: int) -> None:
        self._file, self._device, self._dtype, self._head_dim = file, device, dtype, head_dim

    def matrix(self, name: str) -> torch.Tensor:
        return self._send(self._values(name))

    def layer(self, i: int) -> TeacherLayer:
        def values(role: str) -> np.ndarray:
            return self._values(f"blk.{i}.{role}")

        q, k = self._halves(values("attn_q")), self._halves(values("attn_k"))
        return TeacherLayer(
            attn_norm=self._send(values("attn_norm")),
            qkv=self._send(np.concatenate([q, k, values("attn_v")])),
            attn_output=self._send(values("attn_output")),
            ffn_norm=self._send(values("ffn_norm")),
            gate_up=self._send(np.concatenate([values("ffn_gate"), values("ffn_up")])),
            ffn_down=self._send(values("ffn_down")),
        )

    def _values(self, name: str) -> np.ndarray:
        tensor = self._file.tensor(name + ".weight")
        values = quants.dequantize(tensor.type, np.array(tensor.data))
        return values.reshape(tensor.shape[::-1])

    def _halves(self, weight: np.ndarray) -> np.ndarray:
        pairs = weight.reshape(-1, self._head_dim // 2, 2, weight.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)

    def _send(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, self._dtype)
