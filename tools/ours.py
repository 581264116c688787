"""Our engine's runner with one sequence, under the same few calls as tools/peer.py. Used by parity and benchmark."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from freetoken.gguf import open_model
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import read_spec

__all__ = ["Ours"]


class Ours:
    """A loaded model with one sequence. `exact` asks for an f32 cache, else f16. A context manager."""

    def __init__(
        self, path: str | Path, *, n_ctx: int = 1024, n_threads: int = 2, exact: bool = False, n_planes: int = 2
    ) -> None:
        cache = "f32" if exact else "f16"
        options = EngineOptions(
            n_ctx=n_ctx, n_threads=n_threads, cache_type_k=cache, cache_type_v=cache, n_planes=n_planes
        )
        self.file = open_model(Path(path))
        self.spec = read_spec(self.file)
        self.n_vocab = self.spec.n_vocab
        self.runner = Runner(self.file, self.spec, options, n_ctx=n_ctx)
        self.sequence = self.runner.new_sequence()

    def __enter__(self) -> Ours:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the sequence, the threads and the mapping."""
        self.sequence.release()
        self.runner.close()
        self.file.close()

    def clear(self) -> None:
        """Forget the sequence."""
        self.sequence.truncate(0)

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens as a prompt; fp32 logits [n_vocab] after the last."""
        logits = self.runner.prefill(self.sequence, tokens)
        if logits is None:
            raise RuntimeError(f"a prompt of {len(tokens)} tokens gave no logits")
        return logits

    def step(self, token: int) -> np.ndarray:
        """Append one token by the decode path; fp32 logits [n_vocab]."""
        return np.asarray(self.runner.decode([self.sequence], [token])[0])

    def greedy(self, tokens: Sequence[int], n_predict: int, stop: Container[int]) -> list[int]:
        """The most likely continuation from an empty sequence; ends after a token of `stop`."""
        self.clear()
        logits = self.prefill(tokens)
        out: list[int] = []
        while len(out) < n_predict:
            out.append(int(logits.argmax()))
            if out[-1] in stop:
                break
            logits = self.step(out[-1])
        return out
