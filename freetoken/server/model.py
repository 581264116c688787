"""What the server knows of the model that it serves: names, tokenizer, template and a few figures for /v1/models."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken import __version__
from freetoken.chat import ChatTemplate
from freetoken.tokenizer import Tokenizer

__all__ = ["BUILD_INFO", "ModelFacts", "ServedModel"]

BUILD_INFO = f"b11434-freetoken-{__version__}"
"""`build_info` and `system_fingerprint`: the llama-server build whose interface this is, and who answers."""


@dataclass(frozen=True)
class ModelFacts:
    """Figures of the file, as /v1/models prints them."""

    n_ctx_train: int = 0
    n_embd: int = 0
    n_params: int = 0
    size_bytes: int = 0
    ftype: str = ""


@dataclass(frozen=True)
class ServedModel:
    """One model, read before the engine has loaded it."""

    path: str
    aliases: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate
    facts: ModelFacts = ModelFacts()

    @property
    def name(self) -> str:
        """The id that answers carry: the first alias, else the path as given."""
        return self.aliases[0] if self.aliases else self.path
