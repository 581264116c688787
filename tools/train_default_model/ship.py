"""Stages `pack-text` and `ship`: what a machine that is given back must hand over, in files of at most 15 MiB.

Text: cleaned shards, compressed, as many as fit. Weights: experts as int8 in blocks of 32 with an fp16 scale (ggml's
Q8_0), all else as bf16; 57 MB for the default model. `unpack` turns either back into the work folder's files.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tools.train_default_model.work import load_json, save_arrays, say

__all__ = ["pack_text", "pack_weights", "ship", "unpack"]

PART_BYTES = 15 << 20
SHARD_ROOM = 2 << 20
"""More than a compressed shard takes."""
BLOCK = 32
FACTS = ("*.json", "*.jsonl", "*.svg", "held-out-docs.npz")


def pack_text(folder: Path, out: Path, *, n_files: int, n_processes: int) -> None:
    """Write text-N.tar with cleaned shards, until `n_files` are full."""
    shards = sorted(folder.glob("clean-*.npz"), key=lambda path: ("own" not in path.name, path.name))
    with ThreadPoolExecutor(n_processes) as pool:  # lzma lets other threads run
        packed = pool.map(lambda path: (path.name, lzma.compress(path.read_bytes(), preset=4)), shards)
        n_taken = 0
        for i in range(min(n_files, len(shards))):
            n_bytes = 0
            with tarfile.open(out / f"text-{i}.tar", "w") as tar:
                for name, data in packed:
                    _add(tar, name + ".xz", data)
                    n_taken += 1
                    n_bytes += len(data)
                    if n_bytes > PART_BYTES - SHARD_ROOM:
                        break
    say("pack-text", f"{n_taken} of {len(shards)} shards")


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def pack_weights(weights: dict[str, np.ndarray]) -> bytes:
    """fp32 weights as an .npz: NAME.q and NAME.d of experts, NAME.bf16 of all else."""
    out: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        if "_exps" in name and value.shape[-1] % BLOCK == 0:
            blocks = value.reshape(*value.shape[:-1], -1, BLOCK)
            scale = (np.abs(blocks).max(-1) / 127).astype(np.float16)
            safe = np.maximum(scale.astype(np.float32), 1e-8)[..., None]
            out[name + ".q"] = np.rint(blocks / safe).clip(-127, 127).astype(np.int8).reshape(value.shape)
            out[name + ".d"] = scale
        else:
            bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
            out[name + ".bf16"] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    buffer = io.BytesIO()
    np.savez(buffer, **out)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpack_weights(data: bytes) -> dict[str, np.ndarray]:
    """The inverse of `pack_weights`."""
    out = {}
    with np.load(io.BytesIO(data)) as file:
        for key in file.files:
            name, _, kind = key.rpartition(".")
            if kind == "q":
                blocks = file[key].astype(np.float32)
                scale = file[name + ".d"].astype(np.float32)[..., None]
                out[name] = (blocks.reshape(*scale.shape[:-1], BLOCK) * scale).reshape(blocks.shape)
            elif kind == "bf16":
                out[name] = (file[key].astype(np.uint32) << 16).view(np.float32)
    return out


def ship(folder: Path, out: Path, name: str) -> None:
    """Write NAME.part-N and facts.tar.gz."""
    if (folder / f"{name}.npz").exists():
        with np.load(folder / f"{name}.npz") as file:
            data = pack_weights({key: file[key] for key in file.files})
        for i, start in enumerate(range(0, len(data), PART_BYTES)):
            (out / f"{name}.part-{i}").write_bytes(data[start : start + PART_BYTES])
        say("ship", f"{name}: {len(data) / 1e6:.1f} MB")
    _save_held_out(folder)
    with tarfile.open(out / "facts.tar.gz", "w:gz") as tar:
        for pattern in FACTS:
            for path in sorted(folder.glob(pattern)):
                tar.add(path, path.name)


def _save_held_out(folder: Path, n_docs: int = 1500) -> None:
    """Held-out dialogues of the teacher, in its tokens: what its own answers are like."""
    target = folder / "held-out-docs.npz"
    if target.exists():
        return
    docs: list[np.ndarray] = []
    for path in sorted(folder.glob("clean-[0-9]*.npz")):
        with np.load(path) as file:
            tokens, offsets = file["tokens"], file["offsets"]
            docs += [tokens[offsets[i] : offsets[i + 1]] for i in np.flatnonzero(file["held"])]
        if len(docs) >= n_docs:
            break
    if docs:
        docs = docs[:n_docs]
        save_arrays(target, {"tokens": np.concatenate(docs), "offsets": np.cumsum([0, *map(len, docs)])})


def unpack(source: Path, folder: Path) -> None:
    """Bring back what `pack_text` and `ship` wrote; files of the work folder that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.tar*")):
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member)
                target = folder / Path(member.name).name.removesuffix(".xz")
                if file is not None and not target.exists():
                    data = file.read()
                    target.write_bytes(lzma.decompress(data) if member.name.endswith(".xz") else data)
    for first in sorted(source.glob("*.part-0")):
        name = first.name.removesuffix(".part-0")
        parts = sorted(source.glob(f"{name}.part-*"), key=lambda path: int(path.suffix.rpartition("-")[2]))
        save_arrays(folder / f"{name}.npz", unpack_weights(b"".join(path.read_bytes() for path in parts)))
        say("unpack", f"{name}: {load_json(folder / f'{name}.json').get('steps')} steps")
