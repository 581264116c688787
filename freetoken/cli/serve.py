"""`ft serve`: opens the port at once, answers 503 there, and loads the model beside it."""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import Protocol

from gguf import LlamaFileType

from freetoken.beside import beside
from freetoken.chat import load_template
from freetoken.cli import flags
from freetoken.cli.loading import wait_while_loading
from freetoken.errors import FreeTokenError, ModelFileError
from freetoken.gguf import ModelFile, open_model
from freetoken.gpu.ahead import import_where_usable
from freetoken.options import EngineOptions, ModelOptions
from freetoken.request import EngineState, Generator
from freetoken.server.app import build_app
from freetoken.server.listen import HttpServer
from freetoken.server.model import ModelFacts, ServedModel
from freetoken.server.state import ServerState
from freetoken.spec import read_architecture
from freetoken.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]

log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""How long stopping may take before the process ends without it."""


class _Engine(Generator, Protocol):
    """The engine as this command uses it."""

    def start(self) -> None: ...

    def close(self) -> None: ...


class _Loader(threading.Thread):
    """Reads the vocabulary beside the engine, which loads the model, then imports torch; sets `stop` where one of them
    fails."""

    def __init__(self, state: ServerState, model: ModelOptions, engine: EngineOptions, stop: threading.Event) -> None:
        super().__init__(name="loader", daemon=True)
        self.failure: Exception | None = None
        self.engine: _Engine | None = None
        self._state = state
        self._model = model
        self._engine_options = engine
        self._stop_event = stop

    def run(self) -> None:
        started = time.monotonic()
        try:
            import_where_usable(self._engine_options)
            served = beside("vocabulary", functools.partial(read_model, self._model))
            engine = make_engine(
                self._model, self._engine_options, beside("tokenizer", lambda: served.result().tokenizer)
            )
            if self._stop_event.is_set():
                return
            self.engine = engine
            self.engine.start()
            self._state.attach(served.result(), self.engine)
            wait_while_loading(self.engine, self._stop_event.is_set)
            if self.engine.state is EngineState.FAILED:
                raise self.engine.failure or FreeTokenError("the engine failed to start")
            log.info("model loaded in %.2f s", time.monotonic() - started)
            if not self._stop_event.is_set():
                import_torch()
        except Exception as error:
            if not isinstance(error, FreeTokenError):
                log.error("loading failed", exc_info=error)
                error = FreeTokenError(f"{self._model.path}: loading failed: {type(error).__name__}: {error}")
            self.failure = error
            self._stop_event.set()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `ft serve`: llama-server's."""
    flags.add_model_flags(parser)
    flags.add_engine_flags(parser)
    flags.add_sampling_flags(parser)
    flags.add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raises what keeps the port from opening or the model from loading."""
    model, engine, options = flags.model_options(args), flags.engine_options(args), flags.server_options(args)
    if not model.path.exists():
        raise ModelFileError(f"{model.path}: there is no such file")
    state = ServerState(options)
    server = HttpServer(build_app(state), options)
    stop = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    server.start()
    log.info("listening on %s", server.url)
    loader = _Loader(state, model, engine, stop)
    loader.start()
    try:
        stop.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        close(state, server, loader)
    if loader.failure is not None:
        raise loader.failure
    return 0


def read_model(options: ModelOptions) -> ServedModel:
    """Metadata, vocabulary and template of the model: all that the server itself needs. Milliseconds, no weights."""
    with open_model(options.path) as file:
        facts = facts_of(file)
        tokenizer = Tokenizer(file.shards[0].path, file.metadata)
    aliases = tuple(sorted(set(flags.words(options.alias or ""))))
    template = load_template(options.chat_template, tokenizer)
    return ServedModel(str(options.path), aliases, tokenizer, template, facts)


def facts_of(file: ModelFile) -> ModelFacts:
    """The figures of /v1/models. Raises UnsupportedModelError for an architecture that we do not run."""
    metadata = file.metadata
    architecture = read_architecture(metadata)
    return ModelFacts(
        n_ctx_train=metadata.get_int(f"{architecture}.context_length", 0),
        n_embd=metadata.get_int(f"{architecture}.embedding_length", 0),
        n_params=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        size_bytes=file.n_bytes,
        ftype=ftype_name(metadata.get_int("general.file_type", -1, low=-1)),
    )


def ftype_name(file_type: int) -> str:
    """llama.cpp's words for `general.file_type`, such as "Q4_K - Medium"; empty for an unknown one."""
    try:
        name = LlamaFileType(file_type).name
    except ValueError:
        return ""
    if name == "ALL_F32":
        return "all F32"
    name = name.removeprefix("MOSTLY_")
    stem, _, size = name.rpartition("_")
    sizes = {"S": "Small", "M": "Medium", "L": "Large"}
    return f"{stem} - {sizes[size]}" if size in sizes and stem.startswith("Q") else name


def make_engine(model: ModelOptions, options: EngineOptions, tokenizer: Future[Tokenizer]) -> _Engine:
    """A late import: the port must be open before."""
    from freetoken.engine import Engine

    return Engine(model, options, tokenizer)


def import_torch() -> None:
    """Beside the first requests: what long prompts need takes a second or two to import, unless a GPU needed it."""
    if "torch" in sys.modules:
        return
    from freetoken.runner import import_prefill

    import_prefill()


def close(state: ServerState, server: HttpServer, loader: _Loader) -> None:
    """End everything: the port, the running requests, the engine; what does not end in time is left behind."""
    log.info("stopping")
    watchdog = threading.Timer(_GRACE_S, _leave, (loader.failure,))
    watchdog.daemon = True
    watchdog.start()
    state.close()
    server.stop()
    state.dispose()
    loader.join()
    if loader.engine is not None:
        loader.engine.close()
    watchdog.cancel()


def _leave(failure: Exception | None) -> None:
    """End the process inside an import, a read of the file or a long answer; nothing of ours is left to save."""
    if failure is not None:
        print(f"ft: error: {failure}", file=sys.stderr)
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0 if failure is None else 1)
