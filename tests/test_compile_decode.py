"""The kernels between the products of a decode step compile without a GPU: full size, none fused or approximated."""

from __future__ import annotations

import re
from typing import Any

import pytest
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel

FLOATS, INTS, HALVES = "*fp32", "*i32", "*fp16"
ACTIVATION = {"q": "*i8", "dx": FLOATS, "sums": INTS}
NO_SECOND = {"q2": None, "dx2": None, "sums2": None}
SHAPE = {"N_HEAD": 32, "N_KV": 4, "DIM": 128, "DIM_V": 128}
RECORDS = {"WIDTH": 256, "MAX_SPLITS": 16, "WINDOW": 0, "CLS": 256, "PLANES": 2}

Case = tuple[str, str, dict[str, str], dict[str, Any], int]
"""Module, kernel, types of arguments, constants, warps."""

CASES: dict[str, Case] = {
    "rows": (
        "norm",
        "combine_rows_kernel",
        dict.fromkeys(("source", "weights", "shared", "gate", "post", "residual", "h", "norm", "y"), FLOATS)
        | ACTIVATION
        | {"post_eps": "fp32", "eps": "fp32"},
        NO_SECOND | {"N": 2048, "BLOCK": 2048, "K": 8, "CLS": 256, "CLS2": 0, "PLANES": 2},
        8,
    ),
    "rope": (
        "rope",
        "rotate_and_store_kernel",
        dict.fromkeys(("q", "k", "v", "q_norm", "k_norm", "q_out", "angles"), FLOATS)
        | {"k_pages": HALVES, "v_pages": HALVES, "positions": INTS, "table": INTS, "angle_rows": INTS}
        | {"q_eps": "fp32", "k_eps": "fp32"},
        dict.fromkeys(("q_bias", "k_bias", "v_bias"))
        | SHAPE
        | {"Q_STRIDE": 5120, "K_STRIDE": 5120, "V_STRIDE": 5120, "MAX_PAGES": 64, "ROT": 128}
        | {"BLOCK": 64, "TAIL": 1, "BLOCK_V": 128, "IS_NEOX": True, "Q_BY_HEAD": True, "K_BY_HEAD": True},
        1,
    ),
    "attention": (
        "attention",
        "attend_split_kernel",
        {"query": FLOATS, "k_pages": HALVES, "v_pages": HALVES, "o": FLOATS, "ml": FLOATS, "positions": INTS}
        | {"table": INTS, "scale": "fp32", "cap": "fp32", "arrived": INTS, "sinks": FLOATS, "y": FLOATS}
        | ACTIVATION,
        SHAPE | RECORDS | {"HEADS": 2, "BLOCK_V": 128, "MAX_PAGES": 64, "HAS_CAP": True, "UNROLL": 64, "MERGED": 2},
        4,
    ),
    "splits": (
        "attention",
        "merge_splits_kernel",
        {"o": FLOATS, "ml": FLOATS, "positions": INTS, "y": FLOATS} | ACTIVATION,
        {"sinks": None, "N_HEAD": 32, "DIM_V": 96, "BLOCK": 256} | RECORDS,
        4,
    ),
    "glu": (
        "glu",
        "glu_kernel",
        {"gate": FLOATS, "up": FLOATS} | ACTIVATION,
        {"h": None, "N": 768, "GATE_STRIDE": 1536, "UP_STRIDE": 1536, "ACTIVATION": 0, "BLOCK": 256}
        | {"CLS": 256, "PLANES": 2},
        2,
    ),
    "router": (
        "router",
        "route_kernel",
        {"logits": FLOATS, "ids": INTS, "weights": FLOATS, "scale": "fp32"},
        {"bias": None, "N": 128, "BLOCK": 128, "USED": 8, "USED_BLOCK": 8, "GATE": 0, "NORMALISE": True}
        | {"HAS_SCALE": False},
        1,
    ),
    "places": (
        "handover",
        "clear_places_kernel",
        {"flags": "*i64", "first": "i32", "count": "i32"},
        {"WORDS": 16, "BLOCK": 64},
        2,
    ),
    "hand over": (
        "handover",
        "hand_over_kernel",
        {"x": FLOATS, "ids": INTS, "routes": INTS, "host_x": FLOATS, "host_ids": INTS, "n_expert": "i32"}
        | {"n_ids": "i32"},
        {"N": 2048, "BLOCK": 2048, "N_IDS": 64},
        8,
    ),
    "take rows": (
        "handover",
        "take_rows_kernel",
        {"ids": INTS, "routes": INTS, "host_rows": FLOATS, "rows": FLOATS, "n_expert": "i32"},
        {"N": 2048, "BLOCK": 1024},
        8,
    ),
    "embedding": (
        "embed",
        "row_starts_kernel",
        {"tokens": INTS, "starts": "*i64", "per_row": "i32", "rows": "i32", "n": "i32"},
        {"BLOCK": 8},
        4,
    ),
    "scale": (
        "scale",
        "scale_kernel",
        {"x": FLOATS, "y": FLOATS, "factor": "fp32", "cap": "fp32", "n": "i32"},
        {"HAS_CAP": True, "BLOCK": 1024},
        4,
    ),
}


def check(case: Case, archs: tuple[int, ...]) -> None:
    module, name, signature, constants, warps = case
    pointers = tuple(n for n, t in signature.items() if t.startswith("*"))
    ptx = compile_kernel(
        f"freetoken.kernels.{module}", name, signature, constants, divisible=pointers, warps=warps, archs=archs
    )
    inexact = re.findall(r"\b(?:fma|div\.full|div\.approx|rcp|sqrt\.approx|ex2)\S*|\.ftz\S*", ptx)
    assert not inexact, inexact


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compiles(case: Case) -> None:
    check(case, QUICK[:1])


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_compiles_for_all(case: Case) -> None:
    check(case, ARCHITECTURES)
