"""From the nodes of a trace to launches of kernels: what one launch can do is fused.

Products, attention, gated units, routers and norms of whole rows are launched in the order of the trace. The rest waits
for whoever uses it: projections are joined and rotated by the attention, sums and mixtures are added up by the norm
that follows them. So a layer of routed experts is eleven launches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from freetoken import blocks
from freetoken.gpu import trace as t
from freetoken.gpu.arena import Arena, Lease
from freetoken.gpu.inputs import Inputs
from freetoken.gpu.kv import DeviceKV
from freetoken.gpu.weights import DeviceWeights, weight_class
from freetoken.kernels import attention, glu, norm, rope, router
from freetoken.kernels.activations import Activation, quantize
from freetoken.kernels.attention import Mask, Partials
from freetoken.kernels.embed import EmbeddingTable, embed
from freetoken.kernels.matvec import Source, matvec
from freetoken.kernels.norm import Rows, Shared
from freetoken.kernels.pages import PAGE, Pages
from freetoken.kernels.scale import scale

__all__ = ["ExpertLaunches", "Launch", "Lowering", "Room"]

Launch = Callable[[], None]


class ExpertLaunches(Protocol):
    """The routed experts of all layers: `gpu.experts` as it is used here."""

    def launches(
        self,
        bank: blocks.Experts,
        x: dict[int, Source],
        ids: torch.Tensor,
        rows: torch.Tensor,
        activation: str,
        arena: Arena,
    ) -> list[Launch]:
        """What writes rows fp32 [pairs, n_embd] for ids int32 [n, k]; x holds the input rows by class."""

    def takes_rows(self, bank: blocks.Experts) -> bool:
        """Whether x must hold the rows as fp32 too, as class 0."""


@dataclass
class State:
    """What of a node stands in memory."""

    leases: list[Lease[torch.Tensor] | Lease[Activation]] = field(default_factory=list)
    rows: torch.Tensor | None = None
    quantised: dict[int, Activation] = field(default_factory=dict)
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class Room:
    """Room for the splits of one attention, shared by all of them; grown by whoever makes programs."""

    o: torch.Tensor
    ml: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def empty(n: int, n_head: int, n_splits: int, dim_v: int, device: torch.device) -> Room:
        some = Partials.empty(n, n_head, n_splits, dim_v, device)
        return Room(some.o.reshape(-1), some.ml.reshape(-1), some.arrived.reshape(-1))

    def partials(self, n: int, n_head: int, n_splits: int, dim_v: int) -> Partials:
        """The first part of it as records of this shape."""
        width = max(PAGE, 1 << max(dim_v - 1, 0).bit_length())
        count = n * n_head * n_splits
        return Partials(
            self.o[: count * width].view(n, n_head, n_splits, width),
            self.ml[: count * 2].view(n, n_head, n_splits, 2),
            self.arrived[: n * n_head].view(n, n_head),
        )


class Lowering:
    """Turns one trace into `launches`; `logits` is where they leave the last node's rows. Buffers come from `arena`."""

    def __init__(
        self,
        trace: t.Trace,
        weights: DeviceWeights,
        kv: DeviceKV,
        inputs: Inputs,
        experts: ExpertLaunches | None,
        arena: Arena,
        room: Room,
        n_positions: int,
        n_planes: int,
    ) -> None:
        """The context of a step is at most `n_positions`."""
        self.launches: list[Launch] = []
        self._weights = weights
        self._kv = kv
        self._inputs = inputs
        self._experts = experts
        self._arena = arena
        self._room = room
        self._n_positions = n_positions
        self._n_planes = n_planes
        self._states: dict[int, State] = {}
        self._run(trace.nodes)

    def _run(self, nodes: list[t.Node]) -> None:
        last = nodes[-1]
        for node in nodes:
            if isinstance(node, t.Experts) and self._experts is not None and self._experts.takes_rows(node.bank):
                node.x.needs.add(0)
        last_use = _last_uses(nodes)
        for i, node in enumerate(nodes):
            if _is_anchor(node) or node is last:
                self._emit(node)
            for done in [key for key in self._states if last_use[key] <= i and key != id(last)]:
                del self._states[done]
        self.kept = self._states[id(last)]
        self.logits = self._rows(last)

    def _add(self, launch: Launch) -> None:
        self.launches.append(launch)

    def _state(self, node: t.Node) -> State:
        return self._states.setdefault(id(node), State())

    def _take(self, node: t.Node, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A buffer that lives as long as a node is needed."""
        lease = self._arena.rows(*shape, dtype=dtype)
        self._state(node).leases.append(lease)
        return lease.value

    def _activation(self, node: t.Node, cls: int, n: int, cols: int) -> Activation:
        lease = self._arena.activation(cls, n, cols)
        self._state(node).leases.append(lease)
        return lease.value

    # --- what others ask of a node -------------------------------------------------------------------------------

    def _rows(self, node: t.Node) -> torch.Tensor:
        """fp32 rows of a node, launched now if they are not there."""
        state = self._state(node)
        if state.rows is None:
            if isinstance(node, t.Tail):
                state.rows = self._rows(node.x)[node.x.n - node.n :]
            else:
                self._emit(node)
        assert state.rows is not None, f"{type(node).__name__} has no rows of its own"
        return state.rows

    def _source(self, node: t.Node, type_id: int) -> Source:
        """A node as the products of a type take it."""
        cls = weight_class(type_id)
        if cls == 0:
            return self._rows(node)
        state = self._state(node)
        if cls not in state.quantised:
            self._emit(node)
        if cls not in state.quantised:
            rows = self._rows(node)
            out = self._activation(node, cls, node.n, node.width)
            self._add(partial(quantize, rows, out, self._n_planes))
            state.quantised[cls] = out
        return state.quantised[cls]

    # --- launches ------------------------------------------------------------------------------------------------

    def _emit(self, node: t.Node) -> None:
        """Launch a node unless that has been done."""
        state = self._state(node)
        if state.rows is not None or state.quantised:
            return
        if isinstance(node, t.Entry):
            state.rows = self._inputs.hidden(node.width)[: node.n]
        elif isinstance(node, t.Embedding):
            state.rows = self._take(node, node.n, node.width)
            table = EmbeddingTable.of(self._weights.matrix(node.weight), node.n)
            self._add(partial(embed, table, self._inputs.tokens[: node.n], state.rows, node.scale))
        elif isinstance(node, t.Linear):
            state.rows = self._take(node, node.n, node.width)
            bias = None if node.weight.bias is None else self._weights.vector(node.weight.bias)
            source = self._source(node.x, node.weight.type)
            self._add(partial(matvec, self._weights.matrix(node.weight), source, state.rows, bias))
        elif isinstance(node, t.Norm):
            self._norm(node)
        elif isinstance(node, t.Sum | t.GatedSum | t.Experts):
            self._sum(node)
        elif isinstance(node, t.Glu):
            self._glu(node)
        elif isinstance(node, t.Attention):
            self._attention(node)
        elif isinstance(node, t.Routes):
            self._route(node)
        elif isinstance(node, t.Scaled):
            state.rows = self._take(node, node.n, node.width)
            self._add(partial(scale, self._rows(node.x), state.rows, node.factor, node.softcap))
        else:
            raise NotImplementedError(f"{type(node).__name__} outside the places where the GPU engine fuses it")

    def _outputs(self, node: t.Node) -> tuple[torch.Tensor | None, tuple[Activation, ...]]:
        """Buffers for all that is wanted of a node; they count as written from now on."""
        state = self._state(node)
        if 0 in node.needs or not node.needs:
            state.rows = self._take(node, node.n, node.width)
        for cls in sorted(node.needs - {0}):
            state.quantised[cls] = self._activation(node, cls, node.n, node.width)
        return state.rows, tuple(state.quantised.values())

    def _norm(self, node: t.Norm) -> None:
        """A norm, with the sum in front of it."""
        weight = self._norm_weight(node.norm)
        if not node.is_whole:
            rows = self._rows(node.x).reshape(-1, len(node.norm.weight))
            state = self._state(node)
            state.rows = self._take(node, node.n, node.width)
            self._add(partial(norm.combine_rows, rows, None, norm=weight, y=state.rows.view(rows.shape)))
            return
        y, quantised = self._outputs(node)
        rest = {"norm": weight, "y": y, "quantised": quantised, "planes": self._n_planes}
        x = node.x
        if isinstance(x, t.Sum | t.GatedSum) and self._state(x).rows is None:
            self._sum(x, **rest)
        else:
            self._add(partial(norm.combine_rows, self._rows(x), None, **rest))  # type: ignore[arg-type]

    def _sum(self, node: t.Sum | t.GatedSum | t.Experts, **rest: object) -> None:
        """A sum into the node's rows; `rest` is the norm of it that follows in the same launch."""
        h = self._take(node, node.n, node.width)
        residual: torch.Tensor | None = None
        branch: t.Node = node
        post: norm.Norm | None = None
        if isinstance(node, t.Sum):
            residual, branch = self._rows(node.a), node.b
            if isinstance(branch, t.Norm) and branch.is_whole and self._state(branch).rows is None:
                post, branch = self._norm_weight(branch.norm), branch.x
        shared = None
        if isinstance(branch, t.GatedSum) and self._state(branch).rows is None:
            gate = self._rows(branch.gate).view(-1)
            shared, branch = Shared(self._rows(branch.x), gate), branch.base
        if isinstance(branch, t.Experts) and self._state(branch).rows is None:
            source: torch.Tensor | Rows = self._mixture(branch)
        else:
            source = self._rows(branch)
        self._state(node).rows = h
        self._add(
            partial(norm.combine_rows, source, h, shared=shared, post=post, residual=residual, **rest)  # type: ignore[arg-type]
        )

    def _norm_weight(self, each: blocks.Norm) -> norm.Norm:
        return norm.Norm(self._weights.vector(each.weight), each.eps)

    def _glu(self, node: t.Glu) -> None:
        gate, up = node.gate, node.up
        assert isinstance(gate, t.Linear) and isinstance(up, t.Linear)
        gate_rows, up_rows = self._joined([gate, up], node, with_bias=True)
        h, quantised = self._outputs(node)
        first = quantised[0] if quantised else None
        launch = partial(glu.glu, gate_rows, up_rows, h, first, activation=node.activation, planes=self._n_planes)
        self._add(launch)

    def _joined(self, linears: list[t.Linear], owner: t.Node, *, with_bias: bool) -> list[torch.Tensor]:
        """Rows of several products of one input, those of one type in one launch; parts of wider rows.

        They live as long as `owner`. Without `with_bias` the caller adds biases.
        """
        found: dict[int, torch.Tensor] = {}
        groups: dict[object, list[t.Linear]] = {}
        for linear in linears:
            alone = with_bias and linear.weight.bias is not None
            groups.setdefault(id(linear) if alone else (linear.weight.type, linear.weight.cols), []).append(linear)
        for group in groups.values():
            x = group[0].x
            assert all(linear.x is x for linear in group)
            bias = group[0].weight.bias if with_bias else None
            matrix = self._weights.joined([linear.weight for linear in group])
            rows = self._take(owner, x.n, matrix.rows)
            source = self._source(x, matrix.type)
            self._add(partial(matvec, matrix, source, rows, None if bias is None else self._weights.vector(bias)))
            at = 0
            for linear in group:
                found[id(linear)] = rows[:, at : at + linear.width]
                at += linear.width
        return [found[id(linear)] for linear in linears]

    def _attention(self, node: t.Attention) -> None:
        q, q_norm, table = t.unwrapped(node.q)
        k, k_norm, _ = t.unwrapped(node.k)
        v, _, _ = t.unwrapped(node.v)
        if table is None:
            raise NotImplementedError("attention without a rotation")
        rows = self._joined([q, k, v], node, with_bias=False)
        parts = [
            self._projection(x, linear, each)
            for x, linear, each in zip(rows, (q, k, v), (q_norm, k_norm, None), strict=True)
        ]
        n, inputs = node.n, self._inputs
        pages = Pages(self._kv.k[node.layer], self._kv.v[node.layer], inputs.positions[:n], inputs.page_table[:n])
        turned = self._take(node, n, q.width)
        angles = inputs.angles(table, n)
        self._add(partial(rope.rotate_and_store, parts[0], parts[1], parts[2], angles, pages, turned))
        y, quantised = self._outputs(node)
        dim_v = pages.v.shape[-1]
        n_splits = attention.max_splits(self._n_positions, node.window)
        heads = attention.heads_per_program(n, node.n_head, pages.n_kv, n_splits, self._inputs.n_processors)
        self._add(
            partial(
                attention.attend,
                turned,
                pages,
                Mask(node.scale, node.softcap, node.window),
                self._room.partials(n, node.n_head, n_splits, dim_v),
                y,
                quantised[0] if quantised else None,
                planes=self._n_planes,
                heads=heads,
            )
        )

    def _projection(self, x: torch.Tensor, linear: t.Linear, each: blocks.Norm | None) -> rope.Projection:
        bias = None if linear.weight.bias is None else self._weights.vector(linear.weight.bias)
        return rope.Projection(x, bias, None if each is None else self._norm_weight(each))

    def _route(self, node: t.Routes) -> None:
        state = self._state(node)
        ids = self._take(node, node.n, node.width, dtype=torch.int32)
        weights = self._take(node, node.n, node.width)
        bias = None if node.bias is None else self._weights.vector(node.bias)
        self._add(
            partial(
                router.route,
                self._rows(node.logits),
                ids,
                weights,
                gate=node.gate,
                normalise=node.normalise,
                scale=node.scale,
                bias=bias,
            )
        )
        state.rows, state.weights = ids, weights

    def _mixture(self, node: t.Experts) -> Rows:
        """The experts' rows, one a routed pair."""
        routes = self._state(node.routes)
        ids, weights = routes.rows, routes.weights
        assert ids is not None and weights is not None and self._experts is not None
        x = {weight_class(each.type): self._source(node.x, each.type) for each in (node.bank.gate, node.bank.up)}
        if self._experts.takes_rows(node.bank):
            x[0] = self._rows(node.x)
        rows = self._take(node, node.n, ids.shape[1], node.width)
        for launch in self._experts.launches(
            node.bank, x, ids, rows.view(-1, node.width), node.activation, self._arena
        ):
            self._add(launch)
        return Rows(rows, weights)


def _is_anchor(node: t.Node) -> bool:
    return isinstance(node, t.Attention | t.Glu | t.Routes) or (isinstance(node, t.Norm) and bool(node.needs))


def _last_uses(nodes: list[t.Node]) -> dict[int, int]:
    """By node: the place in the list after which its rows are not read any more. What is not launched where it stands
    reads its inputs when it is used itself: a sum once, for its first user, anything else perhaps for each of them."""
    read_at: dict[int, int] = {}
    last = {id(node): i for i, node in enumerate(nodes)}
    users: dict[int, list[t.Node]] = {id(node): [] for node in nodes}
    for node in nodes:
        for each in node.inputs():
            users[id(each)].append(node)
    for i in range(len(nodes) - 1, -1, -1):
        node = nodes[i]
        times = [read_at[id(user)] for user in users[id(node)]] or [i]
        when = min(times) if isinstance(node, t.Sum) else max(times)
        read_at[id(node)] = i if _is_anchor(node) else when
        tails = [last[id(user)] for user in users[id(node)] if isinstance(user, t.Tail)]  # rows of a tail are its own
        last[id(node)] = max([i, *times, *tails])
    return last
