"""The loader: good files of every kind, and bad ones that must end in a clear error and nothing else."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import gguf_files as g
import numpy as np
import pytest
from gguf_files import TensorBytes, Typed, build

from freetoken.errors import FreeTokenError, MissingShardError, ModelFileError, UnsupportedModelError
from freetoken.gguf import ModelFile, StringArray, open_model
from freetoken.quants import REMOVED, TYPES, GgmlType

VALUES = np.arange(12, dtype=np.float32)
GOOD_KEYS: dict[str, object] = {
    "general.architecture": "llama",
    "general.name": "größe",
    "llama.block_count": 2,
    "llama.rope.freq_base": 1e4,
    "a.bool": True,
    "a.i64": Typed(g.I64, -5),
    "a.floats": [0.5, 1.5],
    "a.flags": [True, False],
    "tokenizer.ggml.tokens": ["<s>", "", "日本", "\n"],
}
GOOD_TENSORS = [
    TensorBytes("w", (4, 3), data=VALUES.tobytes()),
    TensorBytes("q", (64, 2, 3), GgmlType.Q8_0),
    TensorBytes("scalar", (), data=struct.pack("<f", 2.5)),
    TensorBytes("last", (5,), GgmlType.F16),
]


def open_bytes(folder: Path, content: bytes, name: str = "m.gguf") -> ModelFile:
    path = folder / name
    path.write_bytes(content)
    return open_model(path)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [32, 8, 4096])
def test_good_file(tmp_path: Path, version: int, alignment: int) -> None:
    keys = GOOD_KEYS | {"general.alignment": alignment}
    model = open_bytes(tmp_path, build(keys, GOOD_TENSORS, version=version, alignment=alignment))
    meta = model.metadata
    assert list(meta) == list(keys) and len(meta) == len(keys)
    assert meta.get_str("general.name") == "größe"
    assert meta.get_int("llama.block_count") == 2 and meta.get_int("a.i64", low=-9) == -5
    assert meta.get_float("llama.rope.freq_base") == 10000.0 and meta.get_bool("a.bool") is True
    assert meta.get_numbers("a.floats").tolist() == [0.5, 1.5] and meta.get_numbers("a.flags").tolist() == [True, False]
    tokens = meta.get_strings("tokenizer.ggml.tokens")
    assert (
        len(tokens) == 4
        and list(tokens) == ["<s>", "", "日本", "\n"]
        and tokens[2] == "日本"
        and tokens[1:3] == ["", "日本"]
    )
    assert meta.type_of("a.floats") == "array of f32" and meta.type_of("a.i64") == "i64"
    assert list(model.tensors) == ["w", "q", "scalar", "last"]
    w, q = model.tensor("w"), model.tensor("q")
    assert (w.shape, w.rows, w.row_bytes, w.n_bytes, w.n_values) == ((4, 3), 3, 16, 48, 12)
    assert np.array_equal(w.values(), VALUES.reshape(3, 4))
    assert (q.data.shape, q.type_name, q.values().shape) == ((6, 68), "Q8_0", (3, 2, 64))
    assert model.tensor("scalar").values().tolist() == [2.5]
    assert all(t.offset % alignment == 0 for t in model.tensors.values())
    assert model.n_bytes == (tmp_path / "m.gguf").stat().st_size
    model.close()


def test_data_is_a_read_only_view_of_a_shared_mapping(tmp_path: Path) -> None:
    """No copy is made: what is written to the file afterwards is seen (MAP_SHARED), and views outlive close()."""
    with open_bytes(tmp_path, build(GOOD_KEYS, GOOD_TENSORS)) as model:
        tensor = model.tensor("w")
        view = tensor.data
        assert not view.flags.writeable and np.shares_memory(view, model.shards[0].mapping)
        with open(tmp_path / "m.gguf", "r+b") as file:
            file.seek(tensor.offset)
            file.write(struct.pack("<f", 77.0))
        assert tensor.values()[0, 0] == 77.0
    assert view.view("<f4")[0, 0] == 77.0 and not model.tensors


@pytest.mark.parametrize("type_id", sorted(TYPES), ids=lambda t: TYPES[t].name)
def test_every_type_is_read(tmp_path: Path, type_id: int) -> None:
    t = TYPES[type_id]
    model = open_bytes(tmp_path, build(GOOD_KEYS, [TensorBytes("w", (2 * t.block_size, 3), type_id)]))
    assert model.tensor("w").data.shape == (3, 2 * t.block_bytes)


def one(**kwargs: object) -> list[TensorBytes]:
    return [TensorBytes(**({"name": "blk.0.bad", "shape": (32,)} | kwargs))]  # type: ignore[arg-type]


BAD_TENSORS: dict[str, tuple[list[TensorBytes], str]] = {
    "B44 dimension 2^42+1": (one(shape=(2**42 + 1,), data=b""), "blk.0.bad.*takes 17592186044420 bytes"),
    "B44 product wraps to 0": (one(shape=(2**32, 2**32), data=b""), "blk.0.bad.*bytes, more than"),
    "B44 [2^64-1, 2]": (one(shape=(2**64 - 1, 2), data=b""), "blk.0.bad.*bytes, more than"),
    "B44 four large dimensions": (one(shape=(2**63,) * 4, data=b""), "blk.0.bad.*bytes, more than"),
    "B44 many rows of nothing": (one(shape=(0, 2**63), data=b""), "blk.0.bad.*dimension of 0"),
    "B45 n_dims 9": (one(n_dims=9), "blk.0.bad.*9 dimensions, at most 4"),
    "B45 n_dims 2^32-1": (one(n_dims=2**32 - 1), "blk.0.bad.*dimensions, at most 4"),
    "B45 type id 200": (one(type=200, data=b""), "blk.0.bad.*unknown type 200"),
    "B49 a type newer than the reader": (
        one(type=max(TYPES) + 1, data=b""),
        f"blk.0.bad.*unknown type {max(TYPES) + 1}",
    ),
    "B45 offset beyond the file": (one(offset=2**40), "blk.0.bad.*the file ends at"),
    "B45 offset near 2^64": (one(offset=2**64 - 32), "blk.0.bad.*the file ends at"),
    "B45 offset not aligned": (
        one(offset=8, data=bytes(256)),
        "blk.0.bad.*offset 8 is not a multiple of the alignment 32",
    ),
    "B45 data section cut short": (one(shape=(64,), data=bytes(255)), "blk.0.bad.*truncated"),
    "B45 duplicate tensor": (one() + one(), "'blk.0.bad' occurs twice"),
    "row of half a block": (one(shape=(48,), type=2, data=b""), "blk.0.bad.*48 values is not a whole number of Q4_0"),
    "name too long": (one(name="x" * 64), "string of 64 bytes"),
    "name empty": (one(name=""), "no name"),
}
BAD_TENSORS |= {
    f"B45 removed type {t}": (one(type=t, data=b""), rf"blk.0.bad.*type {t} \({name}\), which ggml removed")
    for t, name in REMOVED.items()
}


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_bad_tensor(tmp_path: Path, tensors: list[TensorBytes], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_bytes(tmp_path, build(GOOD_KEYS, tensors))


GOOD = build(GOOD_KEYS, GOOD_TENSORS)
ONE_KEY = build({}, n_keys=1, cut=24) + g.text("k")
BAD_BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "file is empty"),
    "three bytes": (b"GGU", r"not a GGUF file: it starts with b'GGU'"),
    "wrong magic": (b"PK\3\4" + GOOD[4:], "not a GGUF file"),
    "only magic": (b"GGUF", "truncated"),
    "version 1": (build({}, version=1), "GGUF version 1, expected 2 or 3"),
    "version 4": (build({}, version=4), "GGUF version 4, expected 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "header cut": (GOOD[:20], "truncated"),
    "B44 n_tensors 2^63": (build(GOOD_KEYS, n_tensors=2**63), "9223372036854775808 tensors do not fit"),
    "n_tensors one too many": (build(GOOD_KEYS, GOOD_TENSORS, n_tensors=5), "tensor 4 of 5"),
    "n_keys 2^64-1": (build(GOOD_KEYS, n_keys=2**64 - 1), "metadata keys do not fit"),
    "duplicate key": (build([("a", 1), ("a", 2)]), "key 'a' occurs twice"),
    "key not UTF-8": (build([(b"\xff\xfe", 1)]), "no name"),
    "key empty": (build([("", 1)]), "no name"),
    "unknown value type": (ONE_KEY + struct.pack("<I", 13) + bytes(16), "unknown value type 13"),
    "array of arrays": (ONE_KEY + struct.pack("<IIQ", 9, 9, 1) + bytes(32), "array of value type 9"),
    "array of 2^62": (ONE_KEY + struct.pack("<IIQ", 9, 4, 2**62), "at most 1073741824"),
    "array of 2^29 numbers": (ONE_KEY + struct.pack("<IIQ", 9, 4, 2**29), "items do not fit"),
    "array of 2^29 strings": (ONE_KEY + struct.pack("<IIQ", 9, 8, 2**29), "strings do not fit"),
    "string of an array past the end": (
        ONE_KEY + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 8) + bytes(64),
        "runs past the end",
    ),
    "last string of an array past the end": (
        ONE_KEY + struct.pack("<IIQQ", 9, 8, 1, 9) + bytes(8),
        "runs past the end",
    ),
    "string past the end": (ONE_KEY + struct.pack("<IQ", 8, 99) + bytes(16), "99 bytes are needed"),
    "string of 2^60": (ONE_KEY + struct.pack("<IQ", 8, 2**60) + bytes(16), "at most 67108864"),
    "alignment 0": (build({"general.alignment": 0}), "is 0, expected 8 to"),
    "alignment 4": (build({"general.alignment": 4}), "is 4, expected 8 to"),
    "alignment 48": (build({"general.alignment": 48}), "expected a power of two"),
    "alignment of a wrong type": (build({"general.alignment": "32"}), "is string, expected an integer"),
}


@pytest.mark.parametrize(("content", "message"), BAD_BYTES.values(), ids=BAD_BYTES.keys())
def test_bad_bytes(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        open_bytes(tmp_path, content)


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    """Every prefix of a good file: the last tensor ends at the last byte, so none is whole."""
    path = tmp_path / "m.gguf"
    path.write_bytes(GOOD)
    for n in range(len(GOOD) - 1, -1, -1):
        os.truncate(path, n)
        with pytest.raises(ModelFileError, match=r"m\.gguf"):
            open_model(path)


def test_fuzz(tmp_path: Path) -> None:
    """Seeded mutations: every file opens, or ends in one of our errors; whatever opens can be read in full."""
    rng = np.random.default_rng(20260101)
    path = tmp_path / "m.gguf"
    header = GOOD.index(b"last") + 40
    special = [0, 1, 0x7F, 0x80, 0xFF]
    n_opened = 0
    for _ in range(4000):
        content = bytearray(GOOD)
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(4, header))
            kind = rng.integers(3)
            if kind == 0:
                content[at] = special[rng.integers(5)]
            elif kind == 1:
                content[at] ^= 1 << int(rng.integers(8))
            else:
                content[at : at + 8] = rng.bytes(8)
        if rng.integers(4) == 0:
            del content[int(rng.integers(len(content))) :]
        path.write_bytes(content)
        try:
            model = open_model(path)
        except FreeTokenError as error:
            assert str(path) in str(error)
            continue
        n_opened += 1
        assert [str(v) for v in model.metadata.values()]
        assert sum(int(t.data.sum()) for t in model.tensors.values()) >= 0
        for value in model.metadata.values():
            assert not isinstance(value, StringArray) or len(list(value)) == len(value)
    assert 100 < n_opened < 3900


GETTERS = [
    ("get_int", "a.floats", "array of f32, expected an integer"),
    ("get_int", "a.bool", "bool, expected an integer"),
    ("get_float", "general.name", "string, expected a number"),
    ("get_bool", "llama.block_count", "u32, expected a bool"),
    ("get_str", "llama.block_count", "u32, expected a string"),
    ("get_strings", "a.floats", "array of f32, expected an array of strings"),
    ("get_numbers", "tokenizer.ggml.tokens", "array of string, expected an array of numbers"),
    ("get_str", "no.such", "key 'no.such' is missing"),
]


@pytest.mark.parametrize(("getter", "key", "message"), GETTERS)
def test_getters_name_key_and_types(tmp_path: Path, getter: str, key: str, message: str) -> None:
    meta = open_bytes(tmp_path, GOOD).metadata
    with pytest.raises(ModelFileError, match=message):
        getattr(meta, getter)(key)


def test_getters_ranges_and_defaults(tmp_path: Path) -> None:
    keys = {"n": 7, "bad": float("nan"), "ints": [1, 2, 3], "floats": [1.0]}
    meta = open_bytes(tmp_path, build(keys)).metadata
    assert meta.get_int("none", 3) == 3 and meta.get_str("none", "x") == "x" and meta.get_bool("none", False) is False
    assert meta.get_float("none", 2.5) == 2.5 and meta.get_float("n") == 7.0
    assert (
        meta.get_ints("n", 2) == (7, 7) and meta.get_ints("ints", 2) == (1, 2) and meta.get_ints("none", 2, 0) == (0, 0)
    )
    for call in (
        lambda: meta.get_int("n", low=8),
        lambda: meta.get_int("n", high=6),
        lambda: meta.get_float("bad"),
        lambda: meta.get_ints("ints", 4),
        lambda: meta.get_ints("ints", 3, low=2),
        lambda: meta.get_ints("floats", 1),
    ):
        with pytest.raises(ModelFileError, match="key '"):
            call()


def shard(i: int, n: int, **changes: object) -> bytes:
    keys: dict[str, object] = {"general.architecture": "llama"} if i == 0 else {}
    keys |= {"split.no": Typed(g.U16, i), "split.count": Typed(g.U16, n), "split.tensors.count": Typed(g.I32, n)}
    return build(keys | changes, [TensorBytes(f"t{i}", (32 * (n - i),), data=bytes([i]) * 128 * (n - i))])


def write_shards(folder: Path, n: int, prefix: str = "model") -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{prefix}-{i + 1:05d}-of-{n:05d}.gguf" for i in range(n)]
    for i, path in enumerate(paths):
        path.write_bytes(shard(i, n))
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_b47_any_shard_opens_the_model(tmp_path: Path, given: int) -> None:
    paths = write_shards(tmp_path, 3)
    model = open_model(paths[given])
    assert [s.path for s in model.shards] == paths and model.path == paths[0]
    assert [(t.name, t.shard, t.data[0, 0]) for t in model.tensors.values()] == [
        ("t0", 0, 0),
        ("t1", 1, 1),
        ("t2", 2, 2),
    ]
    assert model.metadata.get_str("general.architecture") == "llama"
    assert model.n_bytes == sum(p.stat().st_size for p in paths)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_b47_missing_shard_is_named(tmp_path: Path, missing: int) -> None:
    paths = write_shards(tmp_path, 3)
    paths[missing].unlink()
    with pytest.raises(MissingShardError, match=f"1 of the model's 3 files are missing: {paths[missing].name}"):
        open_model(paths[(missing + 1) % 3])


def test_b47_links_to_files_named_by_hash(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    links = []
    for i in range(2):
        (blobs / f"hash{i}").write_bytes(shard(i, 2))
        links.append(snapshot / f"m-{i + 1:05d}-of-00002.gguf")
        links[i].symlink_to(blobs / f"hash{i}")
    assert len(open_model(links[1]).tensors) == 2
    assert len(open_model(snapshot).tensors) == 2
    (blobs / "hash0").unlink()
    with pytest.raises(MissingShardError, match=links[0].name):
        open_model(links[1])
    with pytest.raises(ModelFileError, match="its name does not end in -0000N-of-00002"):
        open_model(blobs / "hash1")


def test_b47_single_file_with_a_split_name(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00001.gguf"
    for content in (GOOD, shard(0, 1)):
        path.write_bytes(content)
        assert len(open_model(path).shards) == 1


BAD_SHARDS: dict[str, tuple[dict[int, bytes], str]] = {
    "wrong split.no of the given file": ({0: shard(1, 3)}, "says file 2 of 3"),
    "wrong split.no of another": ({1: shard(2, 3)}, "says file 3 of 3, expected 2 of 3"),
    "another split.count": ({2: shard(2, 3, **{"split.count": 4})}, "says file 3 of 4"),
    "no split keys": ({1: GOOD}, "'split.no' is missing"),
    "wrong split.tensors.count": ({0: shard(0, 3, **{"split.tensors.count": 5})}, "is 5, but the 3 files hold 3"),
    "duplicate tensor": ({1: shard(1, 3).replace(b"t1", b"t0")}, "'t0' is in model-00001-of-00003.gguf too"),
    "truncated": ({2: shard(2, 3)[:-1]}, "truncated"),
    "empty": ({2: b""}, "00003-of-00003.gguf: the file is empty"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_SHARDS.values(), ids=BAD_SHARDS.keys())
def test_b47_bad_shard(tmp_path: Path, changes: dict[int, bytes], message: str) -> None:
    paths = write_shards(tmp_path, 3)
    for i, content in changes.items():
        paths[i].write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        open_model(paths[0])


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"without a \.gguf file"):
        open_model(tmp_path)
    paths = write_shards(tmp_path, 3)
    (tmp_path / "mmproj-model.gguf").write_bytes(GOOD)
    (tmp_path / "README.md").write_text("x")
    assert open_model(tmp_path).path == paths[0]
    (tmp_path / "other.gguf").write_bytes(GOOD)
    with pytest.raises(ModelFileError, match=r"2 models, name one of them: model \(3 files\), other\.gguf"):
        open_model(tmp_path)


def test_no_such_file_and_other_paths(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling.gguf")
    for path, message in [
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path / "dangling.gguf", "no such file"),
        ("/dev/null", "not a regular file"),
        ("nul\0byte", "path|read"),
        ("x" * 5000, "path|read"),
        (fifo / "below.gguf", "no such file"),
    ]:
        with pytest.raises(ModelFileError, match=message):
            open_model(path)


def test_error_is_unsupported_for_unknown_types(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        open_bytes(tmp_path, build(GOOD_KEYS, one(type=99, data=b"")))


def test_vocabulary_of_150k_tokens_parses_in_time(tmp_path: Path) -> None:
    """The bar is 0.3 s for tokens, types and merges together; the best of three counts (a loaded machine)."""
    n = 150_000
    keys = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": [f"Ġtok{i}" for i in range(n)],
        "tokenizer.ggml.token_type": Typed(g.ARRAY, [1] * n, g.I32),
        "tokenizer.ggml.merges": [f"Ġt ok{i}" for i in range(n)],
    }
    path = g.write(tmp_path / "m.gguf", keys)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        meta = open_model(path).metadata
        tokens, merges = list(meta.get_strings("tokenizer.ggml.tokens")), meta.get_strings("tokenizer.ggml.merges")
        times.append(time.perf_counter() - start)
        assert tokens[-1] == f"Ġtok{n - 1}" and len(merges) == n
    assert min(times) < 0.3


@pytest.mark.weights
def test_smollm2(smollm2_path: Path) -> None:
    start = time.perf_counter()
    model = open_model(smollm2_path)
    assert time.perf_counter() - start < 0.3
    assert len(model.tensors) == 272 and len(model.metadata.get_strings("tokenizer.ggml.tokens")) == 49152
    embedding = model.tensor("token_embd.weight")
    assert embedding.shape == (576, 49152) and embedding.type_name == "Q8_0"
    last = max(model.tensors.values(), key=lambda t: t.offset)
    assert last.offset + last.n_bytes <= model.n_bytes


@pytest.mark.weights
def test_real_vocabularies(llama_cpp_source: Path) -> None:
    """Every vocabulary file of llama.cpp's tree opens (they hold no tensors)."""
    files = sorted((llama_cpp_source / "models").glob("ggml-vocab-*.gguf"))
    assert len(files) > 10
    for file in files:
        meta = open_model(file).metadata
        assert len(list(meta.get_strings("tokenizer.ggml.tokens"))) > 1000
