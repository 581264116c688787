"""Each sampler and whole chains against llama.cpp's own (llama_sampler_*), draws, greedy, seeds and bad parameters."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter

from freetoken.errors import EngineError, RequestError
from freetoken.request import SamplingParams
from freetoken.sampler import Sampler, dry
from freetoken.sampler.candidates import Candidates
from freetoken.tokenizer import Tokenizer

N_VOCAB = 1500
OFF = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_last_n=64, n_probs=10**6, post_sampling_probs=True, seed=1
)
"""A chain that changes nothing and reports every candidate."""


class Words:
    """A vocabulary without llama.cpp: token t is written as its number and a space, tokens 10 to 12 hold breakers."""

    def __init__(
        self, n_vocab: int = N_VOCAB, eog: frozenset[int] = frozenset({2}), banned: tuple[int, ...] = ()
    ) -> None:
        self.n_vocab = n_vocab
        self.eog_tokens = eog
        self.suppressed_tokens = banned

    def piece(self, token: int, special: bool) -> bytes:
        return {10: b"\n", 11: b'x"y', 12: b"a:"}.get(token, f"w{token} ".encode())

    def encode(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        return [20]


def logits_of(seed: int, n: int = N_VOCAB, spread: float = 4.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def ours(params: SamplingParams, logits: np.ndarray, history: list[int]) -> dict[int, float]:
    """Token -> probability of what the chain leaves."""
    sampled = Sampler(params, Words(len(logits)), history).sample(logits)
    return {t.token: math.exp(t.logprob) for t in sampled.top}


def theirs(p: SamplingParams, logits: np.ndarray, history: list[int], vocab: Any = None) -> dict[int, float]:
    """The same by llama.cpp's samplers in the order of `p.samplers`, as llama-server chains them."""
    n = len(logits)
    c = llama_cpp
    chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
    breakers = (ctypes.c_char_p * len(p.dry_sequence_breakers))(*(b.encode() for b in p.dry_sequence_breakers))
    everything = 4096
    last_n = everything if p.dry_penalty_last_n < 0 else p.dry_penalty_last_n
    make = {
        "penalties": lambda: c.llama_sampler_init_penalties(
            n,
            everything if p.repeat_last_n < 0 else p.repeat_last_n,
            p.repeat_penalty,
            p.frequency_penalty,
            p.presence_penalty,
        ),
        "dry": lambda: c.llama_sampler_init_dry(
            vocab, p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n, breakers, len(breakers)
        ),
        "top_n_sigma": lambda: c.llama_sampler_init_top_n_sigma(p.top_n_sigma),
        "top_k": lambda: c.llama_sampler_init_top_k(p.top_k),
        "typ_p": lambda: c.llama_sampler_init_typical(p.typical_p, p.min_keep),
        "top_p": lambda: c.llama_sampler_init_top_p(p.top_p, p.min_keep),
        "min_p": lambda: c.llama_sampler_init_min_p(p.min_p, p.min_keep),
        "xtc": lambda: c.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, 1),
        "temperature": lambda: c.llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent),
    }
    if p.logit_bias:
        biases = (c.llama_logit_bias * len(p.logit_bias))(*p.logit_bias.items())
        c.llama_sampler_chain_add(chain, c.llama_sampler_init_logit_bias(n, len(biases), biases))
    for name in p.samplers:
        if name != "dry" or vocab is not None:
            c.llama_sampler_chain_add(chain, make[name]())
    c.llama_sampler_chain_add(chain, c.llama_sampler_init_dist(1))
    for token in history:
        c.llama_sampler_accept(chain, token)
    data = (c.llama_token_data * n)(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    array = c.llama_token_data_array(data, n, -1, False)
    c.llama_sampler_apply(chain, ctypes.byref(array))
    left = {array.data[i].id: array.data[i].p for i in range(array.size) if array.data[i].p > 0}
    c.llama_sampler_free(chain)
    return left


def assert_same(got: dict[int, float], expected: dict[int, float]) -> None:
    assert got.keys() == expected.keys()
    for token, p in expected.items():
        assert got[token] == pytest.approx(p, abs=1e-5)


STEPS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 1200},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.995},
    {"top_p": 0.0},
    {"top_p": 0.1, "min_keep": 5},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.5, "min_keep": 7},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"typical_p": 0.1, "min_keep": 9},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "min_keep": N_VOCAB},
    {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"temperature": 0.0},
    {"temperature": -1.0},
    {"temperature": 0.8, "dynatemp_range": 0.5, "dynatemp_exponent": 1.5},
    {"temperature": 0.2, "dynatemp_range": 0.5},
    {"repeat_penalty": 1.3},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"repeat_penalty": 0.8, "frequency_penalty": 0.1, "presence_penalty": 0.2, "repeat_last_n": 3},
    {"repeat_penalty": 1.5, "repeat_last_n": 0},
    {"repeat_penalty": 1.5, "repeat_last_n": -1},
    {"logit_bias": {3: 5.0, 4: -math.inf, 7: -2.5}},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repeat_penalty": 1.1, "typical_p": 0.9, "top_n_sigma": 3.0},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 20, "samplers": ("temperature", "top_k", "penalties"), "repeat_penalty": 1.4},
    {"top_k": 5, "temperature": 0.5, "samplers": ("top_k",)},
    {"temperature": 0.6, "top_p": 0.8, "top_k": 50, "samplers": ("top_p", "temperature", "top_k", "min_p")},
]


