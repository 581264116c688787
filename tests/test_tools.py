"""The generators and converters make files that llama.cpp loads; the parity and speed tools judge rightly."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from tools import bench_peer, parity, synth_check, synth_moe
from tools.dequantise import dequantise_file
from tools.ggml import dequantise, quantise, type_by_name
from tools.llama2c_to_gguf import convert
from tools.peer import Peer
from tools.random_blocks import RANDOM_TYPES, random_rows
from tools.tiny_models import ARCHITECTURES, Tiny, write
from tools.tiny_vocab import byte_symbols, make_vocabulary

ROOT = Path(__file__).resolve().parent.parent
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 386, 64)]
SMALL = Tiny("qwen3moe", 2, 512, 4, 2, 64, 512, 2000, 1024, 16, 4, 256, qk_norm="head")


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_tiny_models_load_and_spread_their_logits(arch: str, tmp_path: Path) -> None:
    with Peer(write(tmp_path / "m.gguf", arch), n_ctx=128, exact=True) as peer:
        logits = peer.decode(TOKENS, every=True)
        assert np.isfinite(logits).all()
        assert logits.std(axis=1).min() >= 2
        peer.clear()
        other = peer.decode([TOKENS[0] + 1, *TOKENS[1:32]])
    assert np.abs(other - logits[31]).max() > 0.05, "the first token must matter to later ones"


TYPES = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "MXFP4", "IQ4_NL"]


@pytest.mark.parametrize("file_type", [*TYPES, "Q4_K_M", "mixed"])
def test_tiny_models_of_every_type_load(file_type: str, tmp_path: Path) -> None:
    arch = "llama" if file_type in TYPES else "qwen3moe"
    path = write(tmp_path / "m.gguf", arch, file_type=file_type, n_layer=2)
    kinds = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    if file_type in TYPES:
        assert kinds == {"F32", file_type}
    with Peer(path, n_ctx=64, exact=True) as peer:
        assert peer.decode(TOKENS[:16]).std() >= 2


def test_mixed_file_has_three_types_a_layer_and_others_in_the_next(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write(tmp_path / "m.gguf", "qwen2moe", file_type="mixed", n_layer=2))
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    layers = [[kinds[f"blk.{n}.ffn_{role}_exps.weight"] for role in ("gate", "up", "down")] for n in range(2)]
    assert all(len(set(layer)) == 3 for layer in layers)
    assert not set(layers[0]) & set(layers[1])


def test_q4_k_m_follows_llama_cpp(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write(tmp_path / "m.gguf", "qwen3moe", file_type="Q4_K_M", n_layer=3))
    kinds = {t.name: t.tensor_type.name for t in reader.tensors}
    assert kinds["output.weight"] == "Q6_K"
    assert [kinds[f"blk.{n}.ffn_down_exps.weight"] for n in range(3)] == ["Q4_K", "Q4_K", "Q6_K"]
    assert kinds["blk.2.attn_q.weight"] == "Q4_K"


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        write(tmp_path / f"{i}.gguf", "llama-moe", file_type="Q8_0", seed=s).read_bytes()
        for i, s in enumerate((5, 5, 6))
    )
    assert first == again
    assert first != other


def test_experts_differ_everywhere(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(write(tmp_path / "m.gguf", "qwen3moe", file_type="Q4_0"))
    banks = [t for t in reader.tensors if "_exps" in t.name]
    experts = {bytes(expert.tobytes()) for bank in banks for expert in bank.data}
    assert len(experts) == sum(len(bank.data) for bank in banks) == 3 * 3 * 10


@pytest.mark.parametrize("arch", ["llama-moe", "qwen2moe", "qwen3moe", "olmoe"])
def test_rounding_does_not_change_the_route(arch: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", arch, file_type="Q4_0")
    routes = []
    for file in (path, dequantise_file(path, tmp_path / "plain.gguf")):
        seen: list[np.ndarray] = []
        with Peer(file, n_ctx=128, capture=(("ffn_moe_topk-",), lambda name, x, to=seen: to.append(x))) as peer:
            peer.decode(TOKENS, every=True)
        routes.append(np.sort(np.stack(seen), axis=-1))
    assert np.array_equal(*routes)
    assert len(np.unique(routes[0].reshape(-1, routes[0].shape[-1]), axis=0)) > 8


def test_writers_refuse_what_they_cannot_make(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown tiny architecture 'gpt9'"):
        write(tmp_path / "m.gguf", "gpt9")
    with pytest.raises(ValueError, match="unknown tensor type 'Q9_X'"):
        write(tmp_path / "m.gguf", "llama", file_type="Q9_X")
    with pytest.raises(ValueError, match="its blocks hold 256"):
        write(tmp_path / "m.gguf", "llama", file_type="Q4_K", n_ff=100)
    with pytest.raises(ValueError, match="unknown preset"):
        synth_moe.write(tmp_path / "m.gguf", "qwen9")
    with pytest.raises(ValueError, match="no random blocks of type NVFP4"):
        random_rows(np.random.default_rng(0), type_by_name("NVFP4"), 2, 64, 1.0)


def test_vocabulary_reads_every_byte_back(tmp_path: Path) -> None:
    text = "the river ran — Größe 🙂\n\t<|im_start|>user"
    with Peer(write(tmp_path / "m.gguf", "qwen2"), n_ctx=64) as peer:
        tokens = peer.tokenize(text)
        assert len(tokens) < len(text.encode()), "merges and control tokens shorten it"
        assert peer.text(tokens) == text.replace("<|im_start|>", "")
    vocabulary = make_vocabulary(1000)
    assert len(set(vocabulary.tokens)) == 1000
    assert vocabulary.tokens[:256] == byte_symbols()


def test_dequantised_file_holds_the_reference_values(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen2moe", file_type="Q4_K_M", n_layer=2)
    plain = gguf.GGUFReader(dequantise_file(path, tmp_path / "plain.gguf"))
    source = gguf.GGUFReader(path)
    assert list(plain.fields) == list(source.fields)
    for quantised, values in zip(source.tensors, plain.tensors, strict=True):
        assert values.tensor_type == gguf.GGMLQuantizationType.F32
        expected = gguf.quants.dequantize(quantised.data, quantised.tensor_type)
        np.testing.assert_allclose(values.data.reshape(expected.shape), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", list(RANDOM_TYPES))
def test_random_blocks_have_the_spread_asked_for(name: str) -> None:
    kind = type_by_name(name)
    rows = random_rows(np.random.Generator(np.random.SFC64(1)), kind, 256, 512, 0.03)
    again = random_rows(np.random.Generator(np.random.SFC64(1)), kind, 256, 512, 0.03)
    values = dequantise(rows, kind, 512)
    assert np.array_equal(rows, again)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.2 * 0.03
    factor = 1.5 if name == "MXFP4" else 1.05
    assert 0.03 / factor < values.std() < 0.03 * factor


def test_quantise_and_back() -> None:
    values = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for name, bound in (("F32", 0), ("F16", 1e-3), ("Q8_0", 0.02), ("Q4_K", 0.2), ("IQ2_XXS", 1.5)):
        kind = type_by_name(name)
        assert np.abs(dequantise(quantise(values, kind), kind, 256) - values).max() <= bound * 1.5


def test_synthetic_file_runs_and_routes_as_planted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, plans = synth_moe.write(tmp_path / "m.gguf", SMALL, types="Q4_K,attn_v=Q8_0,ffn_down_exps=Q6_K")
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert kinds["blk.1.ffn_down_exps.weight"] == "Q6_K"
    assert kinds["blk.1.attn_v.weight"] == "Q8_0"
    assert kinds["blk.1.ffn_gate_inp.weight"] == "F32"
    figures = synth_check.check(path, model.n_layer, model.n_expert, n_tokens=160)
    assert 0.3 < figures["overlap"] < 0.75
    assert 0.5 < figures["hit_rate"] < 0.9
    assert 0.5 < figures["rms_first"] < figures["rms_last"] < 2
    assert "synthetic" in capsys.readouterr().out
    experts, total = synth_moe.expert_share(model, plans)
    banks = sum(p.n_bytes for p in plans if "_exps" in p.name)
    assert experts == banks // 4
    assert experts < total < banks


def test_synthetic_banks_repeat_only_when_asked(tmp_path: Path) -> None:
    for repeat, n_different in ((False, 2), (True, 1)):
        path, _, _ = synth_moe.write(tmp_path / "m.gguf", SMALL, types="Q8_0", repeat_banks=repeat)
        tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
        banks = {tensors[f"blk.{n}.ffn_up_exps.weight"].tobytes() for n in range(2)}
        assert len(banks) == n_different
        assert len({tensors[f"blk.{n}.attn_q.weight"].tobytes() for n in range(2)}) == 2


def test_synthetic_files_are_deterministic(tmp_path: Path) -> None:
    files = [synth_moe.write(tmp_path / f"{i}.gguf", SMALL, seed=s)[0].read_bytes() for i, s in enumerate((1, 1, 2))]
    assert files[0] == files[1] != files[2]


def test_overlap_and_hit_rate_of_known_routes() -> None:
    same = np.tile(np.array([[[0, 1]]]), (100, 1, 1))
    assert synth_check.overlap(same) == 1
    assert synth_check.hit_rate(same, 4, 0.5) == 1
    turns = np.array([[[0, 1]], [[2, 3]]] * 50)
    assert synth_check.overlap(turns) == 0
    assert synth_check.hit_rate(turns, 4, 0.5) == 0
    assert synth_check.hit_rate(turns, 4, 1.0) == 1


def test_errors_are_measured_as_documented() -> None:
    reference = np.array([1.0, 2.0, 3.0], dtype=np.float32)
    assert parity.relative_error(reference, reference) == 0
    assert parity.relative_error(reference, reference + np.float32(0.5)) == pytest.approx(0.5 / reference.std())
    assert parity.relative_error(reference, np.array([1, np.nan, 3], dtype=np.float32)) == float("inf")
    assert parity.kl_divergence(reference, reference + 7) == pytest.approx(0, abs=1e-15)
    assert parity.kl_divergence(np.log([0.5, 0.5]), np.log([0.25, 0.75])) == pytest.approx(0.5 * np.log(4 / 3))


ROWS = [
    (("F32", 1e-5, 1e-9, None), True),
    (("F32", 2e-4, 1e-9, None), False),
    (("F32", 1e-5, 2e-7, None), False),
    (("Q4_K", 1e-2, 1e-4, 2e-4), True),
    (("Q4_K", 1e-2, 3e-4, 4e-4), False),
    (("Q4_K", 1e-2, 1e-4, 5e-5), False),
    (("Q4_K", float("nan"), float("nan"), 5e-5), False),
]


@pytest.mark.parametrize(("figures", "is_good"), ROWS)
def test_rows_hold_the_bars(figures: tuple[str, float, float, float | None], is_good: bool) -> None:
    kind, error, kl, peer_kl = figures
    row = parity.Row("m", kind, 8, "decode", error, kl, peer_kl)
    assert row.is_good == is_good
    assert ("ok" in row.line()) == is_good


@pytest.mark.parametrize("arch", ["llama-rope", "qwen2moe", "gemma3"])
def test_our_logits_are_llama_cpps(arch: str, tmp_path: Path) -> None:
    rows = parity.compare_exact(arch, write(tmp_path / "m.gguf", arch), parity.tiny_tokens())
    assert len(rows) == 6
    assert all(row.is_good for row in rows), "\n".join(row.line() for row in rows)


def test_our_logits_are_closer_than_llama_cpps(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3moe", file_type="mixed")
    rows = parity.compare_quantised("qwen3moe", "mixed", path, parity.tiny_tokens(), tmp_path)
    assert all(row.is_good for row in rows), "\n".join(row.line() for row in rows)


@pytest.mark.weights
def test_smollm2_knows_the_capital(smollm2_path: Path) -> None:
    assert "Paris" in parity.our_answer(smollm2_path)[1]


def test_pairs_take_turns() -> None:
    order: list[str] = []
    ours, theirs = bench_peer.run_pairs(
        lambda: 1.0 if order.append("o") is None else 0, lambda: 2.0 if order.append("t") is None else 0, 3
    )
    assert "".join(order) == "ot" + "ot" + "to" + "ot"
    assert (ours, theirs) == ([1.0] * 3, [2.0] * 3)


def test_bench_measures_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen3moe", file_type="Q8_0", n_layer=2)
    result = bench_peer.measure("MoE decode", path, is_decode=True, n_pairs=2, n_threads=1)
    assert len(result.ratios) == 2
    assert result.median_ratio > 0
    assert "of them experts" in result.note
    assert "ratio" in result.line()


def llama2c_files(folder: Path, rng: np.random.Generator) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """A llama2.c model of random weights (dim 16, 2 layers, 4 heads, 2 of keys, 280 tokens), and its arrays."""
    dim, ff, n, heads, kv, vocab, seq = 16, 24, 2, 4, 2, 280, 32
    shapes = {
        "embed": (vocab, dim),
        "norm1": (n, dim),
        "q": (n, dim, dim),
        "k": (n, dim // 2, dim),
        "v": (n, dim // 2, dim),
        "o": (n, dim, dim),
        "norm2": (n, dim),
        "w1": (n, ff, dim),
        "w2": (n, dim, ff),
        "w3": (n, ff, dim),
        "norm": (dim,),
        "rope": (2, seq, dim // heads // 2),
    }
    arrays = {name: rng.standard_normal(shape).astype(np.float32) * 0.5 for name, shape in shapes.items()}
    weights = folder / "m.bin"
    weights.write_bytes(
        struct.pack("<7i", dim, ff, n, heads, kv, vocab, seq) + b"".join(a.tobytes() for a in arrays.values())
    )
    texts = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{b:02X}>".encode() for b in range(256))]
    texts += [b" ", b"a", b" a", *(f"t{i}".encode() for i in range(vocab - len(texts) - 3))]
    tokenizer = folder / "t.bin"
    tokens = b"".join(struct.pack("<fi", -float(i), len(text)) + text for i, text in enumerate(texts))
    tokenizer.write_bytes(struct.pack("<i", 8) + tokens)
    return weights, tokenizer, arrays


def llama2c_logits(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """llama2.c's forward pass in numpy: logits after the last token."""

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * weight

    x = w["embed"][tokens].astype(np.float64)
    n = len(tokens)
    turn = np.exp(1j * np.outer(np.arange(n), 10000.0 ** (-np.arange(0, 4, 2) / 4)))[:, None]

    def rotate(y: np.ndarray) -> np.ndarray:
        pairs = y.reshape(n, -1, 2, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(n, -1, 4)

    for layer in range(2):
        h = norm(x, w["norm1"][layer])
        q, k = rotate(h @ w["q"][layer].T), rotate(h @ w["k"][layer].T).repeat(2, axis=1)
        v = (h @ w["v"][layer].T).reshape(n, 2, 4).repeat(2, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / 2 + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weights, v).reshape(n, -1) @ w["o"][layer].T
        h = norm(x, w["norm2"][layer])
        gate = h @ w["w1"][layer].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][layer].T)) @ w["w2"][layer].T
    return np.asarray(norm(x[-1], w["norm"]) @ w["embed"].T)


