"""Vocabulary: text to token ids and back, exactly as llama.cpp does it. Knows no model, no template, no torch.

`native` binds llama.cpp's vocabulary loader, `repair` mends vocabularies that it would refuse (or die on),
`vocabulary` is the public `Tokenizer`, `stream` turns a stream of tokens into whole characters.
"""

from freetoken.tokenizer.stream import StreamDecoder
from freetoken.tokenizer.vocabulary import Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
