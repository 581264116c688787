"""Every architecture against llama.cpp and against a plain fp32 reference that shares no code with `arch/`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from freetoken import arch
from freetoken import runner as runner_module
from freetoken.errors import ModelFileError
from freetoken.gguf import ModelFile, open_model
from freetoken.options import EngineOptions
from freetoken.runner import Runner
from freetoken.spec import SUPPORTED, read_spec
from tools import tiny_models
from tools.peer import Peer

LENGTHS = (8, 64, 300)
EXACT = EngineOptions(n_threads=1, cache_type_k="f32", cache_type_v="f32")


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Size of the difference over the size of b."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def divergence(want: np.ndarray, found: np.ndarray) -> float:
    """KL of the distributions of two rows of logits, in nats."""
    p, q = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (want, found))
    return float((p.exp() * (p - q)).sum())


def some_tokens(n: int, n_vocab: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(3, n_vocab, n)]


@pytest.fixture(autouse=True)
def torch_from_nine_tokens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short prompts go through torch too, so that they test it."""
    monkeypatch.setattr(runner_module, "MAX_STEPPED", 8)


@contextmanager
def running(path: Path, options: EngineOptions = EXACT) -> Iterator[Runner]:
    with open_model(path) as file:
        runner = Runner(file, read_spec(file), options, n_ctx=512)
        try:
            yield runner
        finally:
            runner.close()


def both_paths(runner: Runner, tokens: list[int], lengths: tuple[int, ...]) -> dict[tuple[str, int], np.ndarray]:
    """Logits after the first n tokens, for each n in `lengths`: as a prompt, and token by token."""
    found = {}
    s = runner.new_sequence()
    for n in lengths:
        s.truncate(0)
        logits = runner.prefill(s, tokens[:n])
        assert logits is not None
        found["prompt", n] = logits
    s.truncate(0)
    for n, token in enumerate(tokens[: max(lengths)], start=1):
        (logits,) = runner.decode([s], [token])
        if n in lengths:
            found["steps", n] = logits
    s.release()
    return found


def test_every_supported_name_has_an_architecture() -> None:
    assert set(arch.ARCHITECTURES) == set(SUPPORTED)


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_logits_agree_with_llama_cpp(name: str, tmp_path: Path) -> None:
    # ggml's GELU is a table of fp16 by fp16 (ggml-cpu/vec.h), 4e-4 off fp32: gemma3 has the plain reference below too.
    max_relative, max_kl = (1e-3, 2e-6) if name.startswith("gemma3") else (1e-4, 1e-7)
    path = tiny_models.write(tmp_path / "tiny.gguf", name)
    with Peer(path, n_ctx=512, n_threads=1, exact=True) as peer, running(path) as runner:
        tokens = some_tokens(max(LENGTHS), peer.n_vocab)
        found = both_paths(runner, tokens, LENGTHS)
        for (how, n), logits in found.items():
            peer.clear()
            want = peer.decode(tokens[:n])
            assert want.std() > 2
            assert relative(logits, want) <= max_relative, (how, n)
            assert divergence(want, logits) <= max_kl, (how, n)


# --- the plain reference ---------------------------------------------------------------------------------------------


