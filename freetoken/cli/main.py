"""`ft`: chooses the command, catches what it raises. Commands are imported only when chosen, so this stays instant."""

from __future__ import annotations

import importlib
import os
import sys

from freetoken import __version__
from freetoken.cli.flags import verbosity
from freetoken.cli.flags_gpu import devices_text
from freetoken.cli.log import set_up
from freetoken.cli.parser import Parser
from freetoken.errors import FreeTokenError

__all__ = ["main"]

_COMMANDS = {
    "serve": "serve a model over HTTP, as llama-server does",
    "run": "chat in the terminal, or answer one prompt",
    "bench": "measure prompt and generation speed",
    "info": "show what a model file holds",
    "plan": "show what of a model would go where on a machine, without loading it",
    "convert": "write a model as FTW, our weight format, and check such files",
    "ctl": "show or rebuild the caches of a running server",
}
_SUB_COMMANDS = {
    ("bench", "kernels"): "measure the kernels of experts against the machine's memory",
    ("bench", "bw"): "measure fills over PCIe and experts on the CPU, beside each other; stores the profile",
}
_LOG_LEVELS = {"serve": 3}
"""llama-server's levels where no flag says otherwise: a server informs, the others only warn."""
_INTERRUPTED = 130
_THREAD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
}
"""`cores.sleeping_openmp` for the whole process: set before there are threads, since one may not change it then."""


def usage() -> str:
    """The text of `ft --help`."""
    lines = [f"  {name:<15}{text}" for name, text in _all_commands().items()]
    tail = "ft COMMAND --help lists the flags; ft --version prints the version."
    return "\n".join(["usage: ft COMMAND [FLAGS]", "", *lines, "", tail])


def _all_commands() -> dict[str, str]:
    """Each command followed by its sub-commands."""
    commands = {}
    for name, text in _COMMANDS.items():
        commands[name] = text
        commands |= {" ".join(words): text for words, text in _SUB_COMMANDS.items() if words[0] == name}
    return commands


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. Errors are one line on stderr."""
    arguments = sys.argv[1:] if argv is None else argv
    _replace_closed_streams()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except FreeTokenError as error:
        print(f"ft: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OSError as error:
        # Our output has no reader any more, or no space; what Python flushes at exit must go nowhere.
        if not isinstance(error, BrokenPipeError):
            print(f"ft: error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _replace_closed_streams() -> None:
    """Python has None for standard streams that were closed when it started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "--usage"):
        print(usage())
        return 0
    if first == "--version":
        print(f"version: {__version__}")
        return 0
    if first not in _COMMANDS:
        print(f"ft: error: unknown command '{first}'\n\n{usage()}", file=sys.stderr)
        return 2
    for name, value in _THREAD_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    words, text = [first], _COMMANDS[first]
    if tuple(arguments[:2]) in _SUB_COMMANDS:
        words, text = arguments[:2], _SUB_COMMANDS[first, arguments[1]]
    command = importlib.import_module(f"freetoken.cli.{'_'.join(words)}")
    parser = Parser(f"ft {' '.join(words)}", text)
    command.add_arguments(parser)
    args = parser.parse(arguments[len(words) :])
    if args.help:
        print(parser.help())
        return 0
    if args.version:
        print(f"version: {__version__}")
        return 0
    if getattr(args, "list_devices", None):
        print(devices_text())
        return 0
    set_up(verbosity(args, _LOG_LEVELS.get(first, 2)), getattr(args, "log_file", None))
    return int(command.run(args))
