"""llama.cpp as oracle and as peer, driven through llama-cpp-python's low-level API: one model, one sequence.

Called by the parity and benchmark tools and by tests. Nothing here knows of our own engine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np

__all__ = ["Peer", "silence", "system_info", "threads_for"]


Capture = tuple[tuple[str, ...], Callable[[str, np.ndarray], None]]
"""Prefixes of tensor names wanted from every forward pass, and who gets (name, values [rows, width])."""


def threads_for(path: Path) -> int:
    """One thread for tiny files, where the hand-over costs more than the work; else two."""
    return 1 if path.stat().st_size < 1 << 26 else 2


class Tensor(ctypes.Structure):
    """ggml's `struct ggml_tensor` (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )

    def matrix(self) -> np.ndarray:
        """The first matrix [ne1, ne0] of an F32 or I32 tensor in place, rows by their stride."""
        dtype = np.float32 if self.type == llama_cpp.GGML_TYPE_F32 else np.int32
        rows, stride = self.ne[1], self.nb[1]
        raw = (ctypes.c_uint8 * ((rows - 1) * stride + self.ne[0] * 4)).from_address(self.data)
        shape, strides = (rows, self.ne[0]), (stride, 4)
        return np.lib.stride_tricks.as_strided(np.frombuffer(raw, dtype, self.ne[0]), shape, strides)


DROP_LOG = llama_cpp.llama_log_callback(lambda level, text, user_data: None)
"""Swallows llama.cpp's log lines; kept here so that the C side never calls a freed function."""


def silence() -> None:
    """Turn llama.cpp's log off for this process."""
    llama_cpp.llama_log_set(DROP_LOG, ctypes.c_void_p(0))


def system_info() -> str:
    """llama.cpp's line of compiled and detected CPU features."""
    return str(llama_cpp.llama_print_system_info().decode())


def eval_callback(prefixes: tuple[str, ...], receive: Callable[[str, Tensor], None]) -> Any:
    """A C callback that hands over each tensor with a wanted name prefix as soon as it is computed."""

    def on_tensor(address: int, ask: bool, user_data: int | None) -> bool:
        tensor = Tensor.from_address(address)
        name = tensor.name.decode()
        if ask:
            return bool(name.startswith(prefixes))
        receive(name, tensor)
        return True

    return llama_cpp.ggml_backend_sched_eval_callback(on_tensor)


class ExactGelu:
    """Replaces the result of every GELU gate by the exact one: ggml's CPU code takes it from a table of fp16 values."""

    prefixes = ("ffn_gate-", "ffn_up-", "ffn_geglu-")

    def __init__(self) -> None:
        self.seen: dict[str, np.ndarray] = {}

    def receive(self, name: str, tensor: Tensor) -> None:
        """Keep gate and up; overwrite their product."""
        role, layer = name.split("-")
        if role != "ffn_geglu":
            self.seen[name] = tensor.matrix().astype(np.float64)
            return
        gate, up = self.seen.pop(f"ffn_gate-{layer}"), self.seen.pop(f"ffn_up-{layer}")
        inner = np.sqrt(2 / np.pi) * gate * (1 + 0.044715 * gate * gate)
        tensor.matrix()[:] = 0.5 * gate * (1 + np.tanh(inner)) * up


class Peer:
    """A loaded model with one context, as a context manager.

    `exact` asks for an f32 cache without flash attention (the oracle); otherwise the defaults of llama-server hold: f16
    cache, flash attention chosen by llama.cpp. `capture` receives intermediate tensors of every forward pass;
    `exact_gelu` computes that function anew, for models that have it (it cannot be had together with `capture`).
    RuntimeError when llama.cpp refuses the file or a batch.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        n_ctx: int = 1024,
        n_threads: int = 1,
        exact: bool = False,
        n_ubatch: int = 512,
        capture: Capture | None = None,
        exact_gelu: bool = False,
    ) -> None:
        silence()
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = max(n_ctx, 32)
        params.n_ubatch = n_ubatch
        params.n_threads = n_threads
        params.n_threads_batch = n_threads
        if exact:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.callback = None
        if capture:
            prefixes, keep = capture
            self.callback = eval_callback(prefixes, lambda name, tensor: keep(name, tensor.matrix().copy()))
        elif exact_gelu:
            self.callback = eval_callback(ExactGelu.prefixes, ExactGelu().receive)
        if self.callback:
            params.cb_eval = self.callback
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot make a context of {n_ctx} tokens for {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self.vocab))
        self.n_past = 0
        self.batch = llama_cpp.llama_batch_init(n_ctx, 0, 1)

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free batch, context and model."""
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def clear(self) -> None:
        """Forget the sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.n_past = 0

    def decode(self, tokens: Sequence[int], *, every: bool = False) -> np.ndarray:
        """Append tokens to the sequence; fp32 logits [n_vocab] after the last, or [n, n_vocab] after each."""
        n = len(tokens)
        batch = self.batch
        batch.n_tokens = n
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self.n_past + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i == n - 1
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {n} tokens at position {self.n_past} returned {status}")
        self.n_past += n
        rows = range(n) if every else [n - 1]
        out = np.empty((len(rows), self.n_vocab), dtype=np.float32)
        for row, i in zip(out, rows, strict=True):
            row[:] = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, i), (self.n_vocab,))
        return out if every else out[0]

    def greedy(self, tokens: Sequence[int], n_predict: int) -> list[int]:
        """The most likely continuation from an empty sequence; stops after an end-of-generation token."""
        self.clear()
        logits = self.decode(tokens)
        out: list[int] = []
        while len(out) < n_predict:
            out.append(int(logits.argmax()))
            if llama_cpp.llama_vocab_is_eog(self.vocab, out[-1]):
                break
            logits = self.decode(out[-1:])
        return out

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; `special` parses control tokens."""
        data = text.encode()
        room = len(data) + 8
        buffer = (ctypes.c_int32 * room)()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, room, add_bos, special)
        if n < 0:
            raise RuntimeError(f"llama_tokenize wants {-n} places for {len(data)} bytes")
        return list(buffer[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """The tokens' text, without control tokens."""
        out = b""
        buffer = ctypes.create_string_buffer(512)
        for token in tokens:
            n = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, len(buffer), 0, False)
            out += buffer.raw[: max(n, 0)]
        return out.decode("utf-8", errors="replace")
