"""Hyper-parameters, tensor checks and rotation tables of the seven architectures."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import gguf_files as g
import numpy as np
import pytest
from gguf_files import TensorBytes, Typed

from freetoken import quants
from freetoken.blocks import RopeTable
from freetoken.errors import ModelFileError, UnsupportedModelError
from freetoken.gguf import ModelFile, open_model
from freetoken.quants import GgmlType
from freetoken.spec import SUPPORTED, ModelSpec, check_tensors, read_architecture, read_spec

MOE = ("olmoe", "qwen2moe", "qwen3moe")


def tiny(folder: Path, arch: str, keys: dict[str, object] | None = None, drop: str = "", **kwargs: object) -> ModelFile:
    """A tiny model with some metadata keys changed ("@x" stands for "<arch>.x") and one dropped."""
    meta = g.tiny_keys(arch) | {k.replace("@", f"{arch}."): v for k, v in (keys or {}).items()}
    meta.pop(drop.replace("@", f"{arch}."), None)
    return open_model(g.write(folder / "m.gguf", meta, kwargs.pop("tensors", None) or g.tiny_tensors(arch), **kwargs))


@pytest.mark.parametrize("arch", SUPPORTED)
def test_every_architecture(tmp_path: Path, arch: str) -> None:
    model = tiny(tmp_path, arch)
    spec = read_spec(model)
    check_tensors(spec, model)
    assert (spec.architecture, spec.n_layer, spec.n_embd, spec.n_vocab, spec.n_ctx_train) == (arch, 2, 64, 10, 512)
    assert (spec.n_head, spec.n_kv, spec.head_dim_k, spec.head_dim_v, spec.n_ff) == ((4, 4), (2, 2), 16, 16, (96, 96))
    assert spec.is_tied == (arch not in ("olmoe", "qwen2moe")) and spec.is_moe == (arch in MOE)
    assert spec.rope.is_neox == (arch != "llama") and spec.rope.n_rot == 16 and spec.attn_scale == 0.25
    assert spec.eps == pytest.approx(1e-6) and spec.window_of(1) == 0
    if arch in MOE:
        assert (spec.n_expert, spec.n_expert_used) == (4, 2)
        assert spec.n_ff_exp == (96 if arch == "olmoe" else 32) and spec.n_ff_shexp == (96 if arch == "qwen2moe" else 0)
    assert spec.expert_norm == (arch == "qwen3moe") and spec.expert_gating == "softmax" and spec.expert_scale == 1.0


def test_mixtral_is_llama_with_experts(tmp_path: Path) -> None:
    dense = [
        t for t in g.tiny_tensors("llama") if not t.name.startswith("blk") or "ffn_norm" in t.name or "attn" in t.name
    ]
    experts = [t for t in g.tiny_tensors("olmoe") if "exps" in t.name or "gate_inp" in t.name]
    model = tiny(tmp_path, "llama", {"@expert_count": 4, "@expert_used_count": 2}, tensors=dense + experts)
    spec = read_spec(model)
    check_tensors(spec, model)
    assert (spec.n_expert, spec.n_expert_used, spec.n_ff_exp, spec.expert_norm) == (4, 2, 96, True)


def test_expert_width_defaults(tmp_path: Path) -> None:
    spec = read_spec(tiny(tmp_path, "qwen3moe", drop="@expert_feed_forward_length"))
    assert spec.n_ff_exp == 96 // 2
    spec = read_spec(tiny(tmp_path, "qwen2moe", drop="@expert_shared_feed_forward_length"))
    assert spec.n_ff_shexp == 96


def test_optional_keys(tmp_path: Path) -> None:
    model = tiny(
        tmp_path, "qwen3", {"@attention.key_length": 32, "@attention.value_length": 24}, "@attention.head_count_kv"
    )
    spec = read_spec(model)
    assert (spec.head_dim_k, spec.head_dim_v, spec.n_kv, spec.rope.n_rot) == (32, 24, (4, 4), 32)
    spec = read_spec(tiny(tmp_path, "llama", {"@attention.head_count_kv": [1, 4], "@feed_forward_length": [96, 32]}))
    assert spec.n_kv == (1, 4) and spec.n_ff == (96, 32)
    assert read_spec(tiny(tmp_path, "llama", {"@vocab_size": 11}, "tokenizer.ggml.tokens")).n_vocab == 11
    assert read_spec(tiny(tmp_path, "llama", {}, "tokenizer.ggml.tokens")).n_vocab == 10


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(None, "11111011"), (2, "10101010"), (0, "11111111"), (1, "00000000"), ([True, True, False] * 3, "11011011")],
)
def test_gemma3_sliding_layers(tmp_path: Path, pattern: object, expected: str) -> None:
    keys: dict[str, object] = {"@block_count": 8, "@attention.sliding_window": 128, "@rope.freq_base": 1e6}
    if pattern is not None:
        keys["@attention.sliding_window_pattern"] = pattern
    spec = read_spec(tiny(tmp_path, "gemma3", keys | {"@final_logit_softcapping": 30.0, "@rope.scaling.factor": 8.0}))
    assert "".join(str(int(s)) for s in spec.is_sliding) == expected
    assert spec.final_softcap == 30.0 and spec.rope.factor == 8.0
    for layer, is_sliding in enumerate(spec.is_sliding):
        assert spec.window_of(layer) == (128 if is_sliding else 0)
        assert spec.rope_table(layer).inv_freq[1] == pytest.approx(1e4**-0.125 if is_sliding else 1e6**-0.125 / 8)


def test_gemma3_27b_scales_by_the_embedding(tmp_path: Path) -> None:
    keys: dict[str, object] = {"@block_count": 62, "@attention.key_length": 32, "@attention.value_length": 32}
    assert read_spec(tiny(tmp_path, "gemma3", keys)).attn_scale == 1 / math.sqrt(16)


def test_b50_unsupported_architecture(tmp_path: Path) -> None:
    model = open_model(g.write(tmp_path / "m.gguf", {"general.architecture": "mamba2"}))
    for call in (lambda: read_architecture(model.metadata), lambda: read_spec(model)):
        with pytest.raises(UnsupportedModelError) as caught:
            call()
        message = str(caught.value)
        assert "'mamba2'" in message and all(name in message for name in SUPPORTED) and "\n" not in message


def test_b54_trunk_is_block_count_less_nextn(tmp_path: Path) -> None:
    keys: dict[str, object] = {"@block_count": 3, "@nextn_predict_layers": 1}
    draft = [TensorBytes("blk.2.nextn.eh_proj.weight", (128, 64)), TensorBytes("blk.2.attn_norm.weight", (64,))]
    model = tiny(tmp_path, "qwen3moe", keys, tensors=g.tiny_tensors("qwen3moe") + draft)
    spec = read_spec(model)
    check_tensors(spec, model)
    assert spec.n_layer == 2 and len(spec.n_head) == 2


@pytest.mark.parametrize(("n_all", "n_next"), [(1, 1), (3, 1)])
def test_b54_draft_only_file_is_refused(tmp_path: Path, n_all: int, n_next: int) -> None:
    keys: dict[str, object] = {"@block_count": n_all, "@nextn_predict_layers": n_next}
    tensors = [TensorBytes("token_embd.weight", (64, 10)), TensorBytes("blk.2.attn_norm.weight", (64,))]
    with pytest.raises(UnsupportedModelError, match="only the 1 draft"):
        read_spec(tiny(tmp_path, "qwen3moe", keys, tensors=tensors))


def test_b51_types_may_differ_between_banks_and_layers(tmp_path: Path) -> None:
    types = {
        "blk.0.ffn_gate_exps.weight": GgmlType.Q4_0,
        "blk.0.ffn_up_exps.weight": GgmlType.Q5_1,
        "blk.0.ffn_down_exps.weight": GgmlType.Q8_0,
        "blk.1.ffn_gate_exps.weight": GgmlType.MXFP4,
        "blk.1.ffn_up_exps.weight": GgmlType.BF16,
        "blk.1.ffn_down_exps.weight": GgmlType.IQ4_NL,
    }
    model = tiny(tmp_path, "qwen3moe", tensors=g.tiny_tensors("qwen3moe", types))
    check_tensors(read_spec(model), model)
    for name, type_id in types.items():
        tensor = model.tensor(name)
        assert tensor.type == type_id and tensor.data.shape == (tensor.rows, quants.row_bytes(type_id, tensor.shape[0]))
        assert tensor.rows == tensor.shape[1] * 4


BAD_KEYS: list[tuple[str, dict[str, object], str]] = [
    ("llama", {"@block_count": 0}, "'llama.block_count' is 0, expected 1 to 512"),
    ("llama", {"@block_count": 2**31}, "'llama.block_count' is 2147483648"),
    ("llama", {"@block_count": 1.5}, "is f32, expected an integer"),
    ("llama", {"@nextn_predict_layers": 9}, "nextn_predict_layers' is 9, expected 0 to 2"),
    ("llama", {"@embedding_length": 0}, "embedding_length"),
    ("llama", {"@embedding_length": 2**30}, "embedding_length"),
    ("llama", {"@context_length": Typed(g.I32, -1)}, "context_length' is -1"),
    ("llama", {"@attention.head_count": 0}, "head_count' is 0"),
    ("llama", {"@attention.head_count": 3}, "3 heads, not a multiple of its 2 KV heads"),
    ("llama", {"@attention.head_count": [4]}, "has 1 values, expected 2"),
    ("llama", {"@attention.head_count": 6, "@attention.head_count_kv": 6}, "64 values do not divide into 6 heads"),
    ("llama", {"@attention.head_count_kv": [2, 3]}, "layer 1 has 4 heads, not a multiple of its 3"),
    ("llama", {"@attention.key_length": 2**20}, "key_length"),
    ("llama", {"@attention.layer_norm_rms_epsilon": float("nan")}, "epsilon' is nan"),
    ("llama", {"@feed_forward_length": 0}, "feed_forward_length' is missing or 0"),
    ("llama", {"@rope.dimension_count": 15}, "is 15, expected an even number"),
    ("llama", {"@rope.dimension_count": 64}, "is 64, expected 2 to 16"),
    ("llama", {"@rope.freq_base": 0.0}, "freq_base' is 0.0"),
    ("llama", {"@rope.freq_base": float("inf")}, "freq_base' is inf"),
    ("llama", {"@rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported, only none, linear, yarn"),
    ("llama", {"@rope.scaling.factor": -1.0}, "factor' is -1"),
    ("llama", {"@rope.scaling.factor": 1e-5}, "factor' is 9.99"),
    ("llama", {"tokenizer.ggml.tokens": 5}, "tokens' is u32, expected an array of strings"),
    ("qwen3moe", {"@expert_count": 0}, "expert_count' is 0, expected 1 to"),
    ("qwen3moe", {"@expert_count": 5000}, "expert_count' is 5000"),
    ("qwen3moe", {"@expert_used_count": 5}, "expert_used_count' is 5, expected 1 to 4"),
    ("qwen3moe", {"@expert_used_count": 0}, "expert_used_count' is 0"),
    ("qwen3moe", {"@expert_count": 100, "@expert_used_count": 65}, "expert_used_count' is 65, expected 1 to 64"),
    ("qwen3moe", {"@expert_used_count": [2, 1]}, "differs between layers"),
    ("qwen3moe", {"@expert_group_count": 2}, "expert groups"),
    ("gemma3", {"@expert_count": 4}, "gemma3 with 4 experts is not supported"),
    (
        "gemma3",
        {"@attention.sliding_window": 8, "@attention.sliding_window_pattern": [True]},
        "has 1 values, expected 2",
    ),
]


@pytest.mark.parametrize(("arch", "keys", "message"), BAD_KEYS, ids=[f"{a} {k}" for a, k, _ in BAD_KEYS])
def test_bad_metadata(tmp_path: Path, arch: str, keys: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        read_spec(tiny(tmp_path, arch, keys))


@pytest.mark.parametrize("arch", SUPPORTED)
def test_each_missing_key_is_named_or_has_a_default(tmp_path: Path, arch: str) -> None:
    for key in g.tiny_keys(arch):
        model = tiny(tmp_path, arch, drop=key)
        try:
            assert isinstance(read_spec(model), ModelSpec)
        except ModelFileError as error:
            assert key in str(error)


@pytest.mark.parametrize("arch", SUPPORTED)
def test_each_missing_or_misshapen_tensor_is_named(tmp_path: Path, arch: str) -> None:
    tensors = g.tiny_tensors(arch)
    spec = read_spec(tiny(tmp_path, arch))
    for i, tensor in enumerate(tensors):
        if not tensor.name.endswith(".bias") and tensor.name != "output.weight":
            model = tiny(tmp_path, arch, tensors=tensors[:i] + tensors[i + 1 :])
            with pytest.raises(ModelFileError, match=f"tensor '{tensor.name}' is missing"):
                check_tensors(spec, model)
        wrong = TensorBytes(tensor.name, (*tensor.shape[:-1], tensor.shape[-1] + 1))
        model = tiny(tmp_path, arch, tensors=[*tensors[:i], wrong, *tensors[i + 1 :]])
        with pytest.raises(ModelFileError, match=f"'{tensor.name}' has shape .* expected"):
            check_tensors(spec, model)


@pytest.mark.parametrize(
    ("name", "type_id", "message"),
    [
        ("blk.0.attn_norm.weight", GgmlType.Q8_0, "Q8_0, which is no type for a vector"),
        ("blk.1.ffn_up.weight", GgmlType.I32, "I32, which is no type for a matrix"),
        ("token_embd.weight", GgmlType.Q8_1, "Q8_1, which is no type for a matrix"),
    ],
)
def test_types_that_hold_no_weights(tmp_path: Path, name: str, type_id: int, message: str) -> None:
    model = tiny(tmp_path, "llama", tensors=g.tiny_tensors("llama", {name: type_id}))
    with pytest.raises(UnsupportedModelError, match=message):
        check_tensors(read_spec(model), model)


def test_a_tensor_that_would_be_left_unused_is_refused(tmp_path: Path) -> None:
    extra = TensorBytes("blk.0.attn_q.scale", (1,))
    model = tiny(tmp_path, "llama", tensors=[*g.tiny_tensors("llama"), extra])
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.attn_q\.scale' is not one of llama's"):
        check_tensors(read_spec(model), model)


def test_iq_types_pass_as_matrices(tmp_path: Path) -> None:
    model = tiny(tmp_path, "llama", tensors=g.tiny_tensors("llama", {"blk.0.ffn_up.weight": GgmlType.IQ4_NL}))
    check_tensors(read_spec(model), model)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def ggml_cos_sin(table: dict[str, object], positions: np.ndarray, factors: np.ndarray | None) -> np.ndarray:
    """Cosines and sines [n, 2, n_rot / 2] by ggml's own rope on the CPU: heads of (1, 0) pairs, rotated."""
    base = quants._ggml()
    cpu = ctypes.CDLL(str(quants._library(Path(base._name).parent, "ggml-cpu")))
    n_rot, n = int(table["n_rot"]), len(positions)  # type: ignore[call-overload]
    base.ggml_init.restype = base.ggml_get_data.restype = base.ggml_new_graph.restype = ctypes.c_void_p
    base.ggml_init.argtypes = [_InitParams]
    base.ggml_new_tensor_3d.restype = base.ggml_new_tensor_1d.restype = base.ggml_rope_ext.restype = ctypes.c_void_p
    base.ggml_new_tensor_3d.argtypes = [ctypes.c_void_p, ctypes.c_int] + [ctypes.c_int64] * 3
    base.ggml_new_tensor_1d.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    base.ggml_get_data.argtypes = base.ggml_new_graph.argtypes = base.ggml_free.argtypes = [ctypes.c_void_p]
    base.ggml_rope_ext.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 3 + [ctypes.c_float] * 6
    base.ggml_build_forward_expand.argtypes = [ctypes.c_void_p] * 2
    cpu.ggml_graph_compute_with_ctx.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    ctx = base.ggml_init(_InitParams(64 << 20, None, False))

    def new(values: np.ndarray, *shape: int) -> int:
        make = base.ggml_new_tensor_3d if len(shape) == 3 else base.ggml_new_tensor_1d
        tensor = make(ctx, 26 if values.dtype == np.int32 else 0, *shape)
        ctypes.memmove(base.ggml_get_data(tensor), values.ctypes.data, values.nbytes)
        return int(tensor)

    x = new(np.tile(np.array([1, 0], np.float32), (n, n_rot // 2)), n_rot, 1, n)
    pos = new(positions.astype(np.int32), n)
    ff = None if factors is None else new(factors, n_rot // 2)
    names = ("freq_base", "freq_scale", "ext_factor", "attn_factor", "beta_fast", "beta_slow")
    y = base.ggml_rope_ext(ctx, x, pos, ff, n_rot, 0, table["n_ctx_orig"], *(table[name] for name in names))
    graph = base.ggml_new_graph(ctx)
    base.ggml_build_forward_expand(graph, y)
    assert cpu.ggml_graph_compute_with_ctx(ctx, graph, 1) == 0
    out = np.ctypeslib.as_array(ctypes.cast(base.ggml_get_data(y), ctypes.POINTER(ctypes.c_float)), (n, n_rot // 2, 2))
    result = np.array(out.transpose(0, 2, 1))
    base.ggml_free(ctx)
    return result


ROPES: dict[str, dict[str, object]] = {
    "plain": {},
    "linear": {"@rope.scaling.factor": 4.0},
    "old linear key": {"@rope.scale_linear": 2.0},
    "none ignores the factor": {"@rope.scaling.type": "none", "@rope.scaling.factor": 4.0},
    "yarn": {
        "@rope.scaling.type": "yarn",
        "@rope.scaling.factor": 4.0,
        "@rope.scaling.original_context_length": 4096,
        "@rope.freq_base": 1e6,
    },
    "yarn with an attention factor": {
        "@rope.scaling.type": "yarn",
        "@rope.scaling.factor": 32.0,
        "@rope.scaling.attn_factor": 0.8,
        "@rope.scaling.original_context_length": 8192,
    },
    "half of the head": {"@rope.dimension_count": 32},
}


@pytest.mark.parametrize("with_factors", [False, True])
@pytest.mark.parametrize("keys", ROPES.values(), ids=ROPES.keys())
def test_rope_equals_ggml(tmp_path: Path, keys: dict[str, object], with_factors: bool) -> None:
    """Against ggml's rope, with llama-context.cpp's rule for the attention factor of YaRN worked out by hand."""
    spec = read_spec(tiny(tmp_path, "llama", {"@attention.key_length": 64, "@attention.value_length": 64} | keys))
    rope = spec.rope
    factors = np.linspace(1, 8, rope.n_rot // 2, dtype=np.float32) if with_factors else None
    attn_factor = float(keys.get("@rope.scaling.attn_factor", 1.0))  # type: ignore[arg-type]
    if rope.scaling == "yarn":
        attn_factor *= (0.1 * math.log(rope.factor) + 1) / (1 + 0.1 * math.log(rope.factor))
    table = {
        "n_rot": rope.n_rot,
        "n_ctx_orig": rope.n_ctx_orig,
        "freq_base": rope.freq_base,
        "freq_scale": 1 / rope.factor,
        "ext_factor": rope.ext_factor,
        "attn_factor": attn_factor,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    positions = np.array([0, 1, 2, 7, 63, 300])
    ours = RopeTable(*spec.rope_table(0, factors)).cos_sin(positions)
    np.testing.assert_allclose(ours, ggml_cos_sin(table, positions, factors), atol=1e-4)


def test_yarn_magnitude(tmp_path: Path) -> None:
    """YaRN multiplies by 0.1 ln(factor) + 1; sliding layers of a scaled model are not scaled."""
    keys: dict[str, object] = {
        "@rope.scaling.type": "yarn",
        "@rope.scaling.factor": 4.0,
        "@attention.sliding_window": 8,
    }
    spec = read_spec(tiny(tmp_path, "gemma3", keys | {"@attention.sliding_window_pattern": 2}))
    assert spec.rope_table(1).mscale == pytest.approx(0.1 * math.log(4) + 1)
    assert spec.rope_table(0).mscale == pytest.approx(1.0)
    assert spec.rope_table(0).inv_freq[-1] == pytest.approx(1e4 ** -(14 / 16))


@pytest.mark.parametrize("factors", [np.ones(7), np.zeros(8), np.full(8, np.nan), -np.ones(8)])
def test_bad_freq_factors(tmp_path: Path, factors: np.ndarray) -> None:
    spec = read_spec(tiny(tmp_path, "llama"))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight"):
        spec.rope_table(0, factors)


@pytest.mark.parametrize("arch", ["gemma3", "qwen2moe"])
def test_fuzz(tmp_path: Path, arch: str) -> None:
    """Seeded mutations of the values in a header: a spec within bounds, or one of our errors."""
    keys = g.tiny_keys(arch) | {f"{arch}.rope.scaling.type": "yarn", f"{arch}.rope.scaling.factor": 4.0}
    keys |= {f"{arch}.attention.sliding_window": 8, f"{arch}.rope.freq_base": 1e6}
    good = g.build(keys, g.tiny_tensors(arch))
    path = tmp_path / "m.gguf"
    rng = np.random.default_rng(7)
    end = good.index(b"output_norm") + 400
    n_read = 0
    for _ in range(1500):
        content = bytearray(good)
        at = int(rng.integers(24, end))
        if rng.integers(2):
            content[at] ^= 1 << int(rng.integers(8))
        else:
            content[at : at + 4] = rng.bytes(4)
        path.write_bytes(content)
        try:
            model = open_model(path)
            spec = read_spec(model)
            assert np.all(np.isfinite(spec.rope_table(0).inv_freq)) and math.isfinite(spec.rope_table(0).mscale)
            n_read += 1
            check_tensors(spec, model)
        except ModelFileError as error:
            assert str(path) in str(error)
    assert n_read > 100


@pytest.mark.weights
def test_smollm2(smollm2_path: Path) -> None:
    model = open_model(smollm2_path)
    spec = read_spec(model)
    check_tensors(spec, model)
    assert (spec.architecture, spec.n_layer, spec.n_embd, spec.n_vocab, spec.is_tied) == ("llama", 30, 576, 49152, True)
    assert (spec.n_head[0], spec.n_kv[0], spec.head_dim_k, spec.n_ff[0], spec.n_ctx_train) == (9, 3, 64, 1536, 8192)
    assert spec.rope.freq_base == 100000.0 and not spec.rope.is_neox
