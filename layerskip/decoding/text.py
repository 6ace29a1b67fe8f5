"""Text that grows as tokens arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"


class GrowingText:
    """Turns token ids into text piece by piece; the pieces add up to the decoding of all ids.

    A piece never ends within a character: bytes of an unfinished one wait for the rest. Only the last few tokens are
    decoded again, so that the cost of a piece does not grow with the text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.token_ids: list[int] = []
        # Tokens before `shown` have been given out; those from `context` on are decoded along with the next ones, since
        # a tokenizer may treat the first token of a text differently.
        self.context = 0
        self.shown = 0

    def add(self, token_ids: tuple[int, ...]) -> str:
        """Returns the text that these tokens make known; "" while a character is unfinished."""
        self.token_ids += token_ids
        text = self._pending()
        # Without text, such as after a special token, the context must not move on: it would be lost.
        if not text or text.endswith(REPLACEMENT):
            return ""
        self.context, self.shown = self.shown, len(self.token_ids)
        return text

    def finish(self) -> str:
        """Returns what is still held back when no more tokens come."""
        text = self._pending()
        self.context = self.shown = len(self.token_ids)
        return text

    def _pending(self) -> str:
        before = self._decode(self.token_ids[self.context : self.shown])
        return self._decode(self.token_ids[self.context :])[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
