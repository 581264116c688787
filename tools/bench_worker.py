"""One side of tools/bench_peer.py in a process of its own: times runs on request.

    python tools/bench_worker.py ours|peer FILE N_THREADS

Each line on standard input is a test, `decode` or `prompt`; the answer is its seconds. Each engine has its own process
because both use the OpenMP runtime, whose waiting policy is one for a process and suits only one of them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

N_CTX = 1024
N_PROMPT_SHORT = 16
N_DECODE = 64
N_PREFILL = 512
SEED = 1


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def tests_of_ours(path: Path, n_threads: int) -> dict[str, Callable[[], float]]:
    """The tests on our runner."""
    from tools.ours import Ours  # each side loads only its own engine

    ours = Ours(path, n_ctx=N_CTX, n_threads=n_threads)
    tokens, prompt, rest = fixed_tokens(ours.n_vocab)

    def decode() -> float:
        ours.clear()
        ours.prefill(prompt)
        return timed(lambda: [ours.step(token).argmax() for token in rest])

    def prefill() -> float:
        ours.clear()
        return timed(lambda: ours.prefill(tokens))

    return {"decode": decode, "prompt": prefill}


def tests_of_peer(path: Path, n_threads: int) -> dict[str, Callable[[], float]]:
    """The same on llama.cpp, with llama-server's defaults."""
    from tools.peer import Peer

    peer = Peer(path, n_ctx=N_CTX, n_threads=n_threads)
    tokens, prompt, rest = fixed_tokens(peer.n_vocab)

    def decode() -> float:
        peer.clear()
        peer.decode(prompt)
        return timed(lambda: [peer.decode([token]).argmax() for token in rest])

    def prefill() -> float:
        peer.clear()
        return timed(lambda: peer.decode(tokens))

    return {"decode": decode, "prompt": prefill}


def fixed_tokens(n_vocab: int) -> tuple[list[int], list[int], list[int]]:
    """The prompt of 512, and the short prompt and the tokens of the decode test."""
    tokens = [int(t) for t in np.random.default_rng(SEED).integers(0, n_vocab - 3, N_PREFILL)]
    return tokens, tokens[:N_PROMPT_SHORT], tokens[N_PROMPT_SHORT : N_PROMPT_SHORT + N_DECODE]


def main() -> None:
    """Serve tests until the input ends."""
    side, path, n_threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    tests = (tests_of_ours if side == "ours" else tests_of_peer)(path, n_threads)
    print("ready", flush=True)
    for line in sys.stdin:
        print(tests[line.strip()](), flush=True)


if __name__ == "__main__":
    main()
