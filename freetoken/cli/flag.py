"""One flag of the command line as data, converters of values, and how flags join a parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from freetoken.cli.parser import Parser

__all__ = ["FLOAT_MAX", "INT_MAX", "Convert", "Flag", "add_flags", "given", "real", "whole", "words"]

Convert = Callable[[str], Any]
INT_MAX = 2**31 - 1
FLOAT_MAX = 3.4e38


def whole(low: int = 0, high: int = INT_MAX) -> Convert:
    """A converter of whole numbers between two limits."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} does not lie between {low} and {high}")
        return value

    return convert


def real(low: float = -FLOAT_MAX, high: float = FLOAT_MAX) -> Convert:
    """A converter of finite numbers between two limits."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} does not lie between {low:g} and {high:g}")
        return value

    return convert


def words(text: str) -> list[str]:
    """Words separated by commas."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


@dataclass(frozen=True)
class Flag:
    """One flag. `convert` None makes it a switch; `negatives` switch it off again; `dest` is the field it sets."""

    names: tuple[str, ...]
    dest: str
    help: str
    convert: Convert | None = None
    metavar: str = "N"
    env: str | None = None
    negatives: tuple[str, ...] = ()
    is_list: bool = False


def add_flags(parser: argparse.ArgumentParser, title: str, flags: Iterable[Flag]) -> None:
    """Add flags and their variables under a title of the help."""
    group = parser.add_argument_group(title)
    for flag in flags:
        text = flag.help.replace("%", "%%") + (f" [{flag.env}]" if flag.env else "")
        if flag.convert is None:
            action = group.add_argument(
                *flag.names, dest=flag.dest, action="store_const", const=True, default=None, help=text
            )
            if flag.negatives:
                group.add_argument(
                    *flag.negatives,
                    dest=flag.dest,
                    action="store_const",
                    const=False,
                    default=None,
                    help="switch it off",
                )
        else:
            action = group.add_argument(
                *flag.names,
                dest=flag.dest,
                type=flag.convert,
                metavar=flag.metavar,
                default=None,
                action="append" if flag.is_list else "store",
                help=text,
            )
        if flag.env and isinstance(parser, Parser):
            parser.add_variable(flag.env, action, flag.convert)


def given(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Values of the flags that were given, by field."""
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}
