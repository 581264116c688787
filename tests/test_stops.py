"""Stop strings: cases B19, B20 and B22 of the contract, and random texts against a search of the whole text."""

from __future__ import annotations

import random

import pytest

from freetoken.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        text, hit = matcher.push(piece)
        shown += text
        if hit is not None:
            assert matcher.flush() == ""
            return shown, hit
    return shown + matcher.flush(), None


def whole_text(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same by trying every end of the text: slow and plain."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["O P Q"], ["L M N ", "O", " P", " Q", " R"], ("L M N ", "O P Q")),
        (["O P Q"], ["N O P ", "R"], ("N O P R", None)),
        (["</s>", "</stop>"], ["a<", "/", "b", "</", "st", "op>x"], ("a</b", "</stop>")),
        (["aab"], ["a", "a", "a", "b"], ("a", "aab")),
        (["abab"], ["ab", "aab", "ab"], ("aba", "abab")),
        (["\n\n"], ["one\n", "two\n", "\nthree"], ("one\ntwo", "\n\n")),
        (["bc", "abc"], ["xabc"], ("x", "abc")),
        (["", "x"], ["a", "", "x"], ("a", "x")),
        ([], ["all", " of it"], ("all of it", None)),
        (["日本"], ["私は日", "曜", "日本"], ("私は日曜", "日本")),
    ],
)
def test_cases(stops: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stops, pieces) == expected


def test_only_what_can_become_a_stop_is_held() -> None:
    matcher = StopMatcher(["###"])
    assert matcher.push("text #") == ("text ", None)
    assert matcher.held == "#"
    assert matcher.push("1") == ("#1", None)
    assert matcher.held == ""


def test_random_texts_match_the_whole_text_search() -> None:
    rng = random.Random(7)
    for _ in range(4000):
        letters = "ab" if rng.random() < 0.7 else "abc"
        stops = ["".join(rng.choices(letters, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3))]
        text = "".join(rng.choices(letters, k=rng.randint(0, 20)))
        pieces, rest = [], text
        while rest:
            n = rng.randint(1, 4)
            pieces.append(rest[:n])
            rest = rest[n:]
        assert run(stops, pieces) == whole_text(stops, text), (stops, pieces)
