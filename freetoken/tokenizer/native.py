"""llama.cpp's vocabulary through llama-cpp-python's low-level functions: loading, and the log kept quiet.

The only place that calls them. `vocabulary` guards every id and every special token before it calls in here: on bad
arguments llama.cpp throws through C and the process dies.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Final

from freetoken.cores import sleeping_openmp
from freetoken.errors import ModelFileError

with sleeping_openmp():
    import llama_cpp

__all__ = ["VOCAB_TYPES", "LlamaVocab"]

log = logging.getLogger(__name__)

VOCAB_TYPES: Final = {0: "none", 1: "spm", 2: "bpe", 3: "wpm", 4: "ugm", 5: "rwkv", 6: "plamo2"}
"""llama.h's `llama_vocab_type`."""

_WARN, _ERROR, _CONT = 3, 4, 5
"""ggml.h's `ggml_log_level`."""

_PIECE_BYTES = 64


class _Log:
    """Receives llama.cpp's log: to `logging` at debug level, and the problems of one load to its caller."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._problems: list[str] | None = None
        self._level = 0
        self._callback = llama_cpp.llama_log_callback(self._write)

    def _write(self, level: int, text: bytes, user_data: object) -> None:
        self._level = self._level if level == _CONT else level
        line = text.decode("utf-8", "replace").rstrip("\n")
        if self._problems is not None and self._level in (_WARN, _ERROR):
            self._problems.append(line)
        log.debug("llama.cpp: %s", line)

    def start(self) -> list[str]:
        """Take over the log (another user of the library may have set it) and collect problems from now on."""
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))
        self._problems = []
        return self._problems

    def stop(self) -> None:
        self._problems = None


_LOG: Final = _Log()
"""Lives as long as the process: the library keeps the callback's address."""


class LlamaVocab:
    """One loaded vocabulary. Reads are thread-safe; `close` frees it and may be called once nothing reads any more.

    Raises ModelFileError with llama.cpp's own message when it refuses the file.
    """

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        with _LOG.lock:
            problems = _LOG.start()
            model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
            _LOG.stop()
        self.problems: tuple[str, ...] = tuple(p.strip() for p in problems if p.strip(" *:"))
        if model is None:
            raise ModelFileError(f"{path}: llama.cpp cannot load the vocabulary: {_reason(self.problems)}")
        _return_free_memory()
        self._model = model
        self._vocab: Any = llama_cpp.llama_model_get_vocab(model)
        self.close = weakref.finalize(self, llama_cpp.llama_model_free, model)
        self.n_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocab))
        self.type = VOCAB_TYPES.get(int(llama_cpp.llama_vocab_type(self._vocab)), "unknown")

    def special(self, name: str) -> int | None:
        """Id of a special token by llama.h's name ("bos", "eos", "eot", "nl", ...), None where there is none."""
        token = int(getattr(llama_cpp, f"llama_vocab_{name}")(self._vocab))
        return token if 0 <= token < self.n_tokens else None

    @property
    def add_bos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_bos(self._vocab))

    @property
    def add_eos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_eos(self._vocab))

    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end a generation, by llama.cpp's rules."""
        is_eog, vocab = _is_eog(), self._vocab
        return frozenset(token for token in range(self.n_tokens) if is_eog(vocab, token))

    def is_control(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_control(self._vocab, token))

    def suppressed_tokens(self) -> tuple[int, ...]:
        """Tokens that the file bans from generation (`tokenizer.ggml.suppress_tokens`)."""
        count = ctypes.c_int32(0)
        ids = llama_cpp.llama_vocab_get_suppress_tokens(self._vocab, ctypes.byref(count))
        return tuple(int(ids[i]) for i in range(count.value))

    def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of valid UTF-8."""
        size = len(text) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            n = llama_cpp.llama_tokenize(self._vocab, text, len(text), ids, size, add_special, parse_special)
            if n >= 0:
                return [token for token in ids[:n] if token >= 0]  # some types give -1 for a byte without a token
            size = -n

    def piece(self, token: int, special: bool) -> bytes:
        """The bytes that a token stands for; control tokens are empty unless `special`."""
        size = _PIECE_BYTES
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def _is_eog() -> Any:
    """llama_vocab_is_eog as a function that keeps Python's lock: asked for each of 150,000 tokens, one that gives the
    lock away would wait for it as often, milliseconds each while another thread imports a library."""
    address = ctypes.cast(llama_cpp.llama_cpp._lib.llama_vocab_is_eog, ctypes.c_void_p).value
    assert address is not None
    return ctypes.PYFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int32)(address)


def _reason(problems: tuple[str, ...]) -> str:
    """The first error line of a failed load, without the names of C functions and the generic last lines."""
    for line in problems:
        _, _, tail = line.partition("error loading model vocabulary: ")
        if tail:
            return tail
    for line in problems:
        if "error loading model" in line:
            return line.partition("error loading model")[2].lstrip(": ")
    return problems[0] if problems else "no reason given"


def _return_free_memory() -> None:
    """Give back what parsing the metadata took (glibc keeps freed pages otherwise); nothing elsewhere."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
