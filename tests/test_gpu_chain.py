"""Draws on the GPU against the host's sampler, with the same random numbers, under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu_compile import ARCHITECTURES, QUICK, compile_kernel
from kernel_bits import DEVICE, tensor
from test_sampler import Words

from freetoken.gpu.chain import DeviceParams, device_chain
from freetoken.kernels.bias import N_BIASES, add_biases
from freetoken.kernels.checks import next_power_of_2
from freetoken.kernels.sampler import (
    BINS,
    BINS_A_UNIT,
    GROUP,
    LIST,
    MAX_TOP_K,
    N_FIELDS,
    PART,
    SMALL_VOCABULARY,
    TILE,
    Mode,
    SampleRoom,
    sample,
)
from freetoken.request import SamplingParams
from freetoken.sampler import Sampler

DEFAULTS = SamplingParams(seed=1)
BORDER = 2e-6
"""So near a border may another token be drawn: the two functions exp differ in the last bits."""


class Device:
    """`sample` with its buffers, looked at after each call: everything must be ready for the next."""

    def __init__(self, n_vocab: int, n: int = 8) -> None:
        self.room = SampleRoom.empty(n, n_vocab, DEVICE)

    def __call__(self, logits: np.ndarray, rows: list[DeviceParams], numbers: list[float]) -> list[tuple[int, int]]:
        """Token and status of each row."""
        n = len(logits)
        params = np.zeros((8, N_FIELDS), np.int32)
        biases = np.zeros((8, 2, N_BIASES), np.int32)
        for i in range(n):
            rows[i].write(params[i])
            rows[i].write_biases(biases[i])
        tokens, status = torch.full((2, n), -1, dtype=torch.int32)
        with np.errstate(over="ignore"):  # as the GPU does
            biased = tensor(logits)
            add_biases(biased, tensor(biases))
            sample(biased, tensor(params), tensor(np.array(numbers)), tokens, status, self.room)
        assert (self.room.best == -(2**63)).all() and not self.room.counts.any()
        assert not self.room.in_bins.any()
        return list(zip(tokens.tolist(), status.tolist(), strict=True))


class Fixed(Sampler):
    """A sampler whose next random number is given."""

    def __init__(self, params: SamplingParams, n_vocab: int, number: float) -> None:
        super().__init__(params, Words(n_vocab))
        self._ahead.append(number)


def host(params: SamplingParams, logits: np.ndarray, number: float) -> int:
    return Fixed(params, len(logits), number).sample(logits).token


def is_near(params: SamplingParams, logits: np.ndarray, number: float, token: int) -> bool:
    """Whether the host draws this token from a random number or a top_p right beside these."""
    shifts = (0.0, -BORDER, BORDER)
    for p in shifts:
        changed = replace(params, top_p=params.top_p + p) if params.top_p < 1 else params
        for u in shifts:
            if host(changed, logits, min(max(number + u, 0.0), 1 - 2**-53)) == token:
                return True
    return False


def compare(device: Device, logits: np.ndarray, params: list[SamplingParams], numbers: list[float]) -> int:
    """Number of rows in which host and device differ; each must be a matter of a border."""
    n_vocab = logits.shape[1]
    rows = [device_chain(Sampler(p, Words(n_vocab))) for p in params]
    assert all(rows), params
    n_other = 0
    for i, (token, status) in enumerate(device(logits, [r for r in rows if r], numbers)):
        assert status == 0
        if token != host(params[i], logits[i], numbers[i]):
            n_other += 1
            assert is_near(params[i], logits[i], numbers[i], token), (params[i], numbers[i], token)
    return n_other


def random_params(rng: np.random.Generator, mode: Mode) -> SamplingParams:
    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return replace(
        DEFAULTS,
        top_k=one_of(1, 2, 40, int(rng.integers(1, 257))) if mode == Mode.LIST else 0,
        top_p=one_of(0.95, 1.0, 0.0, float(rng.random())) if mode == Mode.LIST else 1.0,
        min_p=one_of(0.05, 0.0, float(rng.random()), 1.0, 1e-50),
        min_keep=one_of(0, 1, 5, 1000) if mode == Mode.LIST else one_of(0, 1),
        temperature=one_of(0.0, 0.8, 1.0, 5.0, 1e-3, 1e-38, 1e30, float(rng.random() * 2)),
    )


def random_logits(rng: np.random.Generator, n: int, n_vocab: int) -> np.ndarray:
    logits = (rng.standard_normal((n, n_vocab)) * rng.choice([0.5, 4.0, 20.0], (n, 1))).astype(np.float32)
    for row in logits:
        kind = rng.integers(5)
        if kind == 0:
            row[:] = np.round(row)  # ties
        if kind == 1:
            row[rng.random(n_vocab) < 0.9] = -np.inf
        if kind == 2:
            row -= np.float32(100)
    return logits


@pytest.mark.parametrize("n_vocab", [300, 1024, 5000])
def test_draws_equal_the_hosts(n_vocab: int) -> None:
    rng = np.random.default_rng(n_vocab)
    device = Device(n_vocab)
    n_other = 0
    for _ in range(8):
        params = [random_params(rng, m) for m in (Mode.LIST, Mode.ALL) for _ in range(4)]
        logits = random_logits(rng, 8, n_vocab)
        for row in logits[:4]:  # so few candidates that they can be listed
            if n_vocab > LIST and (row == np.round(row)).all():
                row += np.float32(1e-4) * rng.random(n_vocab).astype(np.float32)
        n_other += compare(device, logits, params, rng.random(8).tolist())
    assert n_other <= 3


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_first_and_last_of_the_candidates(number: float) -> None:
    n_vocab = 2500
    logits = np.full((4, n_vocab), -np.inf, np.float32)
    logits[:, [1024, 3, 2499]] = 0.0, -0.0, 0.0
    listed = replace(DEFAULTS, min_p=0.0, top_p=1.0)
    rows = [listed, replace(listed, top_k=0), replace(listed, top_k=2), replace(listed, temperature=0.0)]
    assert compare(Device(n_vocab), logits, rows, [number] * 4) == 0


def test_one_token_is_the_whole_vocabulary() -> None:
    logits = np.array([[-3.0], [-3.0], [0.0]], np.float32)
    params = [DEFAULTS, replace(DEFAULTS, top_k=0, top_p=1.0), replace(DEFAULTS, temperature=1e-60)]
    assert compare(Device(1), logits, params, [0.9] * 3) == 0


def test_equal_logits_are_drawn_evenly() -> None:
    n_vocab = 600
    params = replace(DEFAULTS, top_k=200, top_p=1.0)
    device = Device(n_vocab)
    logits = np.zeros((8, n_vocab), np.float32)
    numbers = [(i + 0.5) / 200 for i in range(0, 200, 25)]
    assert compare(device, logits, [params] * 8, numbers) == 0


@pytest.mark.parametrize("params", [DEFAULTS, replace(DEFAULTS, temperature=0), replace(DEFAULTS, top_k=0, top_p=1)])
def test_rows_left_to_the_host(params: SamplingParams) -> None:
    n_vocab = 3000
    logits = np.random.default_rng(1).standard_normal((6, n_vocab)).astype(np.float32)
    logits[1, 2700] = np.nan
    logits[2, 5] = np.inf
    logits[3] = -np.inf
    logits[4] = 7.0
    row = device_chain(Sampler(params, Words(n_vocab)))
    assert row
    device = Device(n_vocab)
    for _ in range(2):
        found = device(logits, [row] * 5 + [DeviceParams(Mode.HOST)], [0.5] * 6)
        too_many = row.mode == Mode.LIST  # 3000 equal logits do not go into a list
        assert [status for _, status in found] == [0, 1, 1, 1, int(too_many), 1]
        assert all(0 <= token < n_vocab for token, _ in found)


def test_the_list_holds_what_many_groups_hide() -> None:
    """All candidates stand side by side, so the groups met from the top are too few until far below."""
    n_vocab = 6000
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((2, n_vocab)).astype(np.float32)
    logits[:, 100:500] += np.float32(30)
    params = [replace(DEFAULTS, top_k=k, top_p=1.0, min_p=0.0, temperature=3.0) for k in (256, 200)]
    assert compare(Device(n_vocab), logits, params, [0.97, 0.999]) == 0


def test_a_large_vocabulary() -> None:
    n_vocab = 70_001
    logits = (np.random.default_rng(5).standard_normal((2, n_vocab)) * 3).astype(np.float32)
    params = [replace(DEFAULTS, temperature=2.0), replace(DEFAULTS, top_k=0, top_p=1.0, min_p=0.0, temperature=0.7)]
    assert compare(Device(n_vocab), logits, params, [0.999, 0.98]) == 0


@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_logits_beyond_the_bins(shift: float) -> None:
    """Those all fall into one bin: few of them are listed, many left to the host."""
    logits = np.random.default_rng(6).standard_normal((1, 5000)).astype(np.float32) + np.float32(shift)
    few = np.where(np.arange(5000) % 10 == 3, logits, np.float32(-np.inf))
    row = device_chain(Sampler(DEFAULTS, Words(5000)))
    assert row
    assert Device(5000)(logits, [row], [0.5])[0][1] == 1
    assert compare(Device(5000), few, [DEFAULTS], [0.5]) == 0


def test_host_and_device_share_one_stream_of_numbers() -> None:
    n_vocab = 700
    rng = np.random.default_rng(3)
    params = [DEFAULTS, replace(DEFAULTS, top_k=0, top_p=1.0), replace(DEFAULTS, temperature=0.0)]
    alone = [Sampler(p, Words(n_vocab)) for p in params]
    mixed = [Sampler(p, Words(n_vocab)) for p in params]
    rows = [device_chain(s) for s in mixed]
    device = Device(n_vocab)
    for _ in range(40):
        logits = (rng.standard_normal((3, n_vocab)) * 3).astype(np.float32)
        logits[:, :2] = logits.max() + 1  # two likely tokens, so numbers out of step would show
        drawn = device(logits, [r for r in rows if r], [s.draw_ahead() for s in mixed])
        for i, (token, status) in enumerate(drawn):
            assert status == 0
            mixed[i].draw_ahead(int(rng.integers(3)))  # a step that ran ahead asks for later ones
            if rng.random() < 0.5:
                token = mixed[i].sample(logits[i]).token
            else:
                mixed[i].take_ahead()
            assert token == alone[i].sample(logits[i]).token


COVERED: list[tuple[dict[str, Any], Mode | None]] = [
    ({}, Mode.LIST),
    ({"top_k": 256, "top_p": 0.1, "min_keep": 7}, Mode.LIST),
    ({"top_k": 257}, None),
    ({"top_k": 0}, None),
    ({"top_k": 0, "top_p": 1.0}, Mode.ALL),
    ({"top_k": -1, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}, Mode.ALL),
    ({"top_k": 0, "top_p": 1.0, "min_keep": 2}, None),
    ({"top_k": 0, "top_p": 1.0, "min_p": 1.5}, None),
    ({"temperature": 0.0}, Mode.GREEDY),
    ({"temperature": -1.0, "top_k": 0, "top_n_sigma": 2.0, "mirostat": 2}, Mode.GREEDY),
    ({"temperature": 0.0, "typical_p": 0.5}, None),
    ({"temperature": 0.0, "repeat_penalty": 1.1}, None),
    ({"temperature": 0.0, "xtc_probability": 0.5, "xtc_threshold": 0.9}, Mode.LIST),
    ({"temperature": 0.0, "samplers": ("top_k",)}, Mode.LIST),
    ({"temperature": 1e300}, None),
    ({"repeat_penalty": 1.1}, None),
    ({"dry_multiplier": 0.5}, None),
    ({"typical_p": 0.5}, None),
    ({"top_n_sigma": 1.0}, None),
    ({"xtc_probability": 0.5}, None),
    ({"mirostat": 1}, None),
    ({"dynatemp_range": 0.5}, None),
    ({"n_probs": 1}, None),
    ({"ignore_eos": True}, Mode.LIST),
    ({"logit_bias": {3: 1.0}, "temperature": 0.0}, Mode.GREEDY),
    ({"logit_bias": dict.fromkeys(range(N_BIASES), 1.0)}, Mode.LIST),
    ({"logit_bias": dict.fromkeys(range(N_BIASES + 1), 1.0)}, None),
    ({"samplers": ("temperature", "top_k")}, None),
    ({"samplers": ("top_k", "top_k")}, None),
    ({"samplers": ("min_p", "temperature")}, Mode.ALL),
]


@pytest.mark.parametrize("case", COVERED, ids=str)
def test_what_is_covered(case: tuple[dict[str, Any], Mode | None]) -> None:
    row = device_chain(Sampler(replace(DEFAULTS, **case[0]), Words()))
    assert (row and row.mode) == case[1]


def test_biases_and_bans_are_the_hosts() -> None:
    rng = np.random.default_rng(3)
    device = Device(300)
    for _ in range(6):
        logits = random_logits(rng, 8, 300)
        params = [random_params(rng, m) for m in (Mode.LIST, Mode.ALL) for _ in range(4)]
        for i, p in enumerate(params):
            tokens = rng.choice(300, 1 + 4 * i, replace=False).tolist()
            values = rng.choice([-np.inf, 3.0, -2.5, 40.0], len(tokens)).tolist()
            params[i] = replace(p, logit_bias=dict(zip(tokens, values, strict=True)))
        compare(device, logits, params, rng.random(8).tolist())


def test_when_every_token_is_banned_the_host_says_so() -> None:
    params = replace(DEFAULTS, logit_bias=dict.fromkeys(range(20), -np.inf))
    row = device_chain(Sampler(params, Words(20)))
    assert row is not None
    assert Device(20)(np.zeros((1, 20), np.float32), [row], [0.5])[0][1] == 1


def check_compiles(n_vocab: int, archs: tuple[int, ...]) -> None:
    types = {"logits": "*fp32", "uniforms": "*fp64", "sums": "*fp64"} | dict.fromkeys(
        ("best", "top", "listed", "ordered"), "*i64"
    )
    n_parts = -(-n_vocab // PART)
    sizes: dict[str, object] = {"N": n_vocab, "N_PARTS": n_parts, "PART": PART}
    sizes |= {"BINS": BINS, "BINS_A_UNIT": BINS_A_UNIT}
    first = ("logits", "settings", "best", "arrived", "top", "reached", "counts", "tokens", "status")
    of_groups = {"GROUP": 1 if n_vocab <= SMALL_VOCABULARY else GROUP}
    second = ("logits", "settings", "uniforms", "top", "reached", "arrived", "n_listed", "listed", "ordered", "sums")
    of_lists = {"PARTS_BLOCK": next_power_of_2(n_parts), "LIST": LIST, "SORTED": MAX_TOP_K, "TILE": TILE}
    for name, pointers, more in (
        ("top_kernel", first, of_groups),
        ("choose_kernel", (*second, "tokens", "status"), of_lists),
    ):
        signature = {p: types.get(p, "*i32") for p in pointers}
        compile_kernel("freetoken.kernels.sampler", name, signature, {**sizes, **more}, warps=8, archs=archs)
    signature = {"logits": "*fp32", "biases": "*i32", "n_vocab": "i32"}
    compile_kernel("freetoken.kernels.bias", "add_biases_kernel", signature, {"SIZE": N_BIASES}, warps=1, archs=archs)


def test_kernels_compile_for_gpus() -> None:
    check_compiles(151936, QUICK)


@pytest.mark.compile
def test_kernels_compile_for_every_gpu() -> None:
    for n_vocab in (3000, 128256, 262144):
        check_compiles(n_vocab, ARCHITECTURES)