@pytest.mark.parametrize("changes", STEPS, ids=lambda c: " ".join(f"{k}={v}" for k, v in c.items()) or "off")
def test_steps_and_chains_equal_llama_cpp(changes: dict[str, Any]) -> None:
    params = replace(OFF, **changes)
    for seed in range(4):
        logits = logits_of(seed, spread=(1.0, 4.0)[seed % 2])
        rng = np.random.default_rng(seed)
        history = [*rng.integers(0, N_VOCAB, 150).tolist(), *np.argsort(-logits)[:9].tolist() * 2]
        assert_same(ours(params, logits, history), theirs(params, logits, history))


@pytest.fixture(scope="module")
def dry_vocab(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("dry") / "v.gguf"
    words = [f"w{i}" for i in range(40)] + ["Ċ", 'x"y', "a:", "ab", "cd", "c", "d", "a", "b", "bc", "zab"]
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_merges(["a b", "c d"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer(path)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dry_allowed_length": 1},
        {"dry_allowed_length": 0},
        {"dry_penalty_last_n": 12},
        {"dry_penalty_last_n": 0},
        {"dry_base": 1.0},
        {"dry_base": 3.0, "dry_allowed_length": 4},
        {"dry_sequence_breakers": ()},
        {"dry_sequence_breakers": ("abcd", "\n")},
        {"dry_sequence_breakers": ("bcd",), "dry_allowed_length": 1},
    ],
    ids=str,
)
def test_dry_equals_llama_cpp(changes: dict[str, Any], dry_vocab: Tokenizer) -> None:
    params = replace(OFF, dry_multiplier=0.8, **changes)
    rng = np.random.default_rng(5)
    for trial in range(25):
        logits = logits_of(trial, dry_vocab.n_vocab, 1.0)
        alphabet = rng.choice(dry_vocab.n_vocab, size=int(rng.integers(1, 7)), replace=False)
        history = rng.choice(alphabet, size=int(rng.integers(0, 90))).tolist()
        if trial % 3 == 0:
            history = history * 3
        sampled = Sampler(params, dry_vocab, history).sample(logits)
        got = {t.token: math.exp(t.logprob) for t in sampled.top}
        assert dry_vocab._vocab is not None
        assert_same(got, theirs(params, logits, history, dry_vocab._vocab._vocab))


def test_dry_remembers_a_bounded_number_of_breakers(dry_vocab: Tokenizer) -> None:
    for first in range(0, 200, 10):
        breakers = tuple(f"break {n}" for n in range(first, first + 10))
        Sampler(replace(OFF, dry_multiplier=0.8, dry_sequence_breakers=breakers), dry_vocab)
    assert len(dry._FOUND[dry_vocab]) == dry._MAX_FOUND


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_cuts_as_llama_cpp(version: int) -> None:
    """The candidates that llama.cpp draws from, and how its bound moves with the same drawn token."""
    c = llama_cpp
    params = replace(OFF, mirostat=version, mirostat_tau=3.0, mirostat_eta=0.2, temperature=0.9)
    for seed in range(6):
        logits = logits_of(seed)
        make = c.llama_sampler_init_mirostat_v2 if version == 2 else c.llama_sampler_init_mirostat
        args = (7, 3.0, 0.2) if version == 2 else (N_VOCAB, 7, 3.0, 0.2, 100)
        chain = c.llama_sampler_chain_init(c.llama_sampler_chain_default_params())
        c.llama_sampler_chain_add(chain, c.llama_sampler_init_temp(0.9))
        c.llama_sampler_chain_add(chain, make(*args))
        data = (c.llama_token_data * N_VOCAB)(*((i, float(x), 0.0) for i, x in enumerate(logits)))
        array = c.llama_token_data_array(data, N_VOCAB, -1, False)
        c.llama_sampler_apply(chain, ctypes.byref(array))
        expected = {array.data[i].id: array.data[i].p for i in range(array.size)}
        c.llama_sampler_free(chain)
        sampler = Sampler(params, Words())
        sampled = sampler.sample(logits)
        assert_same({t.token: math.exp(t.logprob) for t in sampled.top}, expected)
        assert sampler._mirostat is not None
        assert sampler._mirostat.mu == pytest.approx(6.0 - 0.2 * (-math.log2(expected[sampled.token]) - 3.0), abs=1e-4)


def test_greedy_takes_the_lowest_id_at_a_tie() -> None:
    logits = np.zeros(200, np.float32)
    logits[[50, 90, 199]] = 3.0
    for changes in ({}, {"top_k": 1}, {"mirostat": 2}, {"top_p": 0.1}, {"n_probs": 2}):
        params = replace(SamplingParams(temperature=0.0), **changes)  # type: ignore[arg-type]
        assert Sampler(params, Words(200)).sample(logits).token == 50


def test_greedy_with_penalties_after_a_cut() -> None:
    """top_k=2 leaves tokens 5 and 6; the penalty moves the choice among them, never to a token that was cut."""
    logits = np.array([0, 1, 2, 3, 4, 6, 5.9], np.float32)
    params = SamplingParams(
        temperature=0.0, top_k=2, presence_penalty=9.0, samplers=("top_k", "penalties", "temperature")
    )
    assert Sampler(params, Words(7), [5]).sample(logits).token == 6
    assert Sampler(params, Words(7), [5, 6]).sample(logits).token == 5
    assert Sampler(replace(params, top_k=0), Words(7), [5, 6]).sample(logits).token == 4


def test_accepted_tokens_count() -> None:
    logits = logits_of(1)
    params = replace(OFF, repeat_penalty=1.7, repeat_last_n=4)
    sampler = Sampler(params, Words(), [1, 2, 3])
    for token in (4, 5, 6):
        sampler.accept(token)
    assert sampler.sample(logits).top == Sampler(params, Words(), [3, 4, 5, 6]).sample(logits).top


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    rows = [logits_of(i) for i in range(30)]

    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(seed=seed, temperature=1.5), Words())
        return [sampler.sample(row).token for row in rows]

    assert draws(42) == draws(42)
    assert draws(42) != draws(43)
    assert len({tuple(draws(None)) for _ in range(3)}) == 3
    assert len({Sampler(SamplingParams(seed=seed), Words()).seed for seed in (-1, 0xFFFFFFFF, None)}) == 3