def test_llama2c_model_computes_the_same_in_llama_cpp(tmp_path: Path) -> None:
    weights, tokenizer, arrays = llama2c_files(tmp_path, np.random.default_rng(0))
    tokens = [1, 261, 70, 8, 9, 200, 77]
    with Peer(convert(weights, tokenizer, tmp_path / "m.gguf"), n_ctx=32, exact=True) as peer:
        logits = peer.decode(tokens)
        assert peer.tokenize("a", add_bos=True) == [1, 261]
        assert peer.text([3 + ord("Z"), 261]) == "Z a"
    assert parity.relative_error(llama2c_logits(arrays, tokens), logits) < 1e-5


def test_llama2c_converter_refuses_broken_files(tmp_path: Path) -> None:
    weights, tokenizer, _ = llama2c_files(tmp_path, np.random.default_rng(0))
    data = weights.read_bytes()
    for cut, message in ((b"", "too short"), (data[:-4], "header asks for"), (bytes(28), "not a llama2.c model")):
        (tmp_path / "bad.bin").write_bytes(cut)
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "bad.bin", tokenizer, tmp_path / "m.gguf")
    (tmp_path / "bad.bin").write_bytes(tokenizer.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"ends in token|claims"):
        convert(weights, tmp_path / "bad.bin", tmp_path / "m.gguf")


def test_tools_run_as_scripts(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "tiny_models.py"), str(tmp_path), "--arch", "olmoe"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "olmoe-F32.gguf").exists()
