"""A server in this process around a fake engine and a tiny real vocabulary, for tests of the HTTP side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import requests
from fake_engine import FakeEngine

from freetoken.chat import load_template
from freetoken.options import ServerOptions
from freetoken.request import Request
from freetoken.server.app import build_app
from freetoken.server.listen import HttpServer
from freetoken.server.model import ModelFacts, ServedModel
from freetoken.server.state import ServerState
from freetoken.tokenizer import Tokenizer

IM_START, IM_END = 256, 257
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_vocab(path: Path, without: Sequence[str] = ()) -> Path:
    """A GGUF without tensors: token i is byte i, then two control tokens, of which the second ends a text.

    Entries of the tokenizer may be left out.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    texts = [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(8)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [*texts, "<|im_start|>", "<|im_end|>"])
    writer.add_array("tokenizer.ggml.merges", ["Ā ā"])
    if "pre" not in without:
        writer.add_string("tokenizer.ggml.pre", "default")
    if "token_type" not in without:
        writer.add_array("tokenizer.ggml.token_type", [1] * 256 + [3, 3])
    if "eos_token_id" not in without:
        writer.add_uint32("tokenizer.ggml.eos_token_id", IM_END)
    if "chat_template" not in without:
        writer.add_string("tokenizer.chat_template", TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def says(text: str | bytes, *, ends: bool = True) -> Callable[[Request], Sequence[int]]:
    """A script: the bytes of a text, then the end of the text."""
    raw = text.encode() if isinstance(text, str) else text
    return lambda _: [*raw, IM_END] if ends else list(raw)


@dataclass
class Served:
    """A running server."""

    url: str
    port: int
    engine: FakeEngine
    state: ServerState

    def post(self, path: str, body: Any = None, **more: Any) -> requests.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return requests.post(self.url + path, data=data, timeout=20, **more)

    def get(self, path: str, **more: Any) -> requests.Response:
        return requests.get(self.url + path, timeout=20, **more)

    def ok(self, path: str, body: Any, **more: Any) -> Any:
        """The JSON of a POST that must succeed."""
        response = self.post(path, body, **more)
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; "[DONE]" as it is."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["Content-Type"] == "text/event-stream"
        frames = response.content.decode().split("\n\n")
        assert frames.pop() == "" and all(frame.startswith("data: ") for frame in frames)
        return [frame[6:] if frame == "data: [DONE]" else json.loads(frame[6:]) for frame in frames]


@contextmanager
def serving(engine: FakeEngine, tokenizer: Tokenizer, **options: Any) -> Iterator[Served]:
    """Serve an engine on a free port."""
    state = ServerState(ServerOptions(port=0, **options))
    facts = ModelFacts(n_ctx_train=512, n_embd=8, n_params=1000, size_bytes=4000, ftype="all F32")
    state.attach(ServedModel("models/tiny.gguf", ("tiny",), tokenizer, load_template(None, tokenizer), facts), engine)
    server = HttpServer(build_app(state), state.options)
    server.start()
    try:
        yield Served(server.url, server.port, engine, state)
    finally:
        state.close()
        server.stop()
        state.dispose()
