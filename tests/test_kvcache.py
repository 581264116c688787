"""Pages: who holds them, what they cost, and what happens when there are none."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest

from freetoken.errors import EngineError, OptionError
from freetoken.kvcache import PAGE, KVCache, KVCacheFull, KVShape, n_pages_for


def cache(capacity: int = 6, dtype: str = "f16") -> KVCache:
    return KVCache([KVShape(2, 8, 8), KVShape(1, 16, 8)], capacity, dtype)


@pytest.mark.parametrize(("n", "pages"), [(0, 0), (1, 1), (256, 1), (257, 2), (512, 2)])
def test_pages_for_tokens(n: int, pages: int) -> None:
    assert n_pages_for(n) == pages


@pytest.mark.parametrize(("dtype", "size"), [("f16", 2), ("f32", 4)])
def test_arrays_have_the_layout_of_the_native_header(dtype: str, size: int) -> None:
    kv = cache(3, dtype)
    assert [k.shape for k in kv.k] == [(3, 2, PAGE, 8), (3, 1, PAGE, 16)]
    assert [v.shape for v in kv.v] == [(3, 2, PAGE, 8), (3, 1, PAGE, 8)]
    assert all(a.dtype.itemsize == size and a.flags.c_contiguous and a.ctypes.data % 64 == 0 for a in kv.k + kv.v)
    for i, a in enumerate(kv.k + kv.v):
        a[:] = i + 1
    assert all((a == i + 1).all() for i, a in enumerate(kv.k + kv.v))


def test_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"q4_0.*f16, f32"):
        cache(1, "q4_0")


def test_a_cache_that_cannot_be_reserved_says_so() -> None:
    with pytest.raises(EngineError, match="-c"):
        KVCache([KVShape(1024, 4096, 4096)], 1 << 40)


def test_memory_is_touched_by_use_only() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    kv = KVCache([KVShape(8, 128, 128)] * 4, 256)
    assert kv.n_bytes == 4 * 2 * 8 * 128 * 256 * PAGE * 2
    assert process.memory_info().rss - before < 16 << 20


def test_truncate_keeps_a_prefix_and_gives_back_whole_pages() -> None:
    kv = cache()
    s = kv.new_sequence(1024)
    s.reserve(600)
    s.extend(range(600))
    assert (len(s), len(s.pages), kv.n_free) == (600, 3, 3)
    assert list(s.page_table[:3]) == s.pages
    kept = s.pages[:2]
    s.truncate(257)
    assert (len(s), s.pages, kv.n_free) == (257, kept, 4)
    s.truncate(1000)
    assert len(s) == 257
    s.truncate(0)
    assert (len(s), s.pages, kv.n_free) == (0, [], 6)


@pytest.mark.parametrize(
    ("held", "prompt", "n"), [([], [1], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2], 2), ([1, 2], [1, 3, 2], 1)]
)
def test_common_prefix(held: list[int], prompt: list[int], n: int) -> None:
    s = cache().new_sequence(100)
    s.extend(held)
    assert s.common_prefix(prompt) == n


def test_a_full_cache_changes_nothing_and_room_is_found_after_a_release() -> None:
    kv = cache(4)
    a, b = kv.new_sequence(2048), kv.new_sequence(2048)
    a.reserve(2 * PAGE)
    a.extend([0] * 2 * PAGE)
    b.reserve(1)
    b.extend([0])
    with pytest.raises(KVCacheFull, match="4 KV pages"):
        b.reserve(3 * PAGE)
    assert (len(b.pages), kv.n_free, kv.n_held) == (1, 1, 3)
    a.release()
    b.reserve(3 * PAGE)
    assert (len(b.pages), kv.n_free) == (4, 0)


def test_a_sequence_ends_at_its_context() -> None:
    s = cache().new_sequence(300)
    s.reserve(300)
    with pytest.raises(EngineError, match=r"301 tokens.*300"):
        s.reserve(301)


def test_random_use_never_loses_or_shares_a_page() -> None:
    rng = random.Random(3)
    kv = cache(12)
    sequences = [kv.new_sequence(2000) for _ in range(4)]
    for step in range(2000):
        s = rng.choice(sequences)
        n = rng.choice([1, 1, 7, 200, 700])
        try:
            if rng.random() < 0.35:
                s.truncate(rng.randrange(len(s) + 1))
            elif len(s) + n <= s.n_ctx:
                s.reserve(n)
                s.extend([step] * n)
        except KVCacheFull:
            pass
        held = [p for x in sequences for p in x.pages]
        assert len(set(held)) == len(held) == kv.n_held
        assert kv.n_free + kv.n_held == kv.capacity
        assert all(len(x.pages) * PAGE >= len(x) and list(x.page_table[: len(x.pages)]) == x.pages for x in sequences)
    for s in sequences:
        s.truncate(0)
    assert np.array_equal(sorted(kv._free), np.arange(12))
