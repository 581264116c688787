"""torch.compile that falls back to the plain function, with a word about why, where the compiler fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.train_default_model.work import say

__all__ = ["compiled"]


def compiled(function: Callable[..., Any], *, is_wanted: bool) -> Callable[..., Any]:
    """The compiled function for fixed shapes; the plain one from its first failure on, or where it is not wanted."""
    if not is_wanted:
        return function
    fast: Callable[..., Any] | None = torch.compile(function, dynamic=False)

    def call(*args: Any) -> Any:
        nonlocal fast
        if fast is not None:
            try:
                return fast(*args)
            except Exception as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                say("compile", f"{getattr(function, '__name__', function)} runs uncompiled: {str(error)[:400]}")
                fast = None
        return function(*args)

    return call
