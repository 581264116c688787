"""gemma3: scaled embeddings, norms before and after each block, GELU, sliding layers with a rope of their own."""

from __future__ import annotations

import math

from freetoken.arch.parts import Attention, DenseFFN, Ropes, Transformer, Weights
from freetoken.blocks import Act, Ops
from freetoken.gguf import ModelFile
from freetoken.spec import ModelSpec


class Layer:
    """x + norm(attention(norm x)), then x + norm(ffn(norm x))."""

    def __init__(self, weights: Weights, spec: ModelSpec, attention: Attention) -> None:
        self.attn_norm = weights.norm("attn_norm")
        self.attention = attention
        self.post_attention_norm = weights.norm("post_attention_norm")
        self.ffn_norm = weights.norm("ffn_norm")
        self.ffn = DenseFFN(weights, activation="gelu")
        self.post_ffw_norm = weights.norm("post_ffw_norm")
        self.is_last = attention.layer == spec.n_layer - 1

    def forward(self, ops: Ops, x: Act) -> Act:
        y = self.attention.forward(ops, ops.rms_norm(x, self.attn_norm))
        if self.is_last:
            x, y = ops.outputs(x), ops.outputs(y)
        x = ops.add(x, ops.rms_norm(y, self.post_attention_norm))
        y = self.ffn.forward(ops, ops.rms_norm(x, self.ffn_norm))
        return ops.add(x, ops.rms_norm(y, self.post_ffw_norm))


def build(file: ModelFile, spec: ModelSpec) -> Transformer:
    ropes = Ropes(file, spec)
    layers = []
    for i in range(spec.n_layer):
        weights = Weights(file, spec.eps, f"blk.{i}.")
        layers.append(Layer(weights, spec, Attention(weights, spec, i, ropes)))
    return Transformer(Weights(file, spec.eps), spec, layers, embedding_scale=math.sqrt(spec.n_embd))
