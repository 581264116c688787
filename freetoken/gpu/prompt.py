"""From the nodes of a trace to the steps of a prompt: which launches, on which rows, in which order.

As `lower` does for decode steps, with other kernels: a projection's norm, its rotation and the store into pages are one
launch, so are a sum, the norm of it and its fp16 rows; a feed-forward part is one step, which goes through it by rows.
The trace is made once, for a chunk of any length: nodes of one row stand for the rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from freetoken import blocks
from freetoken.blocks import RopeTable, Weight
from freetoken.gpu import trace as t
from freetoken.gpu.dense import Dense, Part, takes_floats
from freetoken.gpu.rows import Plan, Ref, RowMemory, Step, Value, plan_rows
from freetoken.gpu.scratch import upload
from freetoken.kernels.grouped import Rows
from freetoken.kernels.matvec import Matrix
from freetoken.kernels.prompt_attention import attend_chunk
from freetoken.kernels.prompt_heads import HeadNorm, turn_heads
from freetoken.kernels.prompt_rows import Normed, Shared, combine, halve_rows
from freetoken.kernels.router import route

__all__ = ["Chunk", "DenseWeights", "PromptProgram", "PromptTrace"]

F = torch.nn.functional
Tensor = torch.Tensor


class DenseWeights(Protocol):
    """Dense matrices and vectors on the device."""

    def part(self, weight: Weight) -> tuple[Matrix, int]:
        """The matrix that holds a weight, and the row at which it starts there."""

    def vector(self, values: np.ndarray) -> Tensor:
        """A norm's weight or a bias, fp32; the same array gives the same tensor."""

    def embed(self, weight: Weight, tokens: np.ndarray, out: Tensor) -> None:
        """Rows of the token embedding, fp32 [n, cols]."""


class Chunk(Protocol):
    """One chunk under way: what steps ask of `gpu.prefill`."""

    memory: RowMemory
    start: int
    tokens: np.ndarray
    hidden: np.ndarray | None
    """States fp32 [n, n_embd] of layers that ran elsewhere."""
    table: Tensor
    """int32, the sequence's pages."""
    k: Any
    v: Any
    capability: int
    logits: Tensor

    def between(self, layer: int) -> None:
        """Called before each layer."""

    def angles(self, table: RopeTable) -> Tensor:
        """Cosines and sines, fp32 [n, 2, n_rot / 2]."""

    def head(self, x: Tensor, weight: Weight) -> Tensor:
        """Logits."""

    def experts(self, bank: blocks.Experts, x: Rows, ids: Tensor, weights: Tensor, activation: str, y: Tensor) -> None:
        """The mixture of one layer."""


@dataclass(eq=False)
class Head(t.Linear):
    """Logits by the arithmetic of a decode step."""


