"""What architectures share: finding weights, and the blocks that models are made of.

Blocks keep GGUF's tensor names as attributes and have `forward(ops, x)`. Shapes have been checked by
`spec.check_tensors`; sizes here come from the file. Nothing of a weight is read or copied but norms and biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from freetoken import native
from freetoken.blocks import Act, Experts, Norm, Ops, RopeTable, Weight
from freetoken.errors import UnsupportedModelError
from freetoken.gguf import ModelFile, Tensor
from freetoken.spec import ModelSpec

__all__ = ["Attention", "DenseFFN", "Layer", "MoE", "Ropes", "SharedExpertMoE", "Transformer", "Weights"]


class Weights:
    """Tensors of a file by their names without a prefix such as `blk.3.` and without `.weight`."""

    def __init__(self, file: ModelFile, eps: float, prefix: str = "") -> None:
        self._file = file
        self._eps = eps
        self._prefix = prefix

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._file.tensors

    def matrix(self, name: str) -> Weight:
        """A matrix, with its bias where the file has one."""
        t = self._tensor(name)
        weight = Weight(t.name, t.type, t.rows, t.shape[0], t.row_bytes, t.data)
        bias = f"{self._prefix}{name}.bias"
        return replace(weight, bias=self._vector(bias)) if bias in self._file.tensors else weight

    def stacked(self, name: str, n: int) -> Weight:
        """n matrices in one tensor."""
        t = self._tensor(name)
        return Weight(t.name, t.type, t.rows // n, t.shape[0], t.row_bytes, t.stacked(n))

    def _tensor(self, name: str) -> Tensor:
        t = self._file.tensor(f"{self._prefix}{name}.weight")
        if not native.can_decode(t.type):
            raise UnsupportedModelError(
                f"{self._file.path}: tensor {t.name!r} has the type {t.type_name}, which neither our kernels nor the "
                "installed llama-cpp-python decode: convert the file to another type, or update llama-cpp-python"
            )
        return t

    def norm(self, name: str) -> Norm:
        full = f"{self._prefix}{name}.weight"
        return Norm(full, self._vector(full), self._eps)

    def optional_norm(self, name: str) -> Norm | None:
        return self.norm(name) if self.has(name) else None

    def _vector(self, full_name: str) -> np.ndarray:
        return np.array(self._file.tensor(full_name).values(), dtype=np.float32).reshape(-1)


class Ropes:
    """The rotation of each layer; layers of one kind share a table. `has_factors`: `rope_freqs.weight` counts."""

    def __init__(self, file: ModelFile, spec: ModelSpec, *, has_factors: bool = False) -> None:
        name = "rope_freqs.weight"
        factors = file.tensor(name).values() if has_factors and name in file.tensors else None
        kinds: dict[bool, RopeTable] = {}
        for layer, is_sliding in enumerate(spec.is_sliding):
            if is_sliding not in kinds:
                kinds[is_sliding] = RopeTable(*spec.rope_table(layer, factors))
        self.of_layer = [kinds[is_sliding] for is_sliding in spec.is_sliding]


class Attention:
    """Grouped-query attention with rope. Norms of queries and keys are as wide as a head or as the projection."""

    def __init__(self, weights: Weights, spec: ModelSpec, layer: int, ropes: Ropes) -> None:
        self.attn_q = weights.matrix("attn_q")
        self.attn_k = weights.matrix("attn_k")
        self.attn_v = weights.matrix("attn_v")
        self.attn_q_norm = weights.optional_norm("attn_q_norm")
        self.attn_k_norm = weights.optional_norm("attn_k_norm")
        self.attn_output = weights.matrix("attn_output")
        self.layer = layer
        self.n_head = spec.n_head[layer]
        self.n_kv = spec.n_kv[layer]
        self.rope = ropes.of_layer[layer]
        self.scale = spec.attn_scale
        self.window = spec.window_of(layer)
        self.softcap = spec.attn_softcap

    def forward(self, ops: Ops, x: Act) -> Act:
        q = ops.linear(x, self.attn_q)
        k = ops.linear(x, self.attn_k)
        v = ops.linear(x, self.attn_v)
        if self.attn_q_norm is not None:
            q = ops.rms_norm(q, self.attn_q_norm)
        if self.attn_k_norm is not None:
            k = ops.rms_norm(k, self.attn_k_norm)
        q = ops.rope(q, self.n_head, self.rope)
        k = ops.rope(k, self.n_kv, self.rope)
        y = ops.attention(
            self.layer, q, k, v, n_head=self.n_head, scale=self.scale, window=self.window, softcap=self.softcap
        )
        return ops.linear(y, self.attn_output)


class DenseFFN:
    """down(act(gate x) * up x); `suffix` is `_shexp` for a shared expert."""

    def __init__(self, weights: Weights, suffix: str = "", activation: str = "silu") -> None:
        self.ffn_gate = weights.matrix("ffn_gate" + suffix)
        self.ffn_up = weights.matrix("ffn_up" + suffix)
        self.ffn_down = weights.matrix("ffn_down" + suffix)
        self.activation = activation

    def forward(self, ops: Ops, x: Act) -> Act:
        h = ops.glu(ops.linear(x, self.ffn_gate), ops.linear(x, self.ffn_up), self.activation)
        return ops.linear(h, self.ffn_down)


class MoE:
    """Routed experts behind a router."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self.ffn_gate_inp = weights.matrix("ffn_gate_inp")
        self.ffn_exps = Experts(
            spec.n_expert,
            spec.n_expert_used,
            gate=weights.stacked("ffn_gate_exps", spec.n_expert),
            up=weights.stacked("ffn_up_exps", spec.n_expert),
            down=weights.stacked("ffn_down_exps", spec.n_expert),
        )
        self.gating = spec.expert_gating
        self.normalise = spec.expert_norm
        self.weights_scale = spec.expert_scale

    def forward(self, ops: Ops, x: Act) -> Act:
        logits = ops.linear(x, self.ffn_gate_inp)
        ids, weights = ops.route(
            logits, self.ffn_exps.n_used, gate=self.gating, normalise=self.normalise, scale=self.weights_scale
        )
        return ops.experts(x, ids, weights, self.ffn_exps)


