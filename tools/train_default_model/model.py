"""The student in plain torch: qwen3moe, and a dense twin (qwen3) whose feed-forward is as wide as the chosen experts.

Parameters have GGUF's names without `.weight`. Matrices are held in the computing dtype: the optimizer keeps the fp32
originals and writes them here, rounded to the shipped types where it is told to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tools.train_default_model.teacher import rms_norm, rotate

__all__ = ["Geometry", "Student", "initialise"]

ALIGN = 16


@dataclass(frozen=True)
class Geometry:
    """Sizes. `n_expert` 0 makes the dense twin."""

    n_vocab: int = 8192
    n_embd: int = 512
    n_layer: int = 6
    n_head: int = 8
    n_kv: int = 2
    head_dim: int = 64
    n_expert: int = 16
    n_used: int = 4
    n_ff_exp: int = 256
    n_ctx: int = 2048
    rope_base: float = 10000.0
    eps: float = 1e-6

    @property
    def n_ff(self) -> int:
        """Width of the dense twin: the same active size."""
        return max(self.n_used, 1) * self.n_ff_exp


class _Permute(torch.autograd.Function):
    """x[pair // k] for the pair (token, rank) at each place; its gradient is a gather too, since `place` is known."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pair: torch.Tensor, place: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.k = k
        return x[pair // k]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (place,) = ctx.saved_tensors
        return grad[place].view(-1, ctx.k, grad.shape[-1]).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    """y[place]; the gradient of a place that holds no pair is 0."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, pair: torch.Tensor, place: torch.Tensor, is_pair: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(pair, is_pair)
        return y[place]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        pair, is_pair = ctx.saved_tensors
        return grad[pair] * is_pair[:, None], None, None, None


def places(ids: torch.Tensor, n_expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows sorted by expert, each expert's share filled up to a multiple of ALIGN (grouped products ask for that).

    (pair at each place, 0 where none is; place of each pair; whether a place holds a pair; end of each expert's share).
    The number of places is fixed: the last share takes what is over.
    """
    flat = ids.flatten()
    n_pairs, n_places = len(flat), len(flat) + n_expert * ALIGN
    order = torch.argsort(flat, stable=True)
    counts = (flat[:, None] == torch.arange(n_expert, device=flat.device)).sum(0)
    sizes = (counts.clamp_min(1) + ALIGN - 1) // ALIGN * ALIGN
    shift = (sizes.cumsum(0) - sizes) - (counts.cumsum(0) - counts)
    sorted_place = torch.arange(n_pairs, device=flat.device) + shift[flat[order]]
    place = torch.empty_like(order).scatter_(0, order, sorted_place)
    pair = torch.zeros(n_places, dtype=order.dtype, device=flat.device).scatter_(0, sorted_place, order)
    is_pair = torch.zeros(n_places, dtype=torch.bool, device=flat.device).scatter_(
        0, sorted_place, torch.ones_like(order, dtype=torch.bool)
    )
    last = torch.arange(n_expert, device=flat.device) == n_expert - 1
    ends = torch.where(last, n_places, sizes.cumsum(0)).int()
    return pair, place, is_pair, ends


def experts_grouped(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Routed experts [n, d] by grouped products, without a host synchronisation."""
    n, k = ids.shape
    pair, place, is_pair, ends = places(ids, gate_up.shape[0])
    rows = _Permute.apply(x, pair, place, k)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    y = _Unpermute.apply(y, pair, place, is_pair).view(n, k, -1)
    return (y * weights[..., None].to(y.dtype)).sum(1)


def experts_dense(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The same by computing every expert for every token, most with weight 0: the plain form."""
    n_expert, width, d = gate_up.shape
    full = torch.zeros((len(x), n_expert), dtype=x.dtype, device=x.device).scatter(1, ids, weights.to(x.dtype))
    gate, up = F.linear(x, gate_up.reshape(-1, d)).view(len(x), n_expert, width).chunk(2, dim=-1)
    hidden = F.silu(gate) * up * full[..., None]
    return hidden.flatten(1) @ down.transpose(1, 2).reshape(-1, d)


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self, g: Geometry, dtype: torch.dtype, is_grouped: bool) -> None:
        super().__init__()
        self.g, self.is_grouped = g, is_grouped

        def weight(*shape: int, kind: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=kind))

        def norm(n: int) -> nn.Parameter:
            return nn.Parameter(torch.ones(n))

        d, n_q, n_k = g.n_embd, g.n_head * g.head_dim, g.n_kv * g.head_dim
        self.attn_norm, self.ffn_norm = norm(d), norm(d)
        self.attn_q, self.attn_k, self.attn_v = weight(n_q, d), weight(n_k, d), weight(n_k, d)
        self.attn_q_norm, self.attn_k_norm = norm(g.head_dim), norm(g.head_dim)
        self.attn_output = weight(d, n_q)
        if g.n_expert:
            self.ffn_gate_inp = weight(g.n_expert, d, kind=torch.float32)
            self.ffn_gate_exps = weight(g.n_expert, g.n_ff_exp, d)
            self.ffn_up_exps = weight(g.n_expert, g.n_ff_exp, d)
            self.ffn_down_exps = weight(g.n_expert, d, g.n_ff_exp)
        else:
            self.ffn_gate, self.ffn_up, self.ffn_down = weight(g.n_ff, d), weight(g.n_ff, d), weight(d, g.n_ff)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(output, auxiliary losses [balance, z], tokens of each expert) of [batch, n, d]."""
        x = x + self._attention(self._norm(x, self.attn_norm), cos, sin)
        y, losses, counts = self._ffn(self._norm(x, self.ffn_norm).flatten(0, 1))
        return x + y.view_as(x), losses, counts

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight.to(x.dtype), self.g.eps)

    def _attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        g = self.g
        b, n, _ = x.shape
        q = F.linear(x, self.attn_q).view(b, n, g.n_head, g.head_dim)
        k = F.linear(x, self.attn_k).view(b, n, g.n_kv, g.head_dim)
        v = F.linear(x, self.attn_v).view(b, n, g.n_kv, g.head_dim)
        q, k = rotate(self._norm(q, self.attn_q_norm), cos, sin), rotate(self._norm(k, self.attn_k_norm), cos, sin)
        group = g.n_head // g.n_kv
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), self.attn_output)

    def _ffn(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        g = self.g
        if not g.n_expert:
            y = F.linear(F.silu(F.linear(x, self.ffn_gate)) * F.linear(x, self.ffn_up), self.ffn_down)
            return y, torch.zeros(2, device=x.device), torch.zeros(1, device=x.device)
        logits = F.linear(x.float(), self.ffn_gate_inp)
        probs = logits.softmax(-1)
        chosen, ids = probs.topk(g.n_used, dim=-1)
        weights = chosen / chosen.sum(-1, keepdim=True)
        counts = (ids.flatten()[:, None] == torch.arange(g.n_expert, device=x.device)).sum(0).float()
        balance = g.n_expert * (counts / ids.numel() * probs.mean(0)).sum()
        z = torch.logsumexp(logits, -1).square().mean()
        gate_up = torch.cat([self.ffn_gate_exps, self.ffn_up_exps], dim=1)
        run = experts_grouped if self.is_grouped else experts_dense
        return run(x, gate_up, self.ffn_down_exps, ids, weights), torch.stack([balance, z]), counts


class Student(nn.Module):
    """The whole model; the head is the embedding."""

    def __init__(self, g: Geometry, dtype: torch.dtype, *, is_grouped: bool) -> None:
        super().__init__()
        self.g = g
        self.token_embd = nn.Parameter(torch.zeros(g.n_vocab, g.n_embd, dtype=dtype))
        self.output_norm = nn.Parameter(torch.ones(g.n_embd))
        self.layers = nn.ModuleList(Layer(g, dtype, is_grouped) for _ in range(g.n_layer))
        frequencies = g.rope_base ** (-torch.arange(0, g.head_dim, 2, dtype=torch.float64) / g.head_dim)
        angles = torch.arange(g.n_ctx, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin().float()[:, None], persistent=False)

    def hidden(
        self, tokens: torch.Tensor, layer_call: Any = Layer.forward
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(normed states [batch, n, d], auxiliary losses [2], expert counts [n_layer, n_expert]).

        `layer_call` is Layer.forward or its compiled form.
        """
        n = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:n], self.get_buffer("sin")[:n]
        x = F.embedding(tokens, self.token_embd)
        losses, counts = [], []
        for layer in self.layers:
            x, loss, count = layer_call(layer, x, cos, sin)
            losses.append(loss)
            counts.append(count)
        x = rms_norm(x, self.output_norm.to(x.dtype), self.g.eps)
        return x, torch.stack(losses).mean(0), torch.stack(counts)

    def names(self) -> dict[str, nn.Parameter]:
        """Parameters by GGUF's names."""
        return {gguf_name(name): parameter for name, parameter in self.named_parameters()}


def gguf_name(name: str) -> str:
    """ "layers.3.attn_q" is "blk.3.attn_q.weight"."""
    return name.replace("layers.", "blk.") + ".weight"


@torch.no_grad()
def initialise(model: Student, seed: int) -> dict[str, torch.Tensor]:
    """fp32 starting values by GGUF's names; norms are ones."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, parameter in model.names().items():
        if parameter.ndim == 1:
            out[name] = torch.ones(parameter.shape)
            continue
        spread = 0.02 if "token_embd" in name or "ffn_gate_inp" in name else parameter.shape[-1] ** -0.5
        if "attn_output" in name or "ffn_down" in name:
            spread *= 0.3 / (2 * model.g.n_layer) ** 0.5
        out[name] = torch.randn(parameter.shape, generator=generator) * spread
    return out
