"""Stop strings in a stream of text: what may be shown now, what must wait. The server owns one a request."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the stop string that is complete first, whatever pieces the text comes in.

    Of two that end at the same character the one that begins earlier wins. Only a suffix that can still become a stop
    is held back, so every character is given out once and none of a stop string is. Empty stop strings are ignored.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that was hit (the text then ends right before it).

        After a hit nothing is held and what followed the stop string is dropped.
        """
        text = self._held + text
        self._held = ""
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            return text[: found[1]], found[2]
        keep = self._n_held(text)
        if keep:
            self._held = text[-keep:]
            text = text[:-keep]
        return text, None

    @property
    def held(self) -> str:
        """What waits for more text."""
        return self._held

    def flush(self) -> str:
        """The end of the stream: what was held is no stop and may be shown."""
        text, self._held = self._held, ""
        return text

    def _n_held(self, text: str) -> int:
        """Length of the longest suffix that is a proper prefix of a stop string."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-n:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return n
        return 0
