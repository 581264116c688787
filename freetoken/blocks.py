"""What an architecture file is written in: weights by their GGUF names, and the operations of one forward pass.

`Ops` is implemented twice: `cpu/decode.py` records native operations for up to 8 tokens (docs/numerics.md), and
`cpu/prefill.py` runs torch for longer chunks. An architecture's `forward` is written once against it and reads like
plain torch; it knows neither of them. A tensor here (`Act`) is whatever the implementation hands out: fp32, one row a
token, rows contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from freetoken.native import expert_stride
from freetoken.spec import cos_sin

__all__ = ["Act", "Experts", "Model", "Norm", "Ops", "RopeTable", "Weight"]

Act = Any
"""An activation of one forward pass; opaque to architecture files."""


@dataclass(frozen=True)
class Weight:
    """A matrix of the file, in place: `rows` outputs of `cols` inputs, quantised as `type` (ggml's number).

    `data` is a uint8 view [rows, row_bytes] of the mapping (never copied), or of stacked matrices [n, rows, row_bytes],
    each contiguous; `bias` fp32 [rows] or None.
    """

    name: str
    type: int
    rows: int
    cols: int
    row_bytes: int
    data: np.ndarray
    bias: np.ndarray | None = None


@dataclass(frozen=True)
class Norm:
    """An RMS norm's weight, fp32 [width], and its epsilon."""

    name: str
    weight: np.ndarray
    eps: float


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer: three banks [n_expert, rows, row_bytes] in place, as stacked `Weight`s.

    `gate` and `up` map n_embd to n_ff, `down` back; each Weight's `rows` counts one expert's rows. In an FTW file an
    expert's matrices lie side by side, so that there are gaps between those of a bank.
    """

    n_expert: int
    n_used: int
    gate: Weight
    up: Weight
    down: Weight

    @property
    def stride(self) -> int:
        """As the native operation for experts takes it: see `native.expert_stride`."""
        return expert_stride([weight.data for weight in (self.gate, self.up, self.down)])


ROPE_BLOCK = 256
"""Positions whose cosines and sines are computed at once."""
MAX_ROPE_BLOCKS = 32
"""Blocks that a table keeps: 4 MiB at a rotation of 128 values."""


@dataclass(frozen=True)
class RopeTable:
    """Rotation of one kind of layer: `cos_sin(positions)` gives fp32 [n, 2, n_rot / 2], computed in binary64.

    `inv_freq` binary64 [n_rot / 2] (scaling, llama3 factors and YaRN ramp applied), `mscale` YaRN's attention factor,
    `is_neox` whether pairs are halves of the head or neighbours. Used by the engine thread only.
    """

    n_rot: int
    inv_freq: np.ndarray
    mscale: float
    is_neox: bool
    _blocks: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By number: fp32 [ROPE_BLOCK, 2, n_rot / 2]; the one made first goes first."""

    def cos_sin(self, positions: np.ndarray) -> np.ndarray:
        """Cosines and sines of int positions [n]: fp32 [n, 2, n_rot / 2]."""
        return np.stack([self._block(at // ROPE_BLOCK)[at % ROPE_BLOCK] for at in positions.tolist()])

    def _block(self, number: int) -> np.ndarray:
        if number not in self._blocks:
            if len(self._blocks) == MAX_ROPE_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            positions = np.arange(number * ROPE_BLOCK, (number + 1) * ROPE_BLOCK, dtype=np.float64)
            table = np.stack(cos_sin(positions[:, None] * self.inv_freq), axis=1) * self.mscale
            self._blocks[number] = table.astype(np.float32)
        return self._blocks[number]


class Ops(Protocol):
    """Operations of one forward pass over n tokens. Widths are elements; every result is a fresh `Act`."""

    def embed(self, weight: Weight, scale: float = 1.0) -> Act:
        """Rows of the token embedding for the batch's tokens, times scale: [n, cols]."""

    def rms_norm(self, x: Act, norm: Norm) -> Act:
        """RMS norm of x over groups of the norm's width (heads of a projection, or whole rows)."""

    def linear(self, x: Act, weight: Weight) -> Act:
        """x @ weight.T (+ bias): [n, rows]."""

    def add(self, a: Act, b: Act) -> Act: ...

    def scale(self, x: Act, factor: float, softcap: float = 0.0) -> Act:
        """x * factor, then softcap * tanh(x / softcap) where softcap is not 0."""

    def glu(self, gate: Act, up: Act, activation: str) -> Act:
        """act(gate) * up; activation "silu" or "gelu" (tanh form). May work in place: gate is spent."""

    def rope(self, x: Act, n_head: int, table: RopeTable) -> Act:
        """Rotate each head of x [n, n_head * head_dim] for the batch's positions. May work in place: x is spent."""

    def attention(
        self,
        layer: int,
        q: Act,
        k: Act,
        v: Act,
        *,
        n_head: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Act:
        """Store k and v in the cache of `layer`, then attend causally: [n, n_head * head_dim_v].

        `window` w limits a token to the last w positions, itself included; 0 is no limit.
        """

    def route(
        self,
        logits: Act,
        n_used: int,
        *,
        gate: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        bias: np.ndarray | None = None,
    ) -> tuple[Act, Act]:
        """Ids and weights [n, n_used] of the chosen experts; gate "softmax", "sigmoid" or "softmax_chosen"."""

    def experts(self, x: Act, ids: Act, weights: Act, bank: Experts, activation: str = "silu") -> Act:
        """Weighted sum of the chosen experts' feed-forward outputs: [n, n_embd]."""

    def gated_add(self, x: Act, gate: Act, base: Act) -> Act:
        """base + x * sigmoid(gate), gate [n, 1]."""

    def outputs(self, x: Act) -> Act:
        """Only the rows whose logits are wanted, the batch's last n_out: [n_out, width]."""

    def head(self, x: Act, weight: Weight) -> Act:
        """Logits [n_out, n_vocab], by the arithmetic of docs/numerics.md in every implementation."""


class Model(Protocol):
    """An architecture: built from a file's weights and spec, pure description, no state."""

    def forward(self, ops: Ops) -> Act:
        """Logits of one forward pass: `finish` of all layers of `start`."""

    def start(self, ops: Ops) -> Act:
        """The hidden state in front of the first layer, [n, n_embd]."""

    def run_layers(self, ops: Ops, x: Act, first: int, end: int) -> Act:
        """The hidden state behind layers [first, end); the last layer keeps only the rows whose logits are wanted."""

    def finish(self, ops: Ops, x: Act) -> Act:
        """Logits of the hidden state behind the last layer."""
