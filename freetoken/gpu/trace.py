"""A forward pass written down: `blocks.Ops` whose results are nodes of a graph, for `lower` to turn into launches.

Nodes stand in the order in which the model's `forward` asked for them, inputs before users.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from freetoken import blocks
from freetoken.blocks import RopeTable, Weight
from freetoken.gpu.weights import weight_class

__all__ = [
    "Attention",
    "Embedding",
    "Entry",
    "Experts",
    "GatedSum",
    "Glu",
    "Linear",
    "Node",
    "Norm",
    "Rotated",
    "Routes",
    "Scaled",
    "Sum",
    "Tail",
    "Trace",
    "unwrapped",
]


@dataclass(eq=False)
class Node:
    """n rows of `width` values. `needs`: in which classes products want them (0: as fp32)."""

    n: int
    width: int
    needs: set[int] = field(default_factory=set, init=False)

    def inputs(self) -> Iterator[Node]:
        """The nodes it is made of."""
        return (value for value in vars(self).values() if isinstance(value, Node))


@dataclass(eq=False)
class Entry(Node):
    """Hidden states that the host brings."""


@dataclass(eq=False)
class Embedding(Node):
    weight: Weight
    scale: float


@dataclass(eq=False)
class Norm(Node):
    x: Node
    norm: blocks.Norm

    @property
    def is_whole(self) -> bool:
        """Whether a row is one group."""
        return len(self.norm.weight) == self.width


@dataclass(eq=False)
class Linear(Node):
    x: Node
    weight: Weight


@dataclass(eq=False)
class Sum(Node):
    a: Node
    b: Node


@dataclass(eq=False)
class Scaled(Node):
    x: Node
    factor: float
    softcap: float


@dataclass(eq=False)
class Glu(Node):
    gate: Node
    up: Node
    activation: str


@dataclass(eq=False)
class Rotated(Node):
    x: Node
    table: RopeTable


@dataclass(eq=False)
class Attention(Node):
    layer: int
    q: Node
    k: Node
    v: Node
    n_head: int
    scale: float
    window: int
    softcap: float


@dataclass(eq=False)
class Routes(Node):
    """Ids and weights of the chosen experts; `width` is how many."""

    logits: Node
    gate: str
    normalise: bool
    scale: float
    bias: np.ndarray | None


@dataclass(eq=False)
class Experts(Node):
    x: Node
    routes: Node
    bank: blocks.Experts
    activation: str


@dataclass(eq=False)
class GatedSum(Node):
    """base + x * sigmoid(gate)."""

    x: Node
    gate: Node
    base: Node


@dataclass(eq=False)
class Tail(Node):
    """The last n rows of x."""

    x: Node


def unwrapped(node: Node) -> tuple[Linear, blocks.Norm | None, RopeTable | None]:
    """A projection under its norm and its rotation."""
    table = norm = None
    if isinstance(node, Rotated):
        table, node = node.table, node.x
    if isinstance(node, Norm):
        norm, node = node.norm, node.x
    if not isinstance(node, Linear):
        raise NotImplementedError(f"attention of {type(node).__name__} rows")
    return node, norm, table


AnyNode = TypeVar("AnyNode", bound=Node)


class Trace:
    """`blocks.Ops` over n tokens, of which the last n_outputs give logits. `nodes` is the result."""

    def __init__(self, n: int, n_outputs: int) -> None:
        self.n = n
        self.n_outputs = n_outputs
        self.nodes: list[Node] = []

    def widest_attention(self) -> tuple[int, int]:
        """The most query heads, and the widest head's values, of all layers."""
        found = [(node.n_head, node.width // node.n_head) for node in self.nodes if isinstance(node, Attention)]
        return max((n_head for n_head, _ in found), default=1), max((width for _, width in found), default=1)

    def _new(self, node: AnyNode) -> AnyNode:
        self.nodes.append(node)
        return node

    def entry(self, width: int) -> Node:
        """The hidden states of layers that ran elsewhere."""
        return self._new(Entry(self.n, width))

    def embed(self, weight: Weight, scale: float = 1.0) -> Node:
        return self._new(Embedding(self.n, weight.cols, weight, scale))

    def rms_norm(self, x: Node, norm: blocks.Norm) -> Node:
        return self._new(Norm(x.n, x.width, x, norm))

    def linear(self, x: Node, weight: Weight) -> Node:
        x.needs.add(weight_class(weight.type))
        return self._new(Linear(x.n, weight.rows, x, weight))

    def head(self, x: Node, weight: Weight) -> Node:
        return self.linear(x, weight)

    def add(self, a: Node, b: Node) -> Node:
        return self._new(Sum(a.n, a.width, a, b))

    def scale(self, x: Node, factor: float, softcap: float = 0.0) -> Node:
        return self._new(Scaled(x.n, x.width, x, factor, softcap))

    def glu(self, gate: Node, up: Node, activation: str) -> Node:
        return self._new(Glu(gate.n, gate.width, gate, up, activation))

    def rope(self, x: Node, n_head: int, table: RopeTable) -> Node:
        return self._new(Rotated(x.n, x.width, x, table))

    def attention(
        self,
        layer: int,
        q: Node,
        k: Node,
        v: Node,
        *,
        n_head: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Node:
        n_kv = k.width * n_head // q.width
        return self._new(Attention(q.n, n_head * v.width // n_kv, layer, q, k, v, n_head, scale, window, softcap))

    def route(
        self,
        logits: Node,
        n_used: int,
        *,
        gate: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: np.ndarray | None = None,
    ) -> tuple[Node, Node]:
        routes = self._new(Routes(logits.n, n_used, logits, gate, normalise, scale, bias))
        return routes, routes

    def experts(self, x: Node, ids: Node, weights: Node, bank: blocks.Experts, activation: str = "silu") -> Node:
        x.needs.update(weight_class(bank_weight.type) for bank_weight in (bank.gate, bank.up))
        return self._new(Experts(x.n, bank.down.rows, x, ids, bank, activation))

    def gated_add(self, x: Node, gate: Node, base: Node) -> Node:
        return self._new(GatedSum(x.n, x.width, x, gate, base))

    def outputs(self, x: Node) -> Node:
        return x if x.n == self.n_outputs else self._new(Tail(self.n_outputs, x.width, x))
