"""Steps of a choice -> llama-server's JSON, in its three forms: /completion, /v1/completions, /v1/chat/completions.

Field names and their order are those of llama-server's `server-task.cpp`.
"""

from __future__ import annotations

import math
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from freetoken.request import Timings
from freetoken.server.generation import Choice, Final, Piece, Prob, Progress
from freetoken.server.model import BUILD_INFO
from freetoken.server.schema import settings_json

__all__ = ["Answer", "ChatAnswer", "CompletionAnswer", "NativeAnswer", "timings_json"]

Json = dict[str, Any]
_LETTERS = string.ascii_letters + string.digits
_LOWEST = -3.4028234663852886e38
"""The least fp32: stands for the logarithm of 0, which JSON cannot hold."""


def completion_id() -> str:
    """A fresh id."""
    return "chatcmpl-" + "".join(secrets.choice(_LETTERS) for _ in range(32))


def timings_json(t: Timings) -> Json:
    """`timings`; rates are 0 where nothing was timed. Generation counts the steps after the first token."""
    n_steps = max(t.predicted_n - 1, 0)
    return {
        "cache_n": t.cache_n,
        "prompt_n": t.prompt_n,
        "prompt_ms": t.prompt_ms,
        "prompt_per_token_ms": t.prompt_ms / t.prompt_n if t.prompt_n else 0.0,
        "prompt_per_second": 1e3 / t.prompt_ms * t.prompt_n if t.prompt_ms > 0 else 0.0,
        "predicted_n": t.predicted_n,
        "predicted_ms": t.predicted_ms,
        "predicted_per_token_ms": t.predicted_ms / n_steps if n_steps else 0.0,
        "predicted_per_second": 1e3 / t.predicted_ms * n_steps if t.predicted_ms > 0 else 0.0,
    }


def probs_json(probs: tuple[Prob, ...], *, is_post_sampling: bool) -> list[Json]:
    """`completion_probabilities`: logarithms before the sampler chain, or probabilities after it."""
    key, top_key = ("prob", "top_probs") if is_post_sampling else ("logprob", "top_logprobs")

    def one(prob: Prob) -> Json:
        value = math.exp(prob.logprob) if is_post_sampling else max(prob.logprob, _LOWEST)
        return {"id": prob.token, "token": prob.text, "bytes": list(prob.raw), key: value}

    return [{**one(prob), top_key: [one(other) for other in prob.top]} for prob in probs]


def usage_json(choice: Choice, final: Final) -> Json:
    """`usage` of one choice."""
    return {
        "completion_tokens": final.n_decoded,
        "prompt_tokens": choice.n_prompt,
        "total_tokens": final.n_decoded + choice.n_prompt,
        "prompt_tokens_details": {"cached_tokens": final.timings.cache_n},
    }


def progress_json(progress: Progress) -> Json:
    """`prompt_progress`."""
    return {
        "total": progress.total,
        "cache": progress.cache,
        "processed": progress.processed,
        "time_ms": progress.time_ms,
    }


def nested_fields(paths: tuple[str, ...], data: Json) -> Json:
    """`response_fields`: the values at the given paths ("a/b"), each under its path; missing ones are left out."""
    found: Json = {}
    for path in paths:
        value: Any = data
        for key in path.split("/"):
            if not isinstance(value, dict) or key not in value:
                break
            value = value[key]
        else:
            found[path] = value
    return found


class Answer(Protocol):
    """How one route prints a completion."""

    ends_with_done: bool
    """Whether a stream ends with `data: [DONE]`."""

    def progress(self, choice: Choice, step: Progress) -> list[Json]: ...

    def piece(self, choice: Choice, step: Piece) -> list[Json]: ...

    def end_of_stream(self, choice: Choice, final: Final) -> list[Json]: ...

    def whole(self, results: list[tuple[Choice, Final]]) -> Json | list[Json]:
        """The answer of a request that does not stream."""


