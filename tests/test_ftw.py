"""FTW files: the model of the GGUF that they were made of, whole or refused, however their making was disturbed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest

from freetoken.cli.main import main
from freetoken.errors import MissingShardError, ModelFileError, OptionError
from freetoken.gguf import Conversion, ModelFile, convert, ftw_plan, open_model, verify
from freetoken.gguf.ftw_header import ALIGNMENT, HEADER_BYTES
from tools import tiny_models

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture with three types of matrices in each layer, others in the next."""
    return tiny_models.write(tmp_path_factory.mktemp("source") / "m.gguf", "qwen2moe", file_type="mixed", n_layer=2)


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    """Its FTW file; nobody writes to it."""
    return to_ftw(source, source.with_suffix(".ftw"))


def to_ftw(source: Path, target: Path, **options: object) -> Path:
    with open_model(source) as model:
        conversion = Conversion(model, target, **options)  # type: ignore[arg-type]
        conversion.run()
    return conversion.targets[0]


def split_gguf(source: Path, folder: Path, n_tensors: int) -> Path:
    """The model in files of so many tensors; the first one's path."""
    folder.mkdir()
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / "m.gguf", arch, split_max_tensors=n_tensors)
    for key, item in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, item.contents(), item.types[0], item.types[-1] if len(item.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.iterdir())


def same_models(a: ModelFile, b: ModelFile) -> None:
    keys = [key for key in a.metadata if not key.startswith("split.")]
    assert list(b.metadata) == keys
    for key in keys:
        assert a.metadata.type_of(key) == b.metadata.type_of(key)
        one, other = a.metadata[key], b.metadata[key]
        if isinstance(one, np.ndarray | Sequence):
            assert list(one) == list(other)  # type: ignore[call-overload]
        else:
            assert one == other
    assert set(a.tensors) == set(b.tensors)
    for name, one in a.tensors.items():
        other = b.tensors[name]
        assert (one.type, one.shape, one.n_bytes) == (other.type, other.shape, other.n_bytes)
        assert (one.rows, one.row_bytes) == (other.rows, other.row_bytes)
        assert np.ascontiguousarray(other.data).tobytes() == np.ascontiguousarray(one.data).tobytes()


# --- the format ------------------------------------------------------------------------------------------------------


def test_it_holds_the_whole_model(source: Path, made: Path) -> None:
    with open_model(source) as a, open_model(made) as b:
        same_models(a, b)
        assert b.shards[0].ftw is not None and b.n_bytes == made.stat().st_size and b.n_bytes % ALIGNMENT == 0
        verify(b.shards[0])


def test_an_expert_is_one_aligned_record(made: Path) -> None:
    """Gate, up and down of an expert share pages with nobody, layers follow one another, dense tensors come before."""
    with open_model(made) as model:
        starts = {}
        for name, tensor in model.tensors.items():
            if "_exps" not in name:
                assert tensor.offset % ALIGNMENT == 0 and tensor.data.ndim == 2
                continue
            assert tensor.data.shape[0] == 10 and tensor.data[3].flags.c_contiguous
            assert tensor.data.strides[0] % ALIGNMENT == 0
            starts[name] = tensor.offset, tensor.data.strides[0]
        for layer in (0, 1):
            (gate, stride), (up, _), (down, _) = (
                starts[f"blk.{layer}.ffn_{name}_exps.weight"] for name in ("gate", "up", "down")
            )
            assert gate % ALIGNMENT == 0 and up % 128 == down % 128 == 0 and gate < up < down < gate + stride
        last = starts["blk.1.ffn_gate_exps.weight"]
        first = starts["blk.0.ffn_gate_exps.weight"]
        assert last[0] == first[0] + 10 * first[1] and last[0] + 10 * last[1] == model.n_bytes
        assert all(t.offset < first[0] for name, t in model.tensors.items() if "_exps" not in name)


def test_others_read_its_metadata(source: Path, made: Path) -> None:
    """It begins as a GGUF file without tensors."""
    reader = gguf.GGUFReader(made)
    assert not reader.tensors and next(k for k in reader.fields if not k.startswith("GGUF.")) == "freetoken.ftw"
    there = gguf.GGUFReader(source).fields
    assert reader.fields["tokenizer.ggml.tokens"].contents() == there["tokenizer.ggml.tokens"].contents()


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_dense_models(arch: str, tmp_path: Path) -> None:
    path = tiny_models.write(tmp_path / "m.gguf", arch, file_type="Q4_K_M", n_layer=2)
    with open_model(path) as a, open_model(to_ftw(path, tmp_path / "m.ftw")) as b:
        same_models(a, b)


