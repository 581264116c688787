"""qwen2: biases on queries, keys and values. qwen2moe: routed experts and a shared one with a gate."""

from __future__ import annotations

from freetoken.arch.parts import Attention, DenseFFN, Layer, Ropes, SharedExpertMoE, Transformer, Weights
from freetoken.gguf import ModelFile
from freetoken.spec import ModelSpec


def build(file: ModelFile, spec: ModelSpec) -> Transformer:
    ropes = Ropes(file, spec)
    layers = []
    for i in range(spec.n_layer):
        weights = Weights(file, spec.eps, f"blk.{i}.")
        ffn = SharedExpertMoE(weights, spec) if spec.is_moe else DenseFFN(weights)
        layers.append(Layer(weights, spec, Attention(weights, spec, i, ropes), ffn))
    return Transformer(Weights(file, spec.eps), spec, layers)
