"""Logging of the commands: llama-server-like lines on stderr, and a file where one is named."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from freetoken.errors import OptionError

__all__ = ["set_up"]

_LETTERS = {logging.DEBUG: "D", logging.INFO: "I", logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "E"}
_LEVELS = {0: logging.ERROR, 1: logging.ERROR, 2: logging.WARNING, 3: logging.INFO}


class _Format(logging.Formatter):
    """Seconds since the start, a letter for the level, the module, the message."""

    def __init__(self) -> None:
        super().__init__()
        self._started = time.time()

    def format(self, record: logging.LogRecord) -> str:
        seconds = max(record.created - self._started, 0.0)
        name = record.name.removeprefix("freetoken.")
        line = f"{seconds:9.3f} {_LETTERS.get(record.levelno, 'I')} {name}: {record.getMessage()}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def set_up(verbosity: int, file: Path | None = None) -> None:
    """Configure the root logger. `verbosity` is llama-server's: 1 errors, 2 warnings, 3 information, 4 and up all."""
    root = logging.getLogger()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        try:
            handlers.append(logging.FileHandler(file, encoding="utf-8"))
        except OSError as error:
            raise OptionError(f"--log-file {file}: cannot be written: {error.strerror}") from None
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    form = _Format()
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
    root.setLevel(_LEVELS.get(verbosity, logging.DEBUG))
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
