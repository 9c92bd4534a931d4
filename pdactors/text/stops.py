"""Stop strings in streamed text: the answer ends before the first one, however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

from pdactors.errors import BadRequest


class StopMatcher:
    """Holds back text while it may be the beginning of a stop string.

    The stop string that begins first wins, so text stays held while an earlier one may still come true.

    Raises:
        BadRequest: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for index, stop in enumerate(stops):
            if not stop:
                raise BadRequest(f"stop[{index}] must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> tuple[str, bool]:
        """Take the next piece; returns the text that is safe to pass on, and whether the answer ends with it."""
        if self.stopped:
            return "", True
        if not self._stops:
            return piece, False
        text = self._held + piece
        found = self._first_stop(text)
        partial = self._first_partial(text)
        if found < len(text) and found <= partial:
            self._held, self.stopped = "", True
            return text[:found], True
        self._held = text[partial:]
        return text[:partial], False

    def flush(self) -> str:
        """End the text; returns what was held back, up to a stop string that it holds (then `stopped` is set)."""
        text, self._held = self._held, ""
        found = self._first_stop(text)
        self.stopped = self.stopped or found < len(text)
        return text[:found]

    def _first_stop(self, text: str) -> int:
        """Where the first whole stop string begins; len(text) if there is none."""
        return min((at for stop in self._stops if (at := text.find(stop)) >= 0), default=len(text))

    def _first_partial(self, text: str) -> int:
        """Where the first stop string that may be going on beyond the end of the text begins, or len(text)."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            rest = text[start:]
            if any(len(stop) > len(rest) and stop.startswith(rest) for stop in self._stops):
                return start
        return len(text)