def test_large_dense_tensors_have_several_records(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ftw_plan, "PIECE_BYTES", 2 * ALIGNMENT)
    path = to_ftw(source, tmp_path / "m.ftw")
    with open_model(source) as a, open_model(path) as b:
        same_models(a, b)
        verify(b.shards[0])


def test_ftw_of_ftw(source: Path, made: Path, tmp_path: Path) -> None:
    assert to_ftw(made, tmp_path / "again.ftw").read_bytes() == made.read_bytes()


# --- splits ----------------------------------------------------------------------------------------------------------


def test_a_split_gguf_becomes_one_file(source: Path, made: Path, tmp_path: Path) -> None:
    parts = split_gguf(source, tmp_path / "parts", 7)
    assert len(list(parts.parent.iterdir())) > 3
    with open_model(parts) as a, open_model(to_ftw(parts, tmp_path / "m.ftw")) as b, open_model(made) as c:
        same_models(a, b)
        same_models(c, b)


def test_several_files(source: Path, made: Path, tmp_path: Path) -> None:
    most = 2_000_000
    first = to_ftw(source, tmp_path / "m.ftw", max_bytes=most)
    paths = sorted(tmp_path.iterdir())
    assert first.name == f"m-00001-of-{len(paths):05d}.ftw" and len(paths) > 2
    assert all(path.stat().st_size <= most for path in paths)
    with open_model(source) as a, open_model(paths[1]) as b:
        same_models(a, b)
        assert [shard.path for shard in b.shards] == paths
        for shard in b.shards:
            verify(shard)
    assert to_ftw(first, tmp_path / "one.ftw").read_bytes() == made.read_bytes()
    paths[1].rename(tmp_path / "elsewhere")
    with pytest.raises(MissingShardError, match=paths[1].name):
        open_model(first)


def test_files_of_two_conversions_are_not_mixed(source: Path, tmp_path: Path) -> None:
    other = tiny_models.write(tmp_path / "o.gguf", "qwen2moe", file_type="mixed", n_layer=2, seed=1)
    paths = []
    for i, path in enumerate((source, other)):
        (tmp_path / str(i)).mkdir()
        paths.append(to_ftw(path, tmp_path / str(i) / "m.ftw", max_bytes=2_000_000))
    name = paths[0].name.replace("00001-of", "00002-of")
    shutil.copy(paths[1].with_name(name), paths[0].with_name(name))
    with pytest.raises(ModelFileError, match="another conversion"):
        open_model(paths[0])