@pytest.mark.parametrize(
    "params", [OFF, replace(OFF, top_k=12, temperature=1.3), replace(OFF, mirostat=2, mirostat_tau=4)]
)
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    """Chi-square of 20,000 draws; the bound is passed by chance once in some 10,000 seeds, and the seed is fixed."""
    logits = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    vocab, n = Words(16, frozenset()), 20_000
    expected = {t.token: math.exp(t.logprob) for t in Sampler(params, vocab).sample(logits).top}
    quick = replace(params, n_probs=0, seed=11, mirostat_eta=0.0)
    sampler = Sampler(quick, vocab)
    counts = np.bincount([sampler.sample(logits).token for _ in range(n)], minlength=16)
    assert set(np.flatnonzero(counts)) <= expected.keys()
    chi2 = sum((counts[t] - n * p) ** 2 / (n * p) for t, p in expected.items())
    degrees = len(expected) - 1
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees) + 8


def test_xtc_happens_as_often_as_asked() -> None:
    logits = np.array([3, 2.9, 2.8, -50], np.float32)
    params = SamplingParams(
        temperature=0.01, xtc_probability=0.25, xtc_threshold=0.1, seed=2, samplers=("xtc", "temperature")
    )
    sampler = Sampler(params, Words(4))
    tokens = [sampler.sample(logits).token for _ in range(4000)]
    assert tokens.count(2) == pytest.approx(1000, abs=120)
    assert tokens.count(0) + tokens.count(2) == 4000


