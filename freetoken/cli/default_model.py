"""The model that ships with the project: beside the package in an installation, in `models/` of a source tree."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FILE_NAME", "default_model"]

FILE_NAME = "freetoken-small-moe.gguf"
_PACKAGE = Path(__file__).resolve().parent.parent


def default_model() -> Path | None:
    """The file's path, or None where this installation has none."""
    for folder in (_PACKAGE / "models", _PACKAGE.parent / "models"):
        path = folder / FILE_NAME
        if path.is_file():
            return path
    return None