def test_a_file_too_small_for_a_layer(source: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the experts of tensor 'blk\.\d.*stay together, need a file of \d+ bytes"):
        to_ftw(source, tmp_path / "m.ftw", max_bytes=900_000)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_of_the_head_is_refused(made: Path, tmp_path: Path) -> None:
    """Whatever stands before the data: all of the header, and samples of metadata and index."""
    content = bytearray(made.read_bytes())
    with open_model(made) as model:
        end, index = model.shards[0].data_offset, model.shards[0].ftw
    assert index is not None
    rng = np.random.default_rng(1)
    places = [*range(HEADER_BYTES), *rng.integers(HEADER_BYTES, end, 150).tolist(), index.index_offset, end - 1]
    path = tmp_path / "m.ftw"
    path.write_bytes(content)
    with open(path, "r+b") as file:
        for at in places:
            os.pwrite(file.fileno(), bytes([content[at] ^ (1 << at % 8)]), at)
            with pytest.raises(ModelFileError, match=r"damaged|GGUF|FTW|checksum"):
                open_model(path)
            os.pwrite(file.fileno(), content[at : at + 1], at)
    open_model(path).close()


@pytest.mark.parametrize("n_bytes", [-1, 1, -ALIGNMENT, ALIGNMENT])
def test_another_size_is_refused(n_bytes: int, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.ftw"
    shutil.copy(made, path)
    os.truncate(path, made.stat().st_size + n_bytes)
    with pytest.raises(ModelFileError, match="truncated" if n_bytes < 0 else "damaged"):
        open_model(path)


@pytest.mark.parametrize("n_bytes", [10, 61, 100, HEADER_BYTES, 4096])
def test_a_short_piece_of_a_file_is_refused(n_bytes: int, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.ftw"
    path.write_bytes(made.read_bytes()[:n_bytes])
    with pytest.raises(ModelFileError):
        open_model(path)


def test_damaged_data_is_found_by_verify(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(made.read_bytes())
    path = tmp_path / "m.ftw"
    assert main(["convert", "--verify", str(made)]) == 0
    with open_model(made) as model:
        places = [t.offset + t.n_bytes // 2 for t in model.tensors.values() if t.data.ndim == 2][:3]
        tensor = model.tensors["blk.1.ffn_down_exps.weight"]
        places += [tensor.offset + 7 * tensor.data.strides[0], model.n_bytes - 1]
    for at in places:
        content[at] ^= 1
        path.write_bytes(content)
        content[at] ^= 1
        assert main(["convert", "--verify", str(path)]) == 1
        assert "checksum of record" in capsys.readouterr().err
    assert "blk.1" in _message(lambda: verify(open_model(path).shards[0]))


def _message(call: Callable[[], object]) -> str:
    with pytest.raises(ModelFileError) as caught:
        call()
    return str(caught.value)


def _with_header(content: bytes, at: int, value: int) -> bytes:
    """The file with field `at` of its header changed, and the header's checksum right."""
    raw = bytearray(content)
    raw[61 + 8 * at : 69 + 8 * at] = struct.pack("<Q", value)
    raw[HEADER_BYTES - 8 : HEADER_BYTES] = struct.pack("<Q", zlib.crc32(raw[: HEADER_BYTES - 8]))
    return bytes(raw)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, 2, "FTW version 2, expected 1"),
        (1, 0, "its conversion has not ended"),
        (2, 1, "cannot be"),
        (6, 1 << 60, "cannot be"),
        (7, 1 << 60, "cannot be"),
        (7, 4097, "cannot be"),
    ],
)
def test_headers_that_cannot_be(at: int, value: int, message: str, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.ftw"
    path.write_bytes(_with_header(made.read_bytes(), at, value))
    assert message in _message(lambda: open_model(path))


def test_an_index_that_cannot_be(made: Path, tmp_path: Path) -> None:
    """Places and sizes in it are bounded though its checksum is right: random words of it."""
    content = made.read_bytes()
    with open_model(made) as model:
        header = model.shards[0].ftw
    assert header is not None
    path, rng = tmp_path / "m.ftw", np.random.default_rng(2)
    words = [0, 1, 1 << 20, 1 << 40, (1 << 63) + 5, (1 << 64) - 1]
    n_refused = 0
    for _ in range(150):
        raw = bytearray(content)
        at = int(rng.integers(header.index_offset, header.data_offset - 8))
        raw[at : at + 8] = struct.pack("<Q", words[int(rng.integers(len(words)))])
        crc = zlib.crc32(raw[HEADER_BYTES : header.data_offset])
        path.write_bytes(_with_header(raw, 9, crc))
        try:
            with open_model(path) as model:
                sum(int(np.ascontiguousarray(t.data).reshape(-1)[-1]) for t in model.tensors.values())
        except ModelFileError:
            n_refused += 1
    assert n_refused > 75


# --- making ----------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("is_split", [False, True])
def test_an_interrupted_conversion_goes_on(source: Path, made: Path, tmp_path: Path, is_split: bool) -> None:
    """At every stage no file bears the name, and the end is the same bits; what was written is kept."""
    target = tmp_path / "m.ftw"
    options = {"max_bytes": 2_000_000} if is_split else {}
    with open_model(source) as model:
        n_bytes = Conversion(model, target, **options).n_bytes  # type: ignore[arg-type]
        for share in (0.0, 0.3, 0.7, 0.99):
            seen = 0

            def on_bytes(n: int, share: float = share) -> None:
                nonlocal seen
                seen += n
                if seen >= share * n_bytes:
                    raise Interrupted

            with pytest.raises(Interrupted):
                Conversion(model, target, **options).run(on_bytes)  # type: ignore[arg-type]
            left = sorted(path.name for path in tmp_path.iterdir())
            assert left and all(name.endswith(".ftw.part") for name in left)
            for path in tmp_path.iterdir():
                assert "has not ended" in _message(lambda path=path: open_model(path)) or path.stat().st_size == 0
    first = to_ftw(source, target, **options)
    assert not list(tmp_path.glob("*.part"))
    if is_split:
        assert to_ftw(first, tmp_path / "one.ftw").read_bytes() == made.read_bytes()
    else:
        assert first.read_bytes() == made.read_bytes()


def test_what_is_there_is_not_written_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what differs is, wherever it stands."""
    target = tmp_path / "m.ftw"
    written: list[tuple[int, int]] = []
    write = convert._write

    def log(file: int, data: bytes | memoryview, offset: int) -> None:
        written.append((offset, len(data)))
        write(file, data, offset)

    content = to_ftw(source, target).read_bytes()
    with open_model(target) as model:
        start = model.shards[0].data_offset
    damaged = bytearray(content)
    damaged[start + 5] ^= 1
    damaged[-5] ^= 1
    target.unlink()
    target.with_name("m.ftw.part").write_bytes(damaged + bytes(100))
    monkeypatch.setattr(convert, "_write", log)
    assert to_ftw(source, target).read_bytes() == content
    assert len([offset for offset, _ in written if offset >= start]) == 2


def test_a_killed_conversion_goes_on(source: Path, made: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.ftw"
    code = (
        "import sys, time; from freetoken.gguf import Conversion, open_model\n"
        f"def slow(n): print('.', flush=True); time.sleep(0.2)\n"
        f"Conversion(open_model({str(source)!r}), __import__('pathlib').Path({str(target)!r})).run(slow)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not target.exists() and target.with_name("m.ftw.part").exists()
    assert to_ftw(source, target).read_bytes() == made.read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_fails(
    code: int, source: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.ftw"
    left = 1_000_000
    pwrite = os.pwrite

    def limited(file: int, data: bytes | memoryview, offset: int) -> int:
        nonlocal left
        left -= len(data)
        if left < 0:
            raise OSError(code, os.strerror(code))
        return pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", limited)
        full = "the disk is full: free some space and run the same command again"
        assert (os.strerror(code) if code == errno.EIO else full) in _message(lambda: to_ftw(source, target))
    assert not target.exists()
    assert to_ftw(source, target).read_bytes() == made.read_bytes()


def test_room_is_looked_for_before_the_start(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    message = _message(lambda: to_ftw(source, tmp_path / "m.ftw"))
    assert "MiB are needed" in message and "MiB more than are free" in message
    assert (tmp_path / "m.ftw.part").stat().st_size == 0


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.ftw"
    with open_model(source) as model:
        first, second = Conversion(model, target), Conversion(model, target)

        def on_bytes(n: int) -> None:
            assert "another conversion writes this file" in _message(second.run)

        first.run(on_bytes)


# --- the command -----------------------------------------------------------------------------------------------------


def test_command(source: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m.ftw"
    assert main(["convert", str(source), str(target), "--verify"]) == 0
    assert capsys.readouterr().out == f"{target}\n" and target.read_bytes() == made.read_bytes()
    assert main(["convert", str(source), str(target)]) == 2
    assert "there already" in capsys.readouterr().err
    assert main(["convert", str(source), str(target), "--force", "--split-max-size", "0.002G"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 2
    assert main(["convert", str(target), str(target), "--force"]) == 2
    assert "the same file" in capsys.readouterr().err
    assert main(["info", str(target)]) == 0
    assert "FTW 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "two files are expected"),
        (["IN"], "two files are expected"),
        (["IN", "out.gguf"], "ends in .ftw"),
        (["IN", "no/such/out.ftw"], "no such folder"),
        (["IN", "out.ftw", "--split-max-size", "2X"], "no size such as"),
        (["IN", "out.ftw", "--split-max-size", "0"], "no size such as"),
    ],
)
def test_bad_commands(
    arguments: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["convert", *(str(source) if word == "IN" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_only_ftw_files_have_checksums(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--verify", str(source)]) == 1
    assert "which holds no checksums" in capsys.readouterr().err


def test_tool(source: Path, made: Path, tmp_path: Path) -> None:
    """tools/convert.py is the command."""
    command = [sys.executable, str(ROOT / "tools" / "convert.py"), str(source), str(tmp_path / "m.ftw")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "m.ftw").read_bytes() == made.read_bytes()


def test_folder(source: Path, made: Path, tmp_path: Path) -> None:
    shutil.copy(made, tmp_path / "m.ftw")
    assert open_model(tmp_path).path == tmp_path / "m.ftw"
    shutil.copy(source, tmp_path / "m.gguf")
    assert "2 models, name one of them" in _message(lambda: open_model(tmp_path))
