"""Sizes of known models without their files, from their published configurations, for a mix of types.

What is not published, or we do not know, stands in `Geometry.unknown` and in every plan that is made from it. Not all
of these architectures run here yet: a plan says what memory they would take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from freetoken.errors import OptionError
from freetoken.forecast.sizes import Sizes
from freetoken.kernels import layout
from freetoken.plan import DenseBytes
from freetoken.quants import GgmlType, row_bytes
from freetoken.spec import ModelSpec, Rope

__all__ = ["GEOMETRIES", "Geometry", "geometry_named", "sizes_of_geometry", "slot_sizes_of_geometry"]

Matrix = tuple[str, int, int]
"""Role as in GGUF, rows, columns."""
_SLACK = 1024
"""As `plan.dense_bytes` has it, for each tensor."""
_INSTEAD = {GgmlType.Q4_K: GgmlType.Q5_0, GgmlType.Q5_K: GgmlType.Q5_1, GgmlType.Q6_K: GgmlType.Q8_0}
"""What llama.cpp's quantisation takes where rows are no whole blocks of 256."""


@dataclass(frozen=True)
class Geometry:
    """A mixture-of-experts model. Layers before `n_dense_layers` have a plain feed-forward part of `n_ff` instead;
    `full_every` > 1: only every so many layers attend, the others are gated delta nets with a state."""

    name: str
    n_layer: int
    n_embd: int
    n_head: int
    n_kv: int
    head_dim: int
    n_vocab: int
    n_ctx: int
    n_expert: int
    n_used: int
    n_ff_exp: int
    mix: str
    """The types that its files usually have."""
    n_ff_shexp: int = 0
    n_ff: int = 0
    n_dense_layers: int = 0
    full_every: int = 1
    is_query_gated: bool = False
    n_window: int = 0
    """Of every other layer."""
    rest_params: int = 0
    """Parameters of layers of whose matrices we know only the sum."""
    unknown: tuple[str, ...] = ()


