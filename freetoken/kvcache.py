"""Keys and values of all sequences, in pages of 256 positions that any sequence may take.

The runner owns one `KVCache`; the engine holds its `Sequence`s, asks them for room and cuts them back. The memory is
reserved at once and touched by use, so that resident memory grows with the tokens held. Knows no torch: the arrays are
numpy views that the native operations read by address and prefill wraps without a copy.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from freetoken.errors import EngineError, OptionError
from freetoken.options import EngineOptions

__all__ = [
    "CACHE_TYPES",
    "PAGE",
    "KVCache",
    "KVCacheFull",
    "KVShape",
    "Sequence",
    "capacity_for",
    "check_cache_types",
    "n_pages_for",
]

PAGE = 256
"""Positions of one page (FT_KV_PAGE)."""

CACHE_TYPES: dict[str, type[np.generic]] = {"f16": np.float16, "f32": np.float32}
"""Element types by the names of -ctk and -ctv."""

_ALIGNMENT = 64


class KVCacheFull(EngineError):
    """No page is free. The caller may release or truncate another sequence and ask again; nothing has changed."""


@dataclass(frozen=True)
class KVShape:
    """What one layer stores for each position: `n_kv` heads of `head_dim_k` and `head_dim_v` values."""

    n_kv: int
    head_dim_k: int
    head_dim_v: int


def n_pages_for(n_tokens: int) -> int:
    """Pages that hold n_tokens positions."""
    return -(-n_tokens // PAGE)


def capacity_for(n_ctx: int, n_sequences: int, *, is_shared: bool) -> int:
    """Pages for sequences of at most n_ctx tokens: each can be full, or they share so many tokens, with a last page of
    each that is not full."""
    n_pages = n_pages_for(n_ctx)
    return n_pages + n_sequences - 1 if is_shared else n_pages * n_sequences


def check_cache_types(options: EngineOptions) -> None:
    """Raises OptionError where keys and values would have different types."""
    if options.cache_type_k != options.cache_type_v:
        raise OptionError(
            f"cache types {options.cache_type_k} for keys and {options.cache_type_v} for values: give the same "
            "type for both"
        )


class KVCache:
    """`capacity` pages for every layer. `k[layer]` is [capacity, n_kv, PAGE, head_dim_k], `v[layer]` alike."""

    def __init__(self, layers: Iterable[KVShape], capacity: int, dtype: str = "f16") -> None:
        """Raises OptionError for an unknown type and EngineError where the address space cannot be reserved."""
        if dtype not in CACHE_TYPES:
            raise OptionError(f"cache type {dtype!r}: known types are {', '.join(CACHE_TYPES)}")
        self.capacity = capacity
        self.dtype = np.dtype(CACHE_TYPES[dtype])
        shapes = [(capacity, s.n_kv, PAGE, width) for s in layers for width in (s.head_dim_k, s.head_dim_v)]
        offsets, n_bytes = [], 0
        for shape in shapes:
            offsets.append(n_bytes)
            n_bytes += -(-_product(shape) * self.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        try:
            self._memory = mmap.mmap(-1, max(n_bytes, 1))
        except (OSError, OverflowError, ValueError) as error:
            raise EngineError(
                f"the KV cache of {capacity * PAGE} positions needs {n_bytes / 2**20:.0f} MiB, which cannot be "
                f"reserved ({error}): choose a smaller context with -c"
            ) from error
        arrays = [
            np.frombuffer(self._memory, self.dtype, _product(shape), offset).reshape(shape)
            for shape, offset in zip(shapes, offsets, strict=True)
        ]
        self.k, self.v = arrays[0::2], arrays[1::2]
        self.n_bytes = n_bytes
        self._free = list(range(capacity - 1, -1, -1))
        self._sequences: list[Sequence] = []

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def n_held(self) -> int:
        """Pages in the hands of sequences; n_free + n_held == capacity at all times."""
        return sum(len(s.pages) for s in self._sequences)

    def compact(self, capacity: int) -> list[tuple[int, int]]:
        """Give sequences pages with numbers below `capacity` alone: which pages move, [(from, to)], for whoever has
        their memory. Raises KVCacheFull where they hold more."""
        if self.n_held > capacity:
            raise KVCacheFull(f"{self.n_held} KV pages are held, {capacity} do not take them")
        free = sorted((page for page in self._free if page < capacity), reverse=True)
        moves = []
        for sequence in self._sequences:
            for i, page in enumerate(sequence.pages):
                if page >= capacity:
                    to = free.pop()
                    moves.append((page, to))
                    sequence.pages[i] = sequence.page_table[i] = to
        self._free = [page for page, _ in moves] + [p for p in self._free if p >= capacity] + free
        return moves

    def resize(self, capacity: int) -> None:
        """Another number of pages, of a cache whose memory is elsewhere; after `compact`."""
        assert not self.k, "pages on the host do not change their number"
        self._free = [page for page in self._free if page < capacity]
        self._free[:0] = range(capacity - 1, self.capacity - 1, -1)
        self.capacity = capacity

    def new_sequence(self, n_ctx: int) -> Sequence:
        """An empty sequence of at most n_ctx tokens."""
        sequence = Sequence(self, n_ctx, np.zeros(n_pages_for(n_ctx), np.int32))
        self._sequences.append(sequence)
        return sequence

    def take(self) -> int:
        """A free page, the lowest numbered of those never used first. Raises KVCacheFull."""
        if not self._free:
            raise KVCacheFull(f"all {self.capacity} KV pages ({self.capacity * PAGE} positions) are in use")
        return self._free.pop()

    def give_back(self, pages: list[int]) -> None:
        """Return pages; the one given last is taken first again, since it is warm."""
        self._free.extend(pages)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose pages have been given back."""
        self._sequences.remove(sequence)


