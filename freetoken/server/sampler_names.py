"""Names of samplers, in all the spellings that llama.cpp takes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from freetoken.request import SamplingParams
from freetoken.server.refuse import not_supported

__all__ = ["samplers_by_letter", "samplers_by_name"]

log = logging.getLogger(__name__)

_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "t": "temperature",
}
_MISSING = {"infill", "adaptive_p", "i", "a"}
_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
KNOWN = SamplingParams().samplers


def samplers_by_name(names: Sequence[str]) -> tuple[str, ...]:
    """Canonical names in order. Unknown names are skipped with a warning, as llama-server does."""
    found = []
    by_alias = {alias: name for name in KNOWN for alias in (name, name.replace("_", "-"), name.replace("_", ""))}
    by_alias |= _ALIASES
    for name in names:
        lower = name.lower()
        if lower in _MISSING or lower.replace("-", "_") in _MISSING:
            raise not_supported(f"samplers: '{name}' is not supported; there are {', '.join(KNOWN)}")
        if lower in by_alias:
            found.append(by_alias[lower])
        else:
            log.warning("unable to match sampler by name '%s'", name)
    return tuple(found)


def samplers_by_letter(letters: str) -> tuple[str, ...]:
    """The same for a string with one letter a sampler."""
    found = []
    for letter in letters:
        if letter in _MISSING:
            raise not_supported(f"samplers: '{letter}' is not supported; there are {''.join(_LETTERS)}")
        if letter in _LETTERS:
            found.append(_LETTERS[letter])
        else:
            log.warning("unable to match sampler by char '%s'", letter)
    return tuple(found)
