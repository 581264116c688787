"""olmoe: norms over whole query and key projections; routed experts, the weights as the softmax gives them."""

from __future__ import annotations

from freetoken.arch.parts import Attention, Layer, MoE, Ropes, Transformer, Weights
from freetoken.gguf import ModelFile
from freetoken.spec import ModelSpec


def build(file: ModelFile, spec: ModelSpec) -> Transformer:
    ropes = Ropes(file, spec)
    layers = []
    for i in range(spec.n_layer):
        weights = Weights(file, spec.eps, f"blk.{i}.")
        layers.append(Layer(weights, spec, Attention(weights, spec, i, ropes), MoE(weights, spec)))
    return Transformer(Weights(file, spec.eps), spec, layers)
