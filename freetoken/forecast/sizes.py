"""What a plan needs to know of a model: its hyper-parameters, and bytes of its parts. From a file's header here."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.experts.bank import expert_banks
from freetoken.gguf import ModelFile
from freetoken.plan import DenseBytes, dense_bytes
from freetoken.spec import ModelSpec

__all__ = ["Sizes", "sizes_of"]


@dataclass(frozen=True)
class Sizes:
    """`expert_bytes` is one routed expert of each layer (0: it has none), `dense` all else."""

    name: str
    spec: ModelSpec
    expert_bytes: tuple[int, ...]
    dense: DenseBytes
    table_bytes: int = 0
    """The token embedding where it is not the output matrix too: a token reads one row."""
    unknown: tuple[str, ...] = ()
    """What is not known of the model, and so left out or guessed."""

    @property
    def pool_bytes(self) -> int:
        """All routed experts."""
        return sum(self.expert_bytes) * self.spec.n_expert

    def pool_from(self, first_layer: int) -> int:
        """Routed experts of the layers from one on."""
        return sum(self.expert_bytes[first_layer:]) * self.spec.n_expert

    @property
    def n_bytes(self) -> int:
        return self.pool_bytes + self.dense.on_gpu(0)

    def used_bytes(self, layer: int) -> int:
        """Of the experts that a token takes in a layer."""
        return self.expert_bytes[layer] * self.spec.n_expert_used

    @property
    def head_read_bytes(self) -> int:
        """What a token reads of embedding and head."""
        return max(self.dense.head - self.table_bytes, 0)


def sizes_of(file: ModelFile, spec: ModelSpec) -> Sizes:
    """Of an open model; its header is enough."""
    layers = expert_banks(spec, file) if spec.is_moe else [None] * spec.n_layer
    table = 0 if spec.is_tied else file.tensor("token_embd.weight").n_bytes
    return Sizes(
        name=str(file.path),
        spec=spec,
        expert_bytes=tuple(0 if layer is None else layer.expert_bytes for layer in layers),
        dense=dense_bytes(file, spec),
        table_bytes=table,
    )