def reference_logits(file: ModelFile, tokens: list[int]) -> np.ndarray:
    """llama, Mixtral and gemma3 in binary64 torch on decoded weights, with no cache; logits after the last token."""
    name = file.metadata.get_str("general.architecture")
    is_gemma = name == "gemma3"
    n_layer, n_head, n_kv, n_used, window = (
        file.metadata.get_int(f"{name}.{key}", 0)
        for key in (
            "block_count",
            "attention.head_count",
            "attention.head_count_kv",
            "expert_used_count",
            "attention.sliding_window",
        )
    )
    n = len(tokens)

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(np.array(file.tensor(f"{name}.weight").values())).double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight(name)

    def ffn(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = x @ gate.T
        h = functional.gelu(h, approximate="tanh") if is_gemma else functional.silu(h)
        return (h * (x @ up.T)) @ down.T

    def rope(x: torch.Tensor, base: float) -> torch.Tensor:
        half = x.shape[-1] // 2
        inv_freq = base ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones(n, half).double(), torch.arange(n).double()[:, None] * inv_freq)[:, None]
        pairs = torch.stack(x.split(half, -1), -1) if is_gemma else x.reshape(*x.shape[:-1], half, 2)
        turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return turned.transpose(-1, -2).flatten(-2) if is_gemma else turned.flatten(-2)

    def attention(x: torch.Tensor, blk: str, is_sliding: bool) -> torch.Tensor:
        q = (x @ weight(blk + "attn_q").T).view(n, n_head, -1)
        k = (x @ weight(blk + "attn_k").T).view(n, n_kv, -1)
        v = (x @ weight(blk + "attn_v").T).view(n, n_kv, -1)
        if is_gemma:
            q, k = norm(q, blk + "attn_q_norm"), norm(k, blk + "attn_k_norm")
        q, k = (rope(t, 1e6 if is_gemma and not is_sliding else 1e4) for t in (q, k))
        k, v = (t.repeat_interleave(n_head // n_kv, 1) for t in (k, v))
        age = torch.arange(n)[:, None] - torch.arange(n)
        hidden = (age < 0) | (age >= window if is_sliding else age < 0)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1) @ weight(blk + "attn_output").T

    def experts(x: torch.Tensor, blk: str) -> torch.Tensor:
        banks = [weight(f"{blk}ffn_{c}_exps") for c in ("gate", "up", "down")]
        share, ids = (x @ weight(blk + "ffn_gate_inp").T).topk(n_used)  # weights that sum to 1: softmax of the chosen
        y = torch.zeros_like(x)
        for row in range(n):
            for w, e in zip(share[row].softmax(-1), ids[row], strict=True):
                y[row] += w * ffn(x[row], *(bank[e] for bank in banks))
        return y

    x = weight("token_embd")[tokens]
    x = x * x.shape[1] ** 0.5 if is_gemma else x
    for i in range(n_layer):
        blk = f"blk.{i}."
        y = attention(norm(x, blk + "attn_norm"), blk, is_gemma and i % 6 < 5)
        x = x + (norm(y, blk + "post_attention_norm") if is_gemma else y)
        h = norm(x, blk + "ffn_norm")
        y = experts(h, blk) if n_used else ffn(h, *(weight(f"{blk}ffn_{c}") for c in ("gate", "up", "down")))
        x = x + (norm(y, blk + "post_ffw_norm") if is_gemma else y)
    return np.asarray((norm(x[-1], "output_norm") @ weight("token_embd" if is_gemma else "output").T).numpy())


@pytest.mark.parametrize(
    ("name", "file_type", "limit"),
    [
        ("gemma3", "F32", 1e-5),
        ("llama", "F32", 1e-5),
        ("llama-moe", "F32", 1e-5),
        ("llama", "BF16", 1e-5),
        ("llama", "Q4_1", 2e-3),
        ("llama-moe", "Q4_K_M", 2e-3),
        ("llama-moe", "mixed", 2e-3),  # case B51: gate, up and down of three types, which vary by layer
        ("llama-moe", "TQ2_0", 1e-5),  # a type without a kernel of ours
    ],
)
def test_logits_agree_with_a_plain_reference(name: str, file_type: str, limit: float, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "tiny.gguf", name, file_type=file_type)
    tokens = some_tokens(70, 380)
    with open_model(path) as file:
        want = reference_logits(file, tokens)
        if file_type == "mixed":
            kinds = [{file.tensor(f"blk.{i}.ffn_{c}_exps.weight").type for c in ("gate", "up", "down")} for i in (0, 1)]
            assert len(kinds[0]) == 3 and kinds[0] != kinds[1]
    with running(path) as runner:
        found = both_paths(runner, tokens, (len(tokens),))
    assert relative(found["prompt", len(tokens)], want) <= limit
    assert relative(found["steps", len(tokens)], want) <= limit


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    with open_model(tiny_models.write(tmp_path / "tiny.gguf", "llama")) as file:
        spec = read_spec(file)
        del file.tensors["blk.1.ffn_up.weight"]
        with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight"):
            arch.build(file, spec)
