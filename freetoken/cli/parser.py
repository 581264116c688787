"""A parser with llama-server's habits on top of argparse, so that every command may use `add_argument`.

A value is the next argument, whatever it looks like; `--flag=value` and shortened names do not exist; underscores in
long names count as dashes; an unknown flag is refused by name with the nearest match. Flags may name an environment
variable, over which the command line wins.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from freetoken.errors import OptionError

__all__ = ["Parser"]

_TRUE = ("on", "enabled", "true", "1")
_FALSE = ("off", "disabled", "false", "0")


@dataclass(frozen=True)
class _Variable:
    """Where a flag's value may come from besides the command line."""

    name: str
    action: argparse.Action
    convert: Callable[[str], Any]


class Parser(argparse.ArgumentParser):
    """One command's flags. Every flag's value is None where neither line nor environment gives it."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            usage=f"{prog} [FLAGS]",
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=110),
        )
        self._variables: list[_Variable] = []
        self.add_argument("-h", "--help", "--usage", action="store_true", help="print this and exit")
        self.add_argument("--version", action="store_true", help="print the version and exit")

    def add_variable(self, name: str, action: argparse.Action, convert: Callable[[str], Any] | None) -> None:
        """Let an environment variable give a flag's value; `convert` None is for flags without one."""
        self._variables.append(_Variable(name, action, convert or _boolean))

    def parse(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> argparse.Namespace:
        """The values. Raises OptionError naming the flag or variable that is wrong."""
        self._take_environment(os.environ if environ is None else environ)
        args, rest = self.parse_known_args(self._joined(list(argv)))
        if rest:
            hint = "" if self._get_positional_actions() else ": every value follows its flag, a model's file -m"
            self.error(f"unexpected argument {rest[0]!r}{hint}")
        return args

    def help(self) -> str:
        """The text of --help."""
        return self.format_help()

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message} (see {self.prog} --help)")

    def _take_environment(self, environ: Mapping[str, str]) -> None:
        for variable in self._variables:
            value = environ.get(variable.name)
            negative = variable.name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")
            if variable.convert is _boolean and negative != variable.name and negative in environ:
                value = "0"
            if value is None:
                continue
            try:
                converted = variable.convert(value)
            except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
                raise OptionError(f"environment variable {variable.name}={value!r}: {error}") from None
            is_list = isinstance(variable.action, argparse._AppendAction)
            self.set_defaults(**{variable.action.dest: [converted] if is_list else converted})

    def _joined(self, argv: list[str]) -> list[str]:
        """The arguments with each value joined to its flag, so that argparse never takes a value for a flag."""
        result = []
        rest = iter(argv)
        for argument in rest:
            flag = "--" + argument[2:].replace("_", "-") if argument.startswith("--") else argument
            action = self._option_string_actions.get(flag)
            if action is None:
                self._refuse_unknown(argument)
                result.append(argument)
            elif action.nargs == 0:
                result.append(flag)
            else:
                value = next(rest, None)
                if value is None:
                    self.error(f"argument {flag}: expected a value")
                result.append(f"{flag}={value}")
        return result

    def _refuse_unknown(self, argument: str) -> None:
        """Positional arguments pass."""
        if not argument.startswith("-") or argument == "-":
            return
        name, sign, _ = argument.partition("=")
        known = [flag for flag in self._option_string_actions if flag.startswith("-")]
        if sign and name in known:
            self.error(f"unknown flag {argument}: write the value as the next argument, {name} VALUE")
        near = difflib.get_close_matches(argument, known, n=1, cutoff=0.6) if len(argument) > 3 else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.error(f"unknown flag {argument}{hint}")


def _boolean(value: str) -> bool:
    """An environment variable's truth, in llama.cpp's words."""
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"expected one of {', '.join(_TRUE + _FALSE)}")