GEOMETRIES: tuple[Geometry, ...] = (
    Geometry("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 151936, 40960, 128, 8, 768, "Q4_K_M"),
    Geometry(
        *("Qwen3.6-35B-A3B", 40, 2048, 16, 2, 256, 248320, 262144, 256, 8, 512, "Q4_K_M", 512),
        full_every=4,
        is_query_gated=True,
        unknown=("widths of its gated delta nets: taken to be those of Qwen3-Next (16 and 32 heads of 128)",),
    ),
    Geometry("gpt-oss-120b", 36, 2880, 64, 8, 64, 201088, 131072, 128, 4, 2880, "MXFP4", n_window=128),
    Geometry(
        *("GLM-4.5-Air", 46, 4096, 96, 8, 128, 151552, 131072, 128, 8, 1408, "Q4_K_M", 1408, 10944, 1),
    ),
    Geometry(
        *("DeepSeek-V4-Flash", 43, 4096, 0, 0, 0, 129280, 1048576, 256, 6, 2048, "MXFP4", 2048),
        rest_params=4_830_000_000,
        unknown=(
            "how its keys and values are compressed: the context is not counted",
            "attention's matrices, but for their sum: 284 B parameters less experts, embedding and head",
            "an expert's width and the hidden size, but for what 284 B parameters in 43 layers of 256 experts leave",
        ),
    ),
)


def geometry_named(name: str) -> Geometry:
    """Upper and lower case alike. Raises OptionError with the names that there are."""
    for geometry in GEOMETRIES:
        if geometry.name.lower() == name.lower():
            return geometry
    raise OptionError(f"--geometry {name!r} is unknown: {', '.join(g.name for g in GEOMETRIES)}")


def sizes_of_geometry(geometry: Geometry, mix: str = "") -> Sizes:
    """Bytes of its parts in a mix of types, its usual one by default. Raises OptionError for one that does not fit."""
    g, mix = geometry, mix or geometry.mix
    experts = tuple(_bytes_of(g, i, mix, _experts(g, i)) for i in range(g.n_layer))
    dense = tuple(_bytes_of(g, i, mix, _dense(g, i)) + _rest(g, mix) + _state(g, i) for i in range(g.n_layer))
    table = _bytes_of(g, 0, mix, [("token_embd", g.n_vocab, g.n_embd)])
    head = _bytes_of(g, 0, mix, [("output", g.n_vocab, g.n_embd)])
    return Sizes(f"{g.name} as {mix}", spec_of(g), experts, DenseBytes(dense, table + head), table, g.unknown)


def slot_sizes_of_geometry(geometry: Geometry, mix: str = "") -> list[int]:
    """Bytes of one expert's slot in each layer, as `experts.memory.slot_sizes` has them."""
    g, mix = geometry, mix or geometry.mix
    return [
        sum(layout.slot_bytes(_type(g, i, mix, role, cols), rows, cols) for role, rows, cols in _experts(g, i))
        for i in range(g.n_layer)
    ]


def spec_of(g: Geometry) -> ModelSpec:
    """As much of a spec as a plan asks."""
    n = g.n_layer
    return ModelSpec(
        architecture="",
        name=g.name,
        n_layer=n,
        n_embd=g.n_embd,
        n_head=(g.n_head,) * n,
        n_kv=tuple(g.n_kv if _is_full(g, i) else 0 for i in range(n)),
        head_dim_k=g.head_dim,
        head_dim_v=g.head_dim,
        n_ff=(g.n_ff,) * n,
        n_ctx_train=g.n_ctx,
        n_vocab=g.n_vocab,
        eps=1e-6,
        attn_scale=1.0,
        rope=Rope(g.head_dim, True, 1e6, 1e4, "none", 1.0, g.n_ctx, 1.0, 0.0),
        window=g.n_window,
        is_sliding=tuple(bool(g.n_window) and i % 2 == 0 for i in range(n)),
        n_expert=g.n_expert,
        n_expert_used=g.n_used,
        n_ff_exp=g.n_ff_exp,
        n_ff_shexp=g.n_ff_shexp,
    )


def _is_full(g: Geometry, layer: int) -> bool:
    return (layer + 1) % g.full_every == 0


def _experts(g: Geometry, layer: int) -> list[Matrix]:
    """The matrices of one expert."""
    if layer < g.n_dense_layers:
        return []
    wide = [(f"ffn_{role}_exps", g.n_ff_exp, g.n_embd) for role in ("gate", "up")]
    return [*wide, ("ffn_down_exps", g.n_embd, g.n_ff_exp)]


def _dense(g: Geometry, layer: int) -> Iterator[Matrix]:
    d = g.n_embd
    if not _is_full(g, layer):  # queries and keys of 16 heads, values and gates of 32
        yield from (("attn_qkv", 2 * 2048 + 2 * 4096, d), ("attn_output", d, 4096))
    elif g.n_head:
        n_q, n_k = g.n_head * g.head_dim, g.n_kv * g.head_dim
        yield from (("attn_q", n_q * (1 + g.is_query_gated), d), ("attn_k", n_k, d), ("attn_v", n_k, d))
        yield ("attn_output", d, n_q)
    if layer < g.n_dense_layers:
        yield from (("ffn_gate", g.n_ff, d), ("ffn_up", g.n_ff, d), ("ffn_down", d, g.n_ff))
        return
    yield ("ffn_gate_inp", g.n_expert, d)
    if g.n_ff_shexp:
        yield from (("ffn_gate_shexp", g.n_ff_shexp, d), ("ffn_up_shexp", g.n_ff_shexp, d))
        yield ("ffn_down_shexp", d, g.n_ff_shexp)


def _rest(g: Geometry, mix: str) -> int:
    return row_bytes(_named(_parts(mix)[0]), g.rest_params // g.n_layer // 256 * 256)


def _state(g: Geometry, layer: int) -> int:
    """Of a gated delta net, fp32, for four sequences."""
    return 0 if _is_full(g, layer) else 4 * 32 * 128 * 128 * 4


def _bytes_of(g: Geometry, layer: int, mix: str, matrices: list[Matrix] | Iterator[Matrix]) -> int:
    total = 0
    for role, rows, cols in matrices:
        try:
            slack = 0 if role.endswith("_exps") else _SLACK
            total += rows * row_bytes(_type(g, layer, mix, role, cols), cols) + slack
        except ValueError as error:
            raise OptionError(f"--mix {mix}: {role} of {g.name}: {error}") from None
    return total


def _parts(mix: str) -> tuple[str, str]:
    """Types of dense matrices and of experts."""
    if mix == "MXFP4":
        return "Q8_0", "MXFP4"
    base = re.sub(r"(Q\d_K)_[SM]$", r"\1", mix)
    return base, base


def _type(g: Geometry, layer: int, mix: str, role: str, cols: int) -> GgmlType:
    kind = _wished_type(g, layer, mix, role)
    return _INSTEAD.get(kind, kind) if cols % 256 else kind


def _wished_type(g: Geometry, layer: int, mix: str, role: str) -> GgmlType:
    dense, experts = _parts(mix)
    if role == "ffn_gate_inp":
        return GgmlType.F32
    if mix == "Q4_K_M":
        n = g.n_layer
        is_more = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2
        if role == "output" or (is_more and role.startswith(("attn_v", "ffn_down"))):
            return GgmlType.Q6_K
    return _named(experts if role.endswith("_exps") else dense)


def _named(name: str) -> GgmlType:
    try:
        return GgmlType[name]
    except KeyError:
        raise OptionError(f"--mix {name!r}: expected Q4_K_M, MXFP4 (with Q8_0 for all but experts) or a type") from None
