"""What a file's vocabulary lacks: found before llama.cpp sees it, mended in a temporary copy where that is possible.

    lacking                        what we do
    no `tokenizer.ggml.model`      no vocabulary: raw token ids only, text is a clear error
    no `tokenizer.ggml.pre`        llama.cpp's default pre-tokenizer
    `token_type` too short         the rest counts as normal, control-looking texts as control
    `scores` too short             the rest gets the lowest score
    no `merges`                    rebuilt from the vocabulary in the order of ids, as tiktoken ranks them
    no valid `eos_token_id`        none, unless llama.cpp's default id is a control token
    two tokens with one text,      ModelFileError (llama.cpp would end the process)
    SPM without its byte tokens

Each is told once, through `logging`. A temporary copy holds the vocabulary only and is gone once it is loaded.
"""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from gguf import GGUFValueType, GGUFWriter

from freetoken.errors import ModelFileError
from freetoken.gguf import open_model

__all__ = ["Verdict", "examine", "mended_file"]

_PREFIX: Final = "tokenizer."
_MODEL, _PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
_TOKENS, _TYPES, _SCORES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
_MERGES, _EOS, _BOS = "tokenizer.ggml.merges", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.bos_token_id"
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _CONTROL = 1, 3
_BPE: Final = ("gpt2", "gemma4")
_LOOKS_LIKE_CONTROL = re.compile(
    r"<\|[^|]*\|>|<｜[^｜]*｜>|</?(s|unk|bos|eos|pad|mask|start_of_turn|end_of_turn)>|\[/?INST\]"
)


@dataclass
class Verdict:
    """What `examine` found; `changes` are metadata values that a mended copy gets."""

    warnings: list[str] = field(default_factory=list)
    changes: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)
    """The file's own tokenizer entries, for a mended copy."""
    has_no_vocab: bool = False
    names_eos: bool = True
    names_bos: bool = True
    n_vocab: int = 0
    chat_templates: dict[str, str] = field(default_factory=dict)
    """By name; "default" is the one without a name."""

    @property
    def is_mended(self) -> bool:
        return bool(self.changes)


def examine(path: Path, metadata: Mapping[str, Any] | None) -> Verdict:
    """Judge the vocabulary of a file. Raises ModelFileError where nothing can be done."""
    if metadata is not None:
        return _judge(path, metadata)
    file = open_model(path)
    try:
        return _judge(path, file.metadata)
    finally:
        file.close()


def _judge(path: Path, metadata: Mapping[str, Any]) -> Verdict:
    verdict = Verdict(chat_templates=_templates(metadata))
    model = metadata.get(_MODEL, "no_vocab")
    if model in ("no_vocab", "none"):
        verdict.has_no_vocab = True
        size = metadata.get(f"{metadata.get('general.architecture')}.vocab_size", 0)
        verdict.n_vocab = size if isinstance(size, int) else 0
        verdict.warnings.append("no vocabulary in the file: only token ids can be sent, and no text is returned")
        return verdict
    if not isinstance(metadata.get(_TOKENS), Sequence):
        raise ModelFileError(f"{path}: {_TOKENS} is missing or is no array of strings: the vocabulary cannot be read")
    tokens: Sequence[str] = copy.copy(metadata[_TOKENS])  # decoded here and dropped; the file's own stays small
    verdict.n_vocab = len(tokens)
    verdict.names_eos, verdict.names_bos = (_is_id(metadata.get(key), len(tokens)) for key in (_EOS, _BOS))
    if not verdict.names_eos:
        verdict.warnings.append(f"no valid {_EOS}: generation ends at tokens that are known by name, or at the limit")
    ids = _index(path, tokens)
    if model == "llama":
        _check_bytes(path, ids)
    if model == "gpt2" and not metadata.get(_PRE):
        verdict.warnings.append(f"no {_PRE}: the default pre-tokenizer is used, tokens may differ from training")
    _mend_arrays(verdict, metadata, tokens)
    if model in _BPE and not len(metadata.get(_MERGES, ())) and metadata.get(_PRE) != "kimi-k2":
        verdict.warnings.append(f"no {_MERGES}: merges are rebuilt from the order of the vocabulary")
        verdict.changes[_MERGES] = _merges_by_id(tokens, ids)
    if verdict.is_mended:
        verdict.entries = {k: _plain(v) for k, v in metadata.items() if k.startswith(_PREFIX) and k != _TEMPLATE}
    return verdict