def test_probabilities_before_and_after_the_chain() -> None:
    logits = logits_of(3)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    order = np.argsort(-p)
    params = SamplingParams(n_probs=4, temperature=0.0, logit_bias={int(order[5]): 100.0})
    sampled = Sampler(params, Words()).sample(logits)
    assert sampled.token == order[5]
    assert sampled.logprob == pytest.approx(math.log(p[order[5]]), abs=1e-5)
    assert [t.token for t in sampled.top] == order[:4].tolist()
    assert [t.logprob for t in sampled.top] == pytest.approx(np.log(p[order[:4]]).tolist(), abs=1e-5)
    after = Sampler(replace(params, post_sampling_probs=True), Words()).sample(logits)
    assert (after.logprob, len(after.top), after.top[0].token) == (0.0, 1, order[5])
    assert Sampler(replace(params, n_probs=0), Words()).sample(logits) == (order[5], None, ())


def test_banned_tokens_are_never_drawn() -> None:
    logits = np.zeros(6, np.float32)
    logits[2] = 50
    params = SamplingParams(ignore_eos=True, seed=0, logit_bias={2: 80.0})
    sampler = Sampler(params, Words(6, frozenset({2, 3}), banned=(0,)))
    assert {sampler.sample(logits).token for _ in range(200)} == {1, 4, 5}
    with pytest.raises(RequestError, match="every token is banned"):
        Sampler(SamplingParams(logit_bias={1: -math.inf}), Words(2, frozenset(), banned=(0,))).sample(logits[:2])


