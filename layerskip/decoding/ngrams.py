"""Spans copied from the text so far: what followed the same last few tokens the last time that they occurred."""

from __future__ import annotations

from collections.abc import Sequence

# Tokens that must occur alike, longest first. A single token recurs by chance too often to copy what followed it.
SIZES = (3, 2)


class NgramIndex:
    """The n-grams of one row's tokens, each with the place where it last occurred."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        """Indexes the tokens of a prompt."""
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends tokens; each n-gram is known once something has followed it."""
        for token in tokens:
            end = len(self._tokens)
            for size in SIZES:
                if size <= end:
                    self._latest[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Returns `count` tokens that followed the last n-gram where it occurred before; none where it did not.

        A copy that reaches the end of the text goes on with itself, as in a text that repeats.
        """
        for size in SIZES:
            place = self._latest.get(tuple(self._tokens[-size:])) if size <= len(self._tokens) else None
            if place is not None:
                period = len(self._tokens) - place
                return [self._tokens[place + offset % period] for offset in range(count)]
        return []
