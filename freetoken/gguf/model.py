"""A model: one file, or all files of a split model, found from whichever of them was named.

A file is a GGUF or an FTW file, as its first bytes say. Names of a split model end in `-00001-of-0000N.gguf` or `.ftw`.
They are taken from the path as given and never from what a link points to: download caches link such names to files
named by hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from freetoken.errors import MissingShardError, ModelFileError
from freetoken.gguf.ftw import read_ftw
from freetoken.gguf.ftw_header import HEADER_BYTES, is_ftw
from freetoken.gguf.metadata import Metadata
from freetoken.gguf.shard import Shard, Tensor, map_file, read_shard

__all__ = ["ModelFile", "open_model"]

_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.ftw)", re.DOTALL)


@dataclass(frozen=True)
class ModelFile:
    """An open model. `metadata` is the first file's, `tensors` those of all files, in file order."""

    path: Path
    shards: tuple[Shard, ...] = field(repr=False)
    metadata: Metadata = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)

    @property
    def n_bytes(self) -> int:
        """Size of all files."""
        return sum(shard.n_bytes for shard in self.shards)

    def tensor(self, name: str) -> Tensor:
        """A tensor by name; ModelFileError where the model has none of that name."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        return tensor

    def close(self) -> None:
        """Unmap the files; views that are still in use keep theirs until they go."""
        for shard in self.shards:
            shard.tensors.clear()
            shard.close()
        self.tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_model(path: str | Path) -> ModelFile:
    """Open a model file, a split model by any of its files, or the one model of a folder.

    Raises MissingShardError naming the files of a split model that are not there, UnsupportedModelError for a tensor
    type that we do not know, and ModelFileError for everything else that is wrong with the file.
    """
    path = Path(path)
    if _is_dir(path):
        path = _pick(path)
    given = _open(path)
    number, count = _split(given)
    if count <= 1:
        return ModelFile(path, (given,), given.metadata, given.tensors)
    paths = _shard_paths(given, count)
    given.close()
    if number >= count or paths[number] != path:
        raise ModelFileError(f"{path}: 'split.no' says file {number + 1} of {count}, which its name does not")
    shards = tuple(_open(p, i) for i, p in enumerate(paths))
    return ModelFile(paths[0], shards, shards[0].metadata, _merge(shards))


def _open(path: Path, index: int = 0) -> Shard:
    """One file of either kind."""
    handle = map_file(path)
    return read_ftw(path, handle, index) if is_ftw(handle[:HEADER_BYTES]) else read_shard(path, handle, index)


def _split(shard: Shard, *, is_part: bool = False) -> tuple[int, int]:
    """Which file of how many this one is; one that `is_part` of a model has to say so."""
    if shard.ftw is not None:
        return shard.ftw.number, shard.ftw.count
    if not is_part and shard.metadata.get_int("split.count", 1, high=65535) <= 1:
        return 0, 1
    return shard.metadata.get_int("split.no", high=65535), shard.metadata.get_int("split.count", high=65535)


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: not a usable path: {error}") from error


def _pick(folder: Path) -> Path:
    """The one model of a folder: its only file, or the first of its only split model (projectors do not count)."""
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (".gguf", ".ftw") and not p.name.startswith("mmproj"))
    except OSError as error:
        raise ModelFileError(f"{folder}: the folder cannot be read: {error.strerror}") from error
    models: dict[str, Path] = {}
    for file in files:
        match = _SPLIT_NAME.fullmatch(file.name)
        models.setdefault(f"{match['prefix']} ({int(match['count'])} files)" if match else file.name, file)
    if not models:
        raise ModelFileError(f"{folder}: a folder without a .gguf file (or .ftw): name the model file")
    if len(models) > 1:
        names = ", ".join(list(models)[:10]) + (", ..." if len(models) > 10 else "")
        raise ModelFileError(f"{folder}: a folder with {len(models)} models, name one of them: {names}")
    return next(iter(models.values()))


def _shard_paths(given: Shard, count: int) -> list[Path]:
    """The paths of all files of a split model, all there."""
    match = _SPLIT_NAME.fullmatch(given.path.name)
    if match is None or int(match["count"]) != count:
        raise ModelFileError(
            f"{given.path}: this is one of {count} files of a split model, but its name does not end in "
            f"-0000N-of-{count:05d}{given.path.suffix}, so the others cannot be found: restore the names"
        )
    file_names = (f"{match['prefix']}-{i + 1:05d}-of-{count:05d}{match['suffix']}" for i in range(count))
    paths = [given.path.with_name(name) for name in file_names]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        names = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        raise MissingShardError(
            f"{given.path.parent}: {len(missing)} of the model's {count} files are missing: {names}: download them"
        )
    return paths


def _merge(shards: tuple[Shard, ...]) -> dict[str, Tensor]:
    """All tensors of a split model, its counts checked."""
    tensors: dict[str, Tensor] = {}
    for i, shard in enumerate(shards):
        number, count = _split(shard, is_part=True)
        if (number, count) != (i, len(shards)):
            raise ModelFileError(
                f"{shard.path}: the metadata says file {number + 1} of {count}, expected {i + 1} of {len(shards)}: "
                "files of different models are mixed"
            )
        if (shard.ftw and shard.ftw.set_id) != (shards[0].ftw and shards[0].ftw.set_id):
            raise ModelFileError(f"{shard.path}: from another conversion than {shards[0].path.name}: convert again")
        for name, tensor in shard.tensors.items():
            if name in tensors:
                raise ModelFileError(f"{shard.path}: tensor {name!r} is in {shards[tensors[name].shard].path.name} too")
            tensors[name] = tensor
    expected = shards[0].metadata.get_int("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFileError(
            f"{shards[0].path}: 'split.tensors.count' is {expected}, but the {len(shards)} files hold {len(tensors)} "
            "tensors: files of different models are mixed"
        )
    return tensors
