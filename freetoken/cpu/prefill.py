"""Prefill: a long chunk of one sequence (docs/numerics.md, section 8).

Products are native (`many`); weights that it has no product for are decoded, a cache-sized tile at a time, and
multiplied by torch in fp32, which does all the rest; attention reads the sequence's pages. Only the head has the
arithmetic of a decode step, through `Decoder.head_logits`. The runner calls `Prefill.run`, which runs the model's
`forward` over a `PrefillOps`; nothing here knows an architecture.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from freetoken import native
from freetoken.batch import Batch, Stopped
from freetoken.blocks import Experts, Model, Norm, RopeTable, Weight
from freetoken.cpu import many
from freetoken.cpu.quiet_torch import torch
from freetoken.kvcache import PAGE, KVCache

__all__ = ["Prefill", "PrefillOps"]

F = torch.nn.functional
Tensor = torch.Tensor

TILE_VALUES = 1 << 20
"""Values of a weight that are decoded before they are multiplied: 4 MiB, which stay in the cache."""
GATHER_VALUES = 8 << 20
"""Keys and values of the context that are widened to fp32 at once (32 MiB); more go by groups of heads."""
SCORE_VALUES = 4 << 20
"""Scores that exist at once where attention is written out, and values of a mask: 16 MiB."""

QUERY_ROWS = 256
"""Query rows that are attended at once: later keys are not looked at, so shorter blocks save work but cost calls."""

KEPT_BYTES = 128 << 20
"""Freed memory that the C library keeps for the next activation instead of returning it."""

LogitsOfRows = Callable[[np.ndarray, Weight], np.ndarray]


class Prefill:
    """Runs chunks of one sequence. Used by the engine thread only; torch's thread number is the pool's from now on."""

    def __init__(
        self,
        pool: native.Pool,
        model: Model,
        cache: KVCache,
        head_logits: LogitsOfRows,
        n_layers: int | None = None,
    ) -> None:
        """With `n_layers` only the first so many layers run, and what comes out are hidden states of all rows."""
        torch.set_num_threads(pool.n_threads)
        _keep_freed_memory()
        self._model = model
        self._n_layers = n_layers
        self._ops = PrefillOps(pool, cache, head_logits)

    def run(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> np.ndarray:
        """Store the batch's keys and values; logits fp32 [n_outputs, n_vocab], with `n_layers` hidden states fp32
        [n, n_embd] instead. Raises Stopped.

        `between_layers` is called before each layer but the first and may run decode steps of others."""
        with torch.inference_mode():
            if self._n_layers is None:
                self._ops.begin(batch, should_stop, between_layers)
                result: Tensor = self._model.forward(self._ops)
            else:
                self._ops.begin(replace(batch, n_outputs=batch.n), should_stop, between_layers)
                result = self._model.run_layers(self._ops, self._model.start(self._ops), 0, self._n_layers)
            return np.asarray(result.numpy())


class PrefillOps:
    """`blocks.Ops` over torch tensors [n, width]. One object serves all chunks; its scratch is reused."""

    def __init__(self, pool: native.Pool, cache: KVCache, head_logits: LogitsOfRows) -> None:
        self._pool = pool
        self._k = [torch.from_numpy(pages) for pages in cache.k]
        self._v = [torch.from_numpy(pages) for pages in cache.v]
        self._head_logits = head_logits
        self._tile = np.empty(TILE_VALUES, np.float32)
        self._should_stop: Callable[[], bool] | None = None
        self._between_layers: Callable[[], bool] | None = None

    def begin(
        self,
        batch: Batch,
        should_stop: Callable[[], bool] | None = None,
        between_layers: Callable[[], bool] | None = None,
    ) -> None:
        """Take the chunk of the next `forward`; `should_stop` is asked once a layer, and then Stopped is raised."""
        self._batch = batch
        self._start = int(batch.positions[0])
        self._table = torch.from_numpy(batch.page_tables[0]).long()
        self._should_stop, self._between_layers = should_stop, between_layers
        self._ropes: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    # --- products ------------------------------------------------------------------------------------------------

    def embed(self, weight: Weight, scale: float = 1.0) -> Tensor:
        rows = np.ascontiguousarray(weight.data[self._batch.tokens])
        x = np.empty((self._batch.n, weight.cols), np.float32)
        self._pool.dequantize(weight.type, rows, x)
        return torch.from_numpy(x).mul_(scale)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        if many.can_multiply(weight):
            return torch.from_numpy(many.multiply(self._pool, weight, x.contiguous().numpy()))
        y = torch.empty(x.shape[0], weight.rows)
        self._multiply(x, weight, weight.data, y)
        if weight.bias is not None:
            y += torch.from_numpy(weight.bias)
        return y

    def head(self, x: Tensor, weight: Weight) -> Tensor:
        return torch.from_numpy(self._head_logits(x.contiguous().numpy(), weight))

    def _multiply(self, x: Tensor, weight: Weight, data: np.ndarray, y: Tensor) -> None:
        """y[n, rows] = x times the weight's rows in `data` [rows, row_bytes], transposed."""
        if x.shape[0] == 0:
            return
        cols = weight.cols
        step = max(TILE_VALUES // cols, 1)
        if step * cols > self._tile.size:
            self._tile = np.empty(step * cols, np.float32)
        for row in range(0, len(data), step):
            end = min(row + step, len(data))
            tile = self._tile[: (end - row) * cols].reshape(end - row, cols)
            self._pool.dequantize(weight.type, data[row:end], tile)
            torch.mm(x, torch.from_numpy(tile).t(), out=y[:, row:end])

    # --- row by row ----------------------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        width = norm.weight.shape[0]
        groups = x.view(x.shape[0], x.shape[1] // width, width)
        return F.rms_norm(groups, (width,), torch.from_numpy(norm.weight), norm.eps).view(x.shape)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def scale(self, x: Tensor, factor: float, softcap: float = 0.0) -> Tensor:
        x = x * factor
        return softcap * torch.tanh(x / softcap) if softcap else x

    def glu(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        return ACTIVATIONS[activation](gate).mul_(up)

    def gated_add(self, x: Tensor, gate: Tensor, base: Tensor) -> Tensor:
        return torch.addcmul(base, x, torch.sigmoid(gate))

    def outputs(self, x: Tensor) -> Tensor:
        return x[x.shape[0] - self._batch.n_outputs :]

    def rope(self, x: Tensor, n_head: int, table: RopeTable) -> Tensor:
        if id(table) not in self._ropes:
            both = torch.from_numpy(table.cos_sin(self._batch.positions))
            self._ropes[id(table)] = both[:, 0, None], both[:, 1, None]
        cos, sin = self._ropes[id(table)]
        heads = x.view(x.shape[0], n_head, -1)
        pairs = heads[..., : table.n_rot]
        half = table.n_rot // 2
        if table.is_neox:
            a, b = pairs[..., :half], pairs[..., half:]
        else:
            a, b = pairs[..., 0::2], pairs[..., 1::2]
        turned = a * cos - b * sin
        b.mul_(cos).addcmul_(a, sin)
        a.copy_(turned)
        return x

    # --- attention -----------------------------------------------------------------------------------------------

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        n_head: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Tensor:
        if self._should_stop is not None and self._should_stop():
            raise Stopped
        if layer and self._between_layers is not None:
            self._between_layers()
        self._store(self._k[layer], k)
        self._store(self._v[layer], v)
        n = self._batch.n
        n_kv, head_dim = self._k[layer].shape[1], self._v[layer].shape[3]
        first = max(self._start - window + 1, 0) // PAGE * PAGE if window else 0
        per_head = (self._start + n - first) * max(self._k[layer].shape[3], head_dim)
        n_group = n_head // n_kv
        step = max(GATHER_VALUES // per_head, 1)
        queries = q.view(n, n_kv, n_group, -1).permute(1, 2, 0, 3)  # [n_kv, n_group, n, head_dim]
        out = torch.empty(n, n_kv, n_group, head_dim)
        for head in range(0, n_kv, step):
            some = slice(head, min(head + step, n_kv))
            keys = self._gather(self._k[layer], some, first)
            values = self._gather(self._v[layer], some, first)
            result = self._attend(queries[some], keys, values, scale, window, softcap, first)
            out[:, some].copy_(result.permute(2, 0, 1, 3))
        return out.view(n, n_head * head_dim)

    def _store(self, pages: Tensor, x: Tensor) -> None:
        """Write the chunk's rows [n, n_kv * head_dim] at their positions."""
        heads = x.view(x.shape[0], pages.shape[1], -1).transpose(0, 1)  # [n_kv, n, head_dim]
        position, end = self._start, self._start + x.shape[0]
        while position < end:
            offset = position % PAGE
            count = min(PAGE - offset, end - position)
            at = position - self._start
            pages[self._table[position // PAGE], :, offset : offset + count] = heads[:, at : at + count]
            position += count

    def _gather(self, pages: Tensor, heads: slice, first: int) -> Tensor:
        """fp32 [heads, positions first..chunk end, head_dim] of the sequence; first is the start of a page."""
        end = self._start + self._batch.n
        table = self._table[first // PAGE : -(-end // PAGE)].tolist()
        n_heads = heads.stop - heads.start
        out = torch.empty(n_heads, len(table), PAGE, pages.shape[3])
        for i, page in enumerate(table):
            out[:, i].copy_(pages[page, heads])
        return out.view(n_heads, -1, pages.shape[3])[:, : end - first]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, first: int) -> Tensor:
        """[heads, group, n, head_dim_v] of q [heads, group, n, head_dim], k and v [heads, positions, width].

        Query rows go in blocks, so that a mask stays small; each block sees keys up to its last position only.
        """
        n_heads, n_group, n, _ = q.shape
        out = torch.empty(n_heads, n_group, n, v.shape[2])
        n_scores_a_row = k.shape[1] * (n_heads * n_group if softcap else 1)
        step = min(max(SCORE_VALUES // n_scores_a_row, 16), QUERY_ROWS)
        for row in range(0, n, step):
            end = min(row + step, n)
            seen = self._start + end - first
            keys, values = (t[:, None, :seen].expand(-1, n_group, -1, -1) for t in (k, v))
            mask = self._mask(row, end, window, first)
            if softcap:
                scores = torch.matmul(q[:, :, row:end] * scale, keys.transpose(-1, -2))
                scores = softcap * torch.tanh(scores / softcap) + mask
                part = torch.matmul(torch.softmax(scores, -1), values)
            else:
                part = F.scaled_dot_product_attention(q[:, :, row:end], keys, values, attn_mask=mask, scale=scale)
            out[:, :, row:end] = part
        return out

    def _mask(self, row: int, end: int, window: int, first: int) -> Tensor:
        """fp32 [end - row, positions]: 0 where a query sees a key, -inf elsewhere. Kept for the layers to come."""
        key = (row, window)
        if key not in self._masks:
            query = torch.arange(self._start + row, self._start + end)[:, None]
            position = torch.arange(first, self._start + end)[None, :]
            is_hidden = position > query
            if window:
                is_hidden |= position <= query - window
            mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, -math.inf)
            if len(self._masks) * SCORE_VALUES > GATHER_VALUES:
                return mask
            self._masks[key] = mask
        return self._masks[key]

    # --- experts -------------------------------------------------------------------------------------------------

    def route(
        self,
        logits: Tensor,
        n_used: int,
        *,
        gate: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: np.ndarray | None = None,
    ) -> tuple[Tensor, Tensor]:
        if gate == "softmax":
            probs = torch.softmax(logits, -1)
        elif gate == "sigmoid":
            probs = torch.sigmoid(logits)
        else:
            probs = logits
        chosen_by = probs if bias is None else probs + torch.from_numpy(bias)
        ids = torch.sort(chosen_by, dim=-1, descending=True, stable=True).indices[:, :n_used]
        weights = probs.gather(1, ids)
        if gate == "softmax_chosen":
            weights = torch.softmax(weights, -1)
        if normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp_(min=2.0**-14)
        return ids, weights * scale

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, bank: Experts, activation: str = "silu") -> Tensor:
        if many.can_mix(bank):
            routed = ids.to(torch.int32).contiguous().numpy(), weights.contiguous().numpy()
            return torch.from_numpy(many.mix_experts(self._pool, bank, x.contiguous().numpy(), *routed, activation))
        order = torch.argsort(ids.reshape(-1), stable=True)
        token_of = order // ids.shape[1]
        weight_of = weights.reshape(-1, 1)[order]
        counts = torch.bincount(ids.reshape(-1), minlength=bank.n_expert).tolist()
        y = torch.zeros(x.shape[0], bank.down.rows)
        at = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            rows = token_of[at : at + count]
            mine = x.index_select(0, rows)
            gate = self._expert_linear(mine, bank.gate, expert)
            hidden = ACTIVATIONS[activation](gate).mul_(self._expert_linear(mine, bank.up, expert))
            y.index_add_(0, rows, self._expert_linear(hidden, bank.down, expert).mul_(weight_of[at : at + count]))
            at += count
        return y

    def _expert_linear(self, x: Tensor, bank: Weight, expert: int) -> Tensor:
        y = torch.empty(x.shape[0], bank.rows)
        self._multiply(x, bank, bank.data[expert], y)
        return y


def _keep_freed_memory() -> None:
    """Make glibc reuse freed activations: with fresh pages for each, page faults take 8% of a prompt's time.

    Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
        mallopt(m_mmap_threshold, 32 << 20)
        mallopt(m_trim_threshold, KEPT_BYTES)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": _silu, "gelu": _gelu}
"""By `blocks.Ops`' names; they may work in place."""