class SharedExpertMoE:
    """Routed experts, and one that every token takes, times the sigmoid of a gate of its own."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        self.routed = MoE(weights, spec)
        self.ffn_gate_inp_shexp = weights.matrix("ffn_gate_inp_shexp")
        self.shared = DenseFFN(weights, "_shexp")

    def forward(self, ops: Ops, x: Act) -> Act:
        y = self.routed.forward(ops, x)
        gate = ops.linear(x, self.ffn_gate_inp_shexp)
        return ops.gated_add(self.shared.forward(ops, x), gate, y)


class FeedForward(Protocol):
    """DenseFFN or one of the mixtures."""

    def forward(self, ops: Ops, x: Act) -> Act: ...


class Layer:
    """x + attention(norm x), then x + ffn(norm x). The last layer goes on with the rows whose logits are wanted."""

    def __init__(self, weights: Weights, spec: ModelSpec, attention: Attention, ffn: FeedForward) -> None:
        self.attn_norm = weights.norm("attn_norm")
        self.attention = attention
        self.ffn_norm = weights.norm("ffn_norm")
        self.ffn = ffn
        self.is_last = attention.layer == spec.n_layer - 1

    def forward(self, ops: Ops, x: Act) -> Act:
        y = self.attention.forward(ops, ops.rms_norm(x, self.attn_norm))
        if self.is_last:
            x, y = ops.outputs(x), ops.outputs(y)
        x = ops.add(x, y)
        return ops.add(x, self.ffn.forward(ops, ops.rms_norm(x, self.ffn_norm)))


class AnyLayer(Protocol):
    """One layer of a transformer."""

    def forward(self, ops: Ops, x: Act) -> Act: ...


class Transformer:
    """Embedding, layers, norm, head; without an `output` the head is the embedding."""

    def __init__(
        self, weights: Weights, spec: ModelSpec, layers: Sequence[AnyLayer], *, embedding_scale: float = 1.0
    ) -> None:
        self.token_embd = weights.matrix("token_embd")
        self.layers = layers
        self.output_norm = weights.norm("output_norm")
        self.output = self.token_embd if spec.is_tied else weights.matrix("output")
        self.embedding_scale = embedding_scale
        self.final_softcap = spec.final_softcap

    def forward(self, ops: Ops) -> Act:
        return self.finish(ops, self.run_layers(ops, self.start(ops), 0, len(self.layers)))

    def start(self, ops: Ops) -> Act:
        """The hidden state in front of the first layer."""
        return ops.embed(self.token_embd, self.embedding_scale)

    def run_layers(self, ops: Ops, x: Act, first: int, end: int) -> Act:
        """The hidden state behind layers [first, end)."""
        for layer in self.layers[first:end]:
            x = layer.forward(ops, x)
        return x

    def finish(self, ops: Ops, x: Act) -> Act:
        """Logits of the hidden state behind the last layer."""
        logits = ops.head(ops.rms_norm(x, self.output_norm), self.output)
        return ops.scale(logits, 1.0, self.final_softcap) if self.final_softcap else logits
