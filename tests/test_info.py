"""`ft info`: the facts of supported, unsupported, split and broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files as g
import pytest
from gguf_files import TensorBytes

from freetoken.cli.main import main
from freetoken.gpu import driver
from freetoken.quants import GgmlType

MIXED = {
    "token_embd.weight": GgmlType.Q8_0,
    "blk.0.ffn_gate_exps.weight": GgmlType.Q4_0,
    "blk.0.ffn_up_exps.weight": GgmlType.Q4_0,
    "blk.0.ffn_down_exps.weight": GgmlType.Q8_0,
}


def facts(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    """The output of `ft info --json`."""
    assert main(["info", str(path), "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def table(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, str]:
    """The lines of `ft info` with a label, by label."""
    assert main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:15].strip(): line[15:] for line in lines[: lines.index("")]}


def moe(folder: Path) -> Path:
    keys = g.tiny_keys("qwen3moe") | {"tokenizer.chat_template": "{{ messages }}"}
    return g.write(folder / "moe.gguf", keys, g.tiny_tensors("qwen3moe", MIXED))


def test_json_of_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = facts(capsys, moe(tmp_path))
    expected = {
        "architecture": "qwen3moe",
        "supported": True,
        "problem": None,
        "name": "tiny qwen3moe",
        "gguf_version": 3,
        "n_layer": 2,
        "n_embd": 64,
        "n_head": 4,
        "n_kv": 2,
        "n_ctx_train": 512,
        "n_vocab": 10,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "qwen2",
        "has_chat_template": True,
        "chat_template_length": 14,
    }
    assert {k: info[k] for k in expected} == expected
    one = 64 * 32
    layer_0, layer_1 = 2 * one * 18 // 32 + one * 34 // 32, 3 * one * 4
    experts = info["experts"]
    assert (experts["n_expert"], experts["n_used"], experts["n_layers"]) == (4, 2, 2)
    assert (experts["bytes_min"], experts["bytes_max"], experts["n_bytes"]) == (
        layer_0,
        layer_1,
        4 * (layer_0 + layer_1),
    )
    assert info["n_params"] - info["n_params_active"] == 2 * 2 * 3 * one
    groups = {(row["group"], row["type"]): row for row in info["groups"]}
    assert [key[0] for key in groups] == ["embedding", "attention", "router", "experts", "experts", "experts", "norms"]
    assert (
        groups["experts", "Q4_0"]["n_tensors"] == 2 and groups["experts", "Q4_0"]["n_bytes"] == 2 * 4 * one * 18 // 32
    )
    assert sum(row["n_params"] for row in groups.values()) == info["n_params"]
    assert experts["share"] == pytest.approx(
        experts["n_bytes"] / sum(row["n_bytes"] for row in groups.values()), abs=1e-4
    )
    assert info["n_bytes"] == info["files"][0]["n_bytes"] == (tmp_path / "moe.gguf").stat().st_size


def test_table_of_a_mixture_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, moe(tmp_path))
    assert rows["architecture"] == "qwen3moe" and rows["supported"] == "yes" and rows["tokenizer"] == "gpt2 / qwen2"
    assert rows["experts"] == "4, 2 used for a token, in 2 layers" and rows["chat template"] == "yes, 14 characters"
    assert rows["one expert"].endswith("MiB in a layer") and "% of all weights" in rows["expert bytes"]


def test_shared_experts_and_output_have_their_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = g.write(tmp_path / "m.gguf", g.tiny_keys("qwen2moe"), g.tiny_tensors("qwen2moe"))
    groups = {row["group"]: row["n_tensors"] for row in facts(capsys, path)["groups"]}
    assert groups == {
        "embedding": 1,
        "attention": 14,
        "router": 4,
        "experts": 6,
        "shared experts": 6,
        "norms": 5,
        "output": 1,
    }


def test_unsupported_architecture_is_still_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {
        "general.architecture": "nemotron_h",
        "nemotron_h.block_count": 2,
        "nemotron_h.attention.head_count": [0, 8],
    }
    path = g.write(tmp_path / "m.gguf", keys, [TensorBytes("blk.0.ssm_in.weight", (32, 2), GgmlType.Q4_0)])
    info = facts(capsys, path)
    assert (info["supported"], info["n_layer"], info["n_head"], info["n_embd"]) == (False, 2, [0, 8], None)
    assert "'nemotron_h' is not supported" in info["problem"]
    assert info["groups"] == [{"group": "other", "type": "Q4_0", "n_tensors": 1, "n_params": 64, "n_bytes": 36}]
    rows = table(capsys, path)
    assert rows["supported"].startswith("no: ") and rows["embedding"] == "-" and rows["experts"] == "none"


def test_odd_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of unexpected types are left out, and what could drive a terminal is replaced."""
    keys = {"general.architecture": "llama", "general.name": "a\x1b[2Jb\nc", "llama.block_count": "two"}
    path = g.write(tmp_path / "m.gguf", keys | {"tokenizer.chat_template": 5, "llama.context_length": [1.5]})
    rows = table(capsys, path)
    assert (
        rows["name"] == "a\ufffd[2Jb\ufffdc"
        and rows["layers"] == rows["context"] == "-"
        and rows["chat template"] == "no"
    )
    assert facts(capsys, g.write(tmp_path / "none.gguf", {}))["architecture"] is None


def test_split_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = g.tiny_tensors("llama")
    split = {"split.count": 2, "split.tensors.count": len(tensors)}
    g.write(tmp_path / "m-00001-of-00002.gguf", g.tiny_keys("llama") | split | {"split.no": 0}, tensors[:5])
    second = g.write(tmp_path / "m-00002-of-00002.gguf", split | {"split.no": 1}, tensors[5:])
    info = facts(capsys, second)
    assert info["supported"] and [f["n_tensors"] for f in info["files"]] == [5, len(tensors) - 5]
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    assert main(["info", str(second)]) == 1
    assert "m-00001-of-00002.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"GGUF\3\0\0\0"], ids=["empty", "zip", "cut"])
def test_broken_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert main(["info", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ft: error: ") and str(path) in err and err.count("\n") == 1


@pytest.mark.weights
def test_smollm2(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = facts(capsys, smollm2_path)
    assert info["supported"] and info["n_params"] == 134_515_008 and info["experts"] is None
    assert {row["type"] for row in info["groups"]} == {"Q8_0", "Q4_1", "F32"}


def test_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(driver, "find_devices", list)
    monkeypatch.setattr(driver, "why_no_device", lambda: "no driver")
    assert main(["info", "--devices"]) == 0
    assert capsys.readouterr().out == "no GPU: no driver\n"
    card = driver.Device(0, "Card", "GPU-0", (5, 2), 16, 8 << 30, 12080, True, False, True)
    monkeypatch.setattr(driver, "find_devices", lambda: [card])
    monkeypatch.setattr(driver, "why_no_device", lambda: "")
    assert main(["info", "--devices"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CUDA0          Card\n") and "5.2, 16 SMs" in out and "CUDA 12.8" in out
    assert "cannot be locked in place" in out and "usable         no: the card has compute capability 5.2" in out
    assert main(["info", "--devices", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["n_sm"] == 16 and facts["total_bytes"] == 8 << 30 and "7.5" in facts["problem"]