def test_the_callers_logits_stay() -> None:
    logits = logits_of(8)
    before = logits.copy()
    logits.flags.writeable = False
    params = replace(OFF, repeat_penalty=1.4, logit_bias={1: 2.0}, temperature=0.5, top_k=30, top_n_sigma=2.0)
    for changed in (
        params,
        replace(params, mirostat=1),
        replace(params, samplers=("top_k", "penalties"), logit_bias={}),
    ):
        Sampler(changed, Words(), [1, 2, 3]).sample(logits)
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0), OFF])
def test_nonsense_from_the_model_is_an_engine_error(value: float, params: SamplingParams) -> None:
    logits = logits_of(1)
    logits[77] = value
    with pytest.raises(EngineError, match="logits is"):
        Sampler(params, Words()).sample(logits)
    with pytest.raises(EngineError, match="logits is"):
        Sampler(params, Words()).sample(np.full(N_VOCAB, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("top_p", math.inf),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", -1.0),
        ("repeat_penalty", 1e-320),
        ("presence_penalty", math.nan),
        ("repeat_last_n", -2),
        ("dry_penalty_last_n", -5),
        ("mirostat", 3),
        ("min_keep", -1),
        ("n_probs", -1),
        ("samplers", ("top_k", "top_q")),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {N_VOCAB: 1.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_bad_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field):
        Sampler(replace(SamplingParams(), **{field: value}), Words())


def test_the_largest_are_found_in_any_array() -> None:
    rng = np.random.default_rng(4)
    for trial in range(300):
        n = int(rng.integers(1, 5000))
        logits = np.round(rng.standard_normal(n) * rng.choice([0.5, 3, 50])).astype(np.float32)
        logits[rng.random(n) < 0.1] = -np.inf
        k = int(rng.choice([1, 2, 40, 256, n, n + 5]))
        expected = np.argsort(-logits, kind="stable")[:k]
        assert np.array_equal(Candidates(logits).largest(k), expected), trial


@pytest.mark.weights
def test_dry_breakers_of_a_real_vocabulary(smollm2_path: Path) -> None:
    tokenizer = Tokenizer(smollm2_path)
    ids = tokenizer.encode("one two three: one two three\none two three one two", False, False)
    params = replace(OFF, dry_multiplier=0.8, n_probs=60_000)
    logits = logits_of(2, tokenizer.n_vocab, 1.0)
    sampled = Sampler(params, tokenizer, ids).sample(logits)
    assert tokenizer._vocab is not None
    got = {t.token: math.exp(t.logprob) for t in sampled.top}
    assert_same(got, theirs(params, logits, ids, tokenizer._vocab._vocab))


EXTREMES = (0.0, 0.5, 1.0, -1.0, 2.0, 5.0, 1e-45, 1e-38, 1e-30, 1e30, -1e30, 3.4e38, -3.4e38)
"""For the fields that a client may set to any fp32 number."""
UNBOUNDED = (
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_n_sigma",
    "typical_p",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "mirostat_tau",
    "mirostat_eta",
)


def test_extreme_settings_give_a_token_or_a_refusal() -> None:
    rng = np.random.default_rng(9)
    n_drawn = 0
    for case in range(1500):
        names = rng.choice(UNBOUNDED, rng.choice([1, 2, 5, len(UNBOUNDED)]), replace=False)
        changes: dict[str, Any] = {str(name): float(rng.choice(EXTREMES)) for name in names}
        changes |= {"mirostat": int(rng.choice([0, 0, 1, 2])), "n_probs": 3, "post_sampling_probs": bool(case % 2)}
        changes |= {"xtc_probability": float(rng.choice([0, 1])), "xtc_threshold": float(rng.choice([0, 0.1]))}
        changes |= {"min_keep": int(rng.choice([0, 2**31 - 1])), "top_p": float(rng.choice([0, 0.9, 1]))}
        logits = logits_of(case, spread=float(rng.choice([0, 1, 1e4, 1e30])))
        try:
            sampler = Sampler(SamplingParams(seed=case, **changes), Words(), [20, 21, 20, 21, 20])
            for _ in range(2):
                sampled = sampler.sample(logits)
                sampler.accept(sampled.token)
                assert 0 <= sampled.token < N_VOCAB
                values = [sampled.logprob, *(t.logprob for t in sampled.top)]
                assert not any(value is None or math.isnan(value) for value in values), changes
                n_drawn += 1
        except RequestError:
            continue
    assert n_drawn > 1000


@pytest.mark.parametrize("value", [1e-45, 1e-38, 1e-30])
def test_a_tiny_temperature_is_greedy(value: float) -> None:
    logits = logits_of(3, spread=100.0)
    assert ours(SamplingParams(temperature=value, n_probs=5, post_sampling_probs=True), logits, []) == {
        int(logits.argmax()): 1.0
    }


def test_numbers_drawn_ahead_keep_their_order() -> None:
    params = replace(OFF, n_probs=0)
    alone, ahead = Sampler(params, Words()), Sampler(params, Words())
    rows = [logits_of(i) for i in range(8)]
    expected = [alone.sample(row).token for row in rows]
    numbers = [ahead.draw_ahead(place) for place in (0, 1, 2)]
    assert numbers[0] == ahead.draw_ahead() and len(set(numbers)) == 3
    ahead.take_ahead()  # the first was drawn elsewhere
    assert ahead.draw_ahead() == numbers[1]
    assert [ahead.sample(row).token for row in rows[1:]] == expected[1:]
    greedy = Sampler(replace(params, temperature=0.0), Words())
    assert greedy.draw_ahead() == 0.0
    greedy.take_ahead()
