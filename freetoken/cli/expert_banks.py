"""Experts to measure kernels with: banks of random blocks in a mapped temporary file, or those of a model.

Called by `ft bench kernels` and `ft bench bw`. A bank is one layer's experts: gate and up [n_expert * ff, d], down
[n_expert * d, ff].
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from freetoken import quants
from freetoken.errors import UnsupportedModelError
from freetoken.gguf import ModelFile, Tensor
from freetoken.quants import GgmlType

__all__ = ["N_USED", "RANDOM_TYPES", "ExpertBank", "model_banks", "random_bank", "random_blocks"]

N_USED = 8
"""Experts of one step, as in Qwen3-30B-A3B; a model's bank with fewer takes all."""
D_MODEL = 2048
SEED = 3

_FACTORS: dict[GgmlType, tuple[int, ...]] = {
    **dict.fromkeys((GgmlType.Q4_K, GgmlType.Q5_K, GgmlType.Q4_1, GgmlType.Q5_1), (0, 2)),
    **dict.fromkeys((GgmlType.Q8_0, GgmlType.Q4_0, GgmlType.Q5_0, GgmlType.IQ4_XS, GgmlType.IQ4_NL), (0,)),
    **dict.fromkeys((GgmlType.IQ3_S, GgmlType.IQ3_XXS, GgmlType.IQ2_XXS, GgmlType.IQ2_XS, GgmlType.IQ2_S), (0,)),
    **{GgmlType.Q6_K: (208,), GgmlType.Q3_K: (108,), GgmlType.Q2_K: (80, 82), GgmlType.IQ1_S: (0,), GgmlType.MXFP4: ()},
}
"""Where a block's fp16 factors stand; the rest of a block may be anything (MXFP4: its exponent comes first)."""
_FLOATS = (GgmlType.F32, GgmlType.F16, GgmlType.BF16)

RANDOM_TYPES: tuple[GgmlType, ...] = (*_FACTORS, *_FLOATS)
"""Types that random blocks can be made of."""


@dataclass(frozen=True)
class ExpertBank:
    """One layer's experts in a mapped file; tensors are uint8 [rows, row_bytes], or of an FTW file [n_expert, rows of
    one, row_bytes] with gaps between experts."""

    types: tuple[int, int, int]
    n_expert: int
    d: int
    ff: int
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @property
    def tensors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.gate, self.up, self.down

    @property
    def pieces(self) -> list[tuple[np.ndarray, ...]]:
        """For each tensor all its rows, uint8 [rows, row_bytes] without gaps."""
        return [tuple(tensor) if tensor.ndim == 3 else (tensor,) for tensor in self.tensors]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def expert_bytes(self) -> int:
        return self.n_bytes // self.n_expert

    @property
    def type_name(self) -> str:
        """One name, or those of gate, up and down where they differ."""
        names = [quants.type_name(t) for t in self.types]
        return names[0] if len(set(names)) == 1 else "/".join(names)


@contextmanager
def random_bank(type_id: int, expert_mib: float, min_bytes: int) -> Iterator[ExpertBank]:
    """A bank of about the given expert size in a temporary file of at least min_bytes, which goes at the end."""
    row_d = quants.row_bytes(type_id, D_MODEL)
    step = max(32, quants.TYPES[type_id].block_size)
    ff = step * max(1, round(expert_mib * 2**20 / (3 * row_d * step)))
    matrix = ff * row_d
    n_expert = N_USED * max(1, -(-min_bytes // (3 * matrix * N_USED)))
    blocks = random_blocks(type_id, N_USED * matrix)
    with tempfile.NamedTemporaryFile(prefix="freetoken-", suffix=".experts") as file:
        for _ in range(3 * n_expert // N_USED):
            file.write(blocks.data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(mapped, np.uint8).reshape(3, -1)
        row_ff = quants.row_bytes(type_id, ff)
        gate, up, down = data[0].reshape(-1, row_d), data[1].reshape(-1, row_d), data[2].reshape(-1, row_ff)
        yield ExpertBank((type_id,) * 3, n_expert, D_MODEL, ff, gate, up, down)


def random_blocks(type_id: int, n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] of random blocks with factors as files have them."""
    rng = np.random.default_rng(SEED)
    if type_id in _FLOATS:
        values = rng.standard_normal(n_bytes // quants.TYPES[type_id].block_bytes, np.float32) * np.float32(0.02)
        if type_id == GgmlType.F16:
            values = values.astype(np.float16)
        elif type_id == GgmlType.BF16:
            values = (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.view(np.uint8)
    blocks = rng.integers(
        0, 256, (n_bytes // quants.TYPES[type_id].block_bytes, quants.TYPES[type_id].block_bytes), np.uint8
    )
    for offset in _FACTORS[GgmlType(type_id)]:
        factors = rng.uniform(0.001, 0.01, len(blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = factors.view(np.uint8).reshape(-1, 2)
    if type_id == GgmlType.MXFP4:
        blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return blocks.reshape(-1)


def model_banks(model: ModelFile) -> list[ExpertBank]:
    """The banks of a model's layers, in order. Raises UnsupportedModelError where it has none."""
    banks = []
    for name, gate in model.tensors.items():
        if not name.endswith(".ffn_gate_exps.weight"):
            continue
        up = model.tensors.get(name.replace("_gate_", "_up_"))
        down = model.tensors.get(name.replace("_gate_", "_down_"))
        if up is not None and down is not None and _fit(gate, up, down):
            d, ff, n_expert = gate.shape
            types = (gate.type, up.type, down.type)
            banks.append(ExpertBank(types, n_expert, d, ff, gate.data, up.data, down.data))
    if not banks:
        where: Path = model.shards[0].path
        raise UnsupportedModelError(f"{where}: no layer with experts in gate, up and down banks: measure without -m")
    return banks


def _fit(gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether three tensors are the matrices of the same experts."""
    if len(gate.shape) != 3 or up.shape != gate.shape:
        return False
    d, ff, n_expert = gate.shape
    return down.shape == (ff, d, n_expert)
