"""A file's metadata: a mapping of keys to values, with getters that check type and range. Knows nothing of tensors."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

from freetoken.errors import ModelFileError
from freetoken.gguf.cursor import Cursor

__all__ = ["Metadata", "StringArray", "Value", "entry_bytes", "read_metadata"]

STRING, ARRAY = 8, 9
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_SCALARS = {
    i: struct.Struct("<" + code)
    for i, code in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}.items()
}
_DTYPES = {i: np.dtype(s.format.replace("B", "u1").replace("b", "i1")) for i, s in _SCALARS.items()}

MAX_KEY_BYTES = 65535
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY = 1 << 30
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1


class StringArray(Sequence[str]):
    """Strings that stay in the file until the first look, then are decoded all at once (bad UTF-8 is replaced)."""

    def __init__(self, buffer: memoryview, offset: int, n: int) -> None:
        self._buffer = buffer
        self._offset = offset
        self._n = n
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    def _decoded(self) -> list[str]:
        if self._strings is None:
            buffer, pos, unpack = self._buffer, self._offset, _SCALARS[10].unpack_from
            strings = []
            for _ in range(self._n):
                start = pos + 8
                pos = start + unpack(buffer, pos)[0]
                strings.append(str(buffer[start:pos], "utf-8", "replace"))
            self._strings = strings
        return self._strings


Value = int | float | bool | str | StringArray | np.ndarray
T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True)
class _Entry:
    type: int
    item_type: int
    value: Value

    @property
    def type_name(self) -> str:
        name = _TYPE_NAMES[self.type]
        return f"{name} of {_TYPE_NAMES[self.item_type]}" if self.type == ARRAY else name


class Metadata(Mapping[str, Value]):
    """Keys and values in file order. The getters raise ModelFileError naming file, key, what was found and expected.

    A default makes a key optional. Integers of any width pass as integers, and integers pass as floats.
    """

    def __init__(self, where: str, entries: dict[str, _Entry]) -> None:
        self.where = where
        self._entries = entries

    def __getitem__(self, key: str) -> Value:
        return self._entries[key].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def type_of(self, key: str) -> str:
        """The type of a key's value as GGUF names it, such as `u32` or `array of string`."""
        return self._entries[key].type_name

    def get_int(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**63 - 1) -> int:
        """An integer in low..high."""
        if key not in self._entries and default is not None:
            return default
        entry = self._entry(key)
        if not isinstance(entry.value, int) or isinstance(entry.value, bool):
            raise self._wrong(key, "an integer")
        self._check_range(key, entry.value, low, high)
        return entry.value

    def get_float(self, key: str, default: float | None = None, *, low: float = -1e30, high: float = 1e30) -> float:
        """A finite number in low..high."""
        if key not in self._entries and default is not None:
            return default
        entry = self._entry(key)
        if not isinstance(entry.value, int | float) or isinstance(entry.value, bool):
            raise self._wrong(key, "a number")
        self._check_range(key, entry.value, low, high)
        return float(entry.value)

    def get_bool(self, key: str, default: bool | None = None) -> bool:
        """A truth value."""
        if key not in self._entries and default is not None:
            return default
        value = self._entry(key).value
        if not isinstance(value, bool):
            raise self._wrong(key, "a bool")
        return value

    def get_str(self, key: str, default: str | None = None) -> str:
        """A string."""
        if key not in self._entries and default is not None:
            return default
        value = self._entry(key).value
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def get_strings(self, key: str) -> StringArray:
        """An array of strings, decoded on first use."""
        value = self._entry(key).value
        if not isinstance(value, StringArray):
            raise self._wrong(key, "an array of strings")
        return value

    def get_numbers(self, key: str) -> np.ndarray:
        """An array of numbers or bools: a read-only view of the file."""
        value = self._entry(key).value
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "an array of numbers")
        return value

    def get_ints(
        self, key: str, n: int, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1
    ) -> tuple[int, ...]:
        """n integers in low..high, given as an array of at least n or as one number for all."""
        if key not in self._entries and default is not None:
            return (default,) * n
        value = self._entry(key).value
        if not isinstance(value, np.ndarray):
            return (self.get_int(key, low=low, high=high),) * n
        if value.dtype.kind not in "iu":
            raise self._wrong(key, "an integer or an array of integers")
        if len(value) < n:
            raise ModelFileError(f"{self.where}: key {key!r} has {len(value)} values, expected {n}")
        numbers = tuple(int(v) for v in value[:n])
        for number in numbers:
            self._check_range(key, number, low, high)
        return numbers

    def _entry(self, key: str) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise ModelFileError(f"{self.where}: key {key!r} is missing from the metadata")
        return entry

    def _wrong(self, key: str, expected: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: key {key!r} is {self.type_of(key)}, expected {expected}")

    def _check_range(self, key: str, value: float, low: float, high: float) -> None:
        if not low <= value <= high:
            raise ModelFileError(f"{self.where}: key {key!r} is {value}, expected {low} to {high}")


def read_metadata(cursor: Cursor, n: int) -> Metadata:
    """n entries at the cursor. Raises ModelFileError for anything that the format does not allow."""
    cursor.check_count(n, _MIN_ENTRY_BYTES, "metadata keys")
    entries: dict[str, _Entry] = {}
    for i in range(n):
        cursor.what = f"metadata key {i}"
        key = cursor.name(MAX_KEY_BYTES)
        if key in entries:
            raise cursor.error(f"key {key!r} occurs twice")
        cursor.what = f"key {key!r}"
        entries[key] = _read_value(cursor)
    return Metadata(cursor.where, entries)


def entry_bytes(cursor: Cursor, n: int) -> dict[str, bytes]:
    """n entries at the cursor as they are stored, by their keys."""
    entries = {}
    for _ in range(n):
        start = cursor.pos
        key = cursor.name(MAX_KEY_BYTES)
        _read_value(cursor)
        entries[key] = bytes(cursor.buffer[start : cursor.pos])
    return entries


def _read_value(cursor: Cursor) -> _Entry:
    value_type = cursor.u32()
    if value_type == STRING:
        return _Entry(STRING, STRING, cursor.text(MAX_STRING_BYTES))
    if value_type in _SCALARS:
        value = cursor.unpack(_SCALARS[value_type])
        return _Entry(value_type, value_type, bool(value) if value_type == 7 else value)
    if value_type != ARRAY:
        raise cursor.error(f"unknown value type {value_type}, expected 0 to {len(_TYPE_NAMES) - 1}")
    item_type, n = cursor.u32(), cursor.u64()
    if n > MAX_ARRAY:
        raise cursor.error(f"an array of {n} items, at most {MAX_ARRAY} are allowed")
    if item_type == STRING:
        offset = cursor.pos
        cursor.skip_strings(n)
        return _Entry(ARRAY, STRING, StringArray(cursor.buffer, offset, n))
    if item_type not in _SCALARS:
        raise cursor.error(f"an array of value type {item_type}, expected numbers or strings")
    dtype = _DTYPES[item_type]
    cursor.check_count(n, dtype.itemsize, "array items")
    array = np.frombuffer(cursor.buffer[cursor.pos : cursor.pos + n * dtype.itemsize], dtype=dtype)
    cursor.pos += n * dtype.itemsize
    return _Entry(ARRAY, item_type, array != 0 if item_type == 7 else array)
