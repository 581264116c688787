"""What a synthetic file does when it runs: hidden rms by layer, overlap of routed experts, LRU hit rate, topic length.

The file is run in llama.cpp, which hands out the routed experts and hidden states of every layer; the tokens are
sampled from the model's own head at temperature 1, as a user's would be.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from tools.peer import Peer, threads_for

__all__ = ["check", "hit_rate", "overlap", "sample_routes"]

WARM_TOKENS = 64


def overlap(routes: np.ndarray) -> float:
    """Mean share of a token's experts that its predecessor chose too; routes int [n_tokens, n_layer, n_used]."""
    same = (routes[1:, :, :, None] == routes[:-1, :, None, :]).any(axis=-1)
    return float(same.mean())


def hit_rate(routes: np.ndarray, n_expert: int, capacity: float) -> float:
    """Hits of one LRU over (layer, expert) that holds `capacity` of all experts, after WARM_TOKENS tokens."""
    n_slots = int(capacity * routes.shape[1] * n_expert)
    lru: OrderedDict[tuple[int, int], None] = OrderedDict()
    n_hits = n_seen = 0
    for token, layers in enumerate(routes.tolist()):
        for layer, experts in enumerate(layers):
            for expert in experts:
                key = (layer, expert)
                is_hit = key in lru
                lru[key] = None
                lru.move_to_end(key)
                if len(lru) > n_slots:
                    lru.popitem(last=False)
                if token >= WARM_TOKENS:
                    n_hits += is_hit
                    n_seen += 1
    return n_hits / max(n_seen, 1)


def sample_routes(path: Path, n_layer: int, n_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Generate `n_tokens` at temperature 1: routes [n_tokens, n_layer, n_used], rms [n_layer], logits std [n]."""
    rng = np.random.default_rng(seed)
    seen: dict[str, list[np.ndarray]] = {}

    def keep(name: str, values: np.ndarray) -> None:
        seen.setdefault(name, []).append(values[0])

    spread = []
    with Peer(
        path, n_ctx=n_tokens + 8, n_threads=threads_for(path), capture=(("ffn_moe_topk-", "l_out-"), keep)
    ) as peer:
        token = int(rng.integers(peer.n_vocab - 3))
        for _ in range(n_tokens):
            logits = peer.decode([token])
            if not np.isfinite(logits).all():
                raise RuntimeError(f"{path}: logits are not finite after {peer.n_past} tokens")
            spread.append(logits.std())
            token = int((logits + rng.gumbel(size=len(logits))).argmax())
    routes = np.stack([np.stack(seen[f"ffn_moe_topk-{layer}"]) for layer in range(n_layer)], axis=1)
    rms = np.array([np.sqrt(np.mean(np.stack(seen[f"l_out-{layer}"]) ** 2)) for layer in range(n_layer)])
    return routes, rms, np.array(spread)


def check(path: Path, n_layer: int, n_expert: int, n_tokens: int = 320) -> dict[str, float]:
    """Print the file's behaviour over `n_tokens` sampled tokens; the figures are returned too."""
    routes, rms, spread = sample_routes(path, n_layer, n_tokens)
    shown = " ".join(f"{x:.2f}" for x in rms)
    figures = {
        "overlap": overlap(routes),
        "hit_rate": hit_rate(routes, n_expert, 0.37),
        "logits_std": float(spread.mean()),
        "rms_first": float(rms[0]),
        "rms_last": float(rms[-1]),
    }
    print(f"hidden rms after each layer: {shown}")
    print(f"logits: standard deviation {figures['logits_std']:.2f}, all finite")
    print(f"routing over {n_tokens} sampled tokens (synthetic): {figures['overlap']:.2f} of the experts of a token are")
    print(f"  those of its predecessor; one LRU with 37% of the experts hits {figures['hit_rate']:.0%}")
    return figures