def _is_id(value: Any, n_tokens: int) -> bool:
    return isinstance(value, int) and 0 <= value < n_tokens


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {"default" if key == _TEMPLATE else key[len(_TEMPLATE) + 1 :]: key for key in metadata if _is_template(key)}
    return {name: metadata[key] for name, key in found.items() if isinstance(metadata[key], str)}


def _is_template(key: str) -> bool:
    return key == _TEMPLATE or key.startswith(_TEMPLATE + ".")


def _index(path: Path, tokens: Sequence[str]) -> dict[str, int]:
    """Ids by text. Texts that were not UTF-8 look alike here and are left to llama.cpp, which compares bytes."""
    ids = {text: token for token, text in enumerate(tokens)}
    if len(ids) != len(tokens):
        for token, text in enumerate(tokens):
            if ids[text] != token and text and "\ufffd" not in text:
                raise ModelFileError(
                    f"{path}: tokens {token} and {ids[text]} of the vocabulary have the same text {text[:40]!r}: "
                    "expected different ones; convert the model again"
                )
    return ids


def _check_bytes(path: Path, ids: Mapping[str, int]) -> None:
    missing = [b for b in range(256) if f"<0x{b:02X}>" not in ids and (b > 127 or chr(b) not in ids)]
    if missing:
        raise ModelFileError(
            f"{path}: the vocabulary (tokenizer.ggml.model = llama) lacks {len(missing)} byte tokens, the first is "
            f"<0x{missing[0]:02X}>: expected <0x00> to <0xFF>, without them some texts have no tokens"
        )


def _mend_arrays(verdict: Verdict, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    n = len(tokens)
    types = metadata.get(_TYPES)
    if isinstance(types, np.ndarray) and types.dtype.kind in "iu" and len(types) < n:
        verdict.warnings.append(f"{_TYPES} has {len(types)} of {n} values: the others are judged by their text")
        rest = [_CONTROL if _LOOKS_LIKE_CONTROL.fullmatch(text) else _NORMAL for text in tokens[len(types) :]]
        verdict.changes[_TYPES] = [*(int(t) for t in types), *rest]
    scores = metadata.get(_SCORES)
    if isinstance(scores, np.ndarray) and scores.dtype.kind == "f" and len(scores) < n:
        verdict.warnings.append(f"{_SCORES} has {len(scores)} of {n} values: the others get the lowest score")
        lowest = float(scores.min()) if len(scores) else 0.0
        verdict.changes[_SCORES] = [*(float(s) for s in scores), *([lowest] * (n - len(scores)))]


def _merges_by_id(tokens: Sequence[str], ids: Mapping[str, int]) -> list[str]:
    """Every way to join two tokens into a third, ordered by the id of the third (tiktoken ranks merges so)."""
    merges = []
    for text in tokens:
        if len(text) > 1 and " " not in text and not _LOOKS_LIKE_CONTROL.fullmatch(text):
            merges += [
                f"{text[:cut]} {text[cut:]}" for cut in range(1, len(text)) if text[:cut] in ids and text[cut:] in ids
            ]
    return merges or ["\x01 \x01"]  # an array must not be empty; no text contains this pair once its bytes are mapped


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value if isinstance(value, str | bytes | int | float) else list(value)


@contextmanager
def mended_file(verdict: Verdict) -> Iterator[Path]:
    """A temporary GGUF that holds the mended vocabulary and nothing else; removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="freetoken-") as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = GGUFWriter(path, "llama")
        for key, value in {**verdict.entries, **verdict.changes}.items():
            _add(writer, key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        yield path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One entry, in the type that llama.cpp expects for a tokenizer key of this kind."""
    if isinstance(value, list):
        if value:
            writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_key_value(key, value, GGUFValueType.UINT32)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, str(value))
