"""Reading one field of a JSON body: type, limits and names as llama-server's schema has them. Null counts as absent."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.server.refuse import invalid

__all__ = ["INT32_MAX", "Number", "has", "json_type", "read_bool", "read_int", "read_string", "read_strings"]

log = logging.getLogger(__name__)

INT32_MAX = 2**31 - 1
FLOAT_MAX = 3.4028234e38

Body = Mapping[str, Any]


def json_type(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def has(body: Body, name: str) -> bool:
    """Whether a field is there and not null."""
    return body.get(name) is not None


@dataclass(frozen=True)
class Number:
    """A numeric field: its names in order of precedence, and its limits.

    Values outside of hard limits are refused, of soft limits clamped. A boolean counts as 0 or 1 and an integer field
    cuts the fraction off, as llama-server does.
    """

    attribute: str
    names: tuple[str, ...]
    is_integer: bool
    low: float
    high: float
    is_hard: bool = False

    def read(self, body: Body) -> float | int | None:
        """The value, or None where no name is given."""
        for name in self.names:
            if has(body, name):
                return self._checked(name, body[name])
        return None

    def _checked(self, name: str, value: Any) -> float | int:
        if not isinstance(value, int | float):
            raise invalid(f"Field '{name}': type must be number, but is {json_type(value)}")
        number: float | int
        if abs(value) > FLOAT_MAX:
            raise invalid(f"Field '{name}': {str(value)[:20]} is out of range")
        number = int(value) if self.is_integer else float(value)
        if self.low <= number <= self.high:
            return number
        if self.is_hard:
            raise invalid(f"Field '{name}': Value must be between {self.low} <= value <= {self.high}, but got {number}")
        clamped = min(max(number, self.low), self.high)
        return int(clamped) if self.is_integer else float(clamped)


def read_int(body: Body, name: str, default: int, low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> int:
    """An integer between hard limits."""
    value = Number(name, (name,), True, low, high, is_hard=True).read(body)
    return default if value is None else int(value)


def read_bool(body: Body, name: str, default: bool) -> bool:
    """A boolean."""
    if not has(body, name):
        return default
    value = body[name]
    if not isinstance(value, bool):
        raise invalid(f"Field '{name}': type must be boolean, but is {json_type(value)}")
    return value


def read_string(body: Body, name: str, default: str) -> str:
    """A string."""
    if not has(body, name):
        return default
    value = body[name]
    if not isinstance(value, str):
        raise invalid(f"Field '{name}': type must be string, but is {json_type(value)}")
    return value


def read_strings(body: Body, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """An array of strings; a single string counts as an array of one."""
    if not has(body, name):
        return default
    value = body[name]
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise invalid(f"Field '{name}': type must be array, but is {json_type(value)}")
    for item in value:
        if not isinstance(item, str):
            raise invalid(f"Field '{name}': type of its items must be string, but is {json_type(item)}")
    return tuple(value)