@dataclass
class NativeAnswer:
    """/completion. `detokenize` gives the text of a prompt, control tokens shown."""

    model: str
    detokenize: Callable[[tuple[int, ...]], str]
    ends_with_done: bool = False

    def progress(self, choice: Choice, step: Progress) -> list[Json]:
        return [self._partial(choice, "", (), 0) | {"prompt_progress": progress_json(step)}]

    def piece(self, choice: Choice, step: Piece) -> list[Json]:
        return [self.partial(choice, step)]

    def partial(self, choice: Choice, step: Piece) -> Json:
        """One chunk of a stream."""
        data = self._partial(choice, step.text, step.tokens, step.n_decoded)
        if step.timings is not None:
            data["timings"] = timings_json(step.timings)
        if step.probs:
            is_post = choice.params.sampling.post_sampling_probs
            data["completion_probabilities"] = probs_json(step.probs, is_post_sampling=is_post)
        return data

    @staticmethod
    def _partial(choice: Choice, text: str, tokens: tuple[int, ...], n_decoded: int) -> Json:
        return {
            "index": choice.index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": n_decoded,
            "tokens_evaluated": choice.n_prompt,
        }

    def end_of_stream(self, choice: Choice, final: Final) -> list[Json]:
        return [self.final(choice, final)]

    def whole(self, results: list[tuple[Choice, Final]]) -> Json | list[Json]:
        answers = [self.final(choice, final) for choice, final in results]
        return answers[0] if len(answers) == 1 else answers

    def final(self, choice: Choice, final: Final) -> Json:
        """The last chunk of a stream (text and tokens went before), or the whole answer."""
        params = choice.params
        data: Json = {
            "index": choice.index,
            "content": "" if params.stream else final.content,
            "tokens": [] if params.stream else list(final.tokens),
            "id_slot": final.id_slot,
            "stop": True,
            "model": self.model,
            "tokens_predicted": final.n_decoded,
            "tokens_evaluated": choice.n_prompt,
            "generation_settings": settings_json(params),
            "prompt": self.detokenize(choice.request.prompt),
            "has_new_line": final.has_new_line,
            "truncated": final.is_truncated,
            "stop_type": final.stop_type,
            "stopping_word": final.stopping_word,
            "tokens_cached": choice.n_prompt + max(final.n_decoded - 1, 0),
            "timings": timings_json(final.timings),
        }
        if final.probs and not params.stream:
            is_post = params.sampling.post_sampling_probs
            data["completion_probabilities"] = probs_json(final.probs, is_post_sampling=is_post)
        return nested_fields(params.response_fields, data) if params.response_fields else data


def finish_reason(final: Final) -> str:
    """OpenAI's word for how it ended."""
    return "stop" if final.stop_type in ("word", "eos") else "length"


def logprobs_json(choice: Choice, probs: tuple[Prob, ...]) -> Json | None:
    """OpenAI's `logprobs`, None where there are none."""
    if not probs:
        return None
    return {"content": probs_json(probs, is_post_sampling=choice.params.sampling.post_sampling_probs)}


