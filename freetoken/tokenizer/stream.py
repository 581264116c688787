"""Tokens to text as they come: bytes of an unfinished character wait for the rest."""

from __future__ import annotations

import codecs

from freetoken.tokenizer.vocabulary import Tokenizer

__all__ = ["StreamDecoder"]

_DECODER = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """Decodes one stream; belongs to one thread.

    The joined results of `push` and `flush` equal `Tokenizer.decode` of all tokens. Bytes that are not UTF-8 (a lone
    continuation byte, an overlong form, a surrogate) become U+FFFD as soon as they cannot become a character.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = _DECODER("replace")

    def push(self, token: int) -> str:
        """Text that is complete with this token; may be empty."""
        return self._decoder.decode(self._tokenizer.piece(token, self._special))

    def flush(self) -> str:
        """The end of the stream: an unfinished character becomes U+FFFD."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
