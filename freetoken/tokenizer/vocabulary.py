"""`Tokenizer`: a file's vocabulary, safe against any token id and any text that a client may send.

The engine and the server share one; all of it is read-only after construction. Encoding and pieces are llama.cpp's,
bit for bit. What the file lacks is replaced as `repair` documents; a file without any vocabulary still works with raw
token ids, and text then is a clear error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from freetoken.errors import RequestError
from freetoken.tokenizer.native import LlamaVocab
from freetoken.tokenizer.repair import Verdict, examine, mended_file

__all__ = ["Tokenizer"]

log = logging.getLogger(__name__)

_SPECIAL = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "nl": "nl",
    "sep": "sep",
    "pad": "pad",
    "fim_pre": "fim_prefix",
    "fim_suf": "fim_suffix",
    "fim_mid": "fim_middle",
    "fim_pad": "fim_pad",
    "fim_rep": "fim_repo",
    "fim_sep": "fim_separator",
}


class Tokenizer:
    """The vocabulary of a GGUF file (the first shard of a split one).

    `metadata` is the file's metadata by key, when the caller has it already; otherwise it is read here. Raises
    ModelFileError, with llama.cpp's own message where it is llama.cpp that refuses the vocabulary.
    """

    def __init__(self, path: str | Path, metadata: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        verdict = examine(self.path, metadata)
        for message in verdict.warnings:
            log.warning("%s: %s", self.path.name, message)
        self._vocab = None if verdict.has_no_vocab else self._load(verdict)
        self.vocab_type = "none" if self._vocab is None else self._vocab.type
        self.n_vocab = verdict.n_vocab if self._vocab is None else self._vocab.n_tokens
        """Number of tokens; 0 where the file does not say."""
        ids = self._special_ids(verdict)
        self.bos, self.eos, self.eot, self.nl = ids["bos"], ids["eos"], ids["eot"], ids["nl"]
        self.special_tokens: dict[str, int] = {_SPECIAL[n]: t for n, t in ids.items() if t is not None}
        """Ids by name: bos, eos, eot, nl, sep, pad, fim_prefix, fim_suffix, fim_middle, fim_pad, fim_repo, ..."""
        self.eog_tokens = self._find_eog(verdict)
        self.suppressed_tokens = () if self._vocab is None else self._vocab.suppressed_tokens()
        self.add_bos = self._vocab is not None and self._vocab.add_bos and self.bos is not None
        self.add_eos = self._vocab is not None and self._vocab.add_eos and self.eos is not None
        self._can_add_special = self._vocab is not None and _is_complete(self._vocab, self.bos, self.eos)
        self._named_templates = verdict.chat_templates
        self.chat_template = self._named_templates.get("default")
        """The file's Jinja template, None where it has none."""

    def _load(self, verdict: Verdict) -> LlamaVocab:
        if not verdict.is_mended:
            return LlamaVocab(self.path)
        with mended_file(verdict) as path:
            return LlamaVocab(path)

    def _special_ids(self, verdict: Verdict) -> dict[str, int | None]:
        """Special tokens by llama.h's names. A default id that the file does not name must be a control token."""
        if self._vocab is None:
            return dict.fromkeys(_SPECIAL)
        ids = {name: self._vocab.special(name) for name in _SPECIAL}
        for name, is_named in (("bos", verdict.names_bos), ("eos", verdict.names_eos)):
            token = ids[name]
            if token is not None and not is_named and not self._vocab.is_control(token):
                ids[name] = None
        return ids

    def _find_eog(self, verdict: Verdict) -> frozenset[int]:
        if self._vocab is None:
            return frozenset()
        default = self._vocab.special("eos")
        tokens = self._vocab.eog_tokens()
        return tokens if self.eos is not None or verdict.names_eos else tokens - {default}

    def chat_template_named(self, name: str) -> str | None:
        """A named template of the file, such as "tool_use"."""
        return self._named_templates.get(name)

    def encode(self, text: str | bytes, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of a text.

        `add_special` adds BOS (and EOS) as the file wants; `parse_special` reads the names of control tokens in the
        text as those tokens. Bytes that are not UTF-8, and lone surrogates, count as U+FFFD. Raises RequestError for a
        model without a vocabulary.
        """
        if self._vocab is None:
            raise RequestError(
                "this model file has no tokenizer, so text cannot be turned into tokens: send token ids as the prompt"
            )
        return self._vocab.tokenize(_utf8(text), add_special and self._can_add_special, parse_special)

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`. Raises RequestError for a foreign id."""
        if self._vocab is None:
            return b""
        if not 0 <= token < self.n_vocab:
            raise RequestError(f"token id {token} is outside the vocabulary of {self.n_vocab} tokens (0 is the first)")
        return self._vocab.piece(token, special)

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text of all tokens; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.piece(token, special) for token in tokens).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return token in self.eog_tokens

    def is_control(self, token: int) -> bool:
        """Whether the token is a control token, never shown as text."""
        return self._vocab is not None and 0 <= token < self.n_vocab and self._vocab.is_control(token)

    def close(self) -> None:
        """Free the vocabulary (also done when the object is collected). Nothing may use it afterwards."""
        if self._vocab is not None:
            self._vocab.close()
            self._vocab = None


def _is_complete(vocab: LlamaVocab, bos: int | None, eos: int | None) -> bool:
    """Whether every special token that llama.cpp would add exists: it dies on a missing one."""
    return not ((vocab.add_bos and bos is None) or (vocab.add_eos and eos is None))


def _utf8(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text.decode("utf-8", "replace").encode()
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