@dataclass(eq=False)
class Sequence:
    """One sequence of tokens and the pages that hold its keys and values. Used by the engine thread only.

    `tokens` are those whose keys and values are stored; `pages` covers at least them; `page_table` is `pages` as int32
    [n_pages_for(n_ctx)], entries past them meaningless.
    """

    cache: KVCache
    n_ctx: int
    page_table: np.ndarray
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def reserve(self, n_more: int) -> None:
        """Make room for n_more tokens. Raises KVCacheFull, then holding what it held; EngineError past n_ctx."""
        wanted = len(self.tokens) + n_more
        if wanted > self.n_ctx:
            raise EngineError(f"a sequence of {wanted} tokens does not fit its context of {self.n_ctx}")
        held = len(self.pages)
        try:
            while len(self.pages) < n_pages_for(wanted):
                page = self.cache.take()
                self.page_table[len(self.pages)] = page
                self.pages.append(page)
        except KVCacheFull:
            self._drop_pages(held)
            raise

    def extend(self, tokens: Iterable[int]) -> None:
        """Count tokens whose keys and values have just been stored in reserved room."""
        self.tokens.extend(tokens)

    def truncate(self, n_tokens: int) -> None:
        """Keep the first n_tokens tokens (all, where there are fewer) and give back the pages they do not need."""
        del self.tokens[max(n_tokens, 0) :]
        self._drop_pages(n_pages_for(len(self.tokens)))

    def common_prefix(self, tokens: Iterable[int]) -> int:
        """How many of the first tokens are held already."""
        n = 0
        for mine, other in zip(self.tokens, tokens, strict=False):
            if mine != other:
                break
            n += 1
        return n

    def release(self) -> None:
        """Give everything back; the sequence must not be used afterwards."""
        self.truncate(0)
        self.cache.remove(self)

    def _drop_pages(self, n_kept: int) -> None:
        self.cache.give_back(self.pages[n_kept:][::-1])
        del self.pages[n_kept:]


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