@dataclass
class CompletionAnswer:
    """/v1/completions."""

    native: NativeAnswer
    id: str = field(default_factory=completion_id)
    ends_with_done: bool = True

    def progress(self, choice: Choice, step: Progress) -> list[Json]:
        return [self._frame(choice, "", None, None) | {"prompt_progress": progress_json(step)}]

    def piece(self, choice: Choice, step: Piece) -> list[Json]:
        data = self._frame(choice, step.text, logprobs_json(choice, step.probs), None)
        if choice.params.verbose:
            data["__verbose"] = self.native.partial(choice, step)
        if step.timings is not None:
            data["timings"] = timings_json(step.timings)
        return [data]

    def _frame(self, choice: Choice, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {
            "choices": [{"text": text, "index": choice.index, "logprobs": logprobs, "finish_reason": reason}],
            "created": int(time.time()),
            "model": self.native.model,
            "system_fingerprint": BUILD_INFO,
            "object": "text_completion",
            "id": self.id,
        }

    def end_of_stream(self, choice: Choice, final: Final) -> list[Json]:
        return [self._final(choice, final)]

    def _final(self, choice: Choice, final: Final) -> Json:
        is_stream = choice.params.stream
        logprobs = None if is_stream else logprobs_json(choice, final.probs)
        data = self._frame(choice, "" if is_stream else final.content, logprobs, finish_reason(final))
        data["usage"] = usage_json(choice, final)
        if choice.params.verbose:
            data["__verbose"] = self.native.final(choice, final)
        data["timings"] = timings_json(final.timings)
        return data

    def whole(self, results: list[tuple[Choice, Final]]) -> Json | list[Json]:
        return join_choices([self._final(choice, final) for choice, final in results])


@dataclass
class ChatAnswer:
    """/v1/chat/completions."""

    native: NativeAnswer
    id: str = field(default_factory=completion_id)
    ends_with_done: bool = True
    _held_probs: dict[int, tuple[Prob, ...]] = field(default_factory=dict)
    """By choice: probabilities of tokens that have shown no text yet."""
    _with_role: set[int] = field(default_factory=set)

    def progress(self, choice: Choice, step: Progress) -> list[Json]:
        chunk = self._chunk([self._delta(choice, {"role": "assistant", "content": None})])
        return [chunk | {"prompt_progress": progress_json(step)}]

    def piece(self, choice: Choice, step: Piece) -> list[Json]:
        deltas: list[Json] = []
        if choice.index not in self._with_role:
            self._with_role.add(choice.index)
            deltas.append({"role": "assistant", "content": None})
        if step.text:
            deltas.append({"content": step.text})
        chunks = [self._chunk([self._delta(choice, delta)]) for delta in deltas]
        probs = self._held_probs.pop(choice.index, ()) + step.probs
        if not step.text:
            self._held_probs[choice.index] = probs
        elif probs:
            chunks[-1]["choices"][0]["logprobs"] = logprobs_json(choice, probs)
        if chunks and step.timings is not None:
            chunks[-1]["timings"] = timings_json(step.timings)
        return chunks

    @staticmethod
    def _delta(choice: Choice, delta: Json, reason: str | None = None) -> Json:
        return {"finish_reason": reason, "index": choice.index, "delta": delta}

    def _chunk(self, choices: list[Json]) -> Json:
        return {
            "choices": choices,
            "created": int(time.time()),
            "id": self.id,
            "model": self.native.model,
            "system_fingerprint": BUILD_INFO,
            "object": "chat.completion.chunk",
        }

    def end_of_stream(self, choice: Choice, final: Final) -> list[Json]:
        chunks = [self._chunk([self._delta(choice, {}, finish_reason(final))])]
        if choice.params.include_usage:
            chunks.append(self._chunk([]) | {"usage": usage_json(choice, final)})
        chunks[-1]["timings"] = timings_json(final.timings)
        if choice.params.verbose:
            chunks[0]["__verbose"] = self.native.final(choice, final)
        return chunks

    def whole(self, results: list[tuple[Choice, Final]]) -> Json | list[Json]:
        return join_choices([self._final(choice, final) for choice, final in results])

    def _final(self, choice: Choice, final: Final) -> Json:
        message = {"role": "assistant", "content": final.content}
        entry: Json = {"finish_reason": finish_reason(final), "index": choice.index, "message": message}
        logprobs = logprobs_json(choice, final.probs)
        if logprobs is not None:
            entry["logprobs"] = logprobs
        data: Json = {
            "choices": [entry],
            "created": int(time.time()),
            "model": self.native.model,
            "system_fingerprint": BUILD_INFO,
            "object": "chat.completion",
            "usage": usage_json(choice, final),
            "id": self.id,
        }
        if choice.params.verbose:
            data["__verbose"] = self.native.final(choice, final)
        data["timings"] = timings_json(final.timings)
        return data


def join_choices(answers: list[Json]) -> Json:
    """OpenAI's form of several results: the first answer with the choices of all."""
    first = answers[0]
    for other in answers[1:]:
        first["choices"] += other["choices"]
    return first
