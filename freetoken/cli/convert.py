"""`ft convert`: writes a model as FTW, our weight format with one transfer for an expert, and checks such files."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from freetoken.errors import OptionError
from freetoken.gguf import Conversion, ModelFile, open_model, verify

__all__ = ["add_arguments", "run"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMG]?)")
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}


def size(text: str) -> int:
    """Bytes of a size such as 500M or 4G, powers of 1000 as llama-gguf-split takes them."""
    match = _SIZE.fullmatch(text)
    n = int(float(match[1]) * _UNITS[match[2]]) if match is not None else 0
    if n < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 500M or 4G")
    return n


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft convert`."""
    parser.usage = "ft convert IN.gguf OUT.ftw [FLAGS] | ft convert --verify FILE.ftw"
    what = "IN (a GGUF or FTW file, any file of a split model, or a folder) and OUT.ftw; with --verify FILE.ftw alone"
    parser.add_argument("files", metavar="FILE", nargs="*", help=what)
    parser.add_argument(
        "--split-max-size", type=size, default=0, metavar="N(M|G)", help="write several files of at most so many bytes"
    )
    parser.add_argument("--verify", action="store_true", help="read all data of the FTW file and check it")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def run(args: argparse.Namespace) -> int:
    """Convert, verify, or both."""
    paths = [Path(name) for name in args.files]
    if len(paths) == 1 and args.verify:
        with open_model(paths[0]) as model:
            _verify(model)
        return 0
    if len(paths) != 2:
        raise OptionError("two files are expected: ft convert IN.gguf OUT.ftw (or: ft convert --verify FILE.ftw)")
    with open_model(paths[0]) as model:
        if model.shards[0].ftw is not None:
            _verify(model)
        conversion = Conversion(model, paths[1], max_bytes=args.split_max_size, is_forced=args.force)
        try:
            with _bar("converting", conversion.n_bytes) as bar:
                conversion.run(bar.update)
        except KeyboardInterrupt:
            print("ft convert: interrupted; the same command goes on from there", file=sys.stderr)
            raise
    if args.verify:
        for path in conversion.targets:
            _forget(path)
        with open_model(conversion.targets[0]) as model:
            _verify(model)
    for path in conversion.targets:
        print(path)
    return 0


def _verify(model: ModelFile) -> None:
    with _bar("verifying", model.n_bytes) as bar:
        for shard in model.shards:
            verify(shard, bar.update)


def _forget(path: Path) -> None:
    """Let the check read what is on the disk, not what is in memory still."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _bar(what: str, n_bytes: int) -> tqdm[NoReturn]:
    return tqdm(
        total=n_bytes, desc=what, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty(), delay=0.2
    )
