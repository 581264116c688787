"""`Sampler`: from one row of logits to one token, for one request. Belongs to the engine thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from freetoken.errors import EngineError, RequestError
from freetoken.request import SamplingParams, TokenProb
from freetoken.sampler import steps
from freetoken.sampler.candidates import Candidates
from freetoken.sampler.checks import check_params
from freetoken.sampler.dry import Dry, DryVocabulary
from freetoken.sampler.mirostat import Mirostat
from freetoken.sampler.penalties import Penalties

__all__ = ["SampledToken", "Sampler", "Vocabulary"]

Step = Callable[[Candidates], None]

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp's LLAMA_DEFAULT_SEED: draw one."""


class Vocabulary(DryVocabulary, Protocol):
    """What a sampler asks of the vocabulary; `tokenizer.Tokenizer` is one."""

    eog_tokens: frozenset[int]
    suppressed_tokens: tuple[int, ...]


class SampledToken(NamedTuple):
    """A drawn token; where `n_probs` asks for them its natural log probability and the most probable alternatives."""

    token: int
    logprob: float | None = None
    top: tuple[TokenProb, ...] = ()


class Sampler:
    """The chain of one request: logit bias, then `params.samplers` in their order, then the draw.

    `history` is the prompt. With mirostat only bias, temperature and mirostat itself run, as in llama.cpp. A
    temperature of 0 or less takes the largest logit, the lowest id at a tie. Draws use numpy's PCG64 from
    `params.seed`: the same seed and logits give the same tokens, but not those of llama.cpp's generator.

    Raises RequestError for parameters out of range.
    """

    def __init__(self, params: SamplingParams, vocab: Vocabulary, history: Collection[int] = ()) -> None:
        check_params(params, vocab.n_vocab)
        self.params = params
        self.seed = _seed(params.seed)
        """The seed in use."""
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._ahead: deque[float] = deque()
        self._bias_tokens, self._bias = _biases(params, vocab)
        self._penalties = Penalties(
            params.repeat_last_n, params.repeat_penalty, params.frequency_penalty, params.presence_penalty
        )
        self._dry = Dry(
            vocab,
            params.dry_multiplier if not params.mirostat and "dry" in params.samplers else 0.0,
            params.dry_base,
            params.dry_allowed_length,
            params.dry_penalty_last_n,
            params.dry_sequence_breakers,
        )
        self._mirostat: Mirostat | None = None
        if params.mirostat and params.temperature > 0:
            self._mirostat = Mirostat(params.mirostat, vocab.n_vocab, params.mirostat_tau, params.mirostat_eta)
        self.is_greedy = _is_greedy(params)
        """Whether the largest logit is taken after bias and penalties, without a random number."""
        chain = self._chain()
        self.active_steps = tuple(name for name, _ in chain)
        """The steps that change anything, in order: all that runs but for bias and mirostat."""
        self._steps = [step for _, step in chain]
        self._penalties.start(history)
        self._dry.start(history)

    def accept(self, token: int) -> None:
        """The token is part of the text now."""
        self._penalties.accept(token)
        self._dry.accept(token)

    @property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64, all different, whose logits are changed before the chain, and by how much, fp32: the request's
        biases and -inf for banned tokens."""
        return self._bias_tokens, self._bias

    @property
    def has_mirostat(self) -> bool:
        return self._mirostat is not None

    def draw_ahead(self, place: int = 0) -> float:
        """The random number in [0, 1) of the next draw (or of a later one), left in its place in the stream.

        For a draw elsewhere: `take_ahead` is told of it, and where it fails `sample` draws with the same number. A
        greedy sampler needs no number and says 0.
        """
        if self.is_greedy:
            return 0.0
        while len(self._ahead) <= place:
            self._ahead.append(self._random.random())
        return self._ahead[place]

    def take_ahead(self) -> None:
        """A token was drawn elsewhere with the next random number."""
        if not self.is_greedy:
            self._ahead.popleft()

    def sample(self, logits: np.ndarray) -> SampledToken:
        """Draw a token from logits fp32 [n_vocab], which stay as they are.

        Raises EngineError for logits that are NaN or infinite, RequestError when every token is banned or the request's
        settings lead beyond fp32.
        """
        with np.errstate(all="ignore"):
            return self._sample(logits)

    def _sample(self, logits: np.ndarray) -> SampledToken:
        candidates = Candidates(logits)
        _check_finite(logits)
        if len(self._bias_tokens):
            candidates.own()[self._bias_tokens] += self._bias
            if candidates.logits.max() == -np.inf:
                raise RequestError("every token is banned: take some of them out of logit_bias")
        for step in self._steps:
            step(candidates)
            if not np.isfinite(candidates.logits.max(initial=-np.inf)):
                raise RequestError("the sampler's settings lead beyond fp32: the largest logit is not finite any more")
        if self.is_greedy:
            index = candidates.top()
        elif self._mirostat is not None:
            index = self._mirostat.choose(candidates, self._draw)
        else:
            index = self._draw(candidates.probabilities())
        token = candidates.token(index)
        if not self.params.n_probs:
            return SampledToken(token)
        if self.params.post_sampling_probs:
            return self._after(candidates, index, token)
        return _before(logits, token, self.params.n_probs)

    def _chain(self) -> list[tuple[str, Step]]:
        """The steps that change anything, in order. A greedy chain ends with its last penalty: the steps after it
        leave the largest logit where it is."""
        p = self.params
        if p.mirostat:
            return [] if self.is_greedy else [("temperature", self._temperature)]
        available: dict[str, tuple[bool, Step]] = {
            "penalties": (self._penalties.is_active, self._penalties.apply),
            "dry": (self._dry.is_active, self._dry.apply),
            "top_n_sigma": (p.top_n_sigma > 0, lambda c: steps.top_n_sigma(c, p.top_n_sigma)),
            "top_k": (p.top_k > 0, lambda c: steps.top_k(c, p.top_k)),
            "typ_p": (p.typical_p < 1, lambda c: steps.typical(c, p.typical_p, p.min_keep)),
            "top_p": (p.top_p < 1, lambda c: steps.top_p(c, p.top_p, p.min_keep)),
            "min_p": (p.min_p > 0, lambda c: steps.min_p(c, p.min_p, p.min_keep)),
            "xtc": (p.xtc_probability > 0 and p.xtc_threshold <= 0.5, self._xtc),
            "temperature": (p.temperature != 1 or p.dynatemp_range > 0, self._temperature),
        }
        active = [name for name in p.samplers if available[name][0]]
        if self.is_greedy and not (p.n_probs and p.post_sampling_probs):
            while active and active[-1] not in ("penalties", "dry"):
                active.pop()
        return [(name, available[name][1]) for name in active]

    def _temperature(self, candidates: Candidates) -> None:
        p = self.params
        spread = 0.0 if p.mirostat else p.dynatemp_range
        steps.temperature(candidates, p.temperature, spread, p.dynatemp_exponent)

    def _xtc(self, candidates: Candidates) -> None:
        if len(candidates) > 1 and self._number() <= self.params.xtc_probability:
            steps.xtc(candidates, self.params.xtc_threshold, self.params.min_keep)

    def _number(self) -> float:
        return self._ahead.popleft() if self._ahead else self._random.random()

    def _draw(self, probabilities: np.ndarray) -> int:
        """An entry number, each as likely as its probability; one random number a draw."""
        sums = np.cumsum(probabilities, dtype=np.float64)
        index = int(np.searchsorted(sums, self._number() * sums[-1], side="right"))
        return min(index, len(sums) - 1)

    def _after(self, candidates: Candidates, index: int, token: int) -> SampledToken:
        """Probabilities of what was left at the draw."""
        probabilities = candidates.probabilities()
        with np.errstate(divide="ignore"):
            logprobs = np.log(probabilities)
        top = [int(i) for i in candidates.largest(self.params.n_probs) if probabilities[i] > 0]
        return SampledToken(
            token, float(logprobs[index]), tuple(TokenProb(candidates.token(i), float(logprobs[i])) for i in top)
        )


def _before(logits: np.ndarray, token: int, n: int) -> SampledToken:
    """Probabilities of the model itself, before any bias."""
    candidates = Candidates(logits)
    top = candidates.largest(n)
    largest = logits[int(np.argmax(logits))]
    log_sum = largest + np.log(np.exp(logits - largest).sum(dtype=np.float64))
    alternatives = tuple(TokenProb(int(i), float(logits[i] - log_sum)) for i in top)
    return SampledToken(token, float(logits[token] - log_sum), alternatives)


def _check_finite(logits: np.ndarray) -> None:
    largest = logits.max()
    if not np.isfinite(largest):
        kind = "not a number" if np.isnan(largest) else f"{largest}"
        raise EngineError(
            f"the largest of {len(logits)} logits is {kind}, expected a finite number: the model computed nonsense "
            "(a damaged file, or values beyond fp32)"
        )


def _is_greedy(p: SamplingParams) -> bool:
    """Whether the largest logit is taken after bias and penalties, whatever the other steps do."""
    if p.temperature > 0:
        return False
    if p.mirostat:
        return True
    removes_the_largest = (p.typical_p < 1 and "typ_p" in p.samplers) or (p.xtc_probability > 0 and "xtc" in p.samplers)
    return "temperature" in p.samplers and p.dynatemp_range <= 0 and not removes_the_largest


def _seed(seed: int | None) -> int:
    if seed is None or seed < 0 or seed == _RANDOM_SEED:
        return int(np.random.SeedSequence().generate_state(1)[0])
    return seed


def _biases(params: SamplingParams, vocab: Vocabulary) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and what is added to their logits: the request's biases, tokens that the file or the request bans."""
    banned: Iterable[int] = [*vocab.suppressed_tokens, *(vocab.eog_tokens if params.ignore_eos else ())]
    biases = {**params.logit_bias, **dict.fromkeys(banned, -np.inf)}
    return np.fromiter(biases, np.int64, len(biases)), np.fromiter(biases.values(), np.float32, len(biases))