class PromptTrace(t.Trace):
    """A trace for chunks of any length."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def head(self, x: t.Node, weight: Weight) -> t.Node:
        return self._new(Head(x.n, weight.rows, x, weight))


class PromptProgram:
    """`steps` in their order, and the `plan` of their memory."""

    def __init__(self, trace: PromptTrace, weights: DenseWeights, dense: Dense) -> None:
        self.steps: list[Step] = []
        self._weights, self._dense = weights, dense
        self._rows_of: dict[int, Ref] = {}
        self._halves_of: dict[int, tuple[Ref, Ref]] = {}
        self._routes_of: dict[int, tuple[Ref, Ref]] = {}
        self._done: set[int] = set()
        self._users: dict[int, list[t.Node]] = {}
        for node in trace.nodes:
            for each in node.inputs():
                self._users.setdefault(id(each), []).append(node)
        for node in trace.nodes:
            if isinstance(node, t.Attention | t.Glu | t.Routes) or (isinstance(node, t.Norm) and node.needs):
                self._emit(node)
        self._emit(trace.nodes[-1])
        self.plan: Plan = plan_rows(self.steps)

    # --- what others ask of a node -------------------------------------------------------------------------------

    def _add(self, run: Callable[[Any], None], *refs: Ref | None) -> None:
        self.steps.append(Step(run, tuple(ref.value for ref in refs if ref is not None)))

    def _rows(self, node: t.Node) -> Ref:
        """fp32 rows of a node, computed now if they are not there."""
        if id(node) not in self._rows_of:
            if isinstance(node, t.Tail):
                whole = self._rows(node.x)
                self._done.add(id(node))
                self._rows_of[id(node)] = Ref(whole.value, whole.first, whole.width, is_last=True)
            else:
                self._emit(node)
        return self._rows_of[id(node)]

    def _halves(self, node: t.Node) -> tuple[Ref, Ref]:
        """fp16 rows of a node and their scales."""
        if id(node) not in self._halves_of:
            self._emit(node)
        if id(node) not in self._halves_of:
            x, made = self._rows(node), self._new_halves(node)
            half, scale = self._halves_of[id(node)] = made

            def run(c: Chunk) -> None:
                halve_rows(c.memory[x], c.memory[half], c.memory[scale].view(-1))

            self._add(run, x, half, scale)
        return self._halves_of[id(node)]

    def _new(self, node: t.Node, width: int = 0, dtype: torch.dtype = torch.float32) -> Ref:
        return Value(width or node.width, node.n == 1, dtype).ref()

    def _new_halves(self, node: t.Node) -> tuple[Ref, Ref]:
        return self._new(node, dtype=torch.float16), self._new(node, 1)

    # --- steps ---------------------------------------------------------------------------------------------------

    def _emit(self, node: t.Node) -> None:
        if id(node) in self._done:
            return
        self._done.add(id(node))
        if isinstance(node, t.Entry):
            self._entry(node)
        elif isinstance(node, t.Embedding):
            self._embedding(node)
        elif isinstance(node, Head):
            self._head(node)
        elif isinstance(node, t.Linear):
            out = self._rows_of[id(node)] = self._new(node)
            if isinstance(node.x, t.Glu):
                self._feed_forward(node.x, node, out)
            else:
                self._products([node], [out])
        elif isinstance(node, t.Norm):
            self._norm(node)
        elif isinstance(node, t.Sum | t.GatedSum):
            self._sum(node, None)
        elif isinstance(node, t.Experts):
            self._mixture(node)
        elif isinstance(node, t.Attention):
            self._attention(node)
        elif isinstance(node, t.Routes):
            self._route(node)
        elif isinstance(node, t.Scaled):
            self._scaled(node)
        elif isinstance(node, t.Glu):
            self._done.discard(id(node))  # with the product that follows
        else:
            raise NotImplementedError(f"{type(node).__name__} outside the places where a prompt's steps fuse it")

    def _entry(self, node: t.Entry) -> None:
        out = self._rows_of[id(node)] = self._new(node)

        def run(c: Chunk) -> None:
            assert c.hidden is not None, "states of the layers that ran elsewhere"
            c.memory[out].copy_(upload(c.hidden, c.table.device))

        self._add(run, out)

    def _embedding(self, node: t.Embedding) -> None:
        out = self._rows_of[id(node)] = self._new(node)

        def run(c: Chunk) -> None:
            rows = c.memory[out]
            self._weights.embed(node.weight, c.tokens, rows)
            if node.scale != 1.0:
                rows.mul_(node.scale)

        self._add(run, out)

    def _head(self, node: Head) -> None:
        x = self._rows(node.x)

        def run(c: Chunk) -> None:
            c.logits = c.head(c.memory[x].contiguous(), node.weight)

        self._add(run, x)

    def _scaled(self, node: t.Scaled) -> None:
        if not isinstance(node.x, Head):
            raise NotImplementedError("scaled rows that are not logits")
        self._emit(node.x)

        def run(c: Chunk) -> None:
            y = c.logits * node.factor
            c.logits = node.softcap * torch.tanh(y / node.softcap) if node.softcap else y

        self._add(run)

    def _part(self, linears: list[t.Linear]) -> Part:
        """Matrices that lie one under the other as one."""
        matrix, first = self._weights.part(linears[0].weight)
        bias = None
        if any(linear.weight.bias is not None for linear in linears):
            zeros = [np.zeros(linear.width, np.float32) for linear in linears]
            given = [z if x.weight.bias is None else x.weight.bias for x, z in zip(linears, zeros, strict=True)]
            bias = self._weights.vector(given[0] if len(given) == 1 else np.concatenate(given))
        return Part(matrix, first, sum(linear.width for linear in linears), bias)

    def _source(self, node: t.Node, weight: Weight) -> tuple[Callable[[Chunk], Rows | Tensor], tuple[Ref, ...]]:
        """A node as a weight's product takes it, at run time, and what that reads."""
        if takes_floats(weight):
            x = self._rows(node)
            return lambda c: c.memory[x], (x,)
        half, scale = self._halves(node)
        return lambda c: Rows(c.memory[half], c.memory[scale].view(-1)), (half, scale)

    def _products(self, linears: list[t.Linear], outs: list[Ref]) -> None:
        """Products of one input; their results are neighbours in one value, or one alone."""
        groups: list[list[int]] = []
        for i, linear in enumerate(linears):
            last = None if not groups else self._part([linears[groups[-1][-1]]])
            if last is not None and self._part([linear]).continues(last):
                groups[-1].append(i)
            else:
                groups.append([i])
        for group in groups:
            part, out = self._part([linears[i] for i in group]), outs[group[0]]
            out = Ref(out.value, out.first, part.rows)
            get, read = self._source(linears[group[0]].x, linears[group[0]].weight)
            self._add(self._product(get, part, out), *read, out)
        self._done.update(id(linear) for linear in linears)

    def _product(self, get: Callable[[Chunk], Rows | Tensor], part: Part, out: Ref) -> Callable[[Chunk], None]:
        def run(c: Chunk) -> None:
            self._dense.product(get(c), part, c.memory[out])

        return run

    def _feed_forward(self, glu: t.Glu, down: t.Linear, out: Ref) -> None:
        gate, up = glu.gate, glu.up
        assert isinstance(gate, t.Linear) and isinstance(up, t.Linear)
        if self._users[id(glu)] != [down] or takes_floats(gate.weight) != takes_floats(up.weight):
            raise NotImplementedError("a gated unit that more than one product reads, or of fp32 and other matrices")
        gates, ups, downs = (self._part([linear]) for linear in (gate, up, down))
        get, read = self._source(gate.x, gate.weight)
        self._done.update((id(glu), id(gate), id(up)))

        def run(c: Chunk) -> None:
            self._dense.feed_forward(get(c), gates, ups, downs, glu.activation, c.memory[out])

        self._add(run, *read, out)

    def _norm(self, node: t.Norm) -> None:
        """A norm of whole rows, with the sum in front of it."""
        if not node.is_whole:
            raise NotImplementedError("a norm of heads outside of attention")
        x = node.x
        if isinstance(x, t.Sum | t.GatedSum) and id(x) not in self._done:
            self._done.add(id(x))
            self._sum(x, node)
            return
        source = self._rows(x)
        norm, outs = self._normed(node)
        self._add(lambda c: combine(c.memory[source], norm=norm(c)), source, *outs)

    def _normed(self, node: t.Norm) -> tuple[Callable[[Chunk], Normed], tuple[Ref, ...]]:
        """Where a norm goes: fp32 rows, halves, or both, as its users want."""
        users = self._users.get(id(node), [])
        halves = any(_takes_halves(user) for user in users)
        y = None if halves and all(_takes_halves(user) for user in users) else self._new(node)
        if y is not None:
            self._rows_of[id(node)] = y
        half = scale = None
        if halves:
            half, scale = self._halves_of[id(node)] = self._new_halves(node)
        weight, eps = self._weights.vector(node.norm.weight), node.norm.eps

        def make(c: Chunk) -> Normed:
            return Normed(
                weight,
                eps,
                None if y is None else c.memory[y],
                None if half is None else c.memory[half],
                None if scale is None else c.memory[scale].view(-1),
            )

        return make, tuple(ref for ref in (y, half, scale) if ref is not None)

    def _sum(self, node: t.Sum | t.GatedSum, following: t.Norm | None) -> None:
        """A sum, where it can in place, and in the same launch the norm that follows."""
        residual: Ref | None = None
        branch: t.Node = node
        post: Normed | None = None
        if isinstance(node, t.Sum):
            residual, branch = self._rows(node.a), node.b
            if isinstance(branch, t.Norm) and branch.is_whole and id(branch) not in self._done:
                self._done.add(id(branch))
                post, branch = Normed(self._weights.vector(branch.norm.weight), branch.norm.eps), branch.x
        shared: tuple[Ref, Ref] | None = None
        if isinstance(branch, t.GatedSum) and (branch is node or id(branch) not in self._done):
            self._done.add(id(branch))
            shared, branch = (self._rows(branch.x), self._rows(branch.gate)), branch.base
        x = self._rows(branch)
        total = residual if residual is not None and self._is_spent(node) else self._new(node)
        self._rows_of[id(node)] = total
        norm, outs = (None, ()) if following is None else self._normed(following)

        def run(c: Chunk) -> None:
            m = c.memory
            combine(
                m[x],
                m[total],
                shared=None if shared is None else Shared(m[shared[0]], m[shared[1]]),
                post=post,
                residual=None if residual is None else m[residual],
                norm=None if norm is None else norm(c),
            )

        self._add(run, x, *(shared or ()), residual, total, *outs)

    def _is_spent(self, node: t.Node) -> bool:
        """Whether nobody but this sum will read the rows to which it adds."""
        assert isinstance(node, t.Sum)
        a = node.a
        if isinstance(a, t.Tail):
            return False
        return all(user is node or id(user) in self._done for user in self._users[id(a)])

    # --- attention and experts -----------------------------------------------------------------------------------

    def _attention(self, node: t.Attention) -> None:
        layer = node.layer
        self._add(lambda c: c.between(layer))
        (q, q_norm, table), (k, k_norm, _), (v, _, _) = (self._unwrapped(each) for each in (node.q, node.k, node.v))
        if table is None:
            raise NotImplementedError("attention without a rotation")
        value = Value(q.width + k.width + v.width, is_tail=False)
        refs = [Ref(value, at, w) for at, w in ((0, q.width), (q.width, k.width), (q.width + k.width, v.width))]
        self._products([q, k, v], refs)
        heads: list[HeadNorm | None] = []
        for ref, norm, n_head in ((refs[0], q_norm, node.n_head), (refs[1], k_norm, node.n_head * k.width // q.width)):
            weight = None if norm is None else self._weights.vector(norm.weight)
            if norm is None or weight is None:
                heads.append(None)
            elif len(weight) * n_head == ref.width:
                heads.append((weight, norm.eps))
            else:
                self._row_norm(ref, weight, norm.eps)
                heads.append(None)
        turned = table

        def turn(c: Chunk) -> None:
            m = c.memory
            turn_heads(
                m[refs[0]], m[refs[1]], m[refs[2]], heads[0], heads[1], c.angles(turned), c.k[layer], c.v[layer],
                c.table, start=c.start, is_neox=turned.is_neox,
            )  # fmt: skip

        self._add(turn, refs[0])
        out = refs[0] if node.width == q.width else self._new(node)
        self._rows_of[id(node)] = out

        def attend(c: Chunk) -> None:
            attend_chunk(
                c.memory[refs[0]], c.k[layer], c.v[layer], c.table, c.memory[out], start=c.start, n_head=node.n_head,
                scale=node.scale, window=node.window, softcap=node.softcap, capability=c.capability,
            )  # fmt: skip

        self._add(attend, refs[0], out)

    def _row_norm(self, ref: Ref, weight: Tensor, eps: float) -> None:
        def run(c: Chunk) -> None:
            x = c.memory[ref]
            combine(x, norm=Normed(weight, eps, y=x))

        self._add(run, ref)

    def _unwrapped(self, node: t.Node) -> tuple[t.Linear, blocks.Norm | None, RopeTable | None]:
        """A projection under its norm and its rotation, which count as done."""
        linear, norm, table = t.unwrapped(node)
        while node is not linear:
            self._done.add(id(node))
            node = next(node.inputs())
        return linear, norm, table

    def _route(self, node: t.Routes) -> None:
        logits = self._rows(node.logits)
        ids, weights = self._new(node, dtype=torch.int32), self._new(node)
        self._routes_of[id(node)] = ids, weights
        bias = None if node.bias is None else self._weights.vector(node.bias)

        def run(c: Chunk) -> None:
            m = c.memory
            if len(m[ids]):
                route(
                    m[logits], m[ids], m[weights], gate=node.gate, normalise=node.normalise, scale=node.scale,
                    bias=bias, is_step=False,
                )  # fmt: skip

        self._add(run, logits, ids, weights)

    def _mixture(self, node: t.Experts) -> None:
        ids, weights = self._routes_of[id(node.routes)]
        half, scale = self._halves(node.x)
        out = self._rows_of[id(node)] = self._new(node)

        def run(c: Chunk) -> None:
            m = c.memory
            x = Rows(m[half], m[scale].view(-1))
            c.experts(node.bank, x, m[ids], m[weights], node.activation, m[out])

        self._add(run, half, scale, ids, weights, out)


def _takes_halves(node: t.Node) -> bool:
    """Whether a node reads fp16 rows of its input."""
    if isinstance(node, t.Experts):
        return True
    return isinstance(node, t.Linear) and not isinstance(node, Head) and not takes_floats(node.weight)
