"""qwen3 and qwen3moe: a norm on each head's query and key; dense, or routed experts whose weights sum to 1."""

from __future__ import annotations

from freetoken.arch.parts import Attention, DenseFFN, Layer, MoE, Ropes, Transformer, Weights
from freetoken.gguf import ModelFile
from freetoken.spec import ModelSpec


def build(file: ModelFile, spec: ModelSpec) -> Transformer:
    ropes = Ropes(file, spec)
    layers = []
    for i in range(spec.n_layer):
        weights = Weights(file, spec.eps, f"blk.{i}.")
        ffn = MoE(weights, spec) if spec.is_moe else DenseFFN(weights)
        layers.append(Layer(weights, spec, Attention(weights, spec, i, ropes), ffn))
    return Transformer(Weights(file, spec.eps), spec, layers)
