"""Spans copied from the text so far: what followed the same last few tokens the last time that they occurred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Tokens that must occur alike, longest first. A single token recurs by chance too often to copy what followed it.
SIZES = (3, 2)
# What the stop rule expects of a copied token by the size of what was alike, before it has seen any.
CONFIDENCE = {3: 0.7, 2: 0.4}


@dataclass(frozen=True)
class Copy:
    """A span that is copied.

    Attributes:
        tokens: it.
        size: how many tokens before it occurred alike; 0 where nothing did.
    """

    tokens: list[int]
    size: int

    @property
    def confidence(self) -> float:
        """How likely the first of its tokens is to be right, as far as one can tell without having seen any."""
        return CONFIDENCE[self.size]


NOTHING = Copy([], 0)


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

    def continuation(self, count: int) -> Copy:
        """Returns `count` tokens that followed the last n-gram where it occurred before; none where it did not.

        A copy that reaches the end of the text goes on with itself, as in a text that repeats.
        """
        for size in SIZES:
            place = self._latest.get(tuple(self._tokens[-size:])) if size <= len(self._tokens) else None
            if place is not None:
                period = len(self._tokens) - place
                return Copy([self._tokens[place + offset % period] for offset in range(count)], size)
        return NOTHING
